"""Where the time of a decode step goes: attention, FFN, prediction, waiting for the link (paper, Fig 18).

`switch(segment)` says that from now on time belongs to `segment`; what is measured are the times between switches,
so the segments of a step sum to the step. On CUDA the marks are events on the current stream, read after the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

SEGMENTS = ("attention", "ffn", "prediction", "transfer", "other")
"""transfer: the compute waited for the link. ffn: from a layer's attention to the next one's, norms and residuals
included. other: embedding, output head, and the step's bookkeeping."""


class Timeline:
    """Marks of one decode step. Reading it on CUDA synchronises, so read after the timed region."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def switch(self, segment: str) -> str:
        """Time from here on belongs to `segment`; returns the one before."""
        before = self.marks[-1][0] if self.marks else "other"
        self.marks.append((segment, self._now()))
        return before

    def take(self) -> dict[str, float]:
        """Seconds by segment since the first mark, up to now; forgets them."""
        marks = [*self.marks, ("other", self._now())]
        self.marks = []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for (segment, begin), (_, end) in zip(marks, marks[1:], strict=False):
            seconds[segment] += self._seconds(begin, end)
        return {segment: seconds[segment] for segment in SEGMENTS}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
