"""The records of an experiment as one tidy table, `tables/<experiment>.csv` of a results folder,
and a `.md` page of it for people. The plain tables behind the board have no page.

The CSV has fixed columns and one row per (run, task, metric) of accuracy, per timed run, or per
point of an analysis. Seconds, bytes, fractions in [0, 1]; empty where nothing was measured. The
project ships tables without their records; those rows have `shipped=yes` and stay until a run of
one's own has the same identity (`columns.IDENTITY`). All other rows are made of the records.

    python -m harness.results.write results      # for maintainers: mark all rows as shipped
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd

from harness.errors import UserError, exit_code
from harness.files import holding, write_atomic
from harness.results import board
from harness.results.columns import (
    IDENTITY,
    NO_TABLE,
    csv_of,
    read_frame,
    shape_of,
    with_columns,
)
from harness.results.metrics import rank
from harness.results.pages import render_markdown, render_terminal
from harness.results.record import Record, current, read_records
from harness.results.samples import SHAPES, frames_of, full_runs, layers_of
from harness.settings.kinds import BOARD, find
from harness.settings.paths import shipped_beside
from harness.settings.schema import kind_of

MADE = ("board", "board_pairs")
"""Shapes of the tables that `harness.results.board` makes of other tables."""
LAYERS_TABLE = "attention_error"
"""The table that shows the runs of `experiment=perplexity` layer by layer."""
MACHINE = ["model", "platform", "source"]
TIMED_RUN = [*MACHINE, "batch_size", "prompt_len", "gen_len"]
"""What a timed run is of, besides its system."""
FIGURES_OF_SPEED = {
    "fig14": ("batch_size", True), "fig15": ("batch_size", False), "fig16a": ("prompt_len", False),
    "fig16b": ("model", False), "fig18": ("prompt_len", True),
}  # fmt: skip
"""The axis of each figure's sweep, and whether it shows the largest value alone: as in the paper,
14 has the largest batch of 15, and 18 the longest prompt of 16a."""
_OF_BOARD = "dense_layers run_id"
ORDER = {
    "accuracy": "model label task seq_len budget part end rank run_id",
    "latency": "model label platform context memory_bytes batch_size prompt_len gen_len budget "
    "run_id",
    "board_texts": f"model label asked_budget seq_len text {_OF_BOARD} window",
    "board_answers": f"model label asked_budget task {_OF_BOARD} context_id",
    "board_steps": f"model label asked_budget {_OF_BOARD}",
}
"""By shape of table, the columns that its rows are sorted by; points of an analysis stand as they
were made. `part` and `end`: the range of tokens, or length and depth."""


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from finished records and shipped rows.

    `latency` also gives the tables of the figures of speed, `perplexity` the errors of attention
    outputs by layer; `board` gives the windows, answers and steps that the board is made of. Runs
    with batch_size=largest stand in `capacity`. A table without rows is removed. One process at a
    time writes the tables of a folder.

    Returns the path of the CSV. Raises UserError for a damaged record or table of shipped rows, or
    if the folder cannot be written.
    """
    folder = Path(results_dir) / "tables"
    with holding(folder, wait=True):  # the next process then reads what this one has written
        records = current(read_records(results_dir, experiment))
        frames = frames_of(records, partial(full_runs, results_dir))
        kind = kind_of(experiment)
        shape = find(kind).table if kind else next((run["table"] for run in records), "accuracy")
        own = {experiment: (shape, frames[shape])}
        if len(frames["capacity"]):
            own["capacity"] = "latency", frames["capacity"]
        if experiment == "perplexity":
            own[LAYERS_TABLE] = "analysis", layers_of(records)
        if experiment == BOARD:
            for name, of_board in board.evidence_of(records).items():
                of_shape = board.SHAPES[name]
                own[name] = of_shape, with_columns(of_board, of_shape)
        tables = {}
        for name, (of_table, rows) in own.items():
            tables[name] = joined(folder / f"{name}.csv", of_table, rows)
            _write(folder / f"{name}.csv", of_table, tables[name])
        if experiment == "latency":  # its records are the runs of all figures of speed
            for figure, rows in _figures_of_speed(tables[experiment]):
                _write(folder / f"{figure}.csv", shape, rows)
    shown = [name for name in tables if len(tables[name])]
    return folder / f"{shown[0] if shown else experiment}.csv"


def _figures_of_speed(timed: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each figure of speed with its rows of `latency`: on each machine the setups (all of a run but
    the axis) with the most values of the axis; of models at least two."""
    for figure, (axis, is_largest) in FIGURES_OF_SPEED.items():
        setup, machine = ([name for name in of if name != axis] for of in (TIMED_RUN, MACHINE))
        num_values = timed.groupby(setup, dropna=False)[axis].transform("nunique")
        on_machine = num_values.groupby([timed[name] for name in machine], dropna=False)
        least = 2 if axis == "model" else 1
        rows = timed[num_values == on_machine.transform("max").clip(lower=least)]
        if is_largest:
            largest = rows.groupby(setup, dropna=False)[axis].transform("max")
            rows = rows[rows[axis] == largest]
        yield figure, rows.assign(experiment=figure)


# Shipped rows beside one's own


def joined(path: Path, shape: str, own: pd.DataFrame) -> pd.DataFrame:
    """One's own rows, and the shipped rows that they do not replace, in the order of the CSV.

    The shipped rows are those of the results beside the folder of `path` (`shipped_beside`), else
    those in the table at `path`. Raises UserError for a damaged table.
    """
    shipped, identity = _shipped_rows(path, shape), list(IDENTITY[shape])
    replaced = _identified(own)[identity].drop_duplicates()
    found = _identified(shipped)[identity].merge(replaced, "left", on=identity, indicator=True)
    stays = (found["_merge"] == "left_only").to_numpy()
    return ordered(shape, pd.concat([shipped[stays], own], ignore_index=True))


def _identified(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a `fixed_batch`, which a largest batch is not."""
    if "largest_batch" not in rows:
        return rows
    return rows.assign(fixed_batch=rows["batch_size"].where(rows["largest_batch"].isna()))


def _shipped_rows(path: Path, shape: str) -> pd.DataFrame:
    beside = shipped_beside(path.parents[1])
    shipped = path if beside is None else beside / "tables" / path.name
    if not shipped.exists():
        return with_columns(pd.DataFrame(), shape)
    rows = read_frame(shipped)
    if shape_of(rows.columns) != shape:
        raise UserError(f"{shipped}: {NO_TABLE} of this kind of run; delete it")
    return rows[rows["shipped"] != ""]


def ordered(shape: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows in the order of the CSV; a missing number first, but of an asked budget last."""
    if shape not in ORDER:
        return rows
    keys = rows.copy()
    if shape == "accuracy":
        length = pd.to_numeric(rows["metric"], errors="coerce").where(rows["depth"].notna())
        keys["part"], keys["end"] = rows["first"].fillna(length), rows["stop"].fillna(rows["depth"])
        metrics = sorted(set(rows["metric"]), key=rank)
        keys["rank"] = rows["metric"].map({metric: at for at, metric in enumerate(metrics)})
    if "asked_budget" in keys:
        keys["asked_budget"] = keys["asked_budget"].fillna(1)
    keys = keys.sort_values(ORDER[shape].split(), na_position="first", kind="stable")
    return rows.loc[keys.index]


# A terminal, and what the project ships


def summary(records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple) -> str:
    """The records as a small table for a terminal: a line per method and settings, a column per
    metric.

    elsewhere: returns further records, in which the full cache's are looked for too. Returns "" if
    no record is finished.
    """
    frames = frames_of(records, elsewhere)
    texts = [render_terminal(ordered(SHAPES[name], frames[name])) for name in frames]
    return "\n\n".join(filter(None, texts))


def ship(results_dir: Path) -> None:
    """Mark all rows of the tables as shipped, but for figures that the cost model predicts.

    Raises UserError.
    """
    for path in sorted(results_dir.glob("tables/*.csv")):
        rows = read_frame(path)
        shape = shape_of(rows.columns)
        is_predicted = path.stem != "capacity" and (rows["source"] == "modelled").any()
        if shape not in MADE and not is_predicted:
            _write(path, shape, ordered(shape, rows.assign(shipped="yes")))


def _write(path: Path, shape: str, rows: pd.DataFrame) -> None:
    """Write a table and its page, or remove those of a table without rows."""
    page = path.with_suffix(".md")
    if rows.empty:
        path.unlink(missing_ok=True)
        page.unlink(missing_ok=True)
        return
    write_atomic(path, csv_of(rows, shape))
    if shape not in board.SHAPES.values():
        write_atomic(page, render_markdown(path.stem, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.write", description="Mark all rows as shipped."
    )
    parser.add_argument("results_dir", type=Path)
    raise SystemExit(exit_code(partial(ship, parser.parse_args().results_dir)))
