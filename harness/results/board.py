"""The board: each method's KL beside the oracle's, its rank, answers, memory and decode step.

    python -m harness.results.board results

It is made of the tables of `experiment=board` alone (`harness/results/board_sources.py`), of the
named results and of the folders within them. A method or a model of one's own needs no more than
its own run of `experiment=board`. Of two runs of one method on one model the results' own counts,
then that of the first folder.

`board_rows.py` makes the rows and `board_page.py` the pages. A claim of `board.yaml` holds on a
model if the whole 95 % interval of its number is on the claimed side.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from harness.errors import UserError, exit_code
from harness.files import holding, write_atomic
from harness.results import board_page, columns
from harness.results.board_rows import (
    ALL_MODELS,
    FAILS,
    HOLDS,
    OF_ANSWERS,
    OF_KL,
    UNSURE,
    Setting,
    answers_by_model,
    by_model,
    exponential,
    full_answers,
    gap_of,
    has_budget,
    kl_by_model,
    log_ratio,
    method_rows,
    pair_rows,
    pairs_of,
    same_contexts,
    settings_of,
    with_fronts,
)
from harness.results.board_sources import (
    BoardSteps,
    Models,
    Series,
    Sources,
    in_both,
    models_of,
    read,
    rows_at,
    series_of,
)
from harness.results.columns import TableRow
from harness.results.pages import render_markdown
from harness.results.sheet import markdown
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
NOT_MEASURED, OTHER_BUDGET = "not measured", "another budget"
SAYS = Path(__file__).with_name("board.yaml")


def write(results: Path) -> Path:
    """Write the page and the tables into a results folder; returns the page's path.

    Raises UserError: see `read` and `make`; or the folder cannot be written.
    """
    says = yaml.safe_load(SAYS.read_text(encoding="utf-8"))
    tables, models = make(read(results), says)
    folder, page = results / "tables", results / "board.md"
    with holding(folder, wait=True):
        for name, rows in tables.items():
            shape = columns.TABLES[SHAPES[name]]
            columns.check(shape, rows)
            write_atomic(folder / f"{name}.csv", columns.render_csv(shape, rows))
            text = markdown(name, f"Nothing was compared yet; {MEASURE}", [])
            if rows:
                frame = columns.with_columns(pd.DataFrame(rows), SHAPES[name])
                text = render_markdown(name, frame)
            write_atomic(folder / f"{name}.md", text)
        left_out = [model for model in models.all if model not in models.together]
        shown = (tables[NAME], tables[CLAIMS], tables[MODELS], says["readme"])
        write_atomic(page, board_page.page(*shown, left_out=left_out))
    return page


def shown(results: Path) -> str:
    """What is printed once the board is written: its table, and the page's path. Raises as
    `write`."""
    says, page = yaml.safe_load(SAYS.read_text(encoding="utf-8")), write(results)
    rows = columns.read_table(results / "tables" / f"{NAME}.csv")
    return f"{board_page.printed(rows, says['readme']['budget'])}\n\n{page}".strip()


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


# Claims of `board.yaml`, on each model by itself and on all of them together


class Claim(NamedTuple):
    """A claim of `board.yaml`. bound: the largest ratio of KL, or the least difference of
    answers."""

    claim: str
    of: str
    label: str
    other: str
    budgets: Sequence[float]
    bound: float


def claims_of(entries: Any) -> list[Claim]:
    """The claims of the YAML. Raises UserError, which names the entry, for another form."""
    if not isinstance(entries, list):
        raise UserError("claims: must be a list")
    found = []
    for entry in entries:
        try:
            fields = dict(entry)
            budgets = list(map(float, fields.pop("budgets")))
            of = fields.pop("of")
            if of == OF_ANSWERS:
                bound = -float(fields.pop("less", 0))
            else:
                bound = float(fields.pop("at_most", 1))
            if of not in (OF_KL, OF_ANSWERS) or (of == OF_KL and bound <= 0):
                raise ValueError(entry)
            found.append(Claim(of=of, budgets=budgets, bound=bound, **fields))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            allowed = (
                "a claim has claim, of (KL or answers), label, other, budgets, and at_most > 0 "
                "of KL or less of answers"
            )
            raise UserError(f"claims: {str(entry)[:80]}: {allowed}") from error
    return found


def claim_rows(
    entries: Any, settings: Sequence[Setting], series: Sequence[Series], models: Models
) -> Iterator[TableRow]:
    """The rows of all claims: for each budget and length each model, then all of them together.

    A claim about a method that did not run has one row, which says so.
    """
    for claim in claims_of(entries):
        for budget in claim.budgets:
            common = {
                "claim": claim.claim,
                "measure": claim.of,
                "label": claim.label,
                "other": claim.other,
                "asked_budget": budget,
                "bound": claim.bound,
            }
            if claim.of == OF_KL:
                rows = list(_of_kl(claim, budget, settings, models))
            else:
                rows = list(_of_answers(claim, budget, series, models))
            for row in rows or [{"model": ALL_MODELS, "verdict": NOT_MEASURED}]:
                yield common | row


def _of_kl(
    claim: Claim, budget: float, settings: Iterable[Setting], models: Models
) -> Iterator[TableRow]:
    for setting in settings:
        of_labels = {measured.series.label: measured for measured in setting.found}
        own, other = of_labels.get(claim.label), of_labels.get(claim.other)
        if setting.asked_budget != budget or own is None or other is None:
            continue
        for model, windows in by_model(in_both(own.rows, other.rows), models):
            row: TableRow = {"model": model, "seq_len": setting.seq_len, "count": len(windows)}
            estimate = log_ratio(own, other, windows)
            rows = rows_at(own.rows, windows) + rows_at(other.rows, windows)
            if estimate is None:
                row["verdict"] = NOT_MEASURED
            elif not has_budget(rows, budget):
                row["verdict"] = OTHER_BUDGET
            else:
                row |= exponential("value", estimate)
                row["verdict"] = _verdict(row["value_low"], row["value_high"], claim.bound)
            yield row


def _verdict(low: float | None, high: float | None, bound: float) -> str:
    """Whether a number is at most `bound`; without an interval nothing is told apart."""
    if low is None or high is None:
        return UNSURE
    if high <= bound:
        return HOLDS
    return FAILS if low > bound else UNSURE


def _of_answers(
    claim: Claim, budget: float, series: Iterable[Series], models: Models
) -> Iterator[TableRow]:
    of_labels = {one.label: one for one in series if one.asked_budget in (budget, None)}
    if claim.label not in of_labels or claim.other not in of_labels:
        return
    own, other = of_labels[claim.label], of_labels[claim.other]
    for model, contexts in by_model(same_contexts(own.answers, other.answers), models):
        found = gap_of(own.answers, other.answers, contexts)
        assert found is not None, "parts are not empty"
        row: TableRow = {"model": model, "count": found.num_questions}
        are_met = []
        for one in (own, other):
            are_met.append(has_budget(rows_at(one.answers, contexts), one.asked_budget))
        if all(are_met):
            row |= found.columns("value")
            row["verdict"] = UNSURE
            if found.low is not None and found.high is not None:  # at least the bound
                row["verdict"] = _verdict(-found.high, -found.low, -claim.bound)
        else:
            row["verdict"] = OTHER_BUDGET
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Write the board, print its table and its path; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.board", description="Write the board."
    )
    parser.add_argument(
        "results",
        type=Path,
        metavar="RESULTS",
        help="a results folder, which gets the page; folders within it count",
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: print(shown(args.results)))


if __name__ == "__main__":
    sys.exit(main())
