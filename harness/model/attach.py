"""Attach our attention to a loaded Hugging Face decoder, once it is known to give the model's own numbers.

What was read off a model is not trusted. At its first use some tokens run through our attention in several passes, the
later ones over the history of the earlier ones, and the logits are compared with those of the model's own forward. Each
early query is compared with the layer's true one, and a batch with padding with its sequences alone.

    with attach(model) as attached:
        hidden = attached.forward(ids, positions, handler)
        logits = attached.logits(hidden)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError, reason
from harness.model.attached import Attached, Handler, attached_unchecked
from harness.model.attention import dense_attention
from harness.model.decoder import Call, Decoder, read_decoder, refusal

PASSES = (4, 3, 1)
"""Rows of each pass."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.02}
COARSE = 0.08
"""Largest difference of a logit over the largest logit; `COARSE` in bfloat16."""


@contextmanager
def attach(model: Any) -> Iterator[Attached]:
    """Run `model` (eval mode) through our attention inside the `with` block.

    The first time, the model is read and checked. Raises UserError for a model whose attention is not transformers'
    attention interface, or which fails a check.
    """
    decoder = read_decoder(model)
    if not decoder.is_checked:
        check_decoder(model, decoder)
    with attached_unchecked(model, decoder) as attached:
        yield attached


@torch.inference_mode()
def check_decoder(model: Any, decoder: Decoder) -> None:
    """Raise UserError where our attention under the model gives other logits than the model's own.

    Where only a rehearsal or only a padded batch does, the decoder takes down why, and these alone are refused.
    """
    ids = torch.arange(3, 3 + sum(PASSES), device=model.device)[None]
    tolerance = TOLERANCE.get(model.dtype, COARSE)
    expected = model(ids, use_cache=False).logits.float()
    if model.dtype != torch.float16 and not expected.isfinite().all():  # float16 is told of in the pass that overflows
        raise UserError(
            f"model family {decoder.family!r}: the model's own logits are not finite; are its weights whole?"
        )
    uses_latents = any(layer.latent is not None for layer in decoder.layers)
    try:
        off = _difference(model, decoder, ids, expected)
        if decoder.recurrent and not off <= tolerance:
            decoder.takes_rows = False
            off = _difference(model, decoder, ids, expected)
        if uses_latents and not off <= tolerance:
            decoder.expand_latents()
            off = _difference(model, decoder, ids, expected)
    except (AttributeError, TypeError, RuntimeError, ValueError, KeyError, IndexError) as error:
        raise error if isinstance(error, UserError) else refusal(decoder.family, reason(error)) from error
    if not off <= tolerance:
        raise refusal(decoder.family, f"under our attention its logits are off by {off:.1e} of the largest")
    decoder.no_rehearsal = _why_no_rehearsal(model, decoder, ids, tolerance)
    decoder.no_padding = _why_no_padding(model, decoder, ids, tolerance)
    decoder.is_checked = True


def _difference(model: Any, decoder: Decoder, ids: Tensor, expected: Tensor) -> float:
    """How far off the logits of several passes are, relative to the largest."""
    with attached_unchecked(model, decoder) as attached:
        handler, cache, logits = _History(attached), attached.new_cache(), []
        for part in ids.split(PASSES, 1):
            positions = torch.arange(cache.num_columns, cache.num_columns + part.shape[1], device=ids.device)[None]
            logits.append(attached.logits(attached.forward(part, positions, handler, cache)))
    return _relative(torch.cat(logits, 1), expected)


def _why_no_rehearsal(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why early queries are not to be had; None where each is the true one."""
    for layer in decoder.layers:
        if any(module in decoder.recurrent for module in layer.module.modules()):
            return "its queries depend on a state of the sequence"
        tensors = {name for name, each in layer.call.kwargs.items() if isinstance(each, Tensor)}
        unknown = sorted(tensors - {"hidden_states", "position_ids", "position_embeddings", "attention_mask"})
        if layer.positions is None and layer.call.kwargs.get("position_embeddings") is not None:
            unknown.append("position_embeddings")
        if unknown:
            return f"its queries depend on {', '.join(unknown)}"
    try:
        off = early_difference(model, decoder, ids)
    except RuntimeError:
        return "the layer before has no input that it could be made of"
    if not off <= tolerance and any(layer.unused for layer in decoder.layers):
        for layer in decoder.layers:  # a submodule may decide something though no derivative passes through it
            layer.query_modules, layer.unused = (*layer.query_modules, *layer.unused), {}
        off = early_difference(model, decoder, ids)
    return None if off <= tolerance else f"a query made ahead of its layer is off by {off:.1e} of the largest"


def early_difference(model: Any, decoder: Decoder, ids: Tensor) -> float:
    """How far off early queries are, each made of its layer's own input, relative to the largest.

    Each layer is rehearsed in the one before as well, to see that it can be.
    """
    early: dict[int, Tensor] = {}
    with attached_unchecked(model, decoder) as attached, ExitStack() as hooks:

        def make_early(index: int, _: Any, args: Any, kwargs: Any) -> None:
            early[index] = attached.early_query(index, Call(args, kwargs).hidden)

        for index, layer in enumerate(decoder.layers):
            hook = layer.module.register_forward_pre_hook(partial(make_early, index), with_kwargs=True)
            hooks.callback(hook.remove)
        handler = _History(attached, is_rehearsing=True)
        attached.forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], handler)
    return max(_relative(early[index], query) for index, query in handler.queries.items())


def _why_no_padding(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why a batch with padding is not to be had; None where its sequences are as each alone."""
    shorter = ids.shape[1] - 3
    batch = torch.cat([ids, ids.roll(3, 1)])
    real = torch.ones_like(batch, dtype=torch.bool)
    real[1, :3] = False
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with attached_unchecked(model, decoder) as attached:
        together = attached.logits(attached.forward(batch, positions, _History(attached, real), real=real))
        own = torch.arange(shorter, device=ids.device)[None]
        alone = attached.logits(attached.forward(ids[:, :shorter], own, _History(attached)))
    off = _relative(together[1:, 3:], alone)
    return None if off <= tolerance else f"a sequence beside a longer one is off by {off:.1e} of the largest logit"


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


class _History(Handler):
    """Dense attention over all passes so far. real: bool [batch, rows] of the only pass; None: all rows are.
    queries: by layer, of the last pass."""

    def __init__(self, attached: Attached, real: Tensor | None = None, *, is_rehearsing: bool = False) -> None:
        self.attached = attached
        self.real = real
        self.is_rehearsing = is_rehearsing
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.queries: dict[int, Tensor] = {}

    def rehearses(self, layer: int) -> bool:
        return self.is_rehearsing

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.stored:
            before = self.stored[layer]
            key, value = (torch.cat(pair, 2) for pair in zip(before, (key, value), strict=True))
        self.stored[layer], self.queries[layer] = (key, value), query
        tokens = torch.arange(key.shape[2], device=key.device)
        rows = tokens[-query.shape[2] :]
        visible = tokens <= rows[:, None]
        window = self.attached.layers[layer].window
        if window is not None:
            visible &= tokens >= window.first_visible(rows)[:, None]
        visible = visible.expand(len(key), 1, *visible.shape)
        if self.real is not None:  # a row of padding sees itself, so that its softmax is of something
            visible = visible & (self.real[:, None, None].to(key.device) | (tokens == rows[:, None]))
        return dense_attention(query, key, value, self.attached.softmaxes[layer], visible)
