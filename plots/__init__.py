"""Figures from the tables alone: `tables/*.csv` -> `figures/<figure>` of a results folder, as
`.png`, `.pdf` and `.svg`. The shipped tables stand beside those of one's own runs.

`registry.yaml` lists the figures and names the function that draws each: it takes the figure's own
table as a frame, with a second parameter another one, and returns a matplotlib Figure, or None
where they have no rows for it. The table `<figure>-modelled` holds what the cost model predicts;
the same function draws it as a figure of that name. The same tables give the same bytes.

    python -m plots --results-dir results
"""

from pathlib import Path

from harness.errors import UserError
from harness.settings.paths import COMMAND, RESULTS


def draw_figures(results_dir: str | Path) -> list[Path]:
    """Draw every figure of which the folder has a table; returns the files, a PNG, a PDF and an SVG
    per figure, in the order of the registry.

    A figure that is refused stops no other. Raises UserError at the end: which could not be drawn
    and why; at once for a folder that cannot be written.
    """
    from plots.drawing import draw_all  # here, since matplotlib takes a second to load

    return draw_all(Path(results_dir))


def main(results_dir: str | Path = RESULTS) -> list[Path]:
    """`draw_figures`; raises UserError as well where no figure has a table."""
    paths = draw_figures(results_dir)
    if not paths:
        folder = Path(results_dir) / "tables"
        raise UserError(f"{folder}: no table of a figure; `{COMMAND} experiment=fig11` makes one")
    return paths
