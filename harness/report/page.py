"""The report as a page: its sections, and of `runs/` the environment and the failures.

A section per figure or table. Everything is embedded, nothing is fetched. Figures are SVG images.
Scripts sort tables and draw the explorer of the board; without scripts all else works. The
page's policy admits no script but its own.
"""

import gzip
import itertools
import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.errors import UserError
from harness.files import write_atomic
from harness.report.explorer import explorer, library
from harness.report.sections import (
    REGISTRY,
    SOURCES,
    Entry,
    Section,
    entries_of,
    sections_of,
)
from harness.results import board_page, columns
from harness.results.archive import opened
from harness.results.board import SAYS
from harness.results.columns import TableRow, with_columns
from harness.results.metrics import GIB, MISSING
from harness.results.pages import said
from harness.results.record import Record, read_all
from harness.results.sheet import NOTES, WORDS
from harness.settings.kinds import BOARD
from harness.settings.paths import COMMAND, RESULTS, models_beside

HERE = Path(__file__).parent
FIRST = "budget"
"""The figure of the shipped results that the report opens with."""


def write_report(results: str | Path = RESULTS, output: str | Path | None = None) -> Path:
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
    home = source.parent if source.is_file() else source
    path = home / "report.html" if output is None else Path(output)
    write_atomic(path, text)
    return path


def _render(folder: Path) -> str:
    """Results of another model that lie within the folder stand beside its own."""
    folders = {"": folder}
    for name in models_beside(folder):
        folders[name] = folder / name
    records = {where: list(read_all(inner)) for where, inner in folders.items()}
    entries = entries_of([*folders.values()])
    sections = {section.entry.name: section for section in sections_of(folders, entries)}
    if not sections:
        nothing = f"results_dir={folder}: neither table nor figure"
        raise UserError(f"{nothing}; `{COMMAND} experiment=accuracy` makes some")
    pages = columns.grouped(sections.values(), lambda section: section.entry.page)
    boards = sections[BOARD].parts if BOARD in sections else []
    rows_of_boards: list[TableRow] = []
    for part in boards:
        rows = [row for row in part.rows if columns.shape_of(row) == "board"]
        for row in rows:
            over = f"{row['over']} ({part.where})" if part.where else row["over"]
            rows_of_boards.append(row | {"over": over})
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
        explorer=explored,
        explorer_page=sections[BOARD].entry.page if boards else None,
        lead=_lead(sections),
        beside={name: NOTES["beside"].get(name, "") for name in filter(None, folders)},
        sources=SOURCES,
        glossary=NOTES["glossary"],
        script=scripts[0],
        packed=packed,
        digests=list(map(_digest, scripts)),
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        missing=_missing(entries, sections, itertools.chain.from_iterable(records.values())),
        environments={where: environment(found) for where, found in records.items()},
        is_number=lambda text: text == MISSING or re.match(r"[-+]?\d", text) is not None,
        words=WORDS,
    )


class Lead(NamedTuple):
    """What the report opens with. said: the result, in sentences."""

    section: Section
    said: str


def _lead(sections: Mapping[str, Section]) -> Lead | None:
    """The first figure with runs of one's own; else that of the board, else the first. None without
    a figure."""
    drawn = [section for section in sections.values() if section.parts[0].image]
    own = [section for section in drawn if section.has_own]
    boards = [section for section in drawn if section.entry.name == FIRST]
    for section in (*own, *boards, *drawn):
        part = section.parts[0]
        of_board = [row for row in part.rows if columns.shape_of(row) == "board"]
        budget = yaml.safe_load(SAYS.read_text(encoding="utf-8"))["readme"]["budget"]
        compared = board_page.shortest(of_board, budget)
        if compared:
            return Lead(section, board_page.said_of(compared))
        words = "" if section.has_own else part.finding or ""
        if section.has_own and columns.shape_of(part.rows[0]) == "accuracy":
            words = said(
                with_columns(
                    pd.DataFrame([row for row in part.rows if not row.get("shipped")]), "accuracy"
                )
            )
        return Lead(section, words)
    return None


def _missing(
    entries: Sequence[Entry], sections: Mapping[str, Section], records: Iterable[Record]
) -> dict[str, list[str]]:
    not_made, without_numbers = [], []
    for entry in entries:
        if entry.name not in sections:
            not_made.append(f"{entry.name}: {entry.title} ({entry.command})")
    for record in records:
        if record["status"] != "finished":
            run = f"{record['experiment']} {record['config']['label']} ({record['run_id']})"
            error = f", {record['error']}" if record["error"] else ""
            without_numbers.append(f"{run}: {record['status']}{error}")
    return {
        "Figures and tables not made yet": not_made,
        "Runs without numbers": without_numbers,
    }


def _packed(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _digest(script: str) -> str:
    """The script as the page's policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


# The environment of the runs


def environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where the finished runs ran, as (name, value).

    A value that not all runs share says how many had it.
    """
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return []
    minutes = sum(record["seconds"] or 0 for record in finished) / 60
    lines = [("finished runs", f"{len(finished)}, {minutes:.0f} minutes in total")]
    described = pd.DataFrame([dict(_readable(record["environment"])) for record in finished])
    for name, values in described.fillna("unknown").items():
        counts = values.value_counts().sort_index().sort_values(ascending=False, kind="stable")
        parts = [f"{value} ({count} of {len(finished)} runs)" for value, count in counts.items()]
        shown = "; ".join(parts) if len(parts) > 1 else values.iloc[0]
        lines.append((str(name), shown))
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
        elif name == "gpus" and isinstance(value, list):
            for gpu in value:
                yield from _facts_of_gpu(gpu)
        elif name not in ("dirty", "memory_bytes") and value is not None:
            yield name.replace("_", " "), str(value)


def _facts_of_gpu(gpu: Any) -> Iterator[tuple[str, str]]:
    """What does not change from run to run: the driver, and the most that link and clock can do."""
    for name in ("driver", "pcie_generation_max", "pcie_width_max", "sm_mhz_max"):
        if isinstance(gpu, Mapping) and gpu.get(name) is not None:
            yield name.replace("_", " "), str(gpu[name])
