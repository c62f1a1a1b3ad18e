"""What is asked of a store: its first n slots (int), a part of them (`Part`), or slots one by one (`Chosen`, or only
their indices [batch, num_kv_heads, n], of which negative ones read nothing)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """Rows `begin` to `end` of a read of the first `num_slots`, counted through one head after another: a read that
    comes in several parts into one buffer, each of few long copies."""

    begin: int
    end: int
    num_slots: int

    def place(self, row: int) -> int:
        """Where a row so counted lies in the buffer: behind each head's there is one place more."""
        return row + row // self.num_slots


class Chosen(NamedTuple):
    """Slots of each head's own, and how many they are, which is counted once for all who account for them.

    slots: int64 [batch, num_kv_heads, n], negative ones moving nothing. num_rows: those that are not negative, under
    CUDA 0-d on the device. places: which of n rows each slot belongs to, alike; distinct in a head, and of no meaning
    beside a negative slot. None: in order.
    """

    slots: Tensor
    num_rows: int | Tensor
    places: Tensor | None = None

    def by_place(self) -> Tensor:
        """The slot of each row, -1 for none."""
        if self.places is None:
            return self.slots
        n = self.slots.shape[-1]
        found = self.slots.new_full((*self.slots.shape[:-1], n + 1), -1)
        return found.scatter_(-1, self.places.masked_fill(self.slots < 0, n), self.slots)[..., :n]


SlotRequest = int | Part | Chosen | Tensor


def chosen(index: Chosen | Tensor) -> Chosen:
    """Slot indices, counted."""
    return index if isinstance(index, Chosen) else Chosen(index, num_true(index >= 0))


def num_true(mask: Tensor) -> int | Tensor:
    """How many of a mask hold; asked of no device, where it is 0-d."""
    count = mask.sum()
    return int(count) if count.is_cpu else count


def num_requested(request: int | Chosen | Tensor) -> int:
    """Rows per batch element and KV head that a request asks for, negative indices included."""
    if isinstance(request, int):
        return request
    return (request.slots if isinstance(request, Chosen) else request).shape[-1]


def tensors_of(request: SlotRequest) -> list[Tensor]:
    """What a transfer reads to know its rows."""
    parts = request if isinstance(request, Chosen) else (request,)
    return [part for part in parts if isinstance(part, Tensor)]
