"""The indexers of a model that has sparse attention of its own: run by the model's own code, over
index keys that lie elsewhere than in transformers' cache.

An indexer is a module inside an attention module. It makes index keys of the fresh rows, hands them
to the cache, gets back those of all tokens, scores them, and returns the best tokens of each row.
Here the cache and the mask that it is given are others; all arithmetic is the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from harness.model.calls import Call, refusal
from methods.dsa import NO_SLOT

MASK, CACHE = "attention_mask", "past_key_values"
"""Arguments of an indexer that are replaced."""
MOST_KEYS = 2**20
"""Keys among which an indexer must leave some out."""
PAIRS_AT_ONCE = 2**18
"""Pairs of a row and a column that an indexer scores at once; it holds a score of each of its heads
for them."""


class OwnIndexer(NamedTuple):
    """The indexer of one layer. names: of the arguments that its code takes, in their order.
    head_dim: elements of an index key. call: its call in the trace of the model."""

    module: nn.Module
    names: tuple[str, ...]
    head_dim: int
    call: Call

    def with_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)


def own_indexer(module: nn.Module, call: Call, keys: Tensor, family: str) -> OwnIndexer:
    """The indexer that made `call` and handed `keys` to the cache.

    Raises UserError for one that takes no mask or no cache, whose mask is not one of [batch, rows,
    columns], or that has not one key for each row.
    """
    names = tuple(inspect.signature(module.forward).parameters)
    for needed in (MASK, CACHE):
        if needed not in names:
            raise refusal(family, f"its indexer takes no {needed}")
    indexer = OwnIndexer(module, names, keys.shape[-1], call)
    mask = indexer.with_arguments(call.args, call.kwargs)[MASK]
    batch, num_rows = call.hidden.shape[:2]
    if not isinstance(mask, Tensor) or mask.shape != (batch, num_rows, num_rows):
        raise refusal(family, "its indexer takes a mask that does not say what each row sees")
    if keys.dim() != 3 or keys.shape[:2] != (batch, num_rows):
        raise refusal(family, "its indexer has not one key for each token")
    return indexer


class IndexCall:
    """A call of an indexer for the fresh rows of a pass (`methods.base.Indexer`).

    forward: the indexer's own code. arguments: what the model called it with.
    """

    def __init__(self, forward: Callable[..., Tensor], arguments: Mapping[str, Any]) -> None:
        self.forward = forward
        self.arguments = arguments

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._hidden)

    @property
    def num_rows(self) -> int:
        """Fresh rows."""
        return self._hidden.shape[1]

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def _hidden(self) -> Tensor:
        """Its first tensor, [batch, rows, hidden_size]."""
        return next(value for value in self.arguments.values() if isinstance(value, Tensor))

    def __call__(self, keep: Callable[[Tensor], Tensor], seen: Tensor) -> Tensor:
        """The best slots of each row, int [batch, rows, n]; see there."""
        replaced = {MASK: seen, CACHE: _IndexKeys(keep)}
        return self.forward(**{**self.arguments, **replaced})

    def part(self, rows: slice) -> IndexCall:
        """The call for some of its rows."""
        num_rows = self.num_rows

        def part_of(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(part_of(member) for member in value)
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_rows:
                return value[:, rows]
            return value

        arguments = {name: part_of(value) for name, value in self.arguments.items()}
        return IndexCall(self.forward, arguments)


class _IndexKeys:
    """The cache that an indexer is given. The method's name is transformers'."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self.keep = keep

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.keep(keys)


def top_k_of(indexer: OwnIndexer, family: str) -> int:
    """The most tokens that an indexer chooses for a row: it is given more and more keys, until it
    leaves some out. Raises UserError where it never does, or returns something else."""
    arguments = indexer.with_arguments(indexer.call.args, indexer.call.kwargs)
    call = IndexCall(indexer.module.forward, arguments)
    num_rows = indexer.call.hidden.shape[1]
    num_keys = num_rows
    while num_keys < MOST_KEYS:
        num_keys *= 2
        seen = torch.ones(1, num_rows, num_keys, dtype=torch.bool)

        def keep(fresh: Tensor, num_keys: int = num_keys) -> Tensor:
            return fresh.new_zeros(1, num_keys, fresh.shape[-1])

        slots = call(keep, seen.to(indexer.call.hidden.device))
        is_list = slots.dim() == 3 and not slots.is_floating_point()
        if not is_list or bool(((slots < 0) | (slots >= num_keys)).any()):
            break
        if slots.shape[-1] < num_keys:
            return slots.shape[-1]
    raise refusal(family, "its indexer does not choose a number of tokens")


def choose_of_prompt(call: IndexCall, real: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that the rows of a prompt read, int32 [batch, prompt, top_k], `NO_SLOT` for
    nothing, and the prompt's index keys [batch, prompt, head_dim].

    real: bool [batch, prompt], False for padding, whose rows choose anything. Some rows run at a
    time, so that scores do not grow with the square of the prompt.
    """
    batch, prompt = real.shape
    columns = torch.arange(prompt, device=real.device)
    keys = _PromptKeys(prompt)
    chosen = []
    size = max(16, PAIRS_AT_ONCE // (batch * prompt))
    for begin in range(0, prompt, size):
        end = min(begin + size, prompt)
        seen = columns[:end] <= columns[begin:end, None]
        seen = seen & real[:, None, :end]
        of_rows = call.part(slice(begin, end))
        chosen.append(of_rows(keys.keep, seen))
    most = chosen[-1].shape[-1]
    same = [pad(part, (0, most - part.shape[-1]), value=NO_SLOT) for part in chosen]
    assert keys.stored is not None, "a prompt has a token"
    return torch.cat(same, 1).int(), keys.stored


class _PromptKeys:
    """The index keys of a prompt, filled row by row. stored: [batch, prompt, head_dim]."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.length = 0
        self.stored: Tensor | None = None

    def keep(self, fresh: Tensor) -> Tensor:
        """Add the keys of the next rows; returns those so far."""
        if self.stored is None:
            self.stored = fresh.new_empty(len(fresh), self.prompt, fresh.shape[-1])
        end = self.length + fresh.shape[1]
        self.stored[:, self.length : end] = fresh
        self.length = end
        return self.stored[:, :end]
