"""The sections of the report: what `tables/` and `figures/` hold of each figure or table.

A sentence of finding stands where `findings.yaml` of the results gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import yaml

from harness.errors import UserError, nearest, reason
from harness.report.compared import published_sheet, side_by_side
from harness.results.columns import TableRow, read_table
from harness.results.pages import sheets_of
from harness.results.sheet import Sheet
from harness.settings.paths import PACKAGES_DIR, shipped_beside, tables_to_read

REGISTRY = yaml.safe_load((PACKAGES_DIR / "plots" / "registry.yaml").read_text(encoding="utf-8"))
"""Read as a file, since what measures imports nothing of what draws."""
MODELLED = "-modelled"
"""The end of the name of a figure that the cost model predicts."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
    "published": "quoted from the paper",
}
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


class Part(NamedTuple):
    """What one results folder has of a figure or table. where: "" for the folder that is reported,
    the name of a folder within it. image: a data URI. sheets: by table. elsewhere: the section that
    shows a table, by table."""

    where: str
    finding: str | None
    image: str | None
    sheets: Mapping[str, Sequence[Sheet]]
    elsewhere: Mapping[str, str]
    published: Sheet | None
    rows: Sequence[TableRow]


class Section(NamedTuple):
    """A figure or table of all folders. beside: its models side by side."""

    entry: Entry
    parts: Sequence[Part]
    beside: Sheet | None

    @property
    def sources(self) -> list[str]:
        """What its numbers are, in the order of `SOURCES`."""
        found: set[str | None] = set()
        for part in self.parts:
            found.update(row.get("source") for row in part.rows)
        return [source for source in SOURCES if source in found]

    @property
    def gaps(self) -> list[str]:
        """How many scores its tables lack, in words."""
        found = []
        for part in self.parts:
            for sheet in itertools.chain.from_iterable(part.sheets.values()):
                if sheet.num_gaps:
                    found.append(f"{self.entry.name}, {sheet.title}: {sheet.num_gaps}")
        return found


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
            by = fields.get("modelled")
            if by:
                twin = name + MODELLED
                command = "python -m harness.paper.costmodel --write" if by is True else by
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
        for home in filter(None, (shipped_beside(folder), folder)):
            said |= findings(home / "findings.yaml", names)
        results.append(Results(where, folder, origins, tables, said))
    homes = _homes(entries)
    for entry in entries:
        parts = []
        for of_folder in results:
            part = _part(entry, of_folder, homes)
            if part is not None:
                parts.append(part)
        if parts:
            yield Section(entry, parts, side_by_side(_by_model(parts)))


def _homes(entries: Sequence[Entry]) -> dict[str, str]:
    """The section that shows a table: the one of its name, or the first that reads it."""
    homes: dict[str, str] = {}
    for entry in entries:
        for table in entry.tables:
            if table == entry.name:
                homes[table] = table
            homes.setdefault(table, entry.name)
    return homes


def _part(entry: Entry, results: Results, homes: Mapping[str, str]) -> Part | None:
    """What a folder has of a figure or table; None for nothing."""
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
    for folder in folders:
        image = folder / "figures" / f"{entry.name}.svg"
        if image.exists():
            return image
    return None


def _by_model(parts: Sequence[Part]) -> dict[str, list[TableRow]]:
    """The rows by model; two folders of one model go by the folders' names."""
    models: dict[str, list[TableRow]] = {}
    for part in parts:
        for row in part.rows:
            name = row["model"]
            if part.where not in name:
                name = f"{name} in {part.where}"
            models.setdefault(name, []).append(row)
    return models


def sheets(path: Path, rows: Sequence[TableRow]) -> list[Sheet]:
    """The rows of a table as people read them. Raises UserError for a missing number."""
    try:
        return list(sheets_of(rows))
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


def embed(path: Path) -> str:
    """An SVG as a data URI: an image runs no script and loads nothing.

    Raises UserError for a file that is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not ElementTree.fromstring(text).tag.endswith("svg"):
            raise ValueError(path)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"{path}: not an SVG image; `python -m plots` draws it anew") from error
    return "data:image/svg+xml," + quote(" ".join(text.split()), safe=SAFE_IN_URI)
