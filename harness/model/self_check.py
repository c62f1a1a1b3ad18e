"""The check of a model before its first use: our attention under it gives the model's own numbers.

What `harness.model.decoder` has read off a model is not trusted, so it is compared with the model's
own forward pass. A model that fails is refused, wholly or where a query would be predicted or a
batch padded.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.attached import Attached, attached_unchecked
from harness.model.attention import dense_attention, seen_by_last
from harness.model.calls import Call, readable, refusal, reraise_out_of_memory
from harness.model.decoder import Decoder
from harness.model.digest import probe
from harness.model.passes import LOOK_AT, Handler
from harness.model.prompts import PromptPass, positions_of

PASSES = (4, 3, 1)
"""Rows of each pass over the probe."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.02}
"""Largest difference of a logit over the largest logit."""
COARSE = 0.08
"""`TOLERANCE` in bfloat16."""
REMADE = {"hidden_states", "position_ids", "position_embeddings", "attention_mask"}
"""Tensors that an attention module is given and an early query is given anew."""


@torch.inference_mode()
def check_decoder(model: Any, decoder: Decoder) -> None:
    """Raise UserError where our attention under the model gives other logits than the model's own.

    Where only a prediction or a padded batch does, the decoder notes why, and only these are
    refused. Where only a feed-forward network that takes some rows at a time does, it takes all.
    """
    ids = probe(model.device)
    tolerance = TOLERANCE.get(model.dtype, COARSE)
    expected = model(ids, use_cache=False).logits.float()
    has_numbers = expected.isfinite().all() and expected.any()
    if not has_numbers and model.dtype != torch.float16:  # in float16 the pass says it
        raise UserError(
            f"model family {decoder.family!r}: the model's own logits are all zero or not finite; "
            f"{LOOK_AT}"
        )
    with readable(decoder.family):
        off = _difference(model, decoder, ids, expected)
        if decoder.recurrent and not off <= tolerance:
            decoder.takes_rows = False
            off = _difference(model, decoder, ids, expected)
    if not off <= tolerance:
        why = f"under our attention its logits are off by {off:.1e} of the largest"
        raise refusal(decoder.family, why)
    if not _is_row_wise(model, decoder, ids, expected, tolerance):
        decoder.row_wise = []
    decoder.no_prediction = _why_no_prediction(model, decoder, ids, tolerance)
    decoder.no_padding = _why_no_padding(model, decoder, ids, tolerance)


def _difference(model: Any, decoder: Decoder, ids: Tensor, expected: Tensor) -> float:
    """The largest error of the logits of several passes, relative to the largest logit."""
    logits = []
    with attached_unchecked(model, decoder) as attached:
        handler, cache = _History(attached), attached.new_cache()
        for part in ids.split(PASSES, 1):
            end = cache.num_columns + part.shape[1]
            positions = torch.arange(cache.num_columns, end, device=ids.device)[None]
            hidden = attached.forward(part, positions, handler, cache)
            logits.append(attached.logits(hidden))
    return _relative(torch.cat(logits, 1), expected)


def _is_row_wise(
    model: Any, decoder: Decoder, ids: Tensor, expected: Tensor, tolerance: float
) -> bool:
    """Whether the logits are the same where modules take two rows at a time."""
    most = decoder.rows_at_once
    decoder.rows_at_once = 2
    try:
        return _difference(model, decoder, ids, expected) <= tolerance
    except (RuntimeError, TypeError, ValueError) as error:
        reraise_out_of_memory(error)
        return False
    finally:
        decoder.rows_at_once = most


def _why_no_prediction(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why early queries are refused; None where each is the true one."""
    for layer in decoder.layers:
        if any(module in decoder.recurrent for module in layer.module.modules()):
            return "its queries depend on a state of the sequence"
        unknown = []
        for name, value in sorted(layer.call.kwargs.items()):
            if isinstance(value, Tensor) and name not in REMADE:
                unknown.append(name)
        if layer.positions is None and layer.call.kwargs.get("position_embeddings") is not None:
            unknown.append("position_embeddings")
        if unknown:
            return f"its queries depend on {', '.join(unknown)}"
    try:
        off = early_difference(model, decoder, ids)
    except RuntimeError as error:
        reraise_out_of_memory(error)
        return "the layer before has no input that it could be made of"
    if off <= tolerance:
        return None
    return f"a query made ahead of its layer is off by {off:.1e} of the largest"


def early_difference(model: Any, decoder: Decoder, ids: Tensor) -> float:
    """The largest error of early queries, each made of its layer's own input, relative to the
    largest query.

    Each layer's query is also predicted in the one before, to see that this works.
    """
    early: dict[int, Tensor] = {}
    with attached_unchecked(model, decoder) as attached, ExitStack() as hooks:

        def make_early(index: int, _: Any, args: Any, kwargs: Any) -> None:
            early[index] = attached.early_query(index, Call(args, kwargs).hidden)

        for index, layer in enumerate(decoder.layers):
            make = partial(make_early, index)
            hooks.callback(layer.module.register_forward_pre_hook(make, with_kwargs=True).remove)
        handler = _History(attached, is_predicting=True)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        attached.forward(ids, positions, handler)
    return max(_relative(early[index], query) for index, query in handler.queries.items())


def _why_no_padding(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why a batch with padding is refused; None where its sequences give the same as each alone."""
    shorter = ids[:, :-3]
    batch = torch.cat([ids, ids.roll(3, 1)])
    real = torch.ones_like(batch, dtype=torch.bool)
    real[1, :3] = False
    with attached_unchecked(model, decoder) as attached:
        padded_pass = PromptPass(attached, real)
        hidden = attached.forward(batch, positions_of(real), padded_pass, real=real)
        positions = torch.arange(shorter.shape[1], device=ids.device)[None]
        alone = attached.logits(attached.forward(shorter, positions, PromptPass(attached)))
        together = attached.logits(hidden)
    off = _relative(together[1:, 3:], alone)
    if off <= tolerance:
        return None
    return f"a sequence beside a longer one is off by {off:.1e} of the largest logit"


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


class _History(Handler):
    """Dense attention over all passes so far. queries: by layer, of the last pass."""

    def __init__(self, attached: Attached, *, is_predicting: bool = False) -> None:
        self.attached = attached
        self.is_predicting = is_predicting
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.queries: dict[int, Tensor] = {}

    def predicts(self, layer: int) -> bool:
        return self.is_predicting

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.stored:
            earlier_key, earlier_value = self.stored[layer]
            key = torch.cat([earlier_key, key], 2)
            value = torch.cat([earlier_value, value], 2)
        self.stored[layer] = key, value
        self.queries[layer] = query
        tokens = torch.arange(key.shape[2], device=key.device)
        window = self.attached.layers[layer].window
        visible = seen_by_last(tokens, query.shape[2], window)
        visible = visible.expand(len(key), 1, *visible.shape)
        return dense_attention(query, key, value, self.attached.layers[layer].softmax, visible)
