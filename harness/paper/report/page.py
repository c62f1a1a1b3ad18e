"""The report as a page: made from `tables/`, `figures/` and, for the environment and the failures, `runs/`.

Everything is embedded, nothing is fetched. Figures are SVG images. Scripts sort tables and draw the explorer of the
leaderboard; without scripts all else works. The page's policy admits no script but its own. A sentence of finding
stands where `results/findings.yaml` gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.errors import UserError
from harness.files import write_atomic
from harness.paper.report.compared import main_scores, main_times
from harness.paper.report.contents import (
    REGISTRY,
    SOURCES,
    Section,
    all_entries,
    environment,
    folders_of,
    sections_of,
    unfinished,
)
from harness.paper.report.explorer import explorer, library
from harness.records.archive import opened
from harness.records.record import read_all
from harness.tables.columns import MISSING
from harness.tables.leaderboard import NAME as LEADERBOARD
from harness.tables.text import WORDS

HERE = Path(__file__).parent
PICTURE = "fig11"
"""The figure of the overview."""
TIMED = ("fig14", "fig14-modelled")
"""The figures of the overview's times."""


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
    folders = folders_of(folder)
    records = {where: list(read_all(inner)) for where, inner in folders.items()}
    entries = all_entries(folders)
    sections = {section.entry.name: section for section in sections_of(folders, entries)}
    if not sections:
        raise UserError(f"results_dir={folder}: neither table nor figure; `make accuracy` makes some")
    pages: dict[str, list[Section]] = {}
    for section in sections.values():
        pages.setdefault(section.entry.page, []).append(section)
    boards = sections[LEADERBOARD].parts if LEADERBOARD in sections else []
    explored = explorer([row for part in boards for row in part.rows], REGISTRY["families"])
    packed = {"library": library(), "explorer": json.dumps(explored, allow_nan=False)} if explored else {}
    script = (HERE / "report.js").read_text(encoding="utf-8")
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(HERE), **options).get_template("report.html.j2")
    scores = [main_scores(part.rows) for part in boards]
    times = main_times({name: sections[name].parts[0].rows for name in TIMED if name in sections})
    return template.render(
        pages=pages,
        main_sheets=[sheet for sheet in (*scores, times) if sheet],
        picture=_picture(sections.get(PICTURE)),
        explorer=explored,
        explorer_page=sections[LEADERBOARD].entry.page if boards else None,
        beside=[where for where in folders if where],
        sources=SOURCES,
        script=script,
        packed={name: b64encode(gzip.compress(text.encode(), mtime=0)).decode() for name, text in packed.items()},
        digests=[_digest(script), *([_digest(packed["library"])] if packed else [])],
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        missing={
            "Figures and tables not made yet": [
                f"{entry.name}: {entry.title} ({entry.command})" for entry in entries if entry.name not in sections
            ],
            "Runs without numbers": [line for found in records.values() for line in unfinished(found)],
            "Scores that a table lacks": [gap for section in sections.values() for gap in section.gaps],
        },
        environments={where: environment(found) for where, found in records.items()},
        is_number=is_number,
        words=WORDS,
    )


def _picture(section: Section | None) -> tuple[Section, str] | None:
    """The section of the overview's figure, and its image; None without one."""
    images: Sequence[str] = [part.image for part in section.parts if part.image] if section else []
    return (section, images[0]) if section and images else None


def _digest(script: str) -> str:
    """The script as the page's policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def is_number(cell: str) -> bool:
    """Whether a table's cell stands on the right."""
    return cell == MISSING or re.match(r"[-+]?\d", cell) is not None
