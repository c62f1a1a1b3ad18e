"""The sections of the report: what `tables/` and `figures/` hold of each figure or table.

A sentence of finding stands where `findings.yaml` of the results gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import pandas as pd
import yaml

from harness.errors import UserError, nearest, reason
from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperBar, quantity
from harness.results import columns
from harness.results.columns import TableRow, read_table
from harness.results.metrics import MISSING
from harness.results.pages import sheets_of
from harness.results.sheet import Sheet, sheet_of_lines
from harness.settings.paths import PACKAGES_DIR, shipped_beside, tables_to_read

REGISTRY = yaml.safe_load((PACKAGES_DIR / "plots" / "registry.yaml").read_text(encoding="utf-8"))
"""Read as a file, since what measures imports nothing of what draws."""
MODELLED = "-modelled"
"""The end of the name of a figure that the cost model predicts."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
    "published": "quoted from the paper or another project",
}
OF_SHIPPED = "Of the shipped runs:"
ZOOM = 1.6 * 96 / 72
"""CSS pixels of a page for a point of a figure, so that its letters have the size of the page's."""
POINTS = re.compile(r"([\d.]+)pt")
SAFE_IN_URI = " !$&'()*+,-./:;=?@_"
"""Letters of a picture that stand as they are in a data URI."""


class Entry(NamedTuple):
    """A figure or table. name: that of `figures/<name>.svg`. tables: names of `tables/*.csv`,
    its own first."""

    name: str
    title: str
    command: str
    tables: tuple[str, ...]
    page: str


class Image(NamedTuple):
    """A figure. uri: of its data. width: of the page, in CSS pixels; None where the file names
    none."""

    uri: str
    width: int | None


class Part(NamedTuple):
    """What one results folder has of a figure or table. where: "" for the folder that is reported,
    the name of a folder within it. sheets: by table. elsewhere: the section that
    shows a table, by table."""

    where: str
    finding: str | None
    image: Image | None
    sheets: Mapping[str, Sequence[Sheet]]
    elsewhere: Mapping[str, str]
    published: Sheet | None
    rows: Sequence[TableRow]


class Section(NamedTuple):
    """A figure or table of all folders."""

    entry: Entry
    parts: Sequence[Part]

    @property
    def sources(self) -> list[str]:
        """What its numbers are, in the order of `SOURCES`."""
        found = {row.get("source") for part in self.parts for row in part.rows}
        return [source for source in SOURCES if source in found]

    @property
    def has_own(self) -> bool:
        """Whether numbers of it are of runs that are not shipped."""
        rows = [row for row in self.parts[0].rows if "shipped" in row]
        return any(row["source"] != "modelled" and not row["shipped"] for row in rows)


def entries_of(folders: Sequence[Path] = ()) -> list[Entry]:
    """The figures and tables of the registry, in its order, then what only the folders have.

    Those that the cost model predicts come after the timed ones. The folders may have the user's
    own experiments.
    """
    entries = []
    for page, named in REGISTRY["pages"].items():
        for name, fields in named.items():
            title, tables = fields["title"], tuple(fields.get("tables", [name]))
            command = fields.get("command", f"python run.py experiment={name}")
            entries.append(Entry(name, title, command, tables, page))
            if fields.get("modelled"):
                twin = name + MODELLED
                command = "python -m harness.paper.costmodel --write"
                entries.append(Entry(twin, f"{title}, modelled", command, (twin,), page))
    known, found = set(), set()
    for entry in entries:
        known |= {entry.name, *entry.tables}
    for folder in folders:
        found |= {path.stem for path in tables_to_read(folder)}
        found |= {path.stem for path in folder.glob("figures/*.svg")}
    for name in sorted(found - known):
        command = f"python run.py experiment={name}"
        entries.append(Entry(name, "Further runs", command, (name,), "further runs"))
    return entries


class Results(NamedTuple):
    """What a results folder has, and what the shipped results beside it have.

    where: as of `Part`. folders: that of each table, by name. tables: rows by name. findings:
    sentences by figure or table.
    """

    where: str
    folder: Path
    folders: Mapping[str, Path]
    tables: Mapping[str, Sequence[TableRow]]
    findings: Mapping[str, str]


def sections_of(folders: Mapping[str, Path], entries: Sequence[Entry]) -> Iterator[Section]:
    """The sections of what there is, in the order of the entries.

    Raises:
        UserError: a damaged table or figure, or findings about what is not there.
    """
    names = [entry.name for entry in entries]
    results = []
    for where, folder in folders.items():
        origins, tables = {}, {}
        for path in tables_to_read(folder):
            origins[path.stem] = path.parents[1]
            tables[path.stem] = read_table(path)
        said: dict[str, str] = {}
        shipped = shipped_beside(folder)
        if shipped is not None:
            for name, words in findings(shipped / "findings.yaml", names).items():
                said[name] = f"{OF_SHIPPED} {words}"
        said |= findings(folder / "findings.yaml", names)
        results.append(Results(where, folder, origins, tables, said))
    homes: dict[str, str] = {}  # the section that shows a table: of its name, or the first
    for entry in entries:
        for table in entry.tables:
            homes.setdefault(table, table if table in names else entry.name)
    for entry in entries:
        parts = [_part(entry, of_folder, homes) for of_folder in results]
        known = [part for part in parts if part is not None]
        if known:
            yield Section(entry, known)


def _part(entry: Entry, results: Results, homes: Mapping[str, str]) -> Part | None:
    image = _image(entry, results)
    rows: list[TableRow] = []
    own: dict[str, list[Sheet]] = {}
    elsewhere = {}
    for table in entry.tables:
        of_table = results.tables.get(table, ())
        if not of_table:
            continue
        rows += of_table
        if homes[table] == entry.name:
            own[table] = sheets(results.folders[table] / "tables" / f"{table}.csv", of_table)
        else:
            elsewhere[table] = homes[table]
    if not own and image is None:
        return None
    return Part(
        where=results.where,
        finding=results.findings.get(entry.name),
        image=None if image is None else embed(image),
        sheets=own,
        elsewhere=elsewhere,
        published=published_sheet(entry.name.removesuffix(MODELLED), rows),
        rows=rows,
    )


def _image(entry: Entry, results: Results) -> Path | None:
    """The figure of a results folder; the shipped one where all of its tables are shipped ones.

    None for none.
    """
    folders = [results.folder]
    origins = {results.folders[table] for table in entry.tables if table in results.folders}
    if results.folder not in origins:
        folders += origins
    images = [folder / "figures" / f"{entry.name}.svg" for folder in folders]
    return next(filter(Path.exists, images), None)


def sheets(path: Path, rows: Sequence[TableRow]) -> list[Sheet]:
    """The rows of a table as people read them. Raises UserError for a missing number."""
    try:
        shape = columns.shape_of(rows[0])
        return list(sheets_of(columns.with_columns(pd.DataFrame(rows), shape)))
    except (ValueError, TypeError) as error:
        message = f"{path}: not a table of results ({reason(error)}); make it anew"
        raise UserError(message) from error


def findings(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The sentences of `findings.yaml`, by figure or table; none where there is no file.

    Raises:
        UserError: another kind of file, or a name that is not among `names`.
    """
    if not path.exists():
        return {}
    try:
        sentences: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(sentences, dict) or not {str}.issuperset(map(type, sentences.values())):
        raise UserError(f"{path}: must map names of figures to sentences")
    for name in sentences:
        if name not in names:
            raise UserError(f"{path}: {name}: {nearest(name, names)}")
    return sentences


def embed(path: Path) -> Image:
    """An SVG as a data URI: an image runs no script and loads nothing.

    Raises UserError for a file that is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        if not root.tag.endswith("svg"):
            raise ValueError(path)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"{path}: not an SVG image; `python -m plots` draws it anew") from error
    points = POINTS.fullmatch(root.get("width", ""))
    width = None if points is None else round(ZOOM * float(points[1]))
    uri = "data:image/svg+xml," + quote(" ".join(text.split()), safe=SAFE_IN_URI)
    return Image(uri, width)


# Numbers beside numbers: the paper's beside ours

POINT = ("model", "series", "x_name", "x", "metric")
"""What names a published number, and a row of an analysis table."""
HEADER = (
    "model", "series", "setup", "metric", "published", "kind", "ours", "ours / published", "note",
)  # fmt: skip
"""Headings of published numbers; a column without any number is left out."""


def published_sheet(figure: str, rows: Sequence[TableRow]) -> Sheet | None:
    """Published numbers of a figure or table, with ours beside them where `rows` holds that setup.

    None where nothing is known. Numbers of speed are made of timed runs by the same arithmetic as
    the cost model's calibration.
    """
    numbers = columns.where(columns.published_rows(), "figure", figure)
    lines = [_published_line(number, rows) for number in numbers]
    if not lines:
        return None
    known = [not {MISSING, ""}.issuperset(column) for column in zip(*lines, strict=True)]
    shown = [list(compress(line, known)) for line in lines]
    return sheet_of_lines("published", list(compress(HEADER, known)), shown)


def _published_line(number: Mapping[str, str], rows: Sequence[TableRow]) -> list[str]:
    series, metric = number["series"].replace("_", " "), number["metric"].replace("_", " ")
    setup = f"{number['x_name']} {number['x']}".strip().replace("_", " ") or "all"
    value = f"{number['value']} {number['unit']}".strip()
    ours = our_value(number, rows)
    beside = [MISSING, MISSING]
    if ours is not None:
        beside = [f"{ours:.4g}", f"{ours / float(number['value']):.2f}"]
    named = [number["model"], series, setup, metric]
    return [*named, value, number["kind"], *beside, number["note"]]


def our_value(number: Mapping[str, str], rows: Sequence[TableRow]) -> float | None:
    """The published quantity from our rows.

    None where a row that it needs is absent, emulated, or there twice.
    """

    def timed_row(bar: PaperBar) -> TableRow:
        of_length = []
        for row in rows:
            total_len = row["prompt_len"] + row["gen_len"]
            if row["source"] != "emulated" and total_len == bar.total_len:
                of_length.append(row)
        wanted = {"model": bar.model, "label": bar.label, "batch_size": bar.batch_size}
        return _the_row(of_length, wanted)

    try:
        if number["figure"] in TIMED_FIGURES:
            return quantity(number, timed_row)
        point = columns.typed({name: number[name] for name in POINT})
        value: float | None = _the_row(rows, point)["value"]
        return value
    except ValueError:  # no row or several
        return None


def _the_row(rows: Sequence[TableRow], wanted: TableRow) -> TableRow:
    """The row that has all of these values; ValueError where there is none, or several."""
    for name, value in wanted.items():
        rows = [row for row in rows if row.get(name) == value]
    (row,) = rows
    return row
