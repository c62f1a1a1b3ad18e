"""Figures from the tables alone: `tables/*.csv` -> `figures/<figure>` of a results folder, as
`.png`, `.pdf` and `.svg`. The shipped tables stand beside those of one's own runs.

`registry.yaml` lists the figures and names the function that draws each. A draw function takes the
tables and the figure's name, and returns the figure, or None where its table has no rows. The table
`<figure>-modelled` holds what the cost model predicts; the same function draws it as a figure of
that name. The same tables give the same bytes.

    python -m plots --results-dir results
"""

from pathlib import Path

from harness.errors import UserError
from harness.settings.paths import COMMAND, RESULTS


def draw_figures(results_dir: str | Path) -> list[Path]:
    """Draw every figure whose table exists, but for shipped ones that would be the same again.

    One damaged table stops no other figure.

    Returns:
        The files written: a PNG, a PDF and an SVG per figure, in the order of the registry.

    Raises:
        UserError: at the end, which figures could not be drawn and why; at once, a folder that
        cannot be written.
    """
    from plots.drawing import draw_all  # here, since matplotlib takes a second to load

    return draw_all(Path(results_dir))


def main(results_dir: str | Path = RESULTS) -> list[Path]:
    """`draw_figures`; raises UserError as well where no figure has a table."""
    paths = draw_figures(results_dir)
    if not paths:
        folder = Path(results_dir) / "tables"
        tables = ", ".join(sorted(path.name for path in folder.glob("*.csv")))
        found = f"no figure is drawn from {tables} alone" if tables else "no table yet"
        raise UserError(f"{folder}: {found}; `{COMMAND} experiment=fig11` makes one that is")
    return paths
