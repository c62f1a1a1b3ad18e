"""Speed for people, a line per run; and the rows that each figure of speed takes from the timed cells, `latency`.

Figure 14 shows the largest batch of 15, and 18 the longest sequence of 16a, as in the paper; so one cell serves
several figures and is timed once. Each model and machine has a sweep of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.tables.columns import DEVICE_FRAC, LABEL, LATENCY, MISSING, SETTINGS, SIZE, TableRow
from harness.tables.text import Sheet

TIMED_CELLS = "latency"
"""The experiment whose records are the cells of all figures of speed."""
SHAPE = ("model", "platform", "source", "batch_size", "prompt_len", "gen_len")

BRIEF = ("prefill_s", "tokens_per_s", "step_p50_s", "h2d_bytes", "peak_device_bytes")
"""The numbers that are shown in a terminal, beside the shape and the share that is read."""
TableRows = Sequence[TableRow]


def sheets(title: str, rows: TableRows) -> Iterator[Sheet]:
    """One table: the full cache first, then by label and shape; no column where no run has a number."""
    numbers = [column for column in LATENCY if column.digits is not None]
    shown = [
        column
        for column in dict.fromkeys((SIZE, DEVICE_FRAC, *numbers))
        if column == SIZE or any(row.get(column.name) is not None for row in rows)
    ]
    words = [LABEL, SETTINGS] if any(row.get(SETTINGS.name) for row in rows) else [LABEL]
    lines = [
        [
            *(row.get(column.name) or MISSING for column in words),
            *(column.show(row.get(column.name)) for column in shown),
        ]
        for row in sorted(rows, key=_order)
    ]
    yield Sheet(title, [column.heading for column in (*words, *shown)], lines)


def brief(row: TableRow) -> TableRow:
    """A row as it is shown in a terminal."""
    left_out = {column.name for column in LATENCY if column.digits is not None} - {*BRIEF, *SHAPE, SIZE.name}
    return {name: value for name, value in row.items() if name not in left_out}


def _order(row: TableRow) -> tuple[Any, ...]:
    size = row.get("size") or 0
    shape = tuple(row[name] for name in ("batch_size", "prompt_len", "gen_len"))
    return (size < 1, row["label"], *shape, size, row.get("settings") or "")


def by_batch(rows: TableRows) -> TableRows:
    """Figure 15: the lengths that were timed with the most batch sizes."""
    return _widest_sweep(rows, "batch_size")


def by_length(rows: TableRows) -> TableRows:
    """Figure 16a: the batch sizes that were timed with the most lengths."""
    return _widest_sweep(rows, "prompt_len")


def by_model(rows: TableRows) -> TableRows:
    """Figure 16b: the shapes that were timed with the most models; none of a single model, which is no comparison."""
    swept = _widest_sweep(rows, "model")
    pairs = {(_setup(row, "model"), row["model"]) for row in swept}
    several = Counter(setup for setup, _ in pairs)
    return [row for row in swept if several[_setup(row, "model")] > 1]


CHOSEN: Mapping[str, Callable[[TableRows], TableRows]] = {
    "fig14": lambda rows: _largest(by_batch(rows), "batch_size"),
    "fig15": by_batch,
    "fig16a": by_length,
    "fig16b": by_model,
    "fig18": lambda rows: _largest(by_length(rows), "prompt_len"),
}
"""By figure, the rows of `latency` that it draws."""


def _widest_sweep(rows: TableRows, axis: str) -> TableRows:
    """The rows of those setups, all of a shape but `axis`, that have the most values of it on their machine."""
    values: dict[Any, set[Any]] = defaultdict(set)
    for row in rows:
        values[_setup(row, axis)].add(row[axis])
    most: dict[Any, int] = defaultdict(int)
    for row in rows:
        machine = _machine(row, axis)
        most[machine] = max(most[machine], len(values[_setup(row, axis)]))
    return [row for row in rows if len(values[_setup(row, axis)]) == most[_machine(row, axis)]]


def _largest(rows: TableRows, axis: str) -> TableRows:
    """The rows with the largest value of `axis` in each setup."""
    largest: dict[Any, Any] = {}
    for row in rows:
        setup = _setup(row, axis)
        largest[setup] = max(largest.get(setup, row[axis]), row[axis])
    return [row for row in rows if row[axis] == largest[_setup(row, axis)]]


def _setup(row: TableRow, axis: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in SHAPE if name != axis)


def _machine(row: TableRow, axis: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "platform", "source") if name != axis)
