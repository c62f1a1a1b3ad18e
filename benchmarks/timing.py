"""Paired timings: contestants take turns, so that a busy machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_turn(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = False
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Run every contestant once a round. Returns the seconds of each round and the last result, by name.

    warm_up: one more round goes before them, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(rounds + warm_up):
        for name, run in contestants.items():
            began = time.perf_counter()
            results[name] = run()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds, results


def spread(values: Sequence[float], factor: float = 1.0) -> str:
    """The least and the largest value."""
    return f"{factor * min(values):.2f} to {factor * max(values):.2f}"
