"""Two resources, compute and link, and the blocks whose tasks occupy them one after the other.

A task starts when its resource is free and the one task it waits for has ended. The link runs ahead of compute only
as far as what it waits for lets it; what compute then still waits for is the exposed transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""


class BlockTimes(NamedTuple):
    """Seconds of one block when nothing waits. load: what its attention needs over the link; store: what it writes
    back; prediction: the rehearsal of the next block; other: what follows the block, such as the output head."""

    load: float
    attention: float
    ffn: float
    prediction: float = 0.0
    store: float = 0.0
    other: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds on the compute resource."""
        return self.prediction + self.attention + self.ffn + self.other


def block_ends(blocks: Sequence[BlockTimes], overlap: Overlap) -> list[float]:
    """When the compute of each block ends, in seconds; blocks of successive steps follow one another.

    A block's attention waits for its own transfer, and the first block's transfer has nothing to hide behind. With
    overlap `none` every task waits for the one before it.
    """
    return _in_turn(blocks) if overlap == "none" else _beside(blocks, early=overlap == "block")


def _in_turn(blocks: Sequence[BlockTimes]) -> list[float]:
    now, ends = 0.0, []
    for block in blocks:
        for seconds in (block.load, block.prediction, block.attention, block.store, block.ffn + block.other):
            now += seconds
        ends.append(now)
    return ends


def _beside(blocks: Sequence[BlockTimes], *, early: bool) -> list[float]:
    """compute, link: when each resource is free. early: the next transfer starts before this block's attention."""
    compute, arrived, ends = 0.0, blocks[0].load, []
    link = arrived
    for block, load in zip(blocks, [*(block.load for block in blocks[1:]), 0.0], strict=True):
        compute, here = compute + block.prediction, arrived
        if early:
            link = arrived = max(link, compute) + load
        compute = max(compute, here) + block.attention
        if not early:
            link = arrived = max(link, compute) + load
        link = max(link, compute) + block.store
        compute += block.ffn + block.other
        ends.append(compute)
    return ends
