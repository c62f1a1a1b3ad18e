"""The leaderboard for people: a table per size, best in bold, every method outside the bounds marked.

Bold is the best of the methods of a table's size, the bounds aside. A method is compared with a bound where both read
the same share of the cache, whichever table they stand in.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from harness.tables import differences
from harness.tables.columns import (
    ASKED_SIZE,
    BOARD_TASKS,
    DEVICE_FRAC,
    FRONT,
    KL,
    LABEL,
    MISSING,
    NLL,
    RESIDENT_FRAC,
    SIZE,
    STEP,
    TOP1,
    Column,
    TableRow,
)
from harness.tables.leaderboard import BOUNDS, FRONTIER
from harness.tables.text import Sheet

EQUAL = 0.01
"""Shares of the cache that count as equal, as where a method is sized."""
OUTSIDE, OTHER_SIZE, MODELLED = "†", "§", "‡"
TASKS = {column.name for column in BOARD_TASKS}
HIGHER = {TOP1.name, *TASKS}
"""Columns of which more is better."""


class _Field(NamedTuple):
    """A column as people read it. best: whether one of its cells is in bold."""

    heading: str
    column: Column
    show: Callable[[TableRow], str]
    best: bool = True


def sheets(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per size, then the methods that have none; the fronts as one table."""
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    outside = [list(_outside(row, rows)) for row in rows]
    said = {id(row): found for row, found in zip(rows, outside, strict=True)}
    for words, own in groups.items():
        yield _sheet(f"{title}, {words}", own, [said[id(row)] for row in own])


def _group(row: TableRow) -> str:
    if row["experiment"] == FRONTIER:
        return "the fronts"
    return (
        "at a size of their own"
        if row["asked_size"] is None
        else f"{ASKED_SIZE.show(row['asked_size'])} % of the link's bytes"
    )


def _sheet(title: str, rows: Sequence[TableRow], outside: Sequence[Sequence[str]]) -> Sheet:
    fields = [field for field in FIELDS if any(row.get(field.column.name) not in (None, "") for row in rows)]
    off = [not _has_its_size(row) for row in rows]
    labels = [
        row["label"] + OUTSIDE * bool(found) + OTHER_SIZE * missed
        for row, found, missed in zip(rows, outside, off, strict=True)
    ]
    lines = [[label, *(field.show(row) for field in fields)] for label, row in zip(labels, rows, strict=True)]
    bold = {(line, 1 + at) for at, field in enumerate(fields) if field.best for line in _best(field.column, rows)}
    found = ((row["label"], each) for row, each in zip(rows, outside, strict=True) if each)
    notes = [f"{OUTSIDE} {label}: {'; '.join(each)}." for label, each in found]
    if any(off):
        notes.append(f"{OTHER_SIZE} Cannot have this size: the nearest that it can, in no comparison.")
    if any(row.get("step_source") == "modelled" for row in rows):
        notes.append(f"{MODELLED} Modelled from the compute and the bytes of a step timed at another size.")
    return Sheet(
        title, [LABEL.heading, *(field.heading for field in fields)], lines, bold=bold, notes=notes,
        details=[row["settings"] for row in rows],
    )  # fmt: skip


def _best(column: Column, rows: Sequence[TableRow]) -> list[int]:
    """The lines with the best value; none where methods have sizes of their own."""
    values = {
        line: row[column.name]
        for line, row in enumerate(rows)
        if row["asked_size"] is not None
        and row["method"] not in BOUNDS.values()
        and row.get(column.name) is not None
        and abs(_read(row, column) - row["asked_size"]) <= EQUAL
    }
    best = (max if column.name in HIGHER else min)(values.values(), default=None)
    return [line for line, value in values.items() if value == best]


def _outside(row: TableRow, rows: Sequence[TableRow]) -> Iterator[str]:
    """In which scores a row lies outside the bounds that read as much, in words."""
    for column in (KL, TOP1, *BOARD_TASKS):
        for side, method in BOUNDS.items():
            for bound in rows:
                if bound["method"] == method and bound is not row and _comparable(row, bound, column):
                    lead = (row[column.name] - bound[column.name]) * (1 if column.name in HIGHER else -1)
                    if lead > 0 if side == "upper" else lead < 0:
                        word = "above" if side == "upper" else "below"
                        gap = column._replace(heading="").show(abs(lead), _stderr_of_gap(row, bound, column))
                        yield f"{column.words} {word} {bound['label']} by {gap}"


def _comparable(row: TableRow, bound: TableRow, column: Column) -> bool:
    known = row.get(column.name) is not None and bound.get(column.name) is not None
    alike = row["model"] == bound["model"] and row["experiment"] == bound["experiment"]
    return known and alike and abs(_read(row, column) - _read(bound, column)) <= EQUAL


def _stderr_of_gap(row: TableRow, bound: TableRow, column: Column) -> float | None:
    """Of two differences to the same full cache, as if they were independent."""
    errors = [each.get(f"{column.name}_stderr") for each in (row, bound)]
    known = [error for error in errors if error is not None]
    return sum(error**2 for error in known) ** 0.5 if len(known) == len(errors) else None


def _read(row: TableRow, column: Column) -> float:
    """The share of the cache that was read where `column` was measured."""
    name = f"{column.name}_{SIZE.name}" if column.name in TASKS else SIZE.name
    return row[name] if row.get(name) is not None else float("nan")


def _has_its_size(row: TableRow) -> bool:
    sizes = [_read(row, column) for column in (KL, *BOARD_TASKS)]
    return row["asked_size"] is None or not any(abs(size - row["asked_size"]) > EQUAL for size in sizes)


def _plain(column: Column) -> Callable[[TableRow], str]:
    return lambda row: column.show(row.get(column.name), row.get(f"{column.name}_stderr"))


def _sizes(row: TableRow) -> str:
    """The share read, or the least and the largest over text and tasks."""
    sizes = [size for size in (_read(row, column) for column in (KL, *BOARD_TASKS)) if size == size]
    return "-".join(dict.fromkeys(map(SIZE.show, (min(sizes), max(sizes))))) if sizes else MISSING


def _task(column: Column) -> Callable[[TableRow], str]:
    def cell(row: TableRow) -> str:
        cells = (row.get(f"{column.name}{part}") for part in ("", "_stderr", "_difference", "_detectable"))
        return differences.show(column, *cells)

    return cell


def _step(row: TableRow) -> str:
    return STEP.show(row.get(STEP.name)) + MODELLED * (row.get("step_source") == "modelled")


FIELDS = (
    _Field("link (%)", SIZE, _sizes, best=False),
    _Field(DEVICE_FRAC.heading, DEVICE_FRAC, _plain(DEVICE_FRAC)),
    _Field(RESIDENT_FRAC.heading, RESIDENT_FRAC, _plain(RESIDENT_FRAC)),
    *(_Field(column.heading, column, _plain(column)) for column in (KL, TOP1, NLL)),
    *(_Field(f"{column.heading}, less the full cache's", column, _task(column)) for column in BOARD_TASKS),
    _Field(STEP.heading, STEP, _step),
    _Field(FRONT.heading, FRONT, lambda row: row.get(FRONT.name) or MISSING, best=False),
)
