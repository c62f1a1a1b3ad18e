"""The records of an experiment as one tidy table, `tables/<experiment>.csv` of a results folder,
and a `.md` page of it for people.

The CSV has fixed columns and one row per (run, task, metric) of accuracy, per timed cell, or per
point of an analysis. Seconds, bytes, fractions in [0, 1]; empty where nothing was measured. The
same records give the same bytes. Rows that the project ships stay until one's own replace them
(`results/shipped.py`). All other rows are made from the records that are there.

    python -c "from harness.results.write import update; update('outputs', 'fig11')"
    python -m harness.results.write results      # for maintainers: mark all rows as shipped
"""

import argparse
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import exit_code
from harness.files import holding, write_atomic
from harness.results import board_sources
from harness.results.columns import TABLES, TableRow, read_table, render_csv, shape_of
from harness.results.metrics import rank
from harness.results.record import Record, read_records, record_path
from harness.results.samples import full_runs
from harness.results.shipped import merged
from harness.results.table_rows import Pairs, layer_rows, with_rows
from harness.settings.kinds import BOARD, find
from harness.settings.schema import kind_of

log = logging.getLogger(__name__)

TableRows = Sequence[TableRow]
MADE = frozenset(("board", "board_claims", "board_models", "board_pairs"))
"""Shapes of the tables that `harness.results.board` makes of other tables."""
WITH_LAYERS, LAYERS_TABLE = "perplexity", "attention_error"
"""The experiment whose runs are shown layer by layer, and the table that shows them."""
TIMED_CELLS = "latency"
"""The experiment whose records are the cells of all figures of speed."""


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from finished records and shipped rows.

    `latency` also gives the tables of the figures of speed, `perplexity` the errors of attention
    outputs by layer; `board` gives the
    windows, answers and steps that the board is made of. What is modelled of capacity
    stands in a table of its own, `<experiment>-modelled`. A damaged record is left out with a
    warning that names it, a damaged table set aside with a warning. One process at a time writes
    the tables of a folder.

    Returns the path of the CSV. Raises UserError if the folder cannot be written.
    """
    folder = Path(results_dir) / "tables"
    path = folder / f"{experiment}.csv"
    with holding(folder, wait=True):  # the next process then reads what this one has written
        pairs = with_rows(read_records(results_dir, experiment), partial(full_runs, results_dir))
        shape = "accuracy"
        kind = kind_of(experiment)
        if kind:
            shape = find(kind).table
        elif pairs:
            shape = pairs[0][0]["table"]
        if shape == "capacity":
            return _write_capacity(path, _of_shape(pairs, shape))
        rows = _ordered(shape, merged(path, shape, _of_shape(pairs, shape)))
        _say_what_is_gone(path, rows)
        _write(path, shape, rows)
        if experiment == TIMED_CELLS:
            _write_speed_figures(path, rows)
        if experiment == WITH_LAYERS:
            _write_layers(path.with_stem(LAYERS_TABLE), [record for record, _ in pairs])
        if experiment == BOARD:
            _write_board_sources(folder, [record for record, _ in pairs])
    return path


def _say_what_is_gone(path: Path, rows: TableRows) -> None:
    """Warn of the runs whose rows leave a table since their records were deleted."""
    if not path.exists():
        return
    stay = {row["run_id"] for row in rows if not row.get("shipped")}
    gone = {}
    for row in read_table(path):
        record = record_path(path.parents[1], row["experiment"], row["run_id"])
        is_own = row["run_id"] and not row["shipped"]
        if is_own and row["run_id"] not in stay and not record.exists():
            gone[row["run_id"]] = row.get("label") or row["series"]
    if gone:
        runs = ", ".join(f"{label} ({run_id[:8]})" for run_id, label in gone.items())
        log.warning("%s: these runs leave it, as their records are gone: %s", path, runs)


def _write_board_sources(folder: Path, records: Sequence[Record]) -> None:
    """The windows, answers and steps of `experiment=board`; no table without rows is written."""
    for name, own in board_sources.rows_of_records(records).items():
        path, shape = folder / f"{name}.csv", board_sources.SHAPES[name]
        rows = _ordered(shape, merged(path, shape, own))
        if rows:
            _write(path, shape, rows)


def _write_capacity(path: Path, own: TableRows) -> Path:
    """The tables of what ran and of what is modelled; returns the path of the first with rows."""
    written: list[Path] = []
    for is_modelled, of_part in ((False, path), (True, path.with_stem(f"{path.stem}-modelled"))):
        part = [row for row in own if (row["source"] == "modelled") == is_modelled]
        rows = _ordered("capacity", merged(of_part, "capacity", part))
        if rows:
            _write(of_part, "capacity", rows)
            written.append(of_part)
    return written[0] if written else path


def _of_shape(pairs: Pairs, shape: str) -> list[TableRow]:
    """The rows of the records whose tables have this shape."""
    found: list[TableRow] = []
    for record, rows in pairs:
        if record["table"] == shape:
            found += rows
    return found


def _write_speed_figures(path: Path, rows: TableRows) -> None:
    """The tables of the figures of speed beside that at `path`; one without rows is removed."""
    from harness.results.speed_figures import figures  # here, as a command's help needs no pandas

    for figure, of_this in figures(rows):
        shown = [row | {"experiment": figure} for row in of_this]
        of_figure = path.with_stem(figure)
        if shown:
            _write(of_figure, "latency", shown)
        else:
            of_figure.unlink(missing_ok=True)
            of_figure.with_suffix(".md").unlink(missing_ok=True)


def _write_layers(path: Path, records: Sequence[Record]) -> None:
    """The table of the errors of attention outputs by layer; none where no record has them.

    Of runs with one label and size the newest counts, since the others would share its line.
    """
    by_line: dict[tuple[Any, ...], list[TableRow]] = {}
    for record in sorted(records, key=lambda record: record["started"]):
        rows = list(layer_rows(record))
        if rows:
            first = rows[0]
            by_line[first["model"], first["series"], first["x_name"]] = rows
    own: list[TableRow] = []
    for line in sorted(by_line):
        own += by_line[line]
    shown = merged(path, "analysis", own)
    if shown:
        _write(path, "analysis", [row | {"experiment": LAYERS_TABLE} for row in shown])


def summary(records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple) -> str:
    """The records as a small table for a terminal: a line per method and settings, a column per
    metric.

    elsewhere: returns further records, in which the full cache's are looked for too. Returns "" if
    no record is finished.
    """
    from harness.results.pages import render_terminal

    pairs = with_rows(records, elsewhere)
    rows: list[TableRow] = []
    for shape in TABLES:
        rows += _ordered(shape, _of_shape(pairs, shape))
    return render_terminal(rows)


def ship(results_dir: Path) -> None:
    """Mark all rows of the tables as shipped, but for figures that the cost model predicts.

    Raises UserError.
    """
    folder = results_dir / "tables"
    for path in sorted(folder.glob("*.csv")):
        rows = read_table(path)
        if not rows or shape_of(rows[0]) in MADE:
            continue
        shape = shape_of(rows[0])
        if shape == "capacity" or rows[0]["source"] != "modelled":
            _write(path, shape, _ordered(shape, _as_shipped(rows)))


def _as_shipped(rows: TableRows) -> TableRows:
    return [row | {"shipped": "yes"} for row in rows]


def _write(path: Path, shape: str, rows: TableRows) -> None:
    """Write the CSV and the page."""
    from harness.results.pages import render_markdown

    write_atomic(path, render_csv(TABLES[shape], rows))
    write_atomic(path.with_suffix(".md"), render_markdown(path.stem, rows))


def _ordered(shape: str, rows: TableRows) -> TableRows:
    """In the order of the CSV; points of an analysis as they were made."""
    if shape in board_sources.SHAPES.values():
        return board_sources.ordered(rows)
    return rows if shape == "analysis" else sorted(rows, key=_sort_key)


def _sort_key(row: TableRow) -> tuple[Any, ...]:
    """Chunks by their position, a missing number first, the run's id last."""
    task, _, chunk = str(row.get("task", "")).partition("[")
    position = list(map(int, re.findall(r"\d+", chunk)))
    names: tuple[str, ...] = ("batch_size", "prompt_len", "gen_len", "seq_len")
    if "largest_batch" in row:  # the batches of a run stand together
        task = str(row["platform"])
        names = ("prompt_len", "gen_len", "memory_bytes", "batch_size")
    shape = [row.get(name) or 0 for name in names]
    size = row.get("size") or 0
    metric = rank(str(row.get("metric", "")))
    return row["model"], row["label"], task, *shape, size, position, metric, row["run_id"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.write", description="Mark all rows as shipped."
    )
    parser.add_argument("results_dir", type=Path)
    raise SystemExit(exit_code(partial(ship, parser.parse_args().results_dir)))
