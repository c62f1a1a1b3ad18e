"""Charts of accuracy tables along what was swept: a setting, the length of a text, the place of a needle."""

import re
from collections.abc import Iterator, Sequence

from harness.paper.report.charts.chart import Axis, Chart, Level, Point, details, grouped, setup
from harness.paper.report.charts.scores import KEYS, NOTE, SETUP, by_size, is_score, scored
from harness.tables.columns import (
    BATCH_SIZE,
    KEPT_LABEL,
    KL,
    LABEL,
    METHOD,
    NEEDLE_TASK,
    PLATFORM,
    PROMPT_LEN,
    SEQ_LEN,
    SETTING_LABEL,
    SIZE,
    SOURCE,
    SWEPT,
    Column,
    TableRow,
    column,
    quantity,
    rank,
)  # fmt: skip
from harness.tables.depths import is_depth

DECODE = column("decode_s")
TIMED = (PLATFORM, BATCH_SIZE, PROMPT_LEN)
ONE_RUN = "One run each, so without bars."


def by_setting(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality, and the time of decoding, by the setting that the labels name."""
    found = [(row, re.match(SETTING_LABEL, row["label"])) for row in rows]
    own = [row | {"setting": SWEPT.get(at["setting"], at["setting"]), "x": float(at["x"])} for row, at in found if at]
    quality = [row for row in own if "metric" in row and is_score(row) and row["value"] is not None]
    for panel in grouped(quality, "setting", "metric", "task", *KEYS):
        first, shown = panel[0], quantity(panel[0]["metric"])
        whole = [row for row in rows if row.get("metric") == first["metric"] and row[SIZE.name] == 1]
        levels = [Level("y", shown.factor * row["value"], row["label"]) for row in _alike(whole, first)]
        points = [scored(row, shown, row["x"], row["method"]) for row in panel]
        pane = f"{first['task']}: {shown.heading} by {first['setting'].partition(' (')[0]}"
        yield _swept(Chart(pane, setup(first, *SETUP), Axis(first["setting"]), Axis(shown.heading), points, levels))
    timed = [row for row in own if row.get(DECODE.name) is not None]
    for panel in grouped(timed, "setting", "model", "source", *(each.name for each in TIMED)):
        axes = Axis(panel[0]["setting"]), Axis(DECODE.heading, zero=True)
        points = [_timed(row) for row in panel]
        yield Chart(
            f"{DECODE.heading} by {axes[0].title.partition(' (')[0]}",
            setup(panel[0], *TIMED),
            *axes,
            points,
            note=ONE_RUN,
        )


def by_length(rows: list[TableRow]) -> Iterator[Chart]:
    """Every quality by size; then by the length, of runs that keep so many tokens whatever it is, and the full cache's
    perplexity."""
    found = [(row, re.match(KEPT_LABEL, row["label"])) for row in rows]
    yield from by_size([row for row, at in found if not at])
    kept = [row | {"kept": at["kept"], "name": at["name"]} for row, at in found if at and row["value"] is not None]
    full = [row | {"name": "full cache", "metric": "perplexity"} for row in kept if row["metric"] == "perplexity_full"]
    once = {(row["model"], row["task"], row["kept"], row[SEQ_LEN.name]): row for row in full}
    shown = [row for row in (*kept, *once.values()) if is_score(row)]
    for panel in grouped(sorted(shown, key=_rank), "metric", "task", "model", "source", "kept"):
        first, column = panel[0], quantity(panel[0]["metric"])
        points = [scored(row, column, row[SEQ_LEN.name], row["name"]) for row in panel]
        pane = f"{first['task']}: {column.heading} by length"
        axes = Axis(SEQ_LEN.heading, zero=True), Axis(column.heading, log=column == KL)
        yield _swept(Chart(pane, f"{setup(first)}, {first['kept']} tokens kept", *axes, points))


def needles(rows: list[TableRow]) -> Iterator[Chart]:
    """The share of right answers by the length, of every task; then by the depth at which the needle lies."""
    whole = [row for row in rows if is_score(row) and row["metric"].isdecimal() and row["value"] is not None]
    for panel in grouped(sorted(whole, key=_rank), "task", *KEYS):
        points = [scored(row, _right(row), int(row["metric"]), row["label"]) for row in panel]
        axes = Axis("length (tokens)", zero=True), Axis("right (%)", zero=True)
        yield _swept(Chart(f"{panel[0]['task']} by length", setup(panel[0], *SETUP), *axes, points))
    found = [(row, re.match(NEEDLE_TASK, row["task"])) for row in rows if is_depth(row)]
    placed = [
        row | {"needle": at["needle"], "length": int(at["length"]), "x": (int(at["begin"]) + int(at["end"])) / 2}
        for row, at in found
        if at
    ]
    for panel in grouped(placed, "needle", "length", "model", "source"):
        points = [scored(row, _right(row), row["x"], row["label"]) for row in panel]
        axes = Axis("depth of the needle (% of the prompt)", zero=True), Axis("right (%)", zero=True)
        title = f"{setup(panel[0])}, {panel[0]['length']:,} tokens"
        yield _swept(Chart(f"{panel[0]['needle']} by depth", title, *axes, points))


def _rank(row: TableRow) -> tuple[int, int, str]:
    return rank(row["metric"])


def _right(row: TableRow) -> Column:
    return quantity(row["metric"])


def _swept(chart: Chart) -> Chart:
    """A line per series, its points from left to right."""
    return chart._replace(points=sorted(chart.points, key=lambda point: point.x), note=NOTE)


def _alike(rows: Sequence[TableRow], first: TableRow) -> list[TableRow]:
    """The rows that were asked the same."""
    return [row for row in rows if all(row[name] == first[name] for name in ("task", *KEYS))]


def _timed(row: TableRow) -> Point:
    said = {LABEL.heading: row["label"], DECODE.heading: DECODE.show(row[DECODE.name])}
    said |= details(row, *TIMED, SIZE, SOURCE)
    return Point(row[METHOD.name], row["x"], DECODE.factor * row[DECODE.name], said, line=row[METHOD.name])
