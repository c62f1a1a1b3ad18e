"""Charts of accuracy tables: scores and fidelity by the size that is read or kept, and along a text."""

import re
from collections.abc import Iterator

from harness.paper.report.charts.chart import LEAST, Axis, Chart, Level, Point, details, grouped, setup
from harness.tables.accuracy import is_brief
from harness.tables.columns import (
    CHUNK_TASK,
    DEVICE_FRAC,
    DIFFERENCE,
    DIFFERENCE_STDERR,
    KL,
    LABEL,
    NUM_FEWSHOT,
    NUM_SAMPLES,
    RESIDENT_FRAC,
    SEQ_LEN,
    SETTINGS,
    SIZE,
    SOURCE,
    Column,
    TableRow,
    quantity,
    rank,
)  # fmt: skip

FORMER = "index_frac"
"""A size that tables of an older version hold as a metric."""
SETUP = (NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN)
KEYS = ("model", "source", *(column.name for column in SETUP))
SHARES = (SIZE, DEVICE_FRAC, RESIDENT_FRAC)
NOTE = "Bars: one standard error, of the difference to the full cache where there is one."


def is_score(row: TableRow) -> bool:
    """Whether a row of an accuracy table is a score of a method on a whole task or text."""
    return is_brief(row) and row["metric"] != FORMER


def by_size(rows: list[TableRow], x: Column = SIZE) -> Iterator[Chart]:
    """Every quality by a share of the cache; a line per label, and a level for what reads the whole cache."""
    own = [row for row in rows if is_score(row) and None not in (row["value"], row[x.name], row[SIZE.name])]
    own.sort(key=lambda row: (rank(row["metric"]), row["task"]))
    own.sort(key=lambda row: row["metric"] != KL.name)
    for group in grouped(own, "metric", "task"):
        shown, log = quantity(group[0]["metric"]), group[0]["metric"] == KL.name
        for panel in grouped(group, *KEYS):
            whole = [row for row in panel if row[SIZE.name] == 1]
            points = [scored(row, shown, x.factor * row[x.name], row["label"]) for row in panel if row not in whole]
            levels = [Level("y", shown.factor * row["value"], row["label"]) for row in whole if not log]
            pane, axis = f"{panel[0]['task']}: {shown.heading}", Axis(shown.heading, log=log)
            yield Chart(pane, setup(panel[0], *SETUP), Axis(x.heading, zero=True), axis, points, levels, NOTE)


def by_index(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality by what the method keeps on the device."""
    return by_size([row for row in rows if row.get(RESIDENT_FRAC.name) is not None], RESIDENT_FRAC)


def by_step(rows: list[TableRow]) -> Iterator[Chart]:
    """What was measured of ranges of a text, each at its middle; a line per label and size."""
    found = [(row, re.match(CHUNK_TASK, row["task"])) for row in rows if row["value"] is not None]
    own = [row | {"task": at[1], "range": at[0], "x": (int(at[2]) + int(at[3])) / 2} for row, at in found if at]
    for group in grouped([row for row in own if is_score(row)], "metric", "task"):
        shown, log = quantity(group[0]["metric"]), group[0]["metric"] == KL.name
        for panel in grouped(group, *KEYS):
            points = [_along(row, shown) for row in panel if not log or row["value"] > LEAST]
            pane = f"{panel[0]['task']}, along the text: {shown.heading}"
            axes = Axis("token of the text", zero=True), Axis(shown.heading, log=log)
            yield Chart(pane, setup(panel[0], *SETUP), *axes, points)


def decoded(rows: list[TableRow]) -> Iterator[Chart]:
    """What was measured along the texts that were decoded, then of them as a whole."""
    yield from by_step(rows)
    yield from by_size(rows)


def _error(row: TableRow, shown: Column) -> float | None:
    stderr = row["stderr"] if row.get(DIFFERENCE.name) is None else row.get(DIFFERENCE_STDERR.name)
    return None if stderr is None else shown.factor * stderr


def _said(row: TableRow, shown: Column) -> dict[str, str]:
    said = {LABEL.heading: row["label"], shown.heading: shown.show(row["value"], row["stderr"])}
    if row.get(DIFFERENCE.name) is not None:
        said[DIFFERENCE.heading] = shown.show(row[DIFFERENCE.name], row.get(DIFFERENCE_STDERR.name))
    return said | details(row, *SHARES, NUM_SAMPLES, SETTINGS, SOURCE)


def scored(row: TableRow, shown: Column, at: float, series: str) -> Point:
    """The score of a row at a place along x, on the line of a series."""
    return Point(series, at, shown.factor * row["value"], _said(row, shown), _error(row, shown), line=series)


def _along(row: TableRow, shown: Column) -> Point:
    share = row[SIZE.name]
    name = row["label"] if share in (None, 1) else f"{row['label']}, {share:.0%}"
    point = scored(row, shown, row["x"], name)
    return point._replace(details={**point.details, "tokens": row["range"]})
