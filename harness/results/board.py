"""The board: each method's KL beside the oracle's, its rank, answers, memory and decode step.

    python -m harness.results.board results

It is made of the tables of `experiment=board` alone, of the named results and of the folders within
them. A method or a model of one's own needs no more than its own run of `experiment=board`. Of two
runs of one method on one model the results' own counts, then that of the first folder.

`board_rows.py` makes the frames. Here are the pages: `page` is `board.md`, `boards` the sheets of
all boards, `printed` what a terminal shows. All take the methods as a frame of the shape `board`.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import exit_code
from harness.files import holding, write_atomic
from harness.results import metrics
from harness.results.board_rows import ALL_MODELS, OF_SHARES, board_of, read
from harness.results.columns import csv_of, read_frame
from harness.results.metrics import COLUMNS, MISSING
from harness.results.samples import FULL
from harness.results.sheet import (
    SHARES,
    Sheet,
    mark_own,
    markdown,
    note,
    show_range,
    terminal,
)

METHODS, PAIRS = "board-methods", "board-pairs"
README_BUDGET = 0.1
README_METHODS = (
    "Full cache", "INT8", "KIVI-4", "Oracle", "Oracle, InfiniGen's rule", "InfiniGen2, linear rest",
    "InfiniGen2, sampled rest", "InfiniGen2", "RetroInfer", "vAttention", "Twilight", "ParisKV",
    "InfiniGen", "Quest", "H2O", "SnapKV", "Streaming",
)  # fmt: skip
"""The labels of README's table, in its order."""
ANSWER_MARKS = {
    "§": ("reads ", "The method cannot have this budget on the tasks."),
    "¶": ("lacks ", "Some of the full cache's questions were not asked."),
}
"""Behind answers: by mark, what their note says, and what it means."""
SETTING = ["asked_budget", "seq_len"]


def write(results: Path) -> Path:
    """Write the page and the tables into a results folder; returns the page's path.

    Raises UserError: see `read`; or the folder cannot be written.
    """
    methods, pairs, left_out = board_of(*read(results))
    folder, path = results / "tables", results / "board.md"
    with holding(folder, wait=True):
        write_atomic(folder / f"{METHODS}.csv", csv_of(methods, "board"))
        write_atomic(folder / f"{PAIRS}.csv", csv_of(pairs, "board_pairs"))
        write_atomic(folder / f"{METHODS}.md", markdown(METHODS, note("board"), boards(methods)))
        write_atomic(path, page(methods, left_out))
    return path


# Words of rows


def show_ratio(ratio: float) -> str:
    """Two digits after the point, or two digits of a small ratio."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def show_points(difference: float) -> str:
    """A difference of answers, with its sign."""
    shown = metrics.ANSWERS_DIFFERENCE.show(difference)
    return f"+{shown}" if difference > 0 else shown


def _cells(row: Any, to: str = " to ") -> dict[str, str]:
    """A row's cells by column. to: between the ends of a range of models or ranks.

    A difference of answers is marked where its note says more.
    """
    cells = {name: row[name] or MISSING for name in ("label", "apart", "dense_numbers")}
    for name in ("answers", "num_questions", "num_windows", "step_s"):
        cells[name] = COLUMNS[name].show(row[name])
    for share in SHARES.values():
        ends = row[f"{share.name}_low"], row[f"{share.name}_high"]
        cells[share.name] = show_range(share, ends, to)
    cells["rank"] = f"{row['rank']:.0f} ({row['rank_low']:.0f}{to}{row['rank_high']:.0f})"
    for name, show in (("ratio", show_ratio), ("answers_difference", show_points)):
        value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
        cells[name] = MISSING if math.isnan(value) else show(value)
        if not math.isnan(value + low):
            cells[name] += f" ({show(low)} to {show(high)})"
    if cells["answers_difference"] != MISSING:
        marks = [mark for mark, (said, _) in ANSWER_MARKS.items() if said in row["answers_note"]]
        cells["answers_difference"] += "".join(marks)
    return cells


def _table(rows: pd.DataFrame, names: Sequence[str], to: str = " to ") -> pd.DataFrame:
    """Columns as words under their headings; no decode steps where none was timed."""
    cells = pd.DataFrame([_cells(row, to) for row in rows.to_dict("records")], rows.index)
    shown = [name for name in names if name != "step_s" or rows["step_s"].notna().any()]
    return cells[shown].rename(columns=lambda name: COLUMNS[name].heading)


def _setting(row: pd.Series) -> str:
    budget = metrics.ASKED_BUDGET.show(row["asked_budget"])
    return f"budget {budget} %, windows of {row['seq_len']:,.0f} tokens"


def _counts(row: pd.Series) -> str:
    models = "one model" if row["num_models"] == 1 else f"{row['num_models']:.0f} models"
    return (
        f"KL: {row['num_windows']:.0f} windows at {row['num_places']:.0f} places of the texts, on "
        f"{models} ({row['model']})."
    )


def _notes_on_answers(rows: pd.DataFrame) -> list[str]:
    """The meaning of the marks of answers."""
    notes = rows.loc[rows["answers_difference"].notna(), "answers_note"]
    marks = ANSWER_MARKS.items()
    return [f"{mark} {words}" for mark, (said, words) in marks if notes.str.contains(said).any()]


def _notes_on_steps(rows: pd.DataFrame) -> list[str]:
    """Where steps were timed, which is one place of a board."""
    places = rows.loc[rows["step_s"].notna(), "step_on"].head(1)
    return [f"Decode step: {place}, over an emulated link." for place in places]


# The pages


def first_board(methods: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first board, which is over all models if there are several."""
    return methods[methods["over"].isin(methods["over"].head(1))]


def boards(methods: pd.DataFrame) -> Iterator[Sheet]:
    """The sheets of all boards; those after the first are named by their model."""
    for number, (over, rows) in enumerate(methods.groupby("over", sort=False)):
        for sheet in _of_settings(rows):
            yield sheet._replace(title=f"{over}, {sheet.title}" if number else sheet.title)


def _of_settings(rows: pd.DataFrame) -> Iterator[Sheet]:
    """For each budget and length the compared methods, the closest first, then the others."""
    rows, of_own = mark_own(rows, "label")
    behind = ["answers_difference", "answers", "num_questions", *OF_SHARES, "step_s"]
    for _, found in rows.groupby([*SETTING, rows["apart"].ne("")], sort=False):
        title, is_apart = _setting(found.iloc[0]), found["apart"].iloc[0] != ""
        notes = [*_notes_on_answers(found), *_notes_on_steps(found)]
        if is_apart:
            table = _table(found, ["label", "apart", "ratio", "num_windows", *behind])
            yield Sheet(f"{title}: not compared", table, notes)
        else:
            table = _table(found, ["label", "rank", "ratio", *behind, "dense_numbers"])
            table = table.rename(columns={"rank": f"rank of {len(found)}"})
            yield Sheet(title, table, [_counts(found.iloc[0]), *notes, *of_own])


def page(methods: pd.DataFrame, left_out: Sequence[str]) -> str:
    """`board.md`. left_out: models over which no mean goes."""
    first = first_board(methods)
    words = note("board")
    if left_out:
        few = "fewer than half of the methods ran there"
        words += f" Not in the means: {', '.join(left_out)}, since {few}."
    return markdown("board", words, [*_readme(methods), *_of_settings(first)])


def _readme(methods: pd.DataFrame) -> Iterator[Sheet]:
    """README's table at each length: its methods in its order, a ratio for each model, and answers
    where questions were asked."""
    methods = methods[methods["asked_budget"] == README_BUDGET]
    first = first_board(methods)
    full = first[(first["method"] == FULL) & first["answers"].notna()]
    of_answers = "Answers: the full cache was not asked."
    if len(full):  # answers do not depend on the length of windows
        asked = full.iloc[0]
        of_answers = (
            f"Answers: {asked['num_questions']:.0f} questions on {asked['num_contexts']:.0f} "
            f"contexts; the full cache has {metrics.ANSWERS.show(asked['answers'])} % right."
        )
    for _, of_length in methods.groupby("seq_len"):
        by_label = of_length.drop_duplicates(["over", "label"]).set_index("label", drop=False)
        here = first_board(by_label)
        compared = here[here["apart"] == ""]
        rows = here.loc[[label for label in README_METHODS if label in here.index]]
        if rows.empty or compared.empty:
            continue
        table = _table(rows, ["label", *OF_SHARES, "ratio"])
        notes = [_counts(compared.iloc[0]), of_answers]
        of_models = by_label[by_label["over"] != ALL_MODELS]
        for model, of_model in of_models.groupby("over", sort=False):
            ratios = of_model["ratio"].reindex(rows.index).map(show_ratio, na_action="ignore")
            table[f"on {model}"] = ratios.fillna(MISSING)
        coded = compared.reindex(rows["label"] + " + int8")
        heading = metrics.RATIO.heading
        table[f"over rows of 8 bits: {heading}"] = _table(coded, ["ratio"])[heading].to_numpy()
        if rows["answers"].notna().any():
            table = table.join(_table(rows, ["answers_difference"]))
            notes += _notes_on_answers(rows)
        yield Sheet(f"README rows: {_setting(rows.iloc[0])}", table, notes)


# A terminal


def printed(methods: pd.DataFrame) -> str:
    """The compared methods of the first setting of the first board, for a terminal; "" without
    any."""
    first = first_board(methods)
    compared = first[first["apart"] == ""]
    if compared.empty:
        return ""
    found = compared[compared[SETTING].eq(compared[SETTING].iloc[0]).all(axis=1)]
    marked, of_own = mark_own(found, "label")
    on_device = OF_SHARES[1:]  # the title has the budget
    table = _table(marked, ["label", "rank", "ratio", "answers_difference", *on_device], "-")
    table.columns = ["method", "rank", metrics.RATIO.heading, "answers", "device", "resident"]
    words = "Brackets: 95 % intervals. Answers: minus the full cache's, in points."
    notes = [words, _counts(found.iloc[0]), *_notes_on_answers(found), *of_own]
    return terminal(Sheet(f"board, {_setting(found.iloc[0])}", table, notes))


# The command


def shown(results: Path) -> str:
    """What is printed once the board is written: its table, and the page's path. Raises as
    `write`."""
    path = write(results)
    methods = read_frame(results / "tables" / f"{METHODS}.csv")
    return f"{printed(methods)}\n\n{path}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the board, print its table and its path; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.board", description="Write the board."
    )
    parser.add_argument(
        "results", type=Path, metavar="RESULTS", help="a results folder; folders within it count"
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: print(shown(args.results)))


if __name__ == "__main__":
    sys.exit(main())
