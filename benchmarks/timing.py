"""Paired timings: contestants take turns, so that a busy machine slows all of them.

Plain Python alone, since the interpreter of the peers imports it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


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


def in_turn(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[Took]], dict[str, Any]]:
    """Run every contestant once a round, in every other round in reverse order, after a round that is not timed.

    Returns what each round took and the last result, by name. A contestant that returns `Timed` has timed itself.
    """
    times: dict[str, list[Took]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
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
            times[name].append(took)
    return {name: rounds[1:] for name, rounds in times.items()}, results


def spread(values: Sequence[float]) -> str:
    """The least and the largest value."""
    return f"{min(values):.2f} to {max(values):.2f}"
