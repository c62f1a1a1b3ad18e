"""Paired timings: contestants take turns, so that a busy machine slows all of them.

Plain Python alone, since the interpreter of the peers imports it, too.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Took(NamedTuple):
    """Seconds by the clock, and CPU seconds of all threads of the process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Took:
        """Where both clocks stand."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Took) -> Took:
        """The time from `before` to this one."""
        return Took(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


class Timed(NamedTuple):
    """A result and the time it took, where the contestant times a part of its call by itself."""

    took: Took
    result: Any


def in_turn(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = False
) -> tuple[dict[str, list[Took]], dict[str, Any]]:
    """Run every contestant once a round, in every other round in reverse order.

    Returns what each round took and the last result, by name. A contestant that returns `Timed` has timed itself.
    warm_up: one more round goes before them, untimed.
    """
    times: dict[str, list[Took]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(rounds + warm_up):
        order = list(contestants.items())
        if number % 2:
            order.reverse()
        for name, run in order:
            began = Took.now()
            result = run()
            took = Took.now().since(began)
            if isinstance(result, Timed):
                took, result = result
            results[name] = result
            if number >= warm_up:
                times[name].append(took)
    return times, results


def spread(values: Sequence[float], factor: float = 1.0) -> str:
    """The least and the largest value."""
    return f"{factor * min(values):.2f} to {factor * max(values):.2f}"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str]:
    """Median over the rounds of ours / theirs, and its spread."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return statistics.median(found), spread(found)


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory mapped, and serve large requests from it; returns whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return all(mallopt(threshold, 2**31 - 1) == 1 for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
