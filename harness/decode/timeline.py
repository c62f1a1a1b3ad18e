"""Where the time of a decode step goes: attention, FFN, prediction, waiting for the link (the
paper's Fig 18); and how long a prompt and each step take.

In a `Timeline` each mark ends one segment and begins the next, so the segments of a step sum to the
step. On CUDA the marks are events on the current stream, read after the steps. A `StepClock` has
one mark a step, so every session keeps one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

SEGMENTS = ("attention", "ffn", "prediction", "transfer", "other")
"""transfer: the compute waited for rows or weights from the link. ffn: from a layer's attention to
the next one's, norms and residuals included. other: embedding, output head, and the step's
bookkeeping."""


class Timeline:
    """Marks of decode steps, one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[list[tuple[str, Any]]] = []

    def begin_step(self) -> None:
        """A step begins, and the one before ends; its first segment is `other`."""
        self._steps.append([])
        self.switch("other")

    def switch(self, segment: str) -> None:
        """Time from here on belongs to `segment`; outside a step nothing is marked."""
        if self._steps:
            self._steps[-1].append((segment, now(self.device)))

    @contextmanager
    def within(self, segment: str) -> Iterator[None]:
        """Time inside the `with` block belongs to `segment`, afterwards to what it belonged to
        before."""
        before = self._steps[-1][-1][0] if self._steps else segment
        self.switch(segment)
        yield
        self.switch(before)

    def take(self) -> list[dict[str, float]]:
        """Seconds by segment of each step since the last call, the last step ending now. On CUDA it
        synchronises."""
        steps, self._steps = self._steps, []
        last = now(self.device)
        wait_for(last)
        begins = [step[0][1] for step in steps]
        segments = []
        for step, end in zip(steps, [*begins[1:], last], strict=False):
            found = dict.fromkeys(SEGMENTS, 0.0)
            for (segment, begun), (_, ended) in pairwise([*step, ("", end)]):
                found[segment] += seconds(begun, ended)
            segments.append(found)
        return segments


class StepClock:
    """When a prompt began and ended, and when each decode step ended.

    On CUDA these are events on the device's current stream, and only who reads the times waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []
        self._prompt_marks = 1

    def begin_prompt(self, num_rows: int = 1) -> None:
        """A prompt begins now. num_rows: marks until its end, where it is decoded row by row."""
        self._marks = [now(self.device)]
        self._prompt_marks = num_rows

    def mark(self) -> None:
        """The prompt, then a step, ends now: its logits are there."""
        self._marks.append(now(self.device))

    @property
    def ttft_s(self) -> float:
        """Seconds from the prompt to the logits of the first new token."""
        return sum(self._intervals()[: self._prompt_marks])

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step: from the end of what came before to its own end."""
        return self._intervals()[self._prompt_marks :]

    def _intervals(self) -> list[float]:
        wait_for(self._marks[-1])
        return [seconds(begin, end) for begin, end in pairwise(self._marks)]


def now(device: torch.device) -> Any:
    """A time: on CUDA an event on the current stream of the device. While that records a CUDA
    graph, each replay has its own."""
    if device.type != "cuda":
        return time.perf_counter()
    recording = torch.cuda.is_current_stream_capturing()
    event = torch.cuda.Event(enable_timing=True, external=recording)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(begin: Any, end: Any) -> float:
    """Seconds between two times that have passed, below 0 if `end` is earlier."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def has_passed(moment: Any) -> bool:
    """Whether a time has passed."""
    return moment <= time.perf_counter() if isinstance(moment, float) else moment.query()


def wait_for(moment: Any) -> None:
    """Wait until a time has passed, if it is an event."""
    if not isinstance(moment, float):
        moment.synchronize()
