"""The paper's numbers beside ours, where a results folder holds that model and setup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from harness.paper.catalogue import MODELLED, Entry
from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperCell, quantity
from harness.tables.columns import MISSING, SEGMENTS, published_rows
from harness.tables.text import Sheet

POINT = ("model", "series", "x_name", "x", "metric")
"""What names a published number, and a row of an analysis table."""


@dataclass(frozen=True)
class TimedRow:
    """A row of a latency table, as `harness.paper.costmodel.published.Timed`."""

    row: Mapping[str, str]

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return float(self.row["total_s"])

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over `total_s`."""
        return float(self.row["tokens_per_s"])

    @property
    def block(self) -> dict[str, float]:
        """One block in one decode step; a segment that a method lacks takes no time."""
        return {segment.name.removesuffix("_s"): float(self.row[segment.name] or 0) for segment in SEGMENTS}


def published_sheet(entry: Entry, rows: Sequence[Mapping[str, str]]) -> Sheet | None:
    """The paper's numbers for a figure, with ours beside them where `rows` holds that model and setup; None where
    nothing is known. Those of speed are made of timed runs by the same arithmetic as the cost model's calibration."""
    figure = entry.name.removesuffix(MODELLED)
    lines = []
    for line in published_rows():
        if line["figure"] == figure:
            setup = f"{line['x_name']} {line['x']}".strip() or "all"
            value = f"{line['value']} {line['unit']}".strip()
            ours = our_value(line, rows)
            beside = [MISSING, MISSING] if ours is None else [f"{ours:.4g}", f"{ours / float(line['value']):.2f}"]
            series, metric = line["series"].replace("_", " "), line["metric"].replace("_", " ")
            lines.append(
                [line["model"], series, setup.replace("_", " "), metric, value, line["kind"], *beside, line["note"]]
            )
    header = ["model", "series", "setup", "metric", "published", "kind", "ours", "ours / published", "note"]
    known = [any(line[column] not in (MISSING, "") for line in lines) for column in range(len(header))]
    kept = [list(compress(line, known)) for line in (header, *lines)]
    return Sheet("published", kept[0], kept[1:]) if lines else None


def our_value(line: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> float | None:
    """The published quantity from our rows; None where one that it needs is absent, emulated, or there twice."""

    def timed(cell: PaperCell) -> TimedRow:
        wanted = {"model": cell.model, "label": cell.label, "batch_size": str(cell.batch_size)}
        (row,) = (
            row
            for row in rows
            if row["source"] != "emulated"
            and wanted.items() <= row.items()
            and int(row["prompt_len"]) + int(row["gen_len"]) == cell.total_len
        )
        return TimedRow(row)

    try:
        if line["figure"] in TIMED_FIGURES:
            return quantity(line, timed)
        (row,) = (row for row in rows if all(row.get(name) == line[name] for name in POINT))
        return float(row["value"])
    except ValueError:  # no row or several
        return None
