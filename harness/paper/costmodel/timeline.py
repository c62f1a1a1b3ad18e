"""Two resources, compute and link, and the tasks that occupy them one after the other.

A task starts when its resource is free and the one task it waits for has ended. The link runs ahead of compute only
as far as what it waits for lets it; what compute then still waits for is the exposed transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""


class Task(NamedTuple):
    """Work on a resource. after: index of the earlier task that must have ended, None for no such task."""

    resource: Literal["compute", "link"]
    seconds: float
    after: int | None = None


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


def walk(tasks: Sequence[Task]) -> list[float]:
    """When each task ends, in seconds from the start of the first; a resource takes its tasks in the given order."""
    free = {"compute": 0.0, "link": 0.0}
    ends: list[float] = []
    for resource, seconds, after in tasks:
        start = free[resource] if after is None else max(free[resource], ends[after])
        free[resource] = start + seconds
        ends.append(free[resource])
    return ends


def block_ends(blocks: Sequence[BlockTimes], overlap: Overlap) -> list[float]:
    """When the compute of each block ends, in seconds; blocks of successive steps follow one another.

    A block's attention waits for its own transfer, and the first block's transfer has nothing to hide behind. With
    overlap `none` every task waits for the one before it.
    """
    tasks: list[Task] = []

    def add(resource: Literal["compute", "link"], seconds: float, after: int | None = None) -> int:
        tasks.append(Task(resource, seconds, after))
        return len(tasks) - 1

    finished = []
    arrived = add("link", blocks[0].load)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        for stage, seconds in (
            ("block", block.prediction),
            ("ffn", block.attention),
            ("none", block.ffn + block.other),
        ):
            done = add("compute", seconds, arrived if stage == "ffn" else None)
            if following and stage == overlap:
                next_arrived = add("link", following.load, done)
            if stage == "ffn":
                add("link", block.store, done)
        finished.append(done)
        arrived = next_arrived if following else arrived
    ends = list(accumulate(task.seconds for task in tasks)) if overlap == "none" else walk(tasks)
    return [ends[index] for index in finished]
