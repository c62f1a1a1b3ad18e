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
from contextlib import contextmanager
from typing import Any

from harness.errors import UserError
from harness.model.attached import Attached, attached_unchecked
from harness.model.calls import stack_of
from harness.model.decoder import read_decoder
from harness.model.dense_prompts import DensePrompts
from harness.model.self_check import check_decoder


@contextmanager
def attach(model: Any, prompts: DensePrompts | None = None) -> Iterator[Attached]:
    """Run `model` through our attention inside the `with` block, in evaluation mode.

    prompts: kept passes of this model, from which runs start. The first time, the model is read and
    checked. Raises UserError for a model that is attached already, whose attention is not
    transformers' attention interface, or which fails a check. At the end the model is as it was.
    """
    with _claimed(stack_of(model)), _evaluating(model):
        decoder = read_decoder(model)
        if not decoder.is_checked:
            check_decoder(model, decoder)
        with attached_unchecked(model, decoder, prompts) as attached:
            yield attached


_claims = threading.Lock()
_claimed_by: dict[int, int] = {}
"""Which thread has attached a decoder, by the ids of the decoder and of its configuration, which
names the attention function."""


@contextmanager
def _claimed(stack: Any) -> Iterator[None]:
    """No other thread, and nothing inside the `with` block, attaches the same decoder. Raises
    UserError if one has."""
    parts = {id(stack), id(stack.config)}
    this_thread = threading.get_ident()
    with _claims:
        threads = {_claimed_by[part] for part in parts if part in _claimed_by}
        if threads:
            where = "in this thread" if this_thread in threads else "by another thread"
            raise UserError(
                f"the model is attached already {where}: it takes one harness.attach, generate, "
                "perplexity or tasks at a time; wait until that has ended, or load the model a "
                "second time"
            )
        for part in parts:
            _claimed_by[part] = this_thread
    try:
        yield
    finally:
        with _claims:
            for part in parts:
                del _claimed_by[part]


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
