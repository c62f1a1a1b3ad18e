"""Figures from the tables alone: `results/tables/*.csv` -> `results/figures/<figure>.png` and `.pdf`.

One module per figure; each offers `draw`, which takes the tables, or rows of a latency table, and returns the figure,
or None where it has no rows. What the cost model predicts of a figure, in the table `<figure>-modelled`, is a figure of
that name, drawn by the same function. The same tables give the same bytes.

    python -m plots --results-dir results
"""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from harness.errors import UserError
from plots import (
    choices,
    fig2,
    fig4,
    fig5,
    fig7,
    fig11,
    fig12,
    fig13,
    fig14,
    fig15,
    fig16,
    fig17,
    fig18,
    fig19,
    fig20,
    style,
    table2,
)
from plots.data import Tables

Draw = Callable[[Tables], Figure | None]


def _of_latency(name: str, draw: Callable[[pd.DataFrame], Figure | None]) -> dict[str, Draw]:
    """The two figures that `draw` makes of rows of a latency table: of what was timed, and of what is modelled."""

    def of(table: str) -> Draw:
        return lambda tables: draw(tables.latency(table))

    return {table: of(table) for table in (name, f"{name}-modelled")}


FIGURES: dict[str, Draw] = {
    "fig2": fig2.draw,
    "fig4": fig4.draw,
    "fig5": fig5.draw,
    "fig7": fig7.draw,
    "fig11": fig11.draw,
    "fig12": fig12.draw,
    "fig13": fig13.draw,
    **_of_latency("fig14", fig14.draw),
    **_of_latency("fig15", fig15.draw),
    **_of_latency("fig16a", fig16.draw_length),
    **_of_latency("fig16b", fig16.draw_model),
    "fig17": fig17.draw,
    **_of_latency("fig18", fig18.draw),
    "fig19": fig19.draw,
    "fig20": fig20.draw,
    "table2": table2.draw,
    "choices": choices.draw,
}


def main(results_dir: str | Path = "results") -> list[Path]:
    """`draw_figures`, where there must be one. Raises UserError as well where no figure has a table."""
    paths = draw_figures(results_dir)
    if not paths:
        folder = Path(results_dir) / "tables"
        raise UserError(f"{folder}: no table yet; `make accuracy` or `python run.py experiment=fig11` makes one")
    return paths


def draw_figures(results_dir: str | Path) -> list[Path]:
    """Draw every figure whose table exists. A damaged table keeps no other figure from being drawn.

    Returns:
        The files written: a PNG and a PDF per figure, in the order of the figures' numbers.

    Raises:
        UserError: a damaged table, or a folder that cannot be written.
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
    return paths
