"""Figures from the tables alone: `results/tables/*.csv` -> `results/figures/<figure>.png` and `.pdf`.

One module per figure; each offers `draw(tables)`, which returns the figure, or None where the table it needs
is absent. The same tables give the same bytes.

    python -m plots --results-dir results
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from harness.errors import UserError
from plots import fig11, fig12, fig13, fig14, fig15, fig16, fig17, fig18, style
from plots.data import Tables

FIGURES: dict[str, Callable[[Tables], Figure | None]] = {
    "fig11": fig11.draw,
    "fig12": fig12.draw,
    "fig13": fig13.draw,
    "fig14": fig14.draw,
    "fig15": fig15.draw,
    "fig16a": fig16.draw_length,
    "fig16b": fig16.draw_model,
    "fig17": fig17.draw,
    "fig18": fig18.draw,
}


def main(results_dir: str | Path = "results") -> list[Path]:
    """Draw every figure whose table exists. A damaged table keeps no other figure from being drawn.

    Returns:
        The files written: a PNG and a PDF per figure, in the order of the figures' numbers.

    Raises:
        UserError: no table of any figure, a damaged table, or a folder that cannot be written.
    """
    tables = Tables(Path(results_dir) / "tables")
    paths: list[Path] = []
    refusals: list[str] = []
    with style.applied():
        for name, draw in FIGURES.items():
            try:
                figure = draw(tables)
            except UserError as refusal:
                refusals.append(str(refusal))
                continue
            if figure is not None:
                paths += style.save(figure, Path(results_dir) / "figures" / name)
    if refusals:
        raise UserError("; ".join(dict.fromkeys(refusals)))  # several figures read one table
    if not paths:
        raise UserError(
            f"{tables.folder}: no table yet; `make accuracy` or `python run.py experiment=fig11` makes one"
        )
    return paths
