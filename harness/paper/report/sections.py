"""The sections of the report: a figure or table each, with what every results folder has of it."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from harness.errors import UserError
from harness.paper.catalogue import ENTRIES, Entry
from harness.paper.report.beside import side_by_side
from harness.paper.report.charts import CHARTS
from harness.paper.report.charts.vega import Drawn, draw
from harness.paper.report.data import findings, gaps, read_rows, sheets
from harness.paper.report.published import published_sheet
from harness.tables.columns import TableRow, typed
from harness.tables.text import Sheet

MAX_WIDTH = 1120
"""Pixels of an embedded image: three panels stay readable on a phone that scrolls them."""
NUM_COLORS = 64
FURTHER = "further runs"
"""The page of what the catalogue does not know."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
    "published": "quoted from the paper",
}

Row = Mapping[str, str]
Tables = Mapping[str, Sequence[Row]]
"""The rows of a results folder's tables by their names."""


@dataclass(frozen=True)
class Part:
    """What one results folder has of a figure or table. where: "" for the folder that is reported, the name of one
    within it. image: a data URI. sheets: by table. elsewhere: tables that another section shows, with its name.
    published: None where nothing is known."""

    where: str
    finding: str | None
    image: str | None
    sheets: dict[str, list[Sheet]]
    elsewhere: dict[str, str]
    published: Sheet | None
    rows: Sequence[Row]

    @property
    def gaps(self) -> list[str]:
        """The cells that its tables lack, in words."""
        return [gap for sheets in self.sheets.values() for gap in gaps(sheets)]


@dataclass(frozen=True)
class Section:
    """A figure or table of all the folders. panes: charts by the quantity that they show. beside: models compared."""

    entry: Entry
    parts: list[Part]
    panes: dict[str, list[Drawn]]
    beside: Sheet | None

    @property
    def drawn(self) -> list[Drawn]:
        """Its charts in the order of the page."""
        return [drawn for pane in self.panes.values() for drawn in pane]

    @property
    def sources(self) -> list[str]:
        """What its numbers are, in the order of `SOURCES`."""
        found = {row.get("source") for part in self.parts for row in part.rows}
        return [source for source in SOURCES if source in found]


def folders_of(folder: Path) -> dict[str, Path]:
    """The results to report by their names, "" for the folder itself: those with tables that lie within it, such as of
    another model, stand beside its own."""
    inner = sorted({path.parents[1] for path in folder.glob("*/tables/*.csv")})
    return {"": folder} | {path.name: path for path in inner}


def entries_of(folders: Mapping[str, Path]) -> list[Entry]:
    """The catalogue, and what is there and not in it: experiments of the user's own."""
    tables = {path.stem for folder in folders.values() for path in (folder / "tables").glob("*.csv")}
    figures = {path.stem for folder in folders.values() for path in (folder / "figures").glob("*.png")}
    known = {name for entry in ENTRIES for name in (entry.name, *entry.tables)}
    names = sorted((tables | figures) - known)
    return [
        *ENTRIES,
        *(Entry(name, "Further runs", f"python run.py experiment={name}", (name,), FURTHER) for name in names),
    ]


def sections_of(folders: Mapping[str, Path], entries: Sequence[Entry]) -> Iterator[Section]:
    """The sections of what there is, in the order of the entries.

    Raises:
        UserError: a damaged table or figure, or findings about what is not there.
    """
    names = [entry.name for entry in entries]
    tables = {where: _tables(folder) for where, folder in folders.items()}
    said = {where: findings(folder / "findings.yaml", names) for where, folder in folders.items()}
    for entry in entries:
        found = [
            _part(where, folder, tables[where], entry, entries, said[where].get(entry.name))
            for where, folder in folders.items()
        ]
        parts = [part for part in found if part.image or part.sheets]
        if parts:
            yield Section(entry, parts, _panes(entry, parts), _beside(parts))


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


def _tables(folder: Path) -> Tables:
    """The rows of every table of a results folder."""
    return {path.stem: read_rows(path) for path in sorted((folder / "tables").glob("*.csv"))}


def _part(
    where: str, folder: Path, tables: Tables, entry: Entry, entries: Sequence[Entry], finding: str | None
) -> Part:
    image = folder / "figures" / f"{entry.name}.png"
    homes = {table: _home(table, entries) for table in entry.tables if tables.get(table)}
    rows = [row for table in homes for row in tables[table]]
    return Part(
        where=where,
        finding=finding,
        image=embed(image) if image.exists() else None,
        sheets={
            table: sheets(folder / "tables" / f"{table}.csv", tables[table])
            for table, home in homes.items()
            if home == entry.name
        },
        elsewhere={table: home for table, home in homes.items() if home != entry.name},
        published=published_sheet(entry, rows),
        rows=rows,
    )


def _home(table: str, entries: Sequence[Entry]) -> str:
    """The section that shows a table: the one of its name, else the first that reads it."""
    readers = [entry.name for entry in entries if table in entry.tables]
    return table if table in readers else readers[0]


def _panes(entry: Entry, parts: Sequence[Part]) -> dict[str, list[Drawn]]:
    if entry.chart is None:
        return {}
    charts = []
    for part in parts:
        for chart in CHARTS[entry.chart](part.rows):
            told = part.where in chart.title
            charts.append(chart if told else chart._replace(title=f"{part.where}: {chart.title}"))
    panes: dict[str, list[Drawn]] = {}
    for drawn in draw(charts):
        panes.setdefault(drawn.chart.pane, []).append(drawn)
    return panes


def _beside(parts: Sequence[Part]) -> Sheet | None:
    """The models compared. Those of one folder too; two folders of one model go by the folders' names."""
    groups: dict[str, list[TableRow]] = {}
    for part in parts:
        for row in map(typed, part.rows):
            name = row["model"] if part.where in row["model"] else f"{row['model']} in {part.where}"
            groups.setdefault(name, []).append(row)
    return side_by_side(groups)
