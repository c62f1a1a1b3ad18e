"""The leaderboard, from records to its page: a row for every method at every size.

1. `rows_of_records` joins the records of a method at a size: fidelity and tasks of
   `leaderboard-scores`, the decode step of `leaderboard-times`.
2. `write` adds the shipped rows.
3. `complete` compares the rows with one another. Every method runs with 0, 1 and 2 exempt layers.
   At each size two of them are shown: its paper's number, and the best, which is the closest to the
   full cache on the text. `exempt_choice` says which a row is.
4. `tables/leaderboard.csv` has all rows. `sheets` are the tables of `leaderboard.md`.

A metric is declared in `BOARD_METRICS`, and nowhere else.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.files import write_atomic
from harness.results import columns, metrics
from harness.results.columns import TableRow
from harness.results.evidence_tables import READS_ALL, family_of
from harness.results.fronts import (
    COSTS,
    REFERENCES,
    fronts,
    has_its_size,
    has_its_size_on_text,
    outside,
    sizes_of,
)
from harness.results.metrics import MISSING, BoardMetric, Metric
from harness.results.record import BAD_VALUE_ERRORS, Record, current, in_words, read_records
from harness.results.samples import Baselines, nll_difference, num_contexts
from harness.results.sheet import (
    DIFFERENCE_NOTE,
    SIZE_NOTE,
    Sheet,
    mark_own,
    markdown,
    show_difference,
    show_range,
)
from harness.results.shipped import merged
from harness.results.step_time import step_of
from harness.settings.kinds import OF_CODECS
from harness.settings.own_method import shipped
from harness.settings.schema import options

log = logging.getLogger(__name__)

NAME, FRONTIER = "leaderboard", "frontier"
"""Tables made here."""
SCORES, TIMES = "leaderboard-scores", "leaderboard-times"
"""Experiments they are made of."""
BEST, PAPERS, BOTH = "best", "paper's", "both"
"""What `exempt_choice` says; empty for another number."""
TASKS = [metric.column.name for metric in metrics.board_metrics("task")]
OTHER_SIZE, OUTSIDE_MARK, MODELLED = "§", "†", "‡"
LEGEND = {
    OUTSIDE_MARK: (
        f"Better than {REFERENCES['upper']} or worse than {REFERENCES['lower']}, the reference "
        "methods, in some column, so that the 95 % interval of the difference is without zero; the "
        "CSV says which, in the column outside."
    ),
    OTHER_SIZE: (
        "The method cannot have this size. It runs at the nearest one and is compared with no "
        "other."
    ),
    MODELLED: "Modelled from the compute and the bytes of a step that was timed at another size.",
}
"""The meaning of the marks."""
NOTE = (
    f"{SIZE_NOTE} Each table is sorted by KL, the divergence from the full cache's predictions: "
    "less is better. A method stands there with the number of exempt layers that is *best* by KL "
    "of those that ran (`make leaderboard` runs 0, 1 and 2), and with its *paper's*. Bold is the "
    "best of the methods of that size, without the two reference methods. ± is one standard error, "
    f"over windows or contexts. {DIFFERENCE_NOTE}The decode step runs over an emulated link. More "
    "columns, and the settings, are in `tables/leaderboard.csv` and in the report."
)
"""The meaning of the columns."""


def write(results_dir: Path, own: Sequence[TableRow]) -> None:
    """Write the leaderboard and the frontier, of one's own rows and the shipped ones.

    The tables lie in `tables/`, the pages at the top of the results. Raises UserError if the folder
    cannot be written.
    """
    path = results_dir / "tables" / f"{NAME}.csv"
    rows = complete(merged(path, "board", own))
    for name, shown in ((NAME, rows), (FRONTIER, frontier(rows))):
        write_atomic(path.with_stem(name), columns.render_csv(columns.BOARD, shown))
        write_atomic(results_dir / f"{name}.md", markdown(name, NOTE, sheets(shown)))


# Records to rows


def rows_of_records(results_dir: str | Path) -> list[TableRow]:
    """The rows of the records in a results folder. Of two runs for one of them the newer counts."""
    scores, times = _by_age(results_dir, SCORES), _by_age(results_dir, TIMES)
    full = Baselines(scores)
    timed = {_method(record): record for record in times}
    rows = []
    for (method, _), runs in columns.grouped(scores, _method_and_size).items():
        try:
            row = _row(runs, full)
            if method in timed:
                row |= step_of(row, timed[method])
            columns.check(columns.BOARD, [row])
            rows.append(row)
        except BAD_VALUE_ERRORS as error:
            used = [*runs, timed[method]] if method in timed else runs
            named = ", ".join(f"{record['experiment']}/{record['run_id']}" for record in used)
            log.warning("%s: damaged record (%r); left out of the leaderboard", named, error)
    return rows


def _by_age(results_dir: str | Path, experiment: str) -> list[Record]:
    """The records of an experiment, the oldest first."""
    records = current(read_records(results_dir, experiment))
    return sorted(records, key=lambda record: record["started"])


def _method(record: Record) -> str:
    """Model, method and codec, whatever the size, as words that compare."""
    config = record["config"]
    codecs = columns.picked(config, OF_CODECS).values()
    settings = [config["model"]["name"], config["method_name"], config.get("method"), *codecs]
    return json.dumps(settings, sort_keys=True)


def _method_and_size(record: Record) -> tuple[str, float | None]:
    return _method(record), record["config"]["size"]


def _row(runs: Sequence[Record], full: Baselines) -> TableRow:
    """Fidelity and tasks of a method at a size."""
    config = runs[0]["config"]
    family = family_of(runs[0])
    row: TableRow = {
        "experiment": NAME,
        "model": config["model"]["name"],
        "method": config["method_name"],
        "family": family,
        "label": config["label"],
        "codec": config["codec"],
        "settings": _settings(runs),
        "asked_size": config["size"],
        "exempt_layers": None if family == READS_ALL else config["method"]["num_exempt_layers"],
        "source": "measured",
    }
    for record in runs:
        for name, entries in record["metrics"].items():
            if record["kind"] != "tasks":
                row |= _text(record, entries)
            elif name in TASKS:
                row |= _task(record, name, entries, full)
    return row


def _settings(runs: Sequence[Record]) -> str:
    """All settings of the method as it ran on the text, else on the tasks, and the codec."""
    scored = min(runs, key=lambda record: record["kind"] == "tasks")
    settings = dict(next(iter(scored["methods"].values()), scored["config"]["method"]))
    settings |= columns.picked(scored["config"], ("codec", "value_codec", "codec_layers", "size"))
    return in_words({name: value for name, value in settings.items() if value is not None})


def _text(record: Record, entries: Mapping[str, Any]) -> TableRow:
    """Sizes and fidelity on a text, with the difference of its negative log-likelihood."""
    nll = nll_difference(record["samples"]["windows"])
    measured = {**entries, metrics.NLL.name: nll.value, f"{metrics.NLL.name}_stderr": nll.stderr}
    found = columns.picked(measured, columns.names(metrics.board_columns("size", "text")))
    return found | {columns.NUM_WINDOWS.name: nll.num_contexts}


def _task(record: Record, name: str, entries: Mapping[str, Any], full: Baselines) -> TableRow:
    """Accuracy on a task, and its difference to the full cache where that ran on it.

    The standard error is that of the difference, or else that of the value.
    """
    parts: TableRow = {"stderr": entries.get("acc_stderr"), "size": entries["size"]}
    parts[metrics.NUM_CONTEXTS.name] = num_contexts(record["samples"].get(name, ()), "acc")
    difference = full.difference(record, name, "acc")
    if difference is not None:
        parts["difference"] = difference.value
        parts["stderr"] = difference.stderr
        parts["detectable"] = difference.detectable
        parts[metrics.NUM_CONTEXTS.name] = difference.num_contexts
    return {name: entries["acc"]} | {f"{name}_{part}": value for part, value in parts.items()}


# What depends on other rows


def complete(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows by model, size and label, with `exempt_choice`, `front` and `outside`.

    The upper reference, which no link allows, is on no front. A method at another size than asked
    has neither front nor outside, and so has one with another number of exempt layers than its
    best.
    """
    rows = sorted(rows, key=_order)
    best = set()
    for of_method in columns.grouped(rows, _method_at_size).values():
        best.add(id(min(of_method, key=_distance)))
    completed = []
    for row in rows:
        choice = _exempt_choice(row, id(row) in best)
        completed.append(row | {"exempt_choice": choice, "front": "", "outside": ""})
    compared = [row for row in completed if is_best(row) and has_its_size(row)]
    possible = [row for row in compared if row["method"] != REFERENCES["upper"]]
    for row, front in zip(possible, fronts(possible), strict=True):
        row["front"] = front
    for row in compared:
        row["outside"] = "; ".join(outside(row, compared))
    return completed


def _order(row: TableRow) -> tuple[Any, ...]:
    return row["model"], row["asked_size"] or 1, row["label"], row["settings"]


def _method_at_size(row: TableRow) -> tuple[Any, ...]:
    return row["model"], row["method"], row["codec"], row["label"], row["asked_size"]


def _distance(row: TableRow) -> tuple[bool, float]:
    """Sort key of a method's rows of one size: those that have it on the text first, by KL."""
    return not has_its_size_on_text(row), _kl(row)


def _kl(row: TableRow) -> float:
    """The KL, infinite where it was not measured."""
    kl = row.get(metrics.KL.name)
    return math.inf if kl is None else kl


def _exempt_choice(row: TableRow, best: bool) -> str:
    number, method = row["exempt_layers"], row["method"]
    is_shipped = method in options("method")
    is_papers = is_shipped and shipped(method)[1]["num_exempt_layers"] == number
    if best:
        return BOTH if is_papers else BEST
    return PAPERS if is_papers else ""


def is_best(row: TableRow) -> bool:
    """Whether a completed row has its method's best number of exempt layers."""
    return row["exempt_choice"] in (BEST, BOTH)


def frontier(rows: Sequence[TableRow]) -> list[TableRow]:
    """Rows of the frontier table: the completed rows that are on a front, by KL."""
    shown = [row | {"experiment": FRONTIER} for row in rows if row["front"]]
    return sorted(shown, key=_kl)


# The page: a table per asked size


def sheets(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The tables of completed rows, by model and asked size, the smallest KL first."""
    for model, of_model in columns.grouped(rows, lambda row: str(row["model"])).items():
        marked, notes = mark_own(of_model, "label")
        shown = [row for row in marked if row["exempt_choice"]]
        for group, of_group in columns.grouped(shown, _group).items():
            sheet = _sheet(f"{model}, {group}", sorted(of_group, key=_kl))
            yield sheet._replace(notes=[*sheet.notes, *notes])


def _group(row: TableRow) -> str:
    if row["experiment"] == FRONTIER:
        return f"not beaten in {' or in '.join(COSTS)}"
    asked = row["asked_size"]
    return "sizes of their own" if asked is None else f"size {metrics.ASKED_SIZE.show(asked)} %"


def _sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    on_page = {metric.column: metric for metric in metrics.BOARD_METRICS if metric.on_page}
    shown = []
    for column in (columns.EXEMPT_LAYERS, *on_page, columns.FRONT):
        if any(row.get(column.name) not in (None, "") for row in rows):
            shown.append(column)
    marks: set[str] = set()
    lines, details = [], []
    for row in rows:
        own_marks = OUTSIDE_MARK if row.get("outside") else ""
        if not has_its_size(row):
            own_marks += OTHER_SIZE
        line = [row["label"] + own_marks]
        marks.update(own_marks)
        for column in shown:
            text = _shown(column, on_page.get(column), row)
            line.append(text)
            marks.add(text[-1])
        lines.append(line)
        details.append("; ".join(filter(None, [row["settings"], row.get("outside")])))
    bold = set()
    for at, column in enumerate(shown, start=1):
        if column in on_page and column != metrics.SIZE:
            for number in _best_lines(on_page[column], rows):
                bold.add((number, at))
    header = columns.headings((columns.LABEL, *shown))
    notes = [f"{mark} {words}" for mark, words in LEGEND.items() if mark in marks]
    return Sheet(title, header, lines, bold=bold, notes=notes, details=details)


def _shown(column: Metric, metric: BoardMetric | None, row: TableRow) -> str:
    """A row's value of a column as text."""
    value, stderr = row.get(column.name), row.get(f"{column.name}_stderr")
    if column == columns.FRONT:
        return value or MISSING
    if column == columns.EXEMPT_LAYERS:
        return MISSING if value is None else f"{column.show(value)}, {row['exempt_choice']}"
    if column == metrics.SIZE:  # that of the text and those of the tasks
        return show_range(metrics.SIZE, sizes_of(row))
    if column == metrics.STEP and row.get("step_source") == "modelled":
        return metrics.STEP.show(value) + MODELLED
    if metric is not None and metric.origin == "task":
        difference = row.get(f"{column.name}_difference")
        detectable = row.get(f"{column.name}_detectable")
        contexts = row.get(f"{column.name}_{metrics.NUM_CONTEXTS.name}")
        return show_difference(column, value, stderr, difference, detectable, contexts)
    return column.show(value, stderr)


def _best_lines(metric: BoardMetric, rows: Sequence[TableRow]) -> list[int]:
    """The lines with the best value, of methods at the asked size."""
    name = metric.column.name
    best: float | None = None
    lines: list[int] = []
    for line, row in enumerate(rows):
        is_compared = row["asked_size"] is not None and row["method"] not in REFERENCES.values()
        if not is_compared or row.get(name) is None or not has_its_size(row):
            continue
        gain = row[name] if metric.more_is_better else -row[name]
        if best is None or gain > best:
            best, lines = gain, []
        if gain == best:
            lines.append(line)
    return lines
