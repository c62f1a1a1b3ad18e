"""The size of a tile, and the strides of slots."""

from __future__ import annotations

from torch import Tensor

ELEMENTS = 1024
"""Slots or scores that a program of a kernel holds in registers at a time."""


def set_strides(tokens: Tensor) -> tuple[int, int]:
    """Strides of the batch and of the sets in [batch, 1 or sets, slots], 0 along what is shared."""
    return tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0
