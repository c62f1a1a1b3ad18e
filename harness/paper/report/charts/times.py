"""Charts of latency tables: rates, steps and speedups by the batch size and by the length, the paper's beside ours."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from harness.paper.report.charts.chart import Axis, Chart, Level, Point, details, grouped, setup
from harness.paper.report.published import our_value
from harness.tables.columns import (
    BATCH_SIZE,
    DEVICE_KV_BYTES,
    LABEL,
    LINK_BYTES_PER_S,
    PLATFORM,
    PROMPT_LEN,
    SETTINGS,
    SIZE,
    SOURCE,
    Column,
    TableRow,
    column,
    published_rows,
    typed,
)  # fmt: skip

BASE = "offload"
"""The system whose time is a speedup's numerator."""
SPEEDUP = Column("speedup_over_offload", f"speedup over {BASE}, prefill and decode (x)", 1, 2)
QUANTITIES = (column("tokens_per_s"), column("step_p50_s"), column("prefill_s"), SPEEDUP)
GEN_LEN, TOTAL_LEN = column("gen_len"), Column("total_len", "prompt and generated (tokens)", 1, 0)
SIDES: Mapping[str, tuple[Column, tuple[Column, ...]]] = {
    "the batch size": (BATCH_SIZE._replace(heading="batch size (sequences)"), (PLATFORM, PROMPT_LEN, GEN_LEN)),
    "the length": (TOTAL_LEN, (PLATFORM, BATCH_SIZE, GEN_LEN)),
}
"""What time depends on, and what is fixed meanwhile."""
PUBLISHED_X = {"batch_size": "the batch size", "seq_len": "the length"}
SAID = (
    *QUANTITIES, column("step_p95_s"), column("decode_s"), column("h2d_bytes"), column("d2h_bytes"), DEVICE_KV_BYTES,
    SIZE, LINK_BYTES_PER_S, SETTINGS, SOURCE,
)  # fmt: skip
ONE_RUN = "One run each, so without bars."
OF_PAPER = f"Hollow: published. {ONE_RUN}"

Texts = Sequence[Mapping[str, str]]
"""Rows as a CSV has them."""


def times(texts: Texts) -> Iterator[Chart]:
    """Every quantity by the batch size and by the length; a line per label. Published points stand where our own runs
    of the paper's setup do."""
    rows = [_completed(typed(text)) | {"text": text} for text in texts]
    for (words, (x, fixed)), shown in product(SIDES.items(), QUANTITIES):
        for panel in grouped(rows, "model", "source", *(each.name for each in fixed)):
            timed = _with_speedup(panel, x) if shown is SPEEDUP else panel
            if len({row[x.name] for row in timed}) > 1:
                points = [_point(row, x, shown) for row in timed if row[shown.name] is not None]
                paper = list(_of_paper(panel, words, shown))
                levels = [Level("y", 1, BASE)] if shown is SPEEDUP else []
                axes = Axis(x.heading, zero=True), Axis(shown.heading, zero=True)
                pane, note = f"{shown.words} by {words}", OF_PAPER if paper else ONE_RUN
                yield Chart(pane, setup(panel[0], *fixed), *axes, points + paper, levels, note)


def _completed(row: TableRow) -> TableRow:
    return row | {TOTAL_LEN.name: row[PROMPT_LEN.name] + row[GEN_LEN.name]}


def _with_speedup(panel: Sequence[TableRow], x: Column) -> list[TableRow]:
    """The rows, each with its speedup over the base of its size; without the base, and what has none beside it."""
    base = {row[x.name]: row["total_s"] for row in panel if row["label"] == BASE}
    compared = [row for row in panel if row[x.name] in base and row["label"] != BASE]
    return [row | {SPEEDUP.name: base[row[x.name]] / row["total_s"]} for row in compared]


def _point(row: TableRow, x: Column, shown: Column) -> Point:
    label, value = row["label"], row[shown.name]
    said = {LABEL.heading: label, shown.heading: shown.show(value), x.heading: x.show(row[x.name])}
    return Point(label, row[x.name], shown.factor * value, said | details(row, *SAID), line=label)


def _of_paper(panel: Sequence[TableRow], words: str, shown: Column) -> Iterator[Point]:
    x_names = [name for name, side in PUBLISHED_X.items() if side == words]
    for line in published_lines([row["text"] for row in panel], shown.name, x_names):
        said = {LABEL.heading: line["series"], shown.heading: line["value"], SOURCE.name: "published"}
        yield Point(line["series"], float(line["x"]), float(line["value"]), said, hollow=True)


def published_lines(texts: Texts, metric: str, x_names: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """What the paper says of a quantity by one of these, where rows of ours are of the same setup."""
    for line in published_rows():
        if line["metric"] == metric and line["x_name"] in x_names and our_value(line, texts) is not None:
            yield line
