"""Sections of the report: what `tables/` and `figures/` hold of each figure or table.

A sentence of finding stands where `findings.yaml` of the results gives one, beside its numbers:

    fig11: At a tenth of the cache InfiniGen loses ...
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import yaml

from harness.errors import UserError, nearest
from harness.paper.costmodel.published import FIGURES as TIMED_FIGURES
from harness.paper.costmodel.published import PaperBar, quantity
from harness.results.columns import published, read_frame
from harness.results.metrics import MISSING, SEGMENTS
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
    "published": "quoted from the paper or another project",
}
POINT = ["model", "series", "x_name", "x", "metric"]
"""What names a published number, and a row of an analysis table."""
BAR = list(PaperBar._fields)
SAFE_IN_URI = " !$&'()*+,-./:;=?@_"
"""Letters of a picture that stand as they are in a data URI."""


@dataclass(frozen=True)
class Part:
    """What one results folder has of a figure or table.

    where: "" for the folder that is reported, the name of a folder within it. image: a data URI,
    which runs no script and loads nothing; "" for none. tables: by name. sheets: those of the
    tables that this section shows. elsewhere: the sections that show the others. published: the
    paper's numbers beside ours.
    """

    where: str
    finding: str
    image: str
    tables: Mapping[str, pd.DataFrame]
    sheets: Mapping[str, Sequence[Sheet]]
    elsewhere: Mapping[str, str]
    published: pd.DataFrame

    @property
    def sources(self) -> list[str]:
        """What its numbers are, in the order of `SOURCES`."""
        found: set[str] = set().union(*(table["source"] for table in self.tables.values()))
        return [source for source in SOURCES if source in found]

    @property
    def has_own(self) -> bool:
        """Whether numbers of it are of runs that are not shipped."""
        tables = [table for table in self.tables.values() if "shipped" in table]
        return any(len(table.query("shipped == '' and source != 'modelled'")) for table in tables)


@dataclass(frozen=True)
class Section:
    """A figure or table. name: that of `figures/<name>.svg`. tables: names of `tables/*.csv`, its
    own first. parts: none where no folder has any of it."""

    name: str
    title: str
    command: str
    tables: Sequence[str]
    page: str
    parts: list[Part] = field(default_factory=list)


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
            at_home = [name for name in own if homes[name] == section.name]
            shown = {name: list(sheets_of(own[name])) for name in at_home}
            image = _image(folder, section)
            if image or any(shown.values()):
                finding = said.get(section.name, "")
                elsewhere = {name: homes[name] for name in own if name not in shown}
                numbers = compared(section.name.removesuffix(MODELLED), own.values())
                section.parts.append(Part(where, finding, image, own, shown, elsewhere, numbers))
    return sections


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


# Published numbers, with ours beside them where a run has that setup


def compared(figure: str, tables: Collection[pd.DataFrame]) -> pd.DataFrame:
    """The published numbers of a figure or table as words; empty columns are left out.

    tables: our own. Ours is missing where a row that it needs is absent, emulated, or there twice.
    """
    numbers = published()
    numbers = numbers[numbers["figure"] == figure].reset_index(drop=True)
    if numbers.empty or not tables:
        return pd.DataFrame()
    rows = pd.concat(tables, ignore_index=True)
    ours = (_of_runs if figure in TIMED_FIGURES else _of_points)(numbers, rows)
    words = numbers[POINT].replace("_", " ", regex=True)
    shown = {
        "model": words["model"],
        "series": words["series"],
        "setup": (words["x_name"] + " " + words["x"]).str.strip().replace("", "all"),
        "metric": words["metric"],
        "published": (numbers["value"] + " " + numbers["unit"]).str.strip(),
        "kind": numbers["kind"],
        "ours": ours.map("{:.4g}".format, na_action="ignore"),
        "ours / published": (ours / numbers["value"].astype(float)).map(
            "{:.2f}".format, na_action="ignore"
        ),
        "note": numbers["note"],
    }
    frame = pd.DataFrame(shown).fillna(MISSING)
    return frame.loc[:, ~frame.isin(["", MISSING]).all()]


def _of_runs(numbers: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The published quantities of timed runs, by the same arithmetic as the cost model's
    calibration."""
    timed = rows[rows["source"] != "emulated"].fillna({segment.name: 0 for segment in SEGMENTS})
    timed = timed.assign(total_len=timed["prompt_len"] + timed["gen_len"])
    once = timed.drop_duplicates(BAR, keep=False)
    by_bar: dict[Any, Any] = once.set_index(BAR).to_dict("index")

    def value(number: Any) -> Any:
        with suppress(KeyError):
            return quantity(number, by_bar.__getitem__)
        return None

    return numbers.apply(value, axis=1).astype(float)


def _of_points(numbers: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The values of analysis rows at the points of published numbers."""
    if "series" not in rows:
        return pd.Series(float("nan"), numbers.index)
    points = numbers[POINT].assign(x=pd.to_numeric(numbers["x"], errors="coerce"))
    once = rows[[*POINT, "value"]].drop_duplicates(POINT, keep=False)
    return points.merge(once, on=POINT, how="left")["value"]
