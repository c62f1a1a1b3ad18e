"""All tables and figures of a results folder as one HTML file, `results/report.html`, that needs nothing else.

It is made from `tables/`, `figures/` and, for the environment and the failures, `runs/`; published numbers come from
`harness/tables/published.csv`. Images are embedded, nothing is fetched, scripts only sort. A sentence of finding
stands where `results/findings.yaml` gives one, beside the numbers that it is about:

    fig11: At a tenth of the cache InfiniGen loses ...

    python -m harness.paper.report --results-dir results
    python -m harness.paper.report --results-dir results.zip
"""

import argparse
import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from PIL import Image

from harness.errors import UserError, exit_code
from harness.files import write_atomic
from harness.paper.catalogue import ENTRIES, MODELLED, Entry
from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperCell, quantity
from harness.paper.report.data import environment, findings, gaps, read_rows, read_sheets, unfinished
from harness.records.record import read_all
from harness.records.unpack import opened
from harness.tables.columns import MISSING, SEGMENTS, published_rows
from harness.tables.text import WORDS, Sheet

MAX_WIDTH = 1120
"""Pixels of an embedded image: three panels stay readable on a phone that scrolls them."""
NUM_COLORS = 64
POINT = ("model", "series", "x_name", "x", "metric")
"""What names a published number, and a row of an analysis table."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
}


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


@dataclass(frozen=True)
class Section:
    """A figure or table in the report. image: a data URI. sheets: by table. elsewhere: tables that another section
    shows, with its name. published: None where nothing is known."""

    entry: Entry
    finding: str | None
    sources: list[str]
    image: str | None
    sheets: dict[str, list[Sheet]]
    elsewhere: dict[str, str]
    published: Sheet | None


def write_report(results: str | Path = "results", output: str | Path | None = None) -> Path:
    """Write the report; the same results give the same bytes. Returns its path.

    results: a folder, or an archive of one (`harness.records.archive`), which is all that is read then.
    output: the file; None: `report.html` in the folder, or beside the archive.

    Raises:
        UserError: no such results or an archive that was changed, neither table nor figure, a damaged one, findings
            about what is not there, or a folder that cannot be written.
    """
    source = Path(results)
    with opened(source) as folder:
        text = _render(folder)
    home = source if source.is_dir() else source.parent
    path = home / "report.html" if output is None else Path(output)
    write_atomic(path, text)
    return path


def _render(folder: Path) -> str:
    records = list(read_all(folder))
    entries = [*ENTRIES, *_others(folder)]
    sections = list(_sections(folder, entries, findings(folder / "findings.yaml", [entry.name for entry in entries])))
    if not sections:
        raise UserError(f"results_dir={folder}: neither table nor figure; `make accuracy` makes some")
    shown = {section.entry.name for section in sections}
    return _template().render(
        sections=sections,
        sources=SOURCES,
        absent=[entry for entry in entries if entry.name not in shown],
        gaps=[gap for section in sections for sheets in section.sheets.values() for gap in gaps(sheets)],
        unfinished=unfinished(records),
        environment=environment(records),
        is_number=is_number,
        words=WORDS,
    )


def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, **options).get_template("report.html.j2")


def embed(path: Path) -> str:
    """A PNG as a data URI, at most `MAX_WIDTH` pixels wide. Raises UserError for a file that is no image."""
    data = io.BytesIO()
    try:
        with Image.open(path) as stored:
            image = stored.convert("RGB")
            image.thumbnail((MAX_WIDTH, image.height), Image.Resampling.LANCZOS)
            few = image.quantize(NUM_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            few.save(data, "PNG", optimize=True)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow calls a broken PNG a syntax error
        raise UserError(f"{path}: not an image; `make plots` draws it anew") from error
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def is_number(cell: str) -> bool:
    """Whether a table's cell stands on the right."""
    return cell == MISSING or re.match(r"[-+]?\d", cell) is not None


def published_sheet(entry: Entry, rows: Sequence[Mapping[str, str]]) -> Sheet | None:
    """The paper's numbers for a figure, with ours beside them where `rows` holds that model and setup; None where
    nothing is known. Those of speed are made of timed runs by the same arithmetic as the cost model's calibration."""
    figure = entry.name.removesuffix(MODELLED)
    lines = []
    for line in published_rows():
        if line["figure"] == figure:
            setup = f"{line['x_name']} {line['x']}".strip() or "all"
            value = f"{line['value']} {line['unit']}".strip()
            ours = _ours(line, rows)
            beside = [MISSING, MISSING] if ours is None else [f"{ours:.4g}", f"{ours / float(line['value']):.2f}"]
            series, metric = line["series"].replace("_", " "), line["metric"].replace("_", " ")
            lines.append(
                [line["model"], series, setup.replace("_", " "), metric, value, line["kind"], *beside, line["note"]]
            )
    header = ["model", "series", "setup", "metric", "published", "kind", "ours", "ours / published", "note"]
    known = [any(line[column] not in (MISSING, "") for line in lines) for column in range(len(header))]
    kept = [list(compress(line, known)) for line in (header, *lines)]
    return Sheet("published", kept[0], kept[1:]) if lines else None


def _ours(line: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> float | None:
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


def _sections(folder: Path, entries: Sequence[Entry], said: Mapping[str, str]) -> Iterator[Section]:
    for entry in entries:
        image = folder / "figures" / f"{entry.name}.png"
        sheets, rows = _read_tables(folder / "tables", entry)
        own = {table: found for table, found in sheets.items() if _home(table, entries) == entry.name}
        if image.exists() or own:
            yield Section(
                entry=entry,
                finding=said.get(entry.name),
                sources=[source for source in SOURCES if source in {row.get("source") for row in rows}],
                image=embed(image) if image.exists() else None,
                sheets=own,
                elsewhere={table: _home(table, entries) for table in sheets if table not in own},
                published=published_sheet(entry, rows),
            )


def _read_tables(folder: Path, entry: Entry) -> tuple[dict[str, list[Sheet]], list[dict[str, str]]]:
    """What an entry's tables hold of it: as people read it, by table, and as rows."""
    sheets: dict[str, list[Sheet]] = {}
    rows: list[dict[str, str]] = []
    for table in entry.tables:
        path = folder / f"{table}.csv"
        found = read_sheets(path)
        sheets |= {table: found} if found else {}
        rows += read_rows(path)
    return sheets, rows


def _home(table: str, entries: Sequence[Entry]) -> str:
    """The section that shows a table: the one of its name, else the first that reads it."""
    readers = [entry.name for entry in entries if table in entry.tables]
    return table if table in readers else readers[0]


def _others(folder: Path) -> list[Entry]:
    """What is there and not in the catalogue: experiments of the user's own."""
    tables = {path.stem for path in (folder / "tables").glob("*.csv")}
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    known = {name for entry in ENTRIES for name in (entry.name, *entry.tables)}
    names = sorted((tables | figures) - known)
    return [Entry(name, "Further runs", f"python run.py experiment={name}", (name,)) for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m harness.paper.report", description="Write the report of results.")
    parser.add_argument(
        "--results-dir", default="results", metavar="DIR", help="results to report, or an archive (default results)"
    )
    parser.add_argument("--output", metavar="FILE", help="default: report.html in DIR, or beside the archive")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(write_report(args.results_dir, args.output)))

