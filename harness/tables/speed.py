"""The figures of speed take their rows from one set of timed cells, `latency`: which rows, as a table of each figure.

Figure 14 shows the largest batch of 15, and 18 the longest sequence of 16a, as in the paper; so one cell serves
several figures and is timed once. Each model and machine has a sweep of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]

SHAPE = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")


def by_batch(rows: Rows) -> Rows:
    """Figure 15: the lengths that were timed with the most batch sizes."""
    return _widest_sweep(rows, "batch_size")


def by_length(rows: Rows) -> Rows:
    """Figure 16a: the batch sizes that were timed with the most lengths."""
    return _widest_sweep(rows, "prompt_len")


def by_model(rows: Rows) -> Rows:
    """Figure 16b: the shapes that were timed with the most models; none of a single model, which is no comparison."""
    swept = _widest_sweep(rows, "model")
    return swept if len({row["model"] for row in swept}) > 1 else []


FIGURES: Mapping[str, Callable[[Rows], Rows]] = {
    "fig14": lambda rows: _largest(by_batch(rows), "batch_size"),
    "fig15": by_batch,
    "fig16a": by_length,
    "fig16b": by_model,
    "fig18": lambda rows: _largest(by_length(rows), "prompt_len"),
}
"""The rows of `latency` that each figure draws."""


def _widest_sweep(rows: Rows, axis: str) -> Rows:
    """The rows of those setups, all of a shape but `axis`, that have the most values of it on their machine."""
    values: dict[Any, set[Any]] = defaultdict(set)
    for row in rows:
        values[_setup(row, axis)].add(row[axis])
    most: dict[Any, int] = defaultdict(int)
    for row in rows:
        machine = _machine(row, axis)
        most[machine] = max(most[machine], len(values[_setup(row, axis)]))
    return [row for row in rows if len(values[_setup(row, axis)]) == most[_machine(row, axis)]]


def _largest(rows: Rows, axis: str) -> Rows:
    """The rows with the largest value of `axis` in each setup."""
    largest: dict[Any, Any] = {}
    for row in rows:
        setup = _setup(row, axis)
        largest[setup] = max(largest.get(setup, row[axis]), row[axis])
    return [row for row in rows if row[axis] == largest[_setup(row, axis)]]


def _setup(row: Row, axis: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in SHAPE if name != axis)


def _machine(row: Row, axis: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "platform", "source") if name != axis)
