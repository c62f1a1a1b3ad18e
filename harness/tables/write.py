"""Records of an experiment as one tidy table: `results/tables/<experiment>.csv`, and a `.md` for people.

The CSV is what figures and users read: fixed columns, one row per (run, task, metric) for accuracy and one
per run for latency, seconds and bytes, fractions in [0, 1], an empty cell where nothing was measured. The
order depends on the rows alone, so the same records give the same bytes. Imports no torch.

    python -c "from harness.tables.write import update; update('results', 'fig11')"
"""

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.files import write_atomic
from harness.records.baseline import Baselines, full_runs
from harness.records.form import ODD
from harness.records.record import current, read_records
from harness.settings.experiment import find
from harness.settings.schema import kind_of
from harness.tables import leaderboard, speed
from harness.tables.columns import BOARD, OF_SOME_MODELS, TABLES, Column, TableRow, check, has_any, names, rank
from harness.tables.lines import Pairs, tell_apart
from harness.tables.rows import rows_of
from harness.tables.sheets import render_markdown, render_terminal

log = logging.getLogger(__name__)

Record = Mapping[str, Any]


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from the experiment's finished records; from those of `latency`
    also the tables of the figures that show some of its rows; from those of a half of the leaderboard, the leaderboard.

    A damaged record is skipped with a warning that names it, a failed or interrupted one silently: it has no
    numbers.

    Returns:
        The path of the CSV.

    Raises:
        UserError: the folder cannot be written.
    """
    pairs = _with_rows(read_records(results_dir, experiment), partial(full_runs, results_dir))
    path = Path(results_dir) / "tables" / f"{experiment}.csv"
    shape = _shape_of_table(experiment, pairs)
    rows = _rows_of_shape(pairs, shape)
    write_table(path, shape, rows)
    if experiment == speed.TIMED_CELLS:
        write_figures(path.parent, rows if shape == "latency" else [])
    if experiment in (leaderboard.SCORES, leaderboard.TIMES):
        _write_boards(Path(results_dir))
    return path


def _shape_of_table(experiment: str, pairs: Pairs) -> str:
    """That of the experiment's own kind, where there are such records; what has another is named in a warning."""
    counts = Counter(record["table"] for record, _ in pairs)
    kind = kind_of(experiment)
    preferred = (find(kind).table if kind is not None else "accuracy", *TABLES)
    shape = next((shape for shape in preferred if shape in counts), preferred[0])
    for other, count in counts.items():
        if other != shape:
            log.warning(
                "runs/%s: %d records of another shape of table, %s; left out of its table", experiment, count, other
            )
    return shape


def summary(records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple) -> str:
    """The records as a small table for a terminal: a line per method and setting, a column per metric.

    elsewhere: further records, in which the full cache's are looked for too.

    Returns:
        Aligned text, without a final newline; "" where no record is finished.
    """
    pairs = _with_rows(records, elsewhere)
    return render_terminal([row for shape in TABLES for row in _rows_of_shape(pairs, shape)])


def render_csv(columns: Sequence[Column], rows: Iterable[TableRow]) -> str:
    """The rows under `columns` as CSV: an empty cell where a row has none, other keys left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names(columns), restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_table(path: Path, shape: str, rows: Sequence[TableRow]) -> None:
    """Write rows of a shape (`TABLES`) to the CSV at `path`, and for people beside it. Raises UserError as `update`."""
    columns = [column for column in TABLES[shape] if column not in OF_SOME_MODELS or has_any(rows, column)]
    write_atomic(path, render_csv(columns, rows))
    write_atomic(path.with_suffix(".md"), render_markdown(path.stem, rows))


def write_figures(folder: Path, rows: Sequence[TableRow]) -> None:
    """The table of each figure of speed; one that has no rows any more is removed."""
    for figure, choose in speed.CHOSEN.items():
        path = folder / f"{figure}.csv"
        chosen = [{**row, "experiment": figure} for row in choose(rows)]
        if chosen:
            write_table(path, "latency", chosen)
        else:
            path.unlink(missing_ok=True)
            path.with_suffix(".md").unlink(missing_ok=True)


def _write_boards(results_dir: Path) -> None:
    """The leaderboard, whose page lies at the top of the results, and the fronts."""
    for name, rows in leaderboard.tables(results_dir).items():
        write_atomic(results_dir / "tables" / f"{name}.csv", render_csv(BOARD, rows))
        write_atomic(results_dir / f"{name}.md", render_markdown(name, rows))


def _with_rows(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]]
) -> list[tuple[Record, list[TableRow]]]:
    """Finished records that have rows, with their rows, which say what tells them apart."""
    pairs = with_rows(records, elsewhere)
    tell_apart(pairs)
    return pairs


def with_rows(
    records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
) -> list[tuple[Record, list[TableRow]]]:
    """Finished records that have rows, with their rows, compared with the full cache's among them, or else among those
    elsewhere; this is where records are chosen."""
    pairs = []
    chosen = current(records)
    full = Baselines(chosen, elsewhere)
    for record in chosen:
        try:
            rows = rows_of(record, full)
            check(TABLES[record["table"]], rows)
        except ODD as error:
            path = f"{record.get('experiment')}/{record.get('run_id')}/record.json"
            log.warning("%s: damaged record (%r); left out of tables and figures", path, error)
            continue
        if rows:
            pairs.append((record, rows))
    return pairs


def _rows_of_shape(pairs: Pairs, shape: str) -> list[TableRow]:
    """In the order of the CSV; points of an analysis as they were made."""
    rows = [row for record, own in pairs if record["table"] == shape for row in own]
    return rows if shape == "analysis" else sorted(rows, key=_sort_key)


def _sort_key(row: TableRow) -> tuple[Any, ...]:
    """By what a reader looks for; chunks by their position, a missing number first, the run's id last."""
    task, _, chunk = str(row.get("task", "")).partition("[")
    position = [int(number) for number in re.findall(r"\d+", chunk)]
    words = (row["model"], row["label"], task)
    sizes = ("batch_size", "prompt_len", "gen_len", "seq_len", "size")
    shape = tuple(row.get(name) or 0 for name in sizes)
    return (*words, *shape, position, rank(str(row.get("metric", ""))), row["run_id"])
