"""The board: each method's KL beside the oracle's, its rank, answers, memory and decode step.

    python -m harness.results.board results

It is made of the tables of `experiment=board` alone (`harness/results/board_sources.py`), of
the named results and of the folders within them. A method or a model of one's own needs no more
than its own run of `experiment=board`. Of two runs of one method on one model the results named
first count.

`board_rows.py` makes the rows, `board_claims.py` those of the claims in `board.yaml`, and
`board_page.py` the pages.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError, exit_code
from harness.files import holding, write_atomic
from harness.results import board_page, columns
from harness.results.board_claims import claim_rows
from harness.results.board_rows import (
    ALL_MODELS,
    Models,
    answers_by_model,
    full_answers,
    kl_by_model,
    method_rows,
    models_of,
    pair_rows,
    pairs_of,
    settings_of,
    with_fronts,
)
from harness.results.board_sources import Series, Sources, read, series_of
from harness.results.columns import TableRow
from harness.results.pages import render_markdown
from harness.results.sheet import markdown
from harness.results.step_time import BoardSteps
from harness.settings.paths import COMMAND

NAME, CLAIMS, MODELS, PAIRS = "board-methods", "board-claims", "board-models", "board-pairs"
SHAPES = {
    NAME: "board",
    CLAIMS: "board_claims",
    MODELS: "board_models",
    PAIRS: "board_pairs",
}
"""The tables that are made here, and their shapes."""
MEASURE = f"`{COMMAND} experiment=board` measures it."
SAYS = Path(__file__).with_name("board.yaml")


def write(sources: Sequence[Path]) -> Path:
    """Write the page and the tables into the first source, a folder; returns the page's path.

    Raises UserError: see `read` and `make`; or the folder cannot be written.
    """
    results = sources[0]
    if results.is_file():
        raise UserError(f"{results}: the first results get the page, so they must be a folder")
    says = yaml.safe_load(SAYS.read_text(encoding="utf-8"))
    tables, models = make(read(sources), says)
    folder, page = results / "tables", results / "board.md"
    with holding(folder, wait=True):
        for name, rows in tables.items():
            shape = columns.TABLES[SHAPES[name]]
            columns.check(shape, rows)
            write_atomic(folder / f"{name}.csv", columns.render_csv(shape, rows))
            text = markdown(name, f"Nothing was compared yet; {MEASURE}", [])
            if rows:
                text = render_markdown(name, rows)
            write_atomic(folder / f"{name}.md", text)
        left_out = [model for model in models.all if model not in models.together]
        shown = (tables[NAME], tables[CLAIMS], tables[MODELS], says["readme"])
        write_atomic(page, board_page.page(*shown, left_out=left_out))
    return page


def make(sources: Sources, says: Mapping[str, Any]) -> tuple[dict[str, list[TableRow]], Models]:
    """The rows of the tables `SHAPES`, and the models. says: the content of `board.yaml`.

    Raises UserError for two methods with one label, and for claims that are none.
    """
    series = series_of(sources)
    models = models_of(series)
    settings = settings_of(series, models)
    rows: dict[str, list[TableRow]] = {name: [] for name in SHAPES}
    for setting in settings:
        rows[PAIRS] += pair_rows(setting, pairs_of(setting))
        rows[MODELS] += kl_by_model(setting, models)
    over = ALL_MODELS if len(models.together) > 1 else "".join(models.together)
    rows[NAME] += _board(over, series, models, sources.steps)
    for model in models.all:
        if model != over:
            alone = Models([model], [model])
            rows[NAME] += _board(model, series_of(sources, [model]), alone, sources.steps)
    rows[MODELS] += answers_by_model(series, models, full_answers(series))
    rows[CLAIMS] += claim_rows(says["claims"], settings, series, models)
    for name, of_table in rows.items():
        rows[name] = [row | {"source": "measured"} for row in of_table]
    return rows, models


def _board(
    over: str, series: Sequence[Series], models: Models, steps: Iterable[TableRow]
) -> list[TableRow]:
    """The rows of one board. over: all models, or the model it is of."""
    full = {
        context: row
        for context, row in full_answers(series).items()
        if row["model"] in models.together
    }
    timed = BoardSteps(steps, models.together)
    found: list[TableRow] = []
    for setting in settings_of(series, models):
        found += method_rows(setting, pairs_of(setting), full, timed)
    return [{"over": over} | row for row in with_fronts(found)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the board and print its path; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.board", description="Write the board."
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULTS",
        help="results folders or archives; folders within them count, the first gets the page",
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: print(write(args.results)))


if __name__ == "__main__":
    sys.exit(main())
