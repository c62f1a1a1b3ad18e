"""Payload bytes that cross a link, summed without asking the device for a number, and with one launch for many."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1024
"""Counts of the device that are kept until they are summed."""


class Traffic:
    """Rows of any width, counted one transfer after another."""

    def __init__(self) -> None:
        self._num_bytes: int | Tensor = 0
        self._counts: dict[int, list[Tensor]] = {}

    def add(self, num_rows: int | Tensor, row_bytes: int) -> None:
        """num_rows: under CUDA 0-d on the device."""
        if isinstance(num_rows, int):
            self._num_bytes = self._num_bytes + num_rows * row_bytes
            return
        counts = self._counts.setdefault(row_bytes, [])
        counts.append(num_rows)
        if len(counts) == AT_ONCE:
            self._sum()

    @property
    def num_bytes(self) -> int | Tensor:
        """So far; 0-d on the device where a number came from there."""
        self._sum()
        return self._num_bytes

    def _sum(self) -> None:
        for row_bytes, counts in self._counts.items():
            self._num_bytes = self._num_bytes + torch.stack(counts).sum() * row_bytes
        self._counts.clear()
