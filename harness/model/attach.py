"""Attach our attention to a loaded Hugging Face decoder, once it is known to give the model's own
numbers.

`harness.model.attached` has the hooks, which all go at the end, and what they call.

    with attach(model) as attached:
        hidden = attached.forward(ids, positions, handler)
        logits = attached.logits(hidden)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from harness.errors import UserError
from harness.model.attached import Attached, attached_unchecked
from harness.model.calls import stack_of
from harness.model.decoder import Decoder
from harness.model.dense_prompts import DensePrompts
from harness.model.digest import model_digest
from harness.model.self_check import check_decoder


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
