"""Where the project's own files lie: in a checkout at its top, in an installation inside the
package `harness`.

`pyproject.toml` maps `conf` to `harness/conf` and the tables of `results` to `harness/shipped`.
"""

from pathlib import Path

HARNESS = Path(__file__).resolve().parent.parent
PACKAGES_DIR = HARNESS.parent
"""The folder of the packages `harness`, `methods` and `plots`: the checkout, or site-packages."""
INSTALLED = (HARNESS / "conf").is_dir()
"""False in a checkout, also where it is installed as editable."""
CONF_DIR = HARNESS / "conf" if INSTALLED else PACKAGES_DIR / "conf"
SHIPPED = HARNESS / "shipped"
"""Results folder with the shipped tables; exists in an installation only."""
RESULTS = "results"
"""The default of `results_dir`, in the working folder."""
PROGRAM = "kv-harness" if INSTALLED else "run.py"
COMMAND = PROGRAM if INSTALLED else f"python {PROGRAM}"
"""What a user types before the settings of a run."""


def shipped_table(name: str) -> Path | None:
    """The file `tables/<name>` of the project's results on its default model; None where there is
    none."""
    results = SHIPPED if INSTALLED else PACKAGES_DIR / RESULTS
    path = results / "tables" / name
    return path if path.is_file() else None


def table_to_read(results_dir: str | Path, name: str) -> Path | None:
    """The file `tables/<name>` of a results folder, else the shipped one; None where neither
    exists.

    A checkout has the shipped tables in `results`. An installation has them for `./results` and the
    folders below it, until a run writes a table of its own there, which takes over the shipped
    rows.
    """
    path = Path(results_dir) / "tables" / name
    if path.exists():
        return path
    default = Path(RESULTS).resolve()
    here = Path(results_dir).resolve()
    if not INSTALLED or not here.is_relative_to(default):
        return None
    shipped = SHIPPED / here.relative_to(default) / "tables" / name
    return shipped if shipped.is_file() else None
