"""Calls of a model's modules: their arguments, other code in their place, models that are refused.

No code here knows a model family by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from harness.errors import UserError, reason


class Call(NamedTuple):
    """The arguments of a module's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The module's input [batch, rows, hidden_size]."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def with_hidden(self, hidden: Tensor, **changed: Any) -> Call:
        """The same call with another input.

        changed: new values of keyword arguments. Those that the call does not have are left out.
        """
        kwargs = dict(self.kwargs)
        for name, value in changed.items():
            if name in kwargs:
                kwargs[name] = value
        if not self.args:
            kwargs["hidden_states"] = hidden
            return Call((), kwargs)
        # A module that takes the inputs of query, key and value separately gets the same tensor
        # three times.
        before = self.hidden
        args = [hidden if value is before else value for value in self.args]
        return Call(tuple(args), kwargs)


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of a module's output."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference of what one product makes in two ways, over the largest element."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.03


def options_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call that are strings or whole numbers."""
    return tuple(value for value in (*args, *kwargs.values()) if isinstance(value, str | int))


def stack_of(model: Any) -> Any:
    """The module from ids to final hidden states; of a vision-language model the text decoder's."""
    stack = model.get_decoder()
    if stack is model or not isinstance(stack, PreTrainedModel):
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        stack = inner[0] if inner else None
    if stack is None or "position_ids" not in inspect.signature(stack.forward).parameters:
        raise refusal(model.config.model_type, "its decoder is given no positions")
    return stack


# Other code in a module's place


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes `forward` inside the `with` block."""
    with replaced_method(module, "forward", forward):
        yield


@contextmanager
def replaced_method(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """`module` has another method of this name inside the `with` block."""
    before = module.__dict__.get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            setattr(module, name, before)


_names = (f"kv_harness_{number}" for number in count())


@contextmanager
def attention_function(
    model: Any, attend: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> Iterator[str]:
    """Inside the `with` block `attend` is the model's attention function, whose name is returned,
    and `mask` makes masks.

    Without a `mask` transformers makes none: its code would read the positions of every step and so
    wait for the device. `attend` then masks by itself.
    """
    name = next(_names)
    before = model.config._attn_implementation
    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    try:
        model.set_attn_implementation(name)
        yield name
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


class Reached(Exception):  # noqa: N818 - no error: it ends a module's run
    """Ends the run of an attention module at its call of the attention function."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query = query
        self.key = key
        self.value = value


def stop(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """The attention function that ends a module's run."""
    raise Reached(query, key, value)


# Models that are refused


def refusal(family: str, why: str) -> UserError:
    """The one line in which a model is refused."""
    return UserError(f"model family {family!r} is not supported: {why}")


@contextmanager
def readable(family: str) -> Iterator[None]:
    """Refuse a model whose own code fails inside the `with` block, where it runs in a way that it
    does not expect."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, TypeError, RuntimeError, ValueError, KeyError, IndexError) as error:
        reraise_out_of_memory(error)
        raise refusal(family, reason(error)) from error


def reraise_out_of_memory(error: Exception) -> None:
    """Raise an error that says nothing about the model: too little memory on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        raise error
