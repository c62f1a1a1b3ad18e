"""What a report shows: a section per figure or table, made of the tables, figures and findings of results folders."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import yaml

from harness.errors import UserError, nearest, reason
from harness.paper.report.compared import published_sheet, side_by_side
from harness.tables.columns import GIB, MISSING, TableRow, read_table
from harness.tables.pages import sheets_of
from harness.tables.text import Sheet

REGISTRY = yaml.safe_load((Path(__file__).resolve().parents[3] / "plots" / "registry.yaml").read_text(encoding="utf-8"))
"""Read as a file, since what measures imports nothing of what draws."""
MODELLED = "-modelled"
"""The end of the name of a figure that the cost model predicts."""
FURTHER = "further runs"
"""The page of the user's own experiments."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
    "published": "quoted from the paper",
}
SAFE_IN_URI = " !$&'()*+,-./:;=?@_"
"""Letters of a picture that stand as they are in a data URI."""

Tables = Mapping[str, Sequence[TableRow]]
"""The rows of a results folder's tables by their names."""


class Entry(NamedTuple):
    """A figure or table. name: that of `results/figures/<name>.svg`. tables: of `results/tables`, its own first."""

    name: str
    title: str
    command: str
    tables: tuple[str, ...]
    page: str


class Part(NamedTuple):
    """What one results folder has of a figure or table. where: "" for the folder that is reported, the name of a folder
    within it. image: a data URI. sheets: by table. elsewhere: the section that shows a table, by table."""

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
        found = {row.get("source") for part in self.parts for row in part.rows}
        return [source for source in SOURCES if source in found]

    @property
    def gaps(self) -> list[str]:
        """How many scores its tables lack, in words."""
        found = []
        for sheet in (sheet for part in self.parts for sheets in part.sheets.values() for sheet in sheets):
            scores = [at for at, heading in enumerate(sheet.header) if heading in sheet.scores]
            count = sum(line[at] == MISSING for line in sheet.lines for at in scores)
            found += [f"{self.entry.name}, {sheet.title}: {count}"] * bool(count)
        return found


def entries_of(registry: Mapping[str, Any] = REGISTRY) -> list[Entry]:
    """The figures and tables of the registry, in its order; those the cost model predicts after the timed ones."""
    entries = []
    for page, named in registry["pages"].items():
        for name, fields in named.items():
            command = fields.get("command", f"python run.py grid={name}")
            entries.append(Entry(name, fields["title"], command, tuple(fields.get("tables", [name])), page))
            if fields.get("modelled"):
                twin = name + MODELLED
                entries.append(Entry(twin, f"{fields['title']}, modelled", "make modelled", (twin,), page))
    return entries


def folders_of(folder: Path) -> dict[str, Path]:
    """The results to report by their names, "" for the folder itself: results of another model that lie within it
    stand beside its own."""
    inner = sorted({path.parents[1] for path in folder.glob("*/tables/*.csv")})
    return {"": folder} | {path.name: path for path in inner}


def all_entries(folders: Mapping[str, Path]) -> list[Entry]:
    """The registry's entries, then what is there beside them: the user's own experiments."""
    entries = entries_of()
    tables = {path.stem for folder in folders.values() for path in (folder / "tables").glob("*.csv")}
    figures = {path.stem for folder in folders.values() for path in (folder / "figures").glob("*.svg")}
    known = {name for entry in entries for name in (entry.name, *entry.tables)}
    own = sorted((tables | figures) - known)
    return entries + [Entry(name, "Further runs", f"python run.py experiment={name}", (name,), FURTHER) for name in own]


def sections_of(folders: Mapping[str, Path], entries: Sequence[Entry]) -> Iterator[Section]:
    """The sections of what there is, in the order of the entries.

    Raises:
        UserError: a damaged table or figure, or findings about what is not there.
    """
    names = [entry.name for entry in entries]
    read = {}
    for where, folder in folders.items():
        tables = {path.stem: read_table(path) for path in sorted((folder / "tables").glob("*.csv"))}
        read[where] = folder, tables, findings(folder / "findings.yaml", names)
    homes = {table: entry.name for entry in reversed(entries) for table in entry.tables}  # the first that reads it,
    homes |= {entry.name: entry.name for entry in entries if entry.name in entry.tables}  # or the one of its name
    for entry in entries:
        found = [_part(where, *each, entry, homes) for where, each in read.items()]
        parts = [part for part in found if part.image or part.sheets]
        if parts:
            yield Section(entry, parts, _beside(parts))


def sheets(path: Path, rows: Sequence[TableRow]) -> list[Sheet]:
    """The rows of a table as people read them. Raises UserError where a needed number is missing."""
    try:
        return list(sheets_of(rows))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a table of results ({reason(error)}); make it anew") from error


def findings(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The sentences of `findings.yaml`, by figure or table; none where there is no file.

    Raises:
        UserError: another kind of file, or a name that is not among `names`.
    """
    try:
        sentences: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(sentences, dict) or not all(isinstance(sentence, str) for sentence in sentences.values()):
        raise UserError(f"{path}: must map names of figures to sentences")
    for name in sentences:
        if name not in names:
            raise UserError(f"{path}: {name}: {nearest(name, names)}")
    return sentences


def embed(path: Path) -> str:
    """An SVG as a data URI: an image runs no script and loads nothing. Raises UserError for a file that is none."""
    try:
        text = path.read_text(encoding="utf-8")
        if not ElementTree.fromstring(text).tag.endswith("svg"):
            raise ValueError(path)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"{path}: not an SVG image; `make plots` draws it anew") from error
    return "data:image/svg+xml," + quote(" ".join(text.split()), safe=SAFE_IN_URI)


def unfinished(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The runs without numbers, and why."""
    return [
        f"{record['experiment']} {record['config']['label']} ({record['run_id']}): {record['status']}"
        + (f", {record['error']}" if record["error"] else "")
        for record in records
        if record["status"] != "finished"
    ]


def environment(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Where the finished runs ran, as (name, value); a value that not all runs share says how many had it."""
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return []
    flat = [dict(_readable(record["environment"])) for record in finished]
    minutes = sum(record["seconds"] for record in finished) / 60
    lines = [("finished runs", f"{len(finished)}, {minutes:.0f} minutes in total")]
    for name in dict.fromkeys(name for values in flat for name in values):
        counts = Counter(values.get(name, "unknown") for values in flat)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{value} ({count} of {len(flat)} runs)" if count < len(flat) else value for value, count in ranked]
        lines.append((name, "; ".join(parts)))
    return lines


def _readable(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a record's environment for people; unknown fields are left out."""
    for name, value in environment.items():
        if name == "packages":
            yield from ((package, version) for package, version in value.items() if version)
        elif name == "memory_bytes" and value:
            yield "memory", f"{value / GIB:.0f} GiB"
        elif name == "commit" and value:
            yield "commit", value + (" and changes" if environment.get("dirty") else "")
        elif name not in ("dirty", "memory_bytes") and value is not None:
            yield name.replace("_", " "), str(value)


def _part(
    where: str, folder: Path, tables: Tables, sentences: Mapping[str, str], entry: Entry, homes: Mapping[str, str]
) -> Part:
    image = folder / "figures" / f"{entry.name}.svg"
    read = [table for table in entry.tables if tables.get(table)]
    own = [table for table in read if homes[table] == entry.name]
    rows = [row for table in read for row in tables[table]]
    return Part(
        where=where,
        finding=sentences.get(entry.name),
        image=embed(image) if image.exists() else None,
        sheets={table: sheets(folder / "tables" / f"{table}.csv", tables[table]) for table in own},
        elsewhere={table: homes[table] for table in read if table not in own},
        published=published_sheet(entry.name.removesuffix(MODELLED), rows),
        rows=rows,
    )


def _beside(parts: Sequence[Part]) -> Sheet | None:
    """The models compared, those of one folder too; two folders of one model go by the folders' names."""
    groups: dict[str, list[TableRow]] = {}
    for part in parts:
        for row in part.rows:
            name = row["model"] if part.where in row["model"] else f"{row['model']} in {part.where}"
            groups.setdefault(name, []).append(row)
    return side_by_side(groups)
