"""The report as a page: made from `tables/`, `figures/` and, for the environment and the failures,
`runs/`.

A section per figure or table. Everything is embedded, nothing is fetched. Figures are SVG images.
Scripts sort tables and draw the explorer of the leaderboard; without scripts all else works. The
page's policy admits no script but its own. A sentence of finding stands where
`results/findings.yaml` gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

import gzip
import itertools
import json
import re
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.errors import UserError, nearest, reason
from harness.files import write_atomic
from harness.report.compared import main_scores, main_times, published_sheet, side_by_side
from harness.report.explorer import explorer, library
from harness.results.archive import opened
from harness.results.columns import GIB, MISSING, TableRow, read_table
from harness.results.leaderboard import NAME as LEADERBOARD
from harness.results.pages import sheets_of
from harness.results.record import Record, read_all
from harness.results.sheet import WORDS, Sheet
from harness.settings.paths import COMMAND, PACKAGES_DIR

HERE = Path(__file__).parent
REGISTRY = yaml.safe_load((PACKAGES_DIR / "plots" / "registry.yaml").read_text(encoding="utf-8"))
"""Read as a file, since what measures imports nothing of what draws."""
MODELLED = "-modelled"
"""The end of the name of a figure that the cost model predicts."""
PICTURE = "fig11"
"""The figure of the overview."""
TIMED = ("fig14", "fig14-modelled")
"""The figures of the overview's times."""
SOURCES = {
    "measured": "on a GPU, or accuracy computed by the model itself",
    "emulated": "on a CPU whose second memory stands behind a link of limited rate",
    "modelled": "predicted by the cost model, never run",
    "published": "quoted from the paper",
}
SAFE_IN_URI = " !$&'()*+,-./:;=?@_"
"""Letters of a picture that stand as they are in a data URI."""


class Entry(NamedTuple):
    """A figure or table. name: that of `results/figures/<name>.svg`. tables: of `results/tables`,
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


def write_report(results: str | Path = "results", output: str | Path | None = None) -> Path:
    """Write the report; the same results give the same bytes. Returns its path.

    results: a folder, or an archive of one (`harness.results.archive`), which is all that is read
    then. output: the file; None: `report.html` in the folder, or beside the archive.

    Raises:
        UserError: no such results or an archive that was changed, neither table nor figure, a
            damaged one, findings about what is not there, or a folder that cannot be written.
    """
    source = Path(results)
    with opened(source) as folder:
        text = _render(folder)
    home = source if source.is_dir() else source.parent
    path = home / "report.html" if output is None else Path(output)
    write_atomic(path, text)
    return path


# What there is


def entries_of(folders: Sequence[Path] = ()) -> list[Entry]:
    """The figures and tables of the registry, in its order, then what only the folders have.

    Those that the cost model predicts come after the timed ones. The folders may have the user's
    own experiments.
    """
    entries = []
    for page, named in REGISTRY["pages"].items():
        for name, fields in named.items():
            title, tables = fields["title"], tuple(fields.get("tables", [name]))
            command = fields.get("command", f"python run.py grid={name}")
            entries.append(Entry(name, title, command, tables, page))
            if fields.get("modelled"):
                twin = name + MODELLED
                entries.append(Entry(twin, f"{title}, modelled", "make modelled", (twin,), page))
    known, found = set(), set()
    for entry in entries:
        known |= {entry.name, *entry.tables}
    for folder in folders:
        for pattern in ("tables/*.csv", "figures/*.svg"):
            found |= {path.stem for path in folder.glob(pattern)}
    for name in sorted(found - known):
        command = f"python run.py experiment={name}"
        entries.append(Entry(name, "Further runs", command, (name,), "further runs"))
    return entries


class Results(NamedTuple):
    """What a results folder has. where: as of `Part`. tables: rows by name. findings: sentences by
    figure or table."""

    where: str
    folder: Path
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
        tables = {}
        for path in sorted((folder / "tables").glob("*.csv")):
            tables[path.stem] = read_table(path)
        results.append(Results(where, folder, tables, findings(folder / "findings.yaml", names)))
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
    image = results.folder / "figures" / f"{entry.name}.svg"
    rows: list[TableRow] = []
    own: dict[str, list[Sheet]] = {}
    elsewhere = {}
    for table in entry.tables:
        of_table = results.tables.get(table, ())
        if not of_table:
            continue
        rows += of_table
        if homes[table] == entry.name:
            own[table] = sheets(results.folder / "tables" / f"{table}.csv", of_table)
        else:
            elsewhere[table] = homes[table]
    if not own and not image.exists():
        return None
    return Part(
        where=results.where,
        finding=results.findings.get(entry.name),
        image=embed(image) if image.exists() else None,
        sheets=own,
        elsewhere=elsewhere,
        published=published_sheet(entry.name.removesuffix(MODELLED), rows),
        rows=rows,
    )


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


def environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where the finished runs ran, as (name, value).

    A value that not all runs share says how many had it.
    """
    described = []
    seconds = 0.0
    for record in records:
        if record["status"] == "finished":
            described.append(dict(_readable(record["environment"])))
            seconds += record["seconds"] or 0
    if not described:
        return []
    lines = [("finished runs", f"{len(described)}, {seconds / 60:.0f} minutes in total")]
    for name in dict.fromkeys(itertools.chain.from_iterable(described)):
        counts = Counter(fields.get(name, "unknown") for fields in described)
        parts = []
        for value, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            is_shared = count == len(described)
            parts.append(value if is_shared else f"{value} ({count} of {len(described)} runs)")
        lines.append((name, "; ".join(parts)))
    return lines


def _readable(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a record's environment for people; a record may hold any values there."""
    for name, value in environment.items():
        if name == "packages" and isinstance(value, Mapping):
            for package, version in value.items():
                if version:
                    yield str(package), str(version)
        elif name == "memory_bytes" and isinstance(value, int) and value < sys.maxsize:
            yield "memory", f"{value / GIB:.0f} GiB"
        elif name == "commit" and value:
            yield "commit", str(value) + (" and changes" if environment.get("dirty") else "")
        elif name not in ("dirty", "memory_bytes") and value is not None:
            yield name.replace("_", " "), str(value)


# The page


def _render(folder: Path) -> str:
    """Results of another model that lie within the folder stand beside its own."""
    folders = {"": folder}
    for path in sorted(folder.glob("*/tables/*.csv")):
        inner = path.parents[1]
        folders[inner.name] = inner
    records = {where: list(read_all(inner)) for where, inner in folders.items()}
    entries = entries_of([*folders.values()])
    sections = {section.entry.name: section for section in sections_of(folders, entries)}
    if not sections:
        nothing = f"results_dir={folder}: neither table nor figure"
        raise UserError(f"{nothing}; `{COMMAND} grid=accuracy` makes some")
    pages: dict[str, list[Section]] = {}
    for section in sections.values():
        pages.setdefault(section.entry.page, []).append(section)
    boards = sections[LEADERBOARD].parts if LEADERBOARD in sections else []
    rows_of_boards: list[TableRow] = []
    main_sheets = []
    for part in boards:
        rows_of_boards += part.rows
        main_sheets.append(main_scores(part.rows))
    timed = []
    for name in TIMED:
        if name in sections:
            timed.append(sections[name].parts[0].rows)
    main_sheets.append(main_times(timed))
    explored = explorer(rows_of_boards, REGISTRY["families"])
    scripts = [(HERE / "report.js").read_text(encoding="utf-8")]
    packed = {}
    if explored:
        scripts.append(library())
        packed["library"] = _packed(library())
        packed["explorer"] = _packed(json.dumps(explored, allow_nan=False))
    environment_of_page = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment_of_page.get_template("report.html.j2").render(
        pages=pages,
        main_sheets=list(filter(None, main_sheets)),
        picture=_picture(sections),
        explorer=explored,
        explorer_page=sections[LEADERBOARD].entry.page if boards else None,
        beside=list(filter(None, folders)),
        sources=SOURCES,
        script=scripts[0],
        packed=packed,
        digests=list(map(_digest, scripts)),
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        missing=_missing(entries, sections, itertools.chain.from_iterable(records.values())),
        environments={where: environment(found) for where, found in records.items()},
        is_number=lambda text: text == MISSING or re.match(r"[-+]?\d", text) is not None,
        words=WORDS,
    )


def _picture(sections: Mapping[str, Section]) -> tuple[Section, str] | None:
    """The figure of the overview and its image, if there is one."""
    if PICTURE in sections:
        for part in sections[PICTURE].parts:
            if part.image:
                return sections[PICTURE], part.image
    return None


def _missing(
    entries: Sequence[Entry], sections: Mapping[str, Section], records: Iterable[Record]
) -> dict[str, list[str]]:
    """What was not measured, in words."""
    not_made, without_numbers, gaps = [], [], []
    for entry in entries:
        if entry.name not in sections:
            not_made.append(f"{entry.name}: {entry.title} ({entry.command})")
    for record in records:
        if record["status"] != "finished":
            run = f"{record['experiment']} {record['config']['label']} ({record['run_id']})"
            error = f", {record['error']}" if record["error"] else ""
            without_numbers.append(f"{run}: {record['status']}{error}")
    for section in sections.values():
        gaps += section.gaps
    return {
        "Figures and tables not made yet": not_made,
        "Runs without numbers": without_numbers,
        "Scores that a table lacks": gaps,
    }


def _packed(text: str) -> str:
    """A text as base64 of gzip."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _digest(script: str) -> str:
    """The script as the page's policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
