"""The report as a page: made from `tables/`, `figures/` and, for the environment and the failures,
`runs/`.

A section per figure or table. Everything is embedded, nothing is fetched. Figures are SVG images.
Scripts sort tables and draw the explorer of the leaderboard; without scripts all else works. The
page's policy admits no script but its own. A sentence of finding stands where
`results/findings.yaml` gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

import gzip
import json
import re
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from harness.results.pages import WORDS, Sheet, sheets_of
from harness.results.record import read_all
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
        found = {row.get("source") for part in self.parts for row in part.rows}
        return [source for source in SOURCES if source in found]

    @property
    def gaps(self) -> list[str]:
        """How many scores its tables lack, in words."""
        found = []
        for sheet in (
            sheet for part in self.parts for sheets in part.sheets.values() for sheet in sheets
        ):
            scores = [at for at, heading in enumerate(sheet.header) if heading in sheet.scores]
            count = sum(line[at] == MISSING for line in sheet.lines for at in scores)
            found += [f"{self.entry.name}, {sheet.title}: {count}"] * bool(count)
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
    """The figures and tables of the registry, in its order, those that the cost model predicts
    after the timed ones; then what the folders have beside them: the user's own experiments."""
    entries = []
    for page, named in REGISTRY["pages"].items():
        for name, fields in named.items():
            command = fields.get("command", f"python run.py grid={name}")
            entries.append(
                Entry(name, fields["title"], command, tuple(fields.get("tables", [name])), page)
            )
            if fields.get("modelled"):
                twin = name + MODELLED
                entries.append(
                    Entry(twin, f"{fields['title']}, modelled", "make modelled", (twin,), page)
                )
    known = {name for entry in entries for name in (entry.name, *entry.tables)}
    files = (
        path
        for folder in folders
        for kind in ("tables/*.csv", "figures/*.svg")
        for path in folder.glob(kind)
    )
    for name in sorted({path.stem for path in files} - known):
        entries.append(
            Entry(name, "Further runs", f"python run.py experiment={name}", (name,), "further runs")
        )
    return entries


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
    homes = {
        table: entry.name for entry in reversed(entries) for table in entry.tables
    }  # the first that reads it,
    homes |= {
        entry.name: entry.name for entry in entries if entry.name in entry.tables
    }  # or the one of its name
    for entry in entries:
        parts = []
        for where, (folder, tables, sentences) in read.items():
            image = folder / "figures" / f"{entry.name}.svg"
            known = [table for table in entry.tables if tables.get(table)]
            own = [table for table in known if homes[table] == entry.name]
            rows = [row for table in known for row in tables[table]]
            if own or image.exists():
                part = Part(
                    where=where,
                    finding=sentences.get(entry.name),
                    image=embed(image) if image.exists() else None,
                    sheets={
                        table: sheets(folder / "tables" / f"{table}.csv", tables[table])
                        for table in own
                    },
                    elsewhere={table: homes[table] for table in known if table not in own},
                    published=published_sheet(entry.name.removesuffix(MODELLED), rows),
                    rows=rows,
                )
                parts.append(part)
        if parts:
            models: dict[
                str, list[TableRow]
            ] = {}  # two folders of one model go by the folders' names
            for part in parts:
                for row in part.rows:
                    name = (
                        row["model"]
                        if part.where in row["model"]
                        else f"{row['model']} in {part.where}"
                    )
                    models.setdefault(name, []).append(row)
            yield Section(entry, parts, side_by_side(models))


def sheets(path: Path, rows: Sequence[TableRow]) -> list[Sheet]:
    """The rows of a table as people read them. Raises UserError where a needed number is
    missing."""
    try:
        return list(sheets_of(rows))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}: not a table of results ({reason(error)}); make it anew"
        ) from error


def findings(path: Path, names: Sequence[str]) -> Mapping[str, str]:
    """The sentences of `findings.yaml`, by figure or table; none where there is no file.

    Raises:
        UserError: another kind of file, or a name that is not among `names`.
    """
    try:
        sentences: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(sentences, dict) or not all(
        isinstance(sentence, str) for sentence in sentences.values()
    ):
        raise UserError(f"{path}: must map names of figures to sentences")
    for name in sentences:
        if name not in names:
            raise UserError(f"{path}: {name}: {nearest(name, names)}")
    return sentences


def embed(path: Path) -> str:
    """An SVG as a data URI: an image runs no script and loads nothing. Raises UserError for a file
    that is none."""
    try:
        text = path.read_text(encoding="utf-8")
        if not ElementTree.fromstring(text).tag.endswith("svg"):
            raise ValueError(path)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"{path}: not an SVG image; `python -m plots` draws it anew") from error
    return "data:image/svg+xml," + quote(" ".join(text.split()), safe=SAFE_IN_URI)


def environment(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Where the finished runs ran, as (name, value); a value that not all runs share says how many
    had it."""
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return []
    flat = [dict(_readable(record["environment"])) for record in finished]
    minutes = sum(record["seconds"] or 0 for record in finished) / 60
    lines = [("finished runs", f"{len(finished)}, {minutes:.0f} minutes in total")]
    for name in dict.fromkeys(name for values in flat for name in values):
        counts = Counter(values.get(name, "unknown") for values in flat)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        parts = [
            f"{value} ({count} of {len(flat)} runs)" if count < len(flat) else value
            for value, count in ranked
        ]
        lines.append((name, "; ".join(parts)))
    return lines


def _readable(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of a record's environment for people; a record may hold any values there."""
    for name, value in environment.items():
        if name == "packages" and isinstance(value, Mapping):
            yield from (
                (str(package), str(version)) for package, version in value.items() if version
            )
        elif name == "memory_bytes" and isinstance(value, int) and value < sys.maxsize:
            yield "memory", f"{value / GIB:.0f} GiB"
        elif name == "commit" and value:
            yield "commit", str(value) + (" and changes" if environment.get("dirty") else "")
        elif name not in ("dirty", "memory_bytes") and value is not None:
            yield name.replace("_", " "), str(value)


# The page


def _render(folder: Path) -> str:
    """Results of another model that lie within the folder stand beside its own."""
    inner = sorted({path.parents[1] for path in folder.glob("*/tables/*.csv")})
    folders = {"": folder} | {path.name: path for path in inner}
    records = {where: list(read_all(inner)) for where, inner in folders.items()}
    entries = entries_of([*folders.values()])
    sections = {section.entry.name: section for section in sections_of(folders, entries)}
    if not sections:
        raise UserError(
            f"results_dir={folder}: neither table nor figure; `{COMMAND} grid=accuracy` makes some"
        )
    pages: dict[str, list[Section]] = {}
    for section in sections.values():
        pages.setdefault(section.entry.page, []).append(section)
    boards = sections[LEADERBOARD].parts if LEADERBOARD in sections else []
    explored = explorer([row for part in boards for row in part.rows], REGISTRY["families"])
    packed = (
        {"library": library(), "explorer": json.dumps(explored, allow_nan=False)}
        if explored
        else {}
    )
    script = (HERE / "report.js").read_text(encoding="utf-8")
    options: Any = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    template = Environment(loader=FileSystemLoader(HERE), **options).get_template("report.html.j2")
    scores = [main_scores(part.rows) for part in boards]
    times = main_times([sections[name].parts[0].rows for name in TIMED if name in sections])
    images = (
        [part.image for part in sections[PICTURE].parts if part.image]
        if PICTURE in sections
        else []
    )
    return template.render(
        pages=pages,
        main_sheets=[sheet for sheet in (*scores, times) if sheet],
        picture=(sections[PICTURE], images[0]) if images else None,
        explorer=explored,
        explorer_page=sections[LEADERBOARD].entry.page if boards else None,
        beside=[where for where in folders if where],
        sources=SOURCES,
        script=script,
        packed={
            name: b64encode(gzip.compress(text.encode(), mtime=0)).decode()
            for name, text in packed.items()
        },
        digests=[_digest(script), *([_digest(packed["library"])] if packed else [])],
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        missing={
            "Figures and tables not made yet": [
                f"{entry.name}: {entry.title} ({entry.command})"
                for entry in entries
                if entry.name not in sections
            ],
            "Runs without numbers": [
                f"{record['experiment']} {record['config']['label']} ({record['run_id']}): {record['status']}"
                + (f", {record['error']}" if record["error"] else "")
                for found in records.values()
                for record in found
                if record["status"] != "finished"
            ],
            "Scores that a table lacks": [
                gap for section in sections.values() for gap in section.gaps
            ],
        },
        environments={where: environment(found) for where, found in records.items()},
        is_number=lambda cell: cell == MISSING or re.match(r"[-+]?\d", cell) is not None,
        words=WORDS,
    )


def _digest(script: str) -> str:
    """The script as the page's policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
