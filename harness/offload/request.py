"""What is asked of a store: its first n slots (int), a part of them (`Part`), or slot indices [batch, num_kv_heads, n]
of which negative ones read nothing."""

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


SlotRequest = int | Part | Tensor


def num_requested(request: int | Tensor) -> int:
    """Rows per batch element and KV head that a request asks for, negative indices included."""
    return request if isinstance(request, int) else request.shape[-1]
