"""The records of an experiment as one tidy table, `results/tables/<experiment>.csv`, and a `.md`
page of it for people.

The CSV has fixed columns and one row per (run, task, metric) of accuracy, per timed cell, or per
point of an analysis. Seconds, bytes, fractions in [0, 1]; an empty cell where nothing was measured.
The same records give the same bytes.

The project ships tables without their records; those rows have `shipped=yes`. A shipped row stays
until a run of one's own has the same identity (`IDENTITY`) and replaces it. All other rows are made
from the records that are there.

    python -c "from harness.results.write import update; update('results', 'fig11')"
    python -m harness.results.write results      # for maintainers: mark all rows as shipped, before
    they are committed
"""

import argparse
import csv
import io
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness.errors import UserError, exit_code
from harness.files import holding, write_atomic
from harness.results import leaderboard
from harness.results.columns import (
    ANEW,
    BOARD,
    NO_TABLE,
    OF_SOME_RUNS,
    OPTIONAL,
    TABLES,
    Column,
    TableRow,
    check,
    grouped,
    has_any,
    names,
    rank,
    read_table,
    shape_of,
)
from harness.results.pages import render_markdown, render_terminal
from harness.results.record import BAD_VALUE_ERRORS, Record, current, read_records
from harness.results.samples import (
    Baselines,
    Difference,
    Sample,
    clustered_stderr,
    full_runs,
    num_contexts,
    of_windows,
)
from harness.settings.kinds import find, foreign_settings
from harness.settings.paths import table_to_read
from harness.settings.schema import is_unmet, kind_of

log = logging.getLogger(__name__)

TableRows = Sequence[TableRow]
Pairs = list[tuple[Record, list[TableRow]]]
"""Records, each with its rows."""
ROUND = str.maketrans("[]", "()")
SHIPPED_CELL = re.compile(r'(^|[,;\t"])yes($|[,;\t"])')
"""A cell that marks a shipped row, whatever a spreadsheet put between the cells."""
CONDITIONS = (
    "num_samples", "num_fewshot", "seq_len", "size", "size_artifact", "device_frac", "resident_frac",
    *(column.name for column in OF_SOME_RUNS),
)  # fmt: skip
"""Entries beside the metrics of a task that have columns."""
NUM_DEPTHS = 5
DEPTH_PERCENT = 100 // NUM_DEPTHS
IDENTITY = {
    "accuracy": ("model", "method", "label", "settings", "task"),
    "latency": (
        "model", "platform", "source", "method", "label", "settings", "batch_size", "prompt_len", "gen_len",
    ),
    "analysis": ("model", "source", "metric", "series", "x_name"),
    "board": ("model", "method", "codec", "label", "asked_size", "exempt_layers"),
}  # fmt: skip
"""Columns that identify what was measured, by shape of table. A chunk or a depth has the identity
of its task."""
TIMED_CELLS = "latency"
"""The experiment whose records are the cells of all figures of speed."""
MACHINE = ("model", "platform", "source")
SHAPE = (*MACHINE, "batch_size", "prompt_len", "gen_len")


def update(results_dir: str | Path, experiment: str) -> Path:
    """Write `tables/<experiment>.csv` and `.md` anew from the finished records and the shipped
    rows.

    `latency` also gives the tables of the figures of speed; the leaderboard's two experiments give
    the leaderboard. A damaged record is left out with a warning that names it, a damaged table set
    aside with a warning. One process at a time writes the tables of a folder.

    Returns the path of the CSV. Raises UserError if the folder cannot be written.
    """
    folder = Path(results_dir) / "tables"
    path = folder / f"{experiment}.csv"
    with holding(folder, wait=True):  # the next process then reads what this one has written
        pairs = with_rows(read_records(results_dir, experiment), partial(full_runs, results_dir))
        kind = kind_of(experiment)
        shape = find(kind).table if kind else pairs[0][0]["table"] if pairs else "accuracy"
        own = [row for record, rows in pairs if record["table"] == shape for row in rows]
        rows = _ordered(shape, _merged(path, shape, own))
        _write(path, shape, rows)
        for figure, choose in CHOSEN.items() if experiment == TIMED_CELLS else ():
            chosen = [{**row, "experiment": figure} for row in choose(rows)]
            _write(path.with_stem(figure), "latency", chosen, keep_empty=False)
        if experiment in (leaderboard.SCORES, leaderboard.TIMES):
            _write_boards(Path(results_dir), leaderboard.board_rows(results_dir))
    return path


def summary(records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple) -> str:
    """The records as a small table for a terminal: a line per method and settings, a column per
    metric.

    elsewhere: returns further records, in which the full cache's are looked for too. Returns "" if
    no record is finished.
    """
    pairs = with_rows(records, elsewhere)
    rows = {
        shape: [row for record, own in pairs if record["table"] == shape for row in own]
        for shape in TABLES
    }
    return render_terminal([row for shape, own in rows.items() for row in _ordered(shape, own)])


def render_csv(columns: Sequence[Column], rows: Iterable[TableRow]) -> str:
    """The rows under `columns` as CSV; other keys are left out, and columns of some models or runs
    without a value."""
    rows = list(rows)
    shown = [column for column in columns if column.name not in OPTIONAL or has_any(rows, column)]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, names(shown), restval="", extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def ship(results_dir: Path) -> None:
    """Mark all rows of the tables as shipped, but for those that the cost model predicts. Raises
    UserError."""
    board = results_dir / "tables" / f"{leaderboard.NAME}.csv"
    for path in sorted(
        set((results_dir / "tables").glob("*.csv")) - {board, board.with_stem(leaderboard.FRONTIER)}
    ):
        rows = read_table(path)
        if rows and rows[0]["source"] != "modelled" and (shape := shape_of(tuple(rows[0]))):
            _write(path, shape, _ordered(shape, [row | {"shipped": "yes"} for row in rows]))
    if board.exists():
        _write_boards(results_dir, [row | {"shipped": "yes"} for row in read_table(board)])


def _merged(path: Path, shape: str, own: TableRows) -> TableRows:
    """One's own rows, and the shipped rows at `path` that they do not replace."""
    replaced = {_identity(shape, row) for row in own}
    there = _rows_at(path, shape)
    kept = [row for row in there if row.get("shipped") and _identity(shape, row) not in replaced]
    return [*kept, *own]


def _rows_at(path: Path, shape: str) -> TableRows:
    """The rows of the table at `path`, or of the shipped one where there is none. A table that is
    damaged or of another shape is set aside, and a warning says so and what is lost."""
    source = table_to_read(path.parents[1], path.name)
    if source is None:
        return []
    try:
        rows = read_table(source)
        if not rows or shape_of(tuple(rows[0])) == shape:
            return rows
        damage = f"{path}: {NO_TABLE} (it is of another kind of run)"
    except UserError as error:
        damage = str(error).removesuffix(f"; {ANEW}")
    if source != path:  # of the installation
        raise UserError(f"{damage}; install the project again")
    lost = _lost_rows(path)
    kept = _aside(path)
    try:
        path.replace(kept)
    except OSError as error:
        raise UserError(
            f"{damage}; it cannot be renamed to {kept.name} ({error.strerror or error})"
        ) from error
    source = table_to_read(path.parents[1], path.name)
    if source is not None:
        lost = "; shipped rows come from the installation"
    log.warning("%s; kept as %s, written anew from the records%s", damage, kept.name, lost)
    return [] if source is None else read_table(source)


def _lost_rows(path: Path) -> str:
    """What is said of the shipped rows of a damaged table, which have no records."""
    try:
        text = path.read_bytes().replace(b"\0", b"").decode(errors="replace")  # NULs: of UTF-16
    except OSError:
        text = ""
    count = sum(bool(SHIPPED_CELL.search(line)) for line in text.splitlines())
    if count:
        return f"; {count} shipped rows, which have no records, are lost: take the file from the project again"
    return "" if "shipped" in text else "; rows that the project ships in it, if it does, are lost"


def _aside(path: Path) -> Path:
    """The first free `NAME.csv.damaged-N` beside a damaged table. It ends so that nothing takes it
    for a table."""
    candidates = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _identity(shape: str, row: TableRow) -> tuple[Any, ...]:
    whole = row | {"task": row["task"].partition("[")[0]} if "task" in row else row
    return tuple(whole.get(name) or "" for name in IDENTITY[shape])


def _write(path: Path, shape: str, rows: TableRows, *, keep_empty: bool = True) -> None:
    """Write the CSV and the page. A table without rows is removed, unless `keep_empty`."""
    if not rows and not keep_empty:
        path.unlink(missing_ok=True)
        path.with_suffix(".md").unlink(missing_ok=True)
        return
    write_atomic(path, render_csv(TABLES[shape], rows))
    write_atomic(path.with_suffix(".md"), render_markdown(path.stem, rows))


def _write_boards(results_dir: Path, own: TableRows) -> None:
    """The leaderboard and the frontier; their pages lie at the top of the results."""
    path = results_dir / "tables" / f"{leaderboard.NAME}.csv"
    rows = leaderboard.complete(_merged(path, "board", own))
    for name, chosen in (
        (leaderboard.NAME, rows),
        (leaderboard.FRONTIER, leaderboard.frontier(rows)),
    ):
        write_atomic(path.with_stem(name), render_csv(BOARD, chosen))
        write_atomic(results_dir / f"{name}.md", render_markdown(name, chosen))


def _ordered(shape: str, rows: TableRows) -> TableRows:
    """In the order of the CSV; points of an analysis as they were made."""
    return rows if shape == "analysis" else sorted(rows, key=_sort_key)


def _sort_key(row: TableRow) -> tuple[Any, ...]:
    """Chunks by their position, a missing number first, the run's id last."""
    task, _, chunk = str(row.get("task", "")).partition("[")
    position = [int(number) for number in re.findall(r"\d+", chunk)]
    numbers = (
        row.get(name) or 0 for name in ("batch_size", "prompt_len", "gen_len", "seq_len", "size")
    )
    return (
        row["model"],
        row["label"],
        task,
        *numbers,
        position,
        rank(str(row.get("metric", ""))),
        row["run_id"],
    )


# The rows of records: one per timed cell, one per point of an analysis, else one per task and
# metric


def with_rows(
    records: Iterable[Record],
    elsewhere: Callable[[], Iterable[Record]] = tuple,
    *,
    weights: bool = True,
) -> Pairs:
    """The current finished records with their rows, compared with the full cache.

    The full cache's run is looked for among the records, then among those that `elsewhere` returns.
    weights: different weights of one model count as a setting.
    """
    chosen = current(records)
    full = Baselines(chosen, elsewhere)
    pairs = []
    for record in chosen:
        try:
            rows = rows_of(record, full)
            check(TABLES[record["table"]], rows)
        except BAD_VALUE_ERRORS as error:
            path = f"{record['experiment']}/{record['run_id']}/record.json"
            log.warning("%s: damaged record (%r); left out of tables and figures", path, error)
            continue
        if rows:
            pairs.append((record, rows))
    if weights:
        _add_weights(pairs)
    return pairs


def rows_of(record: Record, full: Baselines) -> list[TableRow]:
    """The rows of one finished record. A metric that was not measured (None) has no row.

    The row of a chunk has its range of tokens in the task, such as `offline[256:512]`; the row of a
    needle's depth, a fifth of the prompt, has length and depth, such as `niah_single_1[2048, 20-40
    %]`.
    """
    config = record["config"]
    common = {
        "experiment": record["experiment"],
        "model": config["model"]["name"],
        "method": config["method_name"],
        "label": config["label"],
        "settings": ", ".join(f"{name}={value}" for name, value in record["settings"].items()),
        "run_id": record["run_id"],
    }
    metrics = record["metrics"]
    if record["table"] == "latency":
        return [common | metrics | {"unmet_size": _unmet_size(config, metrics)}]
    if record["table"] == "analysis":
        return [common | {"source": metrics["source"]} | point for point in metrics["points"]]
    return [common | row for row in _accuracy_rows(record, full)]


def _add_weights(pairs: Pairs) -> None:
    """Add the weights to the settings if runs of one model name have different ones, as a model may
    be replaced."""
    for of_model in grouped(pairs, lambda pair: pair[0]["config"]["model"]["name"]).values():
        if len({record["inputs"].get("model") for record, _ in of_model} - {None}) > 1:
            for record, rows in of_model:
                if digest := record["inputs"].get("model"):
                    for row in rows:
                        row["settings"] = ", ".join(
                            filter(None, [row["settings"], f"weights={digest[:8]}"])
                        )


def _accuracy_rows(record: Record, full: Baselines) -> Iterator[TableRow]:
    for name, entries in record["metrics"].items():
        context = _context(record, name, entries)
        for values in _values(entries):
            of_value = {"num_contexts": num_contexts(_samples(record, name), values["metric"])}
            yield (
                context
                | values
                | of_value
                | _compared(full.difference(record, name, values["metric"]))
            )
        for row in depth_rows(context["task"], record["samples"].get(name, ())):
            yield context | row
    if record["chunks"]:
        ((name, entries),) = record["metrics"].items()
        context = _context(record, name, entries)
        for chunk in record["chunks"]:
            task = {"task": f"{context['task']}[{chunk['first']}:{chunk['stop']}]"}
            for values in _values(chunk["metrics"]):
                values["num_contexts"] = context["num_samples"]
                windows = chunk.get("windows", ()) if values["metric"] == "perplexity" else ()
                yield context | task | values | _compared(of_windows(record, windows))


def _values(entries: Mapping[str, Any]) -> Iterator[TableRow]:
    for metric, value in entries.items():
        is_metric = metric not in (
            *CONDITIONS,
            "num_truncated",
            "num_contexts",
        ) and not metric.endswith("_stderr")
        if is_metric and isinstance(value, int | float):
            errors = {
                name: entries.get(f"{metric}_{name}") for name in ("stderr", "repeats_stderr")
            }
            yield {"metric": metric, "value": value} | errors


def depth_rows(task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[TableRow]:
    """A row for each length in tokens and depth of the needle; none for a task without needles."""

    def place(sample: Mapping[str, Any]) -> tuple[int, int]:
        return sample["length"], min(int(NUM_DEPTHS * sample["depth"]), NUM_DEPTHS - 1)

    needles = (sample for sample in samples if sample.get("depth") is not None)
    for (length, part), own in sorted(grouped(needles, place).items()):
        values = [sample[str(length)] for sample in own]
        yield {
            "task": f"{task}[{length}, {DEPTH_PERCENT * part}-{DEPTH_PERCENT * (part + 1)} %]",
            "metric": str(length),
            "value": sum(values) / len(values),
            "stderr": clustered_stderr(values, range(len(values))),
            "num_samples": len(values),
            "num_contexts": len(values),
        }


def _compared(difference: Difference | None) -> TableRow:
    """The cells of `columns.COMPARED`, and the contexts that the difference was measured on."""
    if difference is None:
        return {}
    cells = {"difference": difference.value, "difference_stderr": difference.stderr}
    others = ("detectable", "gained", "lost", "mcnemar_p", "num_contexts")
    return cells | {name: getattr(difference, name) for name in others}


def _samples(record: Record, name: str) -> Sequence[Sample]:
    """The questions of a task, or the windows or prompts of a text; [] if the run keeps none."""
    samples = record["samples"]
    return next((samples[key] for key in (name, "windows", "prompts") if key in samples), [])


def _context(record: Record, name: str, entries: Mapping[str, Any]) -> TableRow:
    """Task, or file name of a text, and the conditions of its values. Square brackets in the name
    become round."""
    config = record["config"]
    seq_len = None if "seq_len" in foreign_settings(config["kind"]) else config["seq_len"]
    shared = {"seq_len": seq_len, "source": "measured"}
    conditions = {key: entries.get(key, shared.get(key)) for key in CONDITIONS}
    task = {"task": Path(name).name.translate(ROUND), "unmet_size": _unmet_size(config, entries)}
    return shared | task | conditions


def _unmet_size(config: Mapping[str, Any], entries: Mapping[str, Any]) -> float | None:
    """The size that was asked for, where the one that ran is another."""
    asked: float | None = config.get("size")
    return asked if is_unmet(asked, entries.get("size")) else None


# The rows of each figure of speed. One cell serves several figures. Each model and machine has a
# sweep of its own.


def _widest_sweep(rows: TableRows, axis: str, least: int = 1) -> TableRows:
    """The rows of the setups, all of a shape but `axis`, with the most values of it on their
    machine, and `least`."""
    setup = itemgetter(*(name for name in SHAPE if name != axis))
    machine = itemgetter(*(name for name in MACHINE if name != axis))
    values = {key: len({row[axis] for row in own}) for key, own in grouped(rows, setup).items()}
    most = {
        key: max(values[setup(row)] for row in own) for key, own in grouped(rows, machine).items()
    }
    return [row for row in rows if values[setup(row)] == max(least, most[machine(row)])]


def _largest(rows: TableRows, axis: str) -> TableRows:
    """The rows with the largest value of `axis` in each setup."""
    setup = itemgetter(*(name for name in SHAPE if name != axis))
    largest = {key: max(row[axis] for row in own) for key, own in grouped(rows, setup).items()}
    return [row for row in rows if row[axis] == largest[setup(row)]]


CHOSEN: Mapping[str, Callable[[TableRows], TableRows]] = {
    "fig14": lambda rows: _largest(_widest_sweep(rows, "batch_size"), "batch_size"),
    "fig15": lambda rows: _widest_sweep(rows, "batch_size"),
    "fig16a": lambda rows: _widest_sweep(rows, "prompt_len"),
    "fig16b": lambda rows: _widest_sweep(rows, "model", least=2),
    "fig18": lambda rows: _largest(_widest_sweep(rows, "prompt_len"), "prompt_len"),
}
"""By figure, the rows of `latency` that it draws. As in the paper, 14 has the largest batch of 15,
18 the longest prompt of 16a."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.write", description="Mark all rows as shipped."
    )
    parser.add_argument("results_dir", type=Path)
    raise SystemExit(exit_code(partial(ship, parser.parse_args().results_dir)))
