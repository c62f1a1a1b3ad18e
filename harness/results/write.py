"""The records of an experiment as one tidy table, `tables/<experiment>.csv` of a results folder,
and a `.md` page of it for people. The plain tables behind the board have no page.

The CSV has fixed columns and one row per (run, task, metric) of accuracy, per timed run, or per
point of an analysis. Seconds, bytes, fractions in [0, 1]; empty where nothing was measured. The
same records give the same bytes. The project ships tables without their records; those rows have
`shipped=yes` and stay until a run of one's own has the same identity (`columns.IDENTITY`). All
other rows are made from the records that are there.

    python -c "from harness.results.write import update; update('outputs', 'fig11')"
    python -m harness.results.write results      # for maintainers: mark all rows as shipped
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, exit_code
from harness.files import free_path, holding, write_atomic
from harness.results.columns import (
    ANEW,
    IDENTITY,
    NO_TABLE,
    TABLES,
    TableRow,
    grouped,
    read_table,
    render_csv,
    shape_of,
)
from harness.results.metrics import rank
from harness.results.record import Record, read_records
from harness.results.samples import full_runs
from harness.results.table_rows import Pairs, layer_rows, with_rows
from harness.settings.kinds import BOARD, find
from harness.settings.paths import shipped_beside
from harness.settings.schema import kind_of

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

TableRows = Sequence[TableRow]
EVIDENCE, MADE = ("board_texts", "board_answers", "board_steps"), ("board", "board_pairs")
"""Shapes of the tables that the board is made of, and of those that `harness.results.board` makes
of them."""
LAYERS_TABLE = "attention_error"
"""The table that shows the runs of `experiment=perplexity` layer by layer."""
MACHINE = ["model", "platform", "source"]
TIMED_RUN = [*MACHINE, "batch_size", "prompt_len", "gen_len"]
"""What a timed run is of, besides its system."""


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from finished records and shipped rows.

    `latency` also gives the tables of the figures of speed, `perplexity` the errors of attention
    outputs by layer; `board` gives the windows, answers and steps that the board is made of. What
    is modelled of capacity stands in a table of its own, `<experiment>-modelled`. A damaged record
    is left out with a warning that names it, a damaged table set aside with a warning. One process
    at a time writes the tables of a folder.

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
        own = _of_shape(pairs, shape)
        if shape == "capacity":
            modelled = [row for row in own if row["source"] == "modelled"]
            measured = [row for row in own if row["source"] != "modelled"]
            twin = path.with_stem(f"{path.stem}-modelled")
            has_own, has_modelled = _join(path, shape, measured), _join(twin, shape, modelled)
            return twin if has_modelled and not has_own else path
        rows = _ordered(shape, merged(path, shape, own))
        _write(path, shape, rows)
        if experiment == "latency":  # its records are the runs of all figures of speed
            for figure, of_figure in _figures_of_speed(rows):
                of_paths = path.with_stem(figure), path.with_stem(figure).with_suffix(".md")
                if of_figure:
                    _write(of_paths[0], shape, of_figure)
                else:
                    for of_path in of_paths:
                        of_path.unlink(missing_ok=True)
        if experiment == "perplexity":
            _write_layers(path.with_stem(LAYERS_TABLE), [record for record, _ in pairs])
        if experiment == BOARD:
            from harness.results import board_evidence  # here, as a command's help needs no pandas

            records = [record for record, _ in pairs]
            for name, of_table in board_evidence.evidence_of(records).items():
                of_frame: Any = of_table.astype(object).where(of_table.notna(), None)
                own = of_frame.to_dict("records")
                _join(folder / f"{name}.csv", board_evidence.SHAPES[name], own)
    return path


def _join(path: Path, shape: str, own: TableRows) -> bool:
    """Write one's own rows beside the shipped ones; no table without rows. Returns whether any."""
    rows = _ordered(shape, merged(path, shape, own))
    if rows:
        _write(path, shape, rows)
    return bool(rows)


def _of_shape(pairs: Pairs, shape: str) -> list[TableRow]:
    found: list[TableRow] = []
    for record, rows in pairs:
        if record["table"] == shape:
            found += rows
    return found


def _figures_of_speed(rows: TableRows) -> Iterator[tuple[str, TableRows]]:
    """Each figure of speed with its rows of `latency`. As in the paper, 14 has the largest batch of
    15, 18 the longest prompt of 16a. Each model and machine has a sweep of its own."""
    import pandas as pd  # here, as a command's help needs no pandas

    timed = pd.DataFrame(rows, columns=TIMED_RUN)
    batches = _widest_sweep(timed, "batch_size")
    prompts = _widest_sweep(timed, "prompt_len")
    for figure, found in (
        ("fig14", _largest(batches, "batch_size")),
        ("fig15", batches),
        ("fig16a", prompts),
        ("fig16b", _widest_sweep(timed, "model", least=2)),
        ("fig18", _largest(prompts, "prompt_len")),
    ):
        yield figure, [rows[number] | {"experiment": figure} for number in found.index]


def _widest_sweep(timed: pd.DataFrame, axis: str, least: int = 1) -> pd.DataFrame:
    """The runs of the setups with the most values of `axis` on their machine, and `least`.

    A setup is all of a run but `axis`.
    """
    setup = [name for name in TIMED_RUN if name != axis]
    machine = [timed[name] for name in MACHINE if name != axis]
    num_values = timed.groupby(setup, dropna=False)[axis].transform("nunique")
    most = num_values.groupby(machine, dropna=False).transform("max")
    return timed[num_values == most.clip(lower=least)]


def _largest(timed: pd.DataFrame, axis: str) -> pd.DataFrame:
    """The runs with the largest value of `axis` in each setup."""
    setup = [name for name in TIMED_RUN if name != axis]
    return timed[timed[axis] == timed.groupby(setup, dropna=False)[axis].transform("max")]


def _write_layers(path: Path, records: Sequence[Record]) -> None:
    """The table of the errors of attention outputs by layer; none where no record has them.

    Of runs with one label and budget the newest counts, since the others would share its line.
    """
    by_line: dict[tuple[Any, ...], list[TableRow]] = {}
    for record in sorted(records, key=lambda record: record["started"]):
        by_line |= grouped(layer_rows(record), itemgetter("model", "series", "x_name"))
    own: list[TableRow] = []
    for line in sorted(by_line):
        own += by_line[line]
    _join(path, "analysis", own)


# Shipped rows beside one's own


def merged(path: Path, shape: str, own: Sequence[TableRow]) -> list[TableRow]:
    """One's own rows, and the shipped rows that they do not replace.

    The shipped rows are those of the results beside the folder of `path` (`shipped_beside`), else
    those in the table at `path`. Raises UserError for a damaged table that cannot be set aside.
    """

    def identity(row: TableRow) -> tuple[Any, ...]:
        whole = row | {"task": row.get("task", "").partition("[")[0]}
        return tuple(whole.get(name) or "" for name in IDENTITY[shape])

    replaced = set(map(identity, own))
    shipped = [row for row in _rows_at(path, shape) if row.get("shipped")]
    return [*(row for row in shipped if identity(row) not in replaced), *own]


def _rows_at(path: Path, shape: str) -> list[TableRow]:
    """The rows of the shipped table beside that at `path`, or of that at `path` where none is.

    A table that is damaged or of another shape is set aside. A warning says so.
    """
    beside = shipped_beside(path.parents[1])
    shipped = None if beside is None else beside / "tables" / path.name
    rows: list[TableRow] = []
    if path.exists():
        try:
            rows = _read(path, shape)
        except UserError as damage:
            _set_aside(path, str(damage))
    if shipped is None or not shipped.exists():
        return rows
    try:
        return _read(shipped, shape)
    except UserError as damage:
        raise UserError(f"{damage}; install the project again") from damage


def _read(path: Path, shape: str) -> list[TableRow]:
    try:
        rows = read_table(path)
    except UserError as error:
        raise UserError(str(error).removesuffix(f"; {ANEW}")) from error
    if rows and shape_of(rows[0]) != shape:
        raise UserError(f"{path}: {NO_TABLE} (it is of another kind of run)")
    return rows


def _set_aside(path: Path, damage: str) -> None:
    # The end of the name keeps everything from taking it for a table.
    kept = free_path(path.with_name(f"{path.name}.damaged-*"))
    try:
        path.replace(kept)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{damage}; it cannot be renamed to {kept.name} ({why})") from error
    log.warning("%s; kept as %s, written anew from the records", damage, kept.name)


# A terminal, and what the project ships


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
    for path in sorted(results_dir.glob("tables/*.csv")):
        rows = [row | {"shipped": "yes"} for row in read_table(path)]
        shape = shape_of(rows[0]) if rows else ""
        if not rows or shape in MADE:
            continue
        if shape == "capacity" or rows[0]["source"] != "modelled":
            _write(path, shape, _ordered(shape, rows))


def _write(path: Path, shape: str, rows: TableRows) -> None:
    from harness.results.pages import render_markdown

    write_atomic(path, render_csv(TABLES[shape], rows))
    if shape not in EVIDENCE:
        write_atomic(path.with_suffix(".md"), render_markdown(path.stem, rows))


def _ordered(shape: str, rows: TableRows) -> TableRows:
    """In the order of the CSV; points of an analysis as they were made."""
    if shape in EVIDENCE:
        import pandas as pd  # here, as a command's help needs no pandas

        from harness.results import board_evidence

        return [rows[number] for number in board_evidence.ordered(pd.DataFrame(rows)).index]
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
    budget = row.get("budget") or 0
    metric = rank(str(row.get("metric", "")))
    return row["model"], row["label"], task, *shape, budget, position, metric, row["run_id"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.write", description="Mark all rows as shipped."
    )
    parser.add_argument("results_dir", type=Path)
    raise SystemExit(exit_code(partial(ship, parser.parse_args().results_dir)))
