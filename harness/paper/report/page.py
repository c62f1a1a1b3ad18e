"""The report as a page: it is made from `tables/`, `figures/` and, for the environment and the failures, `runs/`.

Published numbers come from `harness/tables/published.csv`. All is embedded, nothing is fetched. Without scripts the
charts are drawings and everything else works; scripts sort tables and let charts answer a hover, and the page's policy
admits none but its own. A sentence of finding stands where `results/findings.yaml` gives one, beside its numbers:

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
from harness.paper.catalogue import PAGES
from harness.paper.report.charts.vega import library
from harness.paper.report.data import environment, unfinished
from harness.paper.report.sections import SOURCES, Section, entries_of, folders_of, sections_of
from harness.records.record import read_all
from harness.records.unpack import opened
from harness.tables.columns import MISSING
from harness.tables.text import WORDS

HERE = Path(__file__).parent


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
    entries = entries_of(folders)
    sections = list(sections_of(folders, entries))
    if not sections:
        raise UserError(f"results_dir={folder}: neither table nor figure; `make accuracy` makes some")
    shown = {section.entry.name for section in sections}
    pages = _pages(sections)
    specs = [drawn.spec for page in pages.values() for section in page for drawn in section.drawn]
    scripts = _scripts(bool(specs))
    packed = {"library": library(), "charts": json.dumps(specs)} if specs else {}
    return _template().render(
        pages=pages,
        most_panes=max(len(section.panes) for section in sections),
        beside=[where for where in folders if where],
        sources=SOURCES,
        scripts=scripts,
        packed={name: b64encode(gzip.compress(text.encode(), mtime=0)).decode() for name, text in packed.items()},
        digests=[_digest(script) for script in (*scripts, *([packed["library"]] if specs else []))],
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        absent=[entry for entry in entries if entry.name not in shown],
        gaps=[gap for section in sections for part in section.parts for gap in part.gaps],
        unfinished=[line for found in records.values() for line in unfinished(found)],
        environments={where: environment(found) for where, found in records.items()},
        is_number=is_number,
        words=WORDS,
    )


def _pages(sections: Sequence[Section]) -> dict[str, list[Section]]:
    """The sections by page; pages that the catalogue does not know, of what it does not know, stand last."""
    names = dict.fromkeys((*PAGES, *(section.entry.page for section in sections)))
    pages = {name: [section for section in sections if section.entry.page == name] for name in names}
    return {name: found for name, found in pages.items() if found}


def _scripts(charted: bool) -> list[str]:
    """What runs on the page, each as it stands between its tags."""
    return [(HERE / name).read_text(encoding="utf-8") for name in ("tables.js", *(["charts.js"] if charted else []))]


def _digest(script: str) -> str:
    """As the page's policy names a script that may run."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _template() -> Any:
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(HERE), **options).get_template("report.html.j2")


def is_number(cell: str) -> bool:
    """Whether a table's cell stands on the right."""
    return cell == MISSING or re.match(r"[-+]?\d", cell) is not None
