"""Analyses for people: a table per model and quantity, a line per series, a few values of x as columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.tables.columns import LABEL, LAYER, MISSING, Column, TableRow, quantity
from harness.tables.text import Sheet

MAX_COLUMNS = 6


def sheets(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per run, quantity and kind of x; `title` says the model and the source."""
    groups: dict[tuple[Any, ...], list[TableRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ("run_id", "metric", "x_name")), []).append(row)
    for (_, metric, x_name), own in groups.items():
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        yield _sheet(f"{title}: {quantity(metric).heading}{by}", own, quantity(metric))


def _sheet(title: str, rows: Sequence[TableRow], shown: Column) -> Sheet:
    columns = _evenly(sorted({row["x"] for row in rows if row["x"] is not None})) or [None]
    layered = len({(row["series"], row["layer"]) for row in rows}) > len({row["series"] for row in rows})
    lines: dict[str, dict[Any, TableRow]] = {}
    for row in rows:
        of_layer = layered and row["x_name"] != "layer" and row["layer"] is not None
        name = f"{row['series']}, {LAYER.phrase.format(row['layer'])}" if of_layer else row["series"]
        lines.setdefault(name, {})[row["x"]] = row
    header = [LABEL.heading, *(shown.heading if x is None else f"{x:,g}" for x in columns)]
    cells = [[name, *(_cell(line.get(x), shown) for x in columns)] for name, line in lines.items()]
    return Sheet(title, header, cells)


def _cell(row: TableRow | None, shown: Column) -> str:
    return MISSING if row is None else shown.show(row["value"], row["stderr"])


def _evenly(values: Sequence[float]) -> list[Any]:
    """At most `MAX_COLUMNS` of the values, first and last among them."""
    count = min(MAX_COLUMNS, len(values))
    return [values[index * (len(values) - 1) // max(1, count - 1)] for index in range(count)]
