"""Where the time of a decode step goes: attention, FFN, prediction, waiting for the link (paper, Fig 18).

`switch(segment)` says that from now on time belongs to `segment`; what is measured are the times between switches,
so the segments of a step sum to the step. On CUDA the marks are events on the current stream, read after the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

SEGMENTS = ("attention", "ffn", "prediction", "transfer", "other")
"""transfer: the compute waited for rows or weights from the link. ffn: from a layer's attention to the next one's,
norms and residuals included. other: embedding, output head, and the step's bookkeeping."""


class _Mark(NamedTuple):
    """Where a segment begins, and the one before it ends: one point in time, CUDA's events of either device."""

    segment: str
    end: Any
    begin: Any


class Timeline:
    """Marks of decode steps, one after another.

    CUDA tells the time between events of one device only. So where the current device changes, a mark is an event on
    each: the last device's is past the copy to the new one, the new one's waits for that copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[list[_Mark]] = []
        self._current = device.index or 0
        self._used = {self._current}

    def begin_step(self) -> None:
        """A step begins, and the one before ends; its first segment is `other`."""
        self._steps.append([])
        self.switch("other")

    def switch(self, segment: str) -> None:
        """Time from here on belongs to `segment`; outside a step nothing is marked."""
        if self._steps:
            self._steps[-1].append(self._mark(segment))

    @contextmanager
    def within(self, segment: str) -> Iterator[None]:
        """Time inside the `with` block belongs to `segment`, afterwards to what it belonged to before."""
        before = self._steps[-1][-1].segment if self._steps else segment
        self.switch(segment)
        yield
        self.switch(before)

    def take(self) -> list[dict[str, float]]:
        """Seconds by segment of each step since the last call, the last step ending now. On CUDA it synchronises."""
        steps, self._steps = self._steps, []
        ends = [step[0] for step in steps[1:]] + [self._mark("")]
        for device in self._used if self.device.type == "cuda" else ():
            torch.cuda.synchronize(device)
        return [self._by_segment([*step, end]) for step, end in zip(steps, ends, strict=False)]

    def _by_segment(self, marks: list[_Mark]) -> dict[str, float]:
        seconds = dict.fromkeys(SEGMENTS, 0.0)
        for (segment, _, begin), (_, end, _) in pairwise(marks):
            seconds[segment] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        return seconds

    def _mark(self, segment: str) -> _Mark:
        if self.device.type != "cuda":
            now = time.perf_counter()
            return _Mark(segment, now, now)
        before, self._current = self._current, torch.cuda.current_device()
        self._used.add(self._current)
        begin = _event(self._current)
        return _Mark(segment, begin if before == self._current else _event(before), begin)


def _event(device: int) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
