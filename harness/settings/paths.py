"""Where the project's own files lie: in a checkout at its top, in an installation inside the
package `harness`.

`pyproject.toml` maps `conf` to `harness/conf` and the tables of `results` to `harness/shipped`.

The project's own results are shipped with it. Those of its users go to a folder of their own,
beside which the shipped ones are read and never written.
"""

from pathlib import Path

HARNESS = Path(__file__).resolve().parent.parent
PACKAGES_DIR = HARNESS.parent
"""The folder of the packages `harness`, `methods` and `plots`: the checkout, or site-packages."""
INSTALLED = (HARNESS / "conf").is_dir()
"""False in a checkout, also where it is installed as editable."""
CONF_DIR = HARNESS / "conf" if INSTALLED else PACKAGES_DIR / "conf"
SHIPPED = HARNESS / "shipped" if INSTALLED else PACKAGES_DIR / "results"
"""The project's results; an installation has their tables and pages alone."""
RESULTS = "outputs"
"""The default of `results_dir`, in the working folder."""
PROGRAM = "kv-harness" if INSTALLED else "run.py"
COMMAND = PROGRAM if INSTALLED else f"python {PROGRAM}"
"""What a user types before the settings of a run."""


def shipped_beside(results_dir: str | Path) -> Path | None:
    """The shipped results that are read together with those of `results_dir`; None for none.

    They stand beside `./outputs`, and those of another model beside the folder of its name there.
    """
    own, here = Path(RESULTS).resolve(), Path(results_dir).resolve()
    if not here.is_relative_to(own):
        return None
    shipped = SHIPPED / here.relative_to(own)
    return shipped if shipped.is_dir() else None


def _folders(results_dir: str | Path) -> list[Path]:
    return [Path(results_dir), *filter(None, [shipped_beside(results_dir)])]


def table_to_read(results_dir: str | Path, name: str) -> Path | None:
    """The file `tables/<name>` of a results folder, else the shipped one that stands beside it;
    None where neither exists. A table that a run writes there has the shipped rows, too."""
    paths = [folder / "tables" / name for folder in _folders(results_dir)]
    return next(filter(Path.exists, paths), None)


def tables_to_read(results_dir: str | Path) -> list[Path]:
    """The files `tables/*.csv` of a results folder and the shipped ones that it lacks, by name."""
    found: dict[str, Path] = {}
    for folder in reversed(_folders(results_dir)):
        found |= {path.name: path for path in folder.glob("tables/*.csv")}
    return [found[name] for name in sorted(found)]


def models_beside(results_dir: str | Path) -> list[str]:
    """The folders within a results folder, and within the shipped results beside it, that have
    tables: results of other models."""
    tables = (path for folder in _folders(results_dir) for path in folder.glob("*/tables/*.csv"))
    return sorted({path.parents[1].name for path in tables})
