"""Charts of latency tables with a name a line: the parts of a time end to end, and speedups by model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from harness.paper.report.charts.chart import Axis, Chart, Level, Point, details, grouped, setup
from harness.paper.report.charts.times import BASE, GEN_LEN, OF_PAPER, ONE_RUN, SAID, Texts, published_lines
from harness.tables.columns import (
    BATCH_SIZE,
    LABEL,
    PLATFORM,
    PROMPT_LEN,
    SEGMENTS,
    SOURCE,
    Column,
    TableRow,
    column,
    typed,
)

FAR = 2
"""A label that takes so many times as long as `BASE` hides what is fast: a further pane is without it."""
OF_RUN = tuple(column(name)._replace(heading=words, factor=1, digits=2) for name, words in
               (("prefill_s", "prefill (s)"), ("decode_s", "decode (s)")))  # fmt: skip
SPEEDUPS = {"total_s": "speedup over offload, prefill and decode (x)", "decode_s": "speedup over offload, decode (x)"}
PUBLISHED = "published"
SHAPE = (PLATFORM, BATCH_SIZE, PROMPT_LEN, GEN_LEN)


def run_times(texts: Texts) -> Iterator[Chart]:
    """Prefill and decode, a line per label; the paper's totals where a run is of its setup."""
    yield from _stacked(texts, "prefill and decode", "prefill and decode (s)", OF_RUN, "total_latency")


def block_times(texts: Texts) -> Iterator[Chart]:
    """One block in one decode step by segment, a line per label; the paper's sums where a run is of its setup."""
    yield from _stacked(texts, "time of a block", "one block in a decode step (ms)", SEGMENTS, "block_latency")


def by_model(texts: Texts) -> Iterator[Chart]:
    """Speedups, a line per model; the paper's where a run is of its setup."""
    rows = [typed(text) | {"text": text} for text in texts]
    for (time, words), panel in product(SPEEDUPS.items(), grouped(rows, "source", *(each.name for each in SHAPE))):
        base = {row["model"]: row[time] for row in panel if row["label"] == BASE}
        compared = [row for row in panel if row["model"] in base and row["label"] != BASE]
        points = [_speedup(row, base[row["model"]] / row[time], words) for row in compared]
        paper = _published(panel, "speedup_over_offload", ("model",)) if time == "total_s" else []
        points += [Point(line["series"], value, line["x"], said, hollow=True) for line, value, said in paper]
        models = len({row["model"] for row in panel})
        title = setup({**panel[0], "model": f"{models} model{'s' if models > 1 else ''}"}, *SHAPE)
        axes, note = (Axis(words, zero=True), Axis("model", words=True)), OF_PAPER if paper else ONE_RUN
        yield Chart(words.partition(" (")[0], title, *axes, points, [Level("x", 1, BASE)], note)


def _stacked(texts: Texts, pane: str, title: str, parts: Sequence[Column], metric: str) -> Iterator[Chart]:
    rows = [typed(text) | {"text": text} for text in texts]
    for panel in grouped(rows, "model", "source", *(each.name for each in SHAPE)):
        for words, near in _with_close_up(panel).items():
            points = [_part(row, part, parts) for part in parts for row in near if row[part.name] is not None]
            labels = {row["label"] for row in near}
            paper = [each for each in _published(panel, metric, ("batch_size",)) if each[0]["series"] in labels]
            points += [Point(PUBLISHED, value, line["series"], said, hollow=True) for line, value, said in paper]
            axes, note = (Axis(title, zero=True), Axis(LABEL.heading, words=True)), OF_PAPER if paper else ONE_RUN
            yield Chart(f"{pane}{words}", setup(panel[0], *SHAPE), *axes, points, note=note, stacked=True)


def _with_close_up(panel: Sequence[TableRow]) -> Mapping[str, Sequence[TableRow]]:
    """The rows, and, where one dwarfs the base, those no slower than it, by what the name of a pane adds."""
    longest = [row["total_s"] for row in panel if row["label"] == BASE]
    if not longest or max(row["total_s"] for row in panel) <= FAR * longest[0]:
        return {"": panel}
    return {"": panel, f", {BASE} and faster": [row for row in panel if row["total_s"] <= longest[0]]}


def _part(row: TableRow, part: Column, parts: Sequence[Column]) -> Point:
    """One of the parts of a label's time; a hover on it answers all of them."""
    said = {LABEL.heading: row["label"]} | {each.heading: each.show(row[each.name]) for each in parts}
    return Point(part.words, part.factor * row[part.name], row["label"], said | details(row, *SAID))


def _speedup(row: TableRow, speedup: float, words: str) -> Point:
    said = {LABEL.heading: row["label"], "model": row["model"], words: f"{speedup:.2f}"}
    return Point(row["label"], speedup, row["model"], said | details(row, *SAID))


def _published(
    panel: Sequence[TableRow], metric: str, x_names: Sequence[str]
) -> list[tuple[Mapping[str, str], float, dict[str, str]]]:
    """The paper's lines that our rows have a number for, each with its value and what it says."""
    lines = published_lines([row["text"] for row in panel], metric, x_names)
    return [
        (
            line,
            float(line["value"]),
            {
                LABEL.heading: line["series"],
                metric.replace("_", " "): f"{line['value']} {line['unit']}",
                SOURCE.name: PUBLISHED,
            },
        )
        for line in lines
    ]
