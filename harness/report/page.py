"""The report as a page: its sections, and of `runs/` the environment and the failures.

A section per figure or table. Everything is embedded, nothing is fetched. Figures are SVG images.
DataTables, of which itables brings the script, sorts and searches tables; without scripts all else
works. The page's policy admits no other script.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.errors import UserError
from harness.files import write_atomic
from harness.report.sections import SOURCES, Section, sections_of
from harness.results.metrics import GIB
from harness.results.record import Record, read_all
from harness.results.sheet import NOTES
from harness.settings.paths import COMMAND, RESULTS, models_beside

HERE = Path(__file__).parent
FIRST = "budget"
"""The figure of the shipped results that the report opens with."""


def write_report(results: str | Path = RESULTS) -> Path:
    """Write `report.html` into a results folder; the same results give the same bytes. Returns its
    path.

    Raises:
        UserError: neither table nor figure, a damaged table, findings about what is not there, or a
            folder that cannot be written.
    """
    folder = Path(results)
    path = folder / "report.html"
    write_atomic(path, _render(folder))
    return path


def _render(folder: Path) -> str:
    """Results of another model that lie within the folder stand beside its own."""
    folders = {"": folder} | {name: folder / name for name in models_beside(folder)}
    records = {where: list(read_all(inner)) for where, inner in folders.items()}
    sections = sections_of(folders)
    pages: dict[str, list[Section]] = {}
    for section in filter(lambda each: each.parts, sections):
        pages.setdefault(section.page, []).append(section)
    if not pages:
        nothing = f"results_dir={folder}: neither table nor figure"
        raise UserError(f"{nothing}; `{COMMAND} experiment=accuracy` makes some")
    lead = lead_of(sections)
    library = files("itables").joinpath("html", "dt_bundle.js").read_text(encoding="utf-8")
    # A comment of HTML that opens within a script would hide the script's end.
    scripts = [library.replace("<!--", r"\x3C!--"), (HERE / "report.js").read_text()]
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["table"] = table
    every = [record for found in records.values() for record in found]
    return environment.get_template("report.html.j2").render(
        pages=pages,
        lead=lead,
        beside={name: NOTES["beside"].get(name, "") for name in folders if name},
        sources=SOURCES,
        glossary=NOTES["glossary"],
        scripts=scripts,
        digests=[b64encode(sha256(script.encode()).digest()).decode() for script in scripts],
        style=(HERE / "report.css").read_text(),
        machines={where: machine_of(found) for where, found in records.items()},
        not_made=[section for section in sections if not section.parts],
        unfinished=[record for record in every if record["status"] != "finished"],
    )


def table(cells: pd.DataFrame) -> Markup:
    """A table of words, escaped."""
    with pd.option_context("display.max_colwidth", None):
        return Markup(cells.to_html(index=False, border=0, justify="left"))


def lead_of(sections: Sequence[Section]) -> Section | None:
    """The figure that the report opens with: the first with runs of one's own, else that of the
    board, else the first. None without a figure."""
    drawn = [section for section in sections if section.parts and section.parts[0].image]
    own = [section for section in drawn if section.parts[0].has_own]
    boards = [section for section in drawn if section.name == FIRST]
    return next(iter([*own, *boards, *drawn]), None)


def machine_of(records: Sequence[Record]) -> dict[str, str]:
    """Where the finished runs ran, by name; all values where they are not alike."""
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return {}
    minutes = sum(record["seconds"] or 0 for record in finished) / 60
    found = {"finished runs": f"{len(finished)}, {minutes:.0f} minutes in total"}
    described = pd.DataFrame([facts_of(record["environment"]) for record in finished])
    for name, values in described.fillna("unknown").items():
        found[str(name)] = "; ".join(values.unique())
    return found


def facts_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """The known fields of a record's environment, as people read them.

    Of a GPU those that do not change from run to run: the driver, and the most that link and clocks
    can do.
    """
    facts = dict(environment)
    packages, gpus = facts.pop("packages", {}), facts.pop("gpus", None)
    if memory := facts.pop("memory_bytes", None):
        facts["memory"] = f"{memory / GIB:.0f} GiB"
    if facts.pop("dirty", False):
        facts["commit"] = f"{facts['commit']} and changes"
    for gpu in gpus or ():
        facts |= {name: gpu[name] for name in gpu if name == "driver" or name.endswith("_max")}
    known = {name: value for name, value in (facts | packages).items() if value is not None}
    return {name.replace("_", " "): str(value) for name, value in known.items()}
