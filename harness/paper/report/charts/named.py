"""Charts with a name a line: scores of a few tasks or changes, each a point with its error."""

from collections.abc import Iterator, Sequence

from harness.paper.report.charts.chart import Axis, Chart, Level, grouped, setup
from harness.paper.report.charts.scores import KEYS, NOTE, SETUP, is_score, scored
from harness.tables.columns import (
    NUM_FEWSHOT,
    NUM_SAMPLES,
    SEQ_LEN,
    SIZE,
    WITHOUT_SKEWING,
    Column,
    TableRow,
    quantity,
    rank,
)

ASKED = ("model", "task", *(column.name for column in (NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN)))
"""What two runs share that were asked the same."""
FULL = "perplexity_full"
DEFAULT = "default"


def pairs(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality with and without skewing, a line per task; beside them the full cache, where it was asked the same,
    which another experiment's table may say."""
    own = [row for row in rows if row["label"].endswith(WITHOUT_SKEWING)]
    kept = {(row["experiment"], row["label"].removesuffix(WITHOUT_SKEWING)) for row in own}
    asked = {_asked(row) for row in own}
    shown = [
        row
        for row in _scores(rows)
        if row in own or (row["experiment"], row["label"]) in kept or (row[SIZE.name] == 1 and _asked(row) in asked)
    ]
    for metric in grouped(shown, "metric"):
        for panel in grouped(metric, "model", "source"):
            column = quantity(panel[0]["metric"])
            yield _chart(
                column.heading, setup(panel[0]), column, [(row, row["task"], row["label"]) for row in panel], "task"
            )


def changes(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality of a text or task, a line per run, by what its label adds to the words that all begin with."""
    own = _scores(rows)
    shared = {row["label"].partition(", ")[0] for row in own}
    series = " and ".join(shared) if len(shared) == 1 else ""
    for metric in grouped(own, "metric", "task"):
        for panel in grouped(metric, *KEYS):
            column = quantity(panel[0]["metric"])
            placed = [(row, _change(row["label"], series), series or row["label"]) for row in panel]
            chart = _chart(f"{panel[0]['task']}: {column.heading}", setup(panel[0], *SETUP), column, placed, "run")
            yield chart._replace(levels=_full(rows, panel[0]))


def _scores(rows: list[TableRow]) -> list[TableRow]:
    own = [row for row in rows if is_score(row) and row["value"] is not None]
    return sorted(own, key=lambda row: rank(row["metric"]))


def _asked(row: TableRow) -> tuple[object, ...]:
    return tuple(row[name] for name in ASKED)


def _change(label: str, shared: str) -> str:
    return label.removeprefix(shared).removeprefix(", ") or DEFAULT


def _full(rows: Sequence[TableRow], of: TableRow) -> list[Level]:
    """The full cache's perplexity on the same windows, where perplexity is shown."""
    same = [row for row in rows if row["metric"] == FULL and _asked(row) == _asked(of)]
    values = dict.fromkeys(row["value"] for row in same if of["metric"] == "perplexity")
    return [Level("x", value, "full cache") for value in values]


def _chart(pane: str, title: str, shown: Column, placed: Sequence[tuple[TableRow, str, str]], kind: str) -> Chart:
    """placed: a row, the name of its line, and its series. kind: what the names are of."""
    points = []
    for row, name, series in placed:
        point = scored(row, shown, shown.factor * row["value"], series)
        points.append(point._replace(y=name, line=""))
    return Chart(pane, title, Axis(shown.heading, zero=True), Axis(kind, words=True), points, note=NOTE)
