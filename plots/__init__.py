"""Figures from the tables alone: `results/tables/*.csv` -> `results/figures/<figure>.png` and `.pdf`.

`registry.yaml` lists all figures. One module per figure; each offers `draw`, which takes the tables and the figure's
name, and returns the figure, or None where it has no rows. What the cost model predicts of a figure, in the table
`<figure>-modelled`, is a figure of that name, drawn by the same function. The same tables give the same bytes.

    python -m plots --results-dir results
"""

from pathlib import Path

from harness.errors import UserError, reason


def main(results_dir: str | Path = "results") -> list[Path]:
    """`draw_figures`, where there must be one. Raises UserError as well where no figure has a table."""
    paths = draw_figures(results_dir)
    if not paths:
        folder = Path(results_dir) / "tables"
        tables = ", ".join(sorted(path.name for path in folder.glob("*.csv")))
        found = f"no figure is drawn from {tables} alone" if tables else "no table yet"
        raise UserError(f"{folder}: {found}; `make accuracy` or `python run.py experiment=fig11` makes one that is")
    return paths


def draw_figures(results_dir: str | Path) -> list[Path]:
    """Draw every figure whose table exists. One that cannot be drawn, as its table is damaged, keeps no other from it.

    Returns:
        The files written: a PNG and a PDF per figure, in the order of the registry.

    Raises:
        UserError: at the end, which figures could not be drawn and why; at once, a folder that cannot be written.
    """
    from plots import files, registry, style  # here, since matplotlib takes a second to load
    from plots.data import Tables

    tables = Tables(Path(results_dir) / "tables")
    paths: list[Path] = []
    refusals: list[str] = []
    with style.applied():
        for name, draw in registry.DRAWINGS.items():
            try:
                figure = draw(tables, name)
                formats = {} if figure is None else files.rendered(figure)
            except UserError as refusal:
                refusals.append(str(refusal))
            except Exception as error:  # whatever an odd table leads matplotlib or pandas to
                refusals.append(f"{name}: not drawn ({reason(error)})")
            else:
                paths += files.save(formats, Path(results_dir) / "figures" / name)
    if refusals:
        raise UserError("; ".join(dict.fromkeys(refusals)))  # several figures read one table
    return paths
