"""Attach our attention to a loaded Hugging Face decoder, once it is known to give the model's own
numbers.

`harness.model.attached` has the hooks, which all go at the end, and what they call.

    with attach(model) as attached:
        hidden = attached.forward(ids, positions, handler)
        logits = attached.logits(hidden)

What `harness.model.decoder` has read off a model is not trusted, so it is compared with the model's
own forward pass. A model that fails is refused, wholly or where a query would be predicted or a
batch padded.

Weights in memory change: by training, pruning, a merge. So the decoder is kept under the digest of
the model, by which all that is derived of the model is keyed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from xxhash import xxh3_128

from harness.errors import UserError
from harness.model.attached import Attached, attached_unchecked
from harness.model.attention import dense_attention, seen_by_last
from harness.model.calls import Call, readable, refusal, reraise_out_of_memory, stack_of
from harness.model.decoder import Decoder
from harness.model.passes import LOOK_AT, DensePrompts, Handler, one_thread
from harness.model.prompts import PromptPass, positions_of

NUM_TOKENS = 8
"""Tokens of the probe."""
PASSES = (4, 3, 1)
"""Rows of each pass over the probe."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.02}
"""Largest difference of a logit over the largest logit."""
COARSE = 0.08
"""`TOLERANCE` in bfloat16."""
REMADE = {"hidden_states", "position_ids", "position_embeddings", "attention_mask"}
"""Tensors that an attention module is given and an early query is given anew."""


@contextmanager
def attach(model: Any, prompts: DensePrompts | None = None) -> Iterator[Attached]:
    """Run `model` through our attention inside the `with` block, in evaluation mode.

    prompts: kept passes of this model, from which runs start. The model is read and checked where
    it is new or has changed. Raises UserError for a model that lies on several devices, that is
    attached already, whose attention is not transformers' attention interface, or which fails a
    check. At the end the model is as it was.
    """
    _require_one_device(model)
    with ExitStack() as stack:
        stack.enter_context(_claimed(stack_of(model)))
        stack.enter_context(_evaluating(model))
        decoder = checked_decoder(model)
        attached = stack.enter_context(attached_unchecked(model, decoder))
        if not decoder.recurrent:  # such layers would go on from a prompt's states
            attached.prompts = prompts
        yield attached


def _require_one_device(model: Any) -> None:
    """Raise UserError for a model that accelerate has spread over devices, or left on the disk."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UserError(
            f"the model lies on several devices ({', '.join(devices)}), and a method's cache lies "
            "on one; load it without device_map, or with device_map='cuda'"
        )


def digest_of(model: Any) -> str:
    """The digest of a model as it is now. Raises UserError as `attach`."""
    with attach(model) as attached:
        return attached.decoder.digest


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Inside the `with` block nobody changes the model, so that its digest is taken once. Raises
    UserError as `attach`."""
    digest_of(model)
    _unchanged.add(model)
    try:
        yield
    finally:
        _unchanged.discard(model)


_unchanged: WeakSet[Any] = WeakSet()
_decoders: WeakKeyDictionary[Any, Decoder] = WeakKeyDictionary()


def checked_decoder(model: Any) -> Decoder:
    """The decoder of a model with the weights that it has now, read and checked once for them."""
    known = _decoders.get(model)
    if known is not None and (model in _unchanged or known.digest == model_digest(model)):
        return known
    decoder = Decoder(model)
    check_decoder(model, decoder)
    decoder.digest = model_digest(model)
    _decoders[model] = decoder
    return decoder


_lock = threading.Lock()
_attached: set[int] = set()
"""Ids of the decoders that are attached, and of their configurations, which name the attention
function."""


@contextmanager
def _claimed(stack: Any) -> Iterator[None]:
    """No other thread, and nothing inside the `with` block, attaches the same decoder. Raises
    UserError if one has."""
    parts = {id(stack), id(stack.config)}
    with _lock:
        if parts & _attached:
            raise UserError(
                "the model is attached already: it takes one harness.attach, generate, perplexity "
                "or tasks at a time; wait until that has ended, or load the model a second time"
            )
        _attached.update(parts)
    try:
        yield
    finally:
        with _lock:
            _attached.difference_update(parts)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model is in evaluation mode inside the `with` block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        model.eval()
        for module in training:
            module.training = True


# The identity of a model in memory


def probe(device: torch.device) -> Tensor:
    """The tokens by which models are compared, int [1, NUM_TOKENS]."""
    return torch.arange(3, 3 + NUM_TOKENS, device=device)[None]


@torch.inference_mode()
def model_digest(model: Any) -> str:
    """The digest of a model as it is now, 32 hex digits: of its configurations, its parameters and
    buffers with their devices, and its own logits of the `probe`.

    No counter of torch's notes a write through `.data`, so the weights' content is read, at several
    GB/s. Some changes touch no tensor, such as an adapter that is switched on, or a hook: they show
    in the logits. model: in evaluation mode, and not attached.
    """
    with one_thread():
        logits = model(probe(model.device), use_cache=False).logits
    digest = xxh3_128(model.config.to_json_string(use_diff=False).encode())
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        digest.update(generation.to_json_string(use_diff=False, ignore_metadata=True).encode())
    held = chain(model.named_parameters(), model.named_buffers())
    for name, tensor in (*held, ("logits", logits)):
        digest.update(f"{name} {tensor.device} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# The check of a model before its first use


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
