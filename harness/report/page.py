"""The report as a page: a section for each figure or table with what `tables/` and `figures/` hold
of it, and of `runs/` the environment and the failures.

A sentence of finding stands where `findings.yaml` of the results gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...

Everything is embedded, nothing is fetched. Figures are SVG images. DataTables, of which itables
brings the script, sorts and searches tables; without scripts all else works.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.errors import UserError, nearest
from harness.files import write_atomic
from harness.results.columns import read_frame
from harness.results.pages import sheets_of_page
from harness.results.record import Record, flat, read_all
from harness.results.sheet import NOTES
from harness.settings.paths import (
    COMMAND,
    PACKAGES_DIR,
    RESULTS,
    models_beside,
    shipped_beside,
    tables_to_read,
)

HERE = Path(__file__).parent
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
SAFE_IN_URI = " !$&'()*+,-./:;=?@_"
"""Letters of a picture that stand as they are in a data URI."""


@dataclass(frozen=True)
class Section:
    """A figure or table. name: that of `figures/<name>.svg`. tables: names of `tables/*.csv`, its
    own first. parts: what each results folder has of it, see `_part`; none where no folder has any
    of it."""

    name: str
    title: str
    command: str
    tables: Sequence[str]
    page: str
    parts: list[dict[str, Any]] = field(default_factory=list)


def registered() -> Iterator[Section]:
    """The sections of the registry, in its order. Those that the cost model predicts come after the
    timed ones."""
    for page, named in REGISTRY["pages"].items():
        for name, fields in named.items():
            title, tables = fields["title"], fields.get("tables", [name])
            command = fields.get("command", f"python run.py experiment={name}")
            yield Section(name, title, command, tables, page)
            if fields.get("modelled"):
                twin, command = name + MODELLED, "python -m harness.paper.costmodel --write"
                yield Section(twin, f"{title}, modelled", command, [twin], page)


def sections_of(folders: Mapping[str, Path]) -> list[Section]:
    """The registered sections, then those of the user's own experiments, with what the folders have
    of them.

    Raises:
        UserError: a damaged table, or findings about what is not there.
    """
    sections = list(registered())
    known = {name for section in sections for name in (section.name, *section.tables)}
    found: set[str] = set()
    for folder in folders.values():
        found.update(path.stem for path in tables_to_read(folder))
        found.update(path.stem for path in folder.glob("figures/*.svg"))
    for name in sorted(found - known):
        command = f"python run.py experiment={name}"
        sections.append(Section(name, "Further runs", command, [name], "further runs"))

    names = [section.name for section in sections]
    homes: dict[str, str] = {}  # the section that shows a table: of its name, or the first
    for section in sections:
        for name in section.tables:
            homes.setdefault(name, name if name in names else section.name)
    for where, folder in folders.items():
        tables = {path.stem: read_frame(path) for path in tables_to_read(folder)}
        said = _findings(folder, names)
        for section in sections:
            own = {name: tables[name] for name in section.tables if name in tables}
            shown = [name for name in own if homes[name] == section.name]
            part = _part(folder, section, own, shown)
            if part["image"] or any(part["sheets"].values()):
                section.parts.append(part | {"where": where, "finding": said.get(section.name, "")})
    return sections


def _part(
    folder: Path, section: Section, tables: Mapping[str, pd.DataFrame], shown: Sequence[str]
) -> dict[str, Any]:
    """What a results folder has of a figure or table. `image`: a data URI, which runs no script and
    loads nothing; "" for none. `sheets`: those of the tables `shown`, by name. `sources`: what the
    numbers of its tables are, in the order of `SOURCES`."""
    found: set[str] = set().union(*(table["source"] for table in tables.values()))
    return {
        "image": _image(folder, section),
        "sheets": {name: sheets_of_page(name, tables[name]) for name in shown},
        "sources": [source for source in SOURCES if source in found],
    }


def _findings(folder: Path, names: Collection[str]) -> dict[str, str]:
    """The sentences of a results folder by section, and those of the shipped ones beside it.

    Raises UserError for a name that is not among `names`.
    """
    said: dict[str, str] = {}
    for place in filter(None, (shipped_beside(folder), folder)):
        path = place / "findings.yaml"
        sentences = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
        for name, sentence in (sentences or {}).items():
            if name not in names:
                raise UserError(f"{path}: {name}: {nearest(name, names)}")
            said[name] = sentence if place == folder else f"Of the shipped runs: {sentence}"
    return said


def _image(folder: Path, section: Section) -> str:
    """The figure of a results folder; the shipped one where none of its tables is one's own."""
    path, shipped = folder / "figures" / f"{section.name}.svg", shipped_beside(folder)
    own_tables = [folder / "tables" / f"{name}.csv" for name in section.tables]
    if not path.exists() and shipped is not None and not any(map(Path.exists, own_tables)):
        path = shipped / "figures" / path.name
    if not path.exists():
        return ""
    text = " ".join(path.read_text(encoding="utf-8").split())
    return "data:image/svg+xml," + quote(text, safe=SAFE_IN_URI)


# The page


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
        beside={name: NOTES["beside"].get(name, "") for name in folders if name},
        sources=SOURCES,
        glossary=NOTES["glossary"],
        scripts=scripts,
        style=(HERE / "report.css").read_text(),
        machines={where: machine_of(found) for where, found in records.items()},
        not_made=[section for section in sections if not section.parts],
        unfinished=[record for record in every if record["status"] != "finished"],
    )


def table(cells: pd.DataFrame) -> Markup:
    """A table of words, escaped."""
    with pd.option_context("display.max_colwidth", None):
        return Markup(cells.to_html(index=False, border=0, justify="left"))


def machine_of(records: Sequence[Record]) -> dict[str, str]:
    """Where the finished runs ran, by name; all values where they are not alike."""
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        return {}
    minutes = sum(record["seconds"] or 0 for record in finished) / 60
    found = {"finished runs": f"{len(finished)}, {minutes:.0f} minutes in total"}
    described = pd.DataFrame([flat(record["environment"]) for record in finished])
    for name, values in described.dropna(axis="columns", how="all").astype(str).items():
        found[str(name).replace("_", " ")] = "; ".join(values.unique())
    return found
