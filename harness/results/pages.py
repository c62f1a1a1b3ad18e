"""Pages of tables: the sheets that rows make. Rows of records and of a CSV give the same pages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from harness.results import board_page, columns, metrics
from harness.results.columns import TableRow, grouped, having, named, shape_of, values
from harness.results.lines import Key, lines_of, pairs_of_settings, shared
from harness.results.metrics import MISSING
from harness.results.sheet import (
    Sheet,
    mark_own,
    markdown,
    note,
    sheet_of,
    show_range,
    show_score,
    shown_as_is,
)

LENGTHS = ("generated_tokens", "at_limit")
"""Metrics of `METRICS` that say how long answers are: a sheet of their own beside several tasks."""
BRIEF_SPEED = (
    "batch_size", "prompt_len", "gen_len", "budget", "unmet_budget",
    "ttft_s", "tokens_per_s", "tpot_p50_s", "h2d_bytes", "peak_device_bytes",
)  # fmt: skip
"""Numbers of a timed run that a terminal shows."""
SHOWN_OF_CAPACITY = (
    "label", "settings",
    "largest_batch", "kv_tokens", "decode_tokens_per_s", "sequence_tokens_per_s", "equal_batch",
    "equal_tokens_per_s", "device_kv_bytes", "host_kv_bytes", "budget",
)  # fmt: skip
"""Columns of a method's largest batch that a page shows."""
MAX_COLUMNS = 6
"""Values of x that a page shows of an analysis."""
PUBLISHED_HEADER = ["model", "series", "x_name", "x", "metric", "value", "kind"]


def sheets_of(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per model, source and shape of row; none for the plain tables behind the board.

    Chunks of texts stand below whole ones, each quantity of an analysis apart. One's own runs among
    shipped ones are marked.
    """
    shape = shape_of(rows[0]) if rows else ""
    if shape == "board":
        yield from board_page.boards(pd.DataFrame(rows))
    if shape.startswith("board"):
        return
    for title, of_title in grouped(rows, _title).items():
        for shape, of_shape in grouped(of_title, shape_of).items():
            marked, notes = mark_own(of_shape, "series" if shape == "analysis" else "label")
            for sheet in SHEETS[shape](title, marked):
                yield sheet._replace(notes=[*sheet.notes, *notes])


def _title(row: TableRow) -> str:
    if row["source"] == "modelled" and "platform" in row:
        return f"{row['model']} on {row['platform']}, modelled"
    is_timed = shape_of(row) in ("latency", "capacity")
    return f"{row['model']}, {row['source']}" if is_timed else str(row["model"])


def render_markdown(name: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of a table, with published numbers at its end."""
    words = note(shape_of(rows[0]) if rows else "accuracy", max_columns=MAX_COLUMNS)
    sheets = list(sheets_of(rows))
    lines = []
    for row in columns.where(columns.published_rows(), "figure", name):
        lines.append([row[column] or MISSING for column in PUBLISHED_HEADER])
    if lines:
        sheets.append(Sheet("published numbers", PUBLISHED_HEADER, lines))
    return markdown(name, words, sheets)


def render_modelled(figure: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of the cost model's predictions of a figure."""
    return markdown(f"{figure}, modelled", note("modelled"), sheets_of(rows))


def render_terminal(rows: Sequence[TableRow]) -> str:
    """The tables for a terminal, with the most important columns; "" without rows."""
    from harness.results import summary  # here, as a command's help needs no pandas

    texts = [summary.printed([row for row in rows if shape_of(row) == "accuracy"])]
    others = []
    for row in rows:
        if shape_of(row) == "latency":
            others.append({name: value for name, value in row.items() if name not in NOT_BRIEF})
        elif shape_of(row) != "accuracy":
            others.append(row)
    texts += map(summary.printed_sheet, sheets_of(others))
    return "\n\n".join(filter(None, texts))


# Settings


def _own_settings(rows: Sequence[TableRow]) -> tuple[list[TableRow], list[str]]:
    """The rows without the settings that all of several share, which tell none apart."""
    pairs = [pairs_of_settings(row.get("settings")) for row in rows]
    known = shared(pairs) if len(rows) > 1 else set()
    found = []
    for row, of_row in zip(rows, pairs, strict=True):
        own = [pair for pair in of_row if pair not in known]
        found.append(row | {"settings": ", ".join(own)})
    return found, _note_on_settings(pair for pair in pairs[0] if pair in known)


def _note_on_settings(pairs: Iterable[str]) -> list[str]:
    words = ", ".join(dict.fromkeys(pairs))
    return [f"Settings of all runs: {words}."] if words else []


# Accuracy: a line per method and settings, a column per task and metric


def _accuracy(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """Whole tasks and texts, then chunks of texts, then each task with needles by their depth."""
    parts = grouped(rows, lambda row: (columns.is_part(row), columns.is_depth(row)))
    whole = parts.get((False, False), [])
    has_several_tasks = len(set(values(whole, "task"))) > 1
    by_sheet = grouped(whole, lambda row: has_several_tasks and _is_length(row))
    if False in by_sheet:
        yield _accuracy_sheet(title, by_sheet[False])
    if True in by_sheet:
        yield _accuracy_sheet(f"{title}, length of the answers", by_sheet[True])
    if (True, False) in parts:
        yield _accuracy_sheet(f"{title}, by range of tokens", parts[True, False])
    depths = grouped(parts.get((True, True), ()), lambda row: row["task"].partition("[")[0])
    for task, of_task in depths.items():
        words = "right answers (%) by length and depth of the needle"
        yield _accuracy_sheet(f"{title}, {task}: {words}", of_task)


def _is_length(row: TableRow) -> bool:
    return row["metric"].partition(",")[0] in LENGTHS


def _accuracy_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    by_key = grouped(rows, itemgetter("task", "metric"))
    of_key = _headings(by_key)
    beside = (
        metrics.UNMET_BUDGET,
        *metrics.OF_SOME_RUNS,
        metrics.DEVICE_FRAC,
        metrics.RESIDENT_FRAC,
    )
    shares = [metrics.BUDGET, *columns.with_values(beside, rows)]
    of_lines = lines_of(rows)
    known = shared(line.settings for line in of_lines) if len(of_lines) > 1 else set()
    shown = []
    told: list[str] = []
    for line in of_lines:
        own = [pair for pair in line.settings if pair not in known]
        cells = [line.label, ", ".join(own) or MISSING]
        for column in shares:
            cells.append(show_range(column, [row.get(column.name) for row in line.rows.values()]))
        for key in of_key:
            cells.append(show_score(line.rows[key]) if key in line.rows else MISSING)
        shown.append(cells)
        for row in line.rows.values():
            told += [pair for pair in pairs_of_settings(row["settings"]) if pair not in own]
    header = [column.heading for column in (metrics.LABEL, metrics.SETTINGS, *shares)]
    return Sheet(title, [*header, *of_key.values()], shown, notes=_note_on_settings(told))


def _headings(by_key: Mapping[Key, list[TableRow]]) -> dict[Key, str]:
    """The heading of each column, in the order of the page.

    If columns differ in number of samples, shots or length, a heading has what all rows of its
    column share.
    """
    found = {}
    for key in sorted(by_key, key=lambda key: metrics.rank(key[1])):
        found[key] = _heading(by_key[key][0])
    for condition in (metrics.NUM_SAMPLES, metrics.NUM_FEWSHOT, metrics.SEQ_LEN):
        shared = {}
        for key, rows in by_key.items():
            distinct = {row.get(condition.name) for row in rows}
            if len(distinct) == 1 and distinct != {None}:
                shared[key] = distinct.pop()
        if len(set(shared.values())) > 1:
            for key, value in shared.items():
                found[key] += f", {condition.phrase.format(value)}"
    return found


def _heading(row: TableRow) -> str:
    if columns.is_depth(row) and row["metric"].isdecimal():
        depths = row["task"].partition(", ")[2].removesuffix("]")
        return f"{int(row['metric']):,} tokens, {depths}"
    return f"{row['task']} {metrics.quantity(row['metric']).heading}"


# Speed: a line per timed run

NUMBERS_OF_SPEED = [column for column in columns.LATENCY if column.digits is not None]
NOT_BRIEF = {column.name for column in NUMBERS_OF_SPEED}.difference(BRIEF_SPEED)


def _latency(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The full cache first, then by label and shape. A column needs a number, `budget` does not."""
    own, notes = _own_settings(rows)
    words = named("label settings" if any(values(own, "settings")) else "label")
    numbers = (metrics.UNMET_BUDGET, metrics.DEVICE_FRAC, *NUMBERS_OF_SPEED)
    beside = columns.with_values(numbers, rows)
    shown = shown_as_is(dict.fromkeys((*words, metrics.BUDGET, *beside)))
    yield sheet_of(title, sorted(own, key=_order_of_cell), shown, notes=notes)


def _order_of_cell(row: TableRow) -> tuple[Any, ...]:
    budget = row.get("budget") or 0
    shape = row["batch_size"], row["prompt_len"], row["gen_len"]
    return budget < 1, row["label"], *shape, budget, row["settings"]


# Analyses: a table per quantity, a line per series


def _analysis(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    for of_table in _tables_of_series(rows):
        metric, x_name = of_table[0]["metric"], of_table[0]["x_name"]
        shown = metrics.quantity(metric)
        shown_x = _shown_x(of_table)
        lines = []
        for name, line in _series(of_table, x_name).items():
            of_line = [name]
            for x in shown_x:
                is_known = x in line
                text = shown.show(line[x]["value"], line[x]["stderr"]) if is_known else MISSING
                of_line.append(text)
            lines.append(of_line)
        header = [metrics.LABEL.heading]
        header += [shown.heading if x is None else f"{x:,g}" for x in shown_x]
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        yield Sheet(f"{title}: {shown.heading}{by}", header, lines)


def _tables_of_series(rows: Sequence[TableRow]) -> list[list[TableRow]]:
    """The rows of each table: of one quantity, and of the runs that have no series in common."""
    tables: list[list[TableRow]] = []
    for of_run in grouped(rows, itemgetter("run_id", "metric", "x_name")).values():
        kind = of_run[0]["metric"], of_run[0]["x_name"]
        series = set(values(of_run, "series"))
        for table in tables:
            is_alike = (table[0]["metric"], table[0]["x_name"]) == kind
            if is_alike and series.isdisjoint(values(table, "series")):
                table += of_run
                break
        else:
            tables.append(of_run)
    return tables


def _shown_x(rows: Sequence[TableRow]) -> list[Any]:
    found = sorted(set(values(having(rows, "x"), "x")))
    count = min(MAX_COLUMNS, len(found))
    last, gaps = len(found) - 1, max(1, count - 1)
    return [found[index * last // gaps] for index in range(count)] or [None]


def _series(rows: Sequence[TableRow], x_name: str) -> dict[str, dict[Any, TableRow]]:
    """The rows by series and x; a series of several layers is one of each layer."""
    layers: dict[str, set[float | None]] = {}
    for row in rows:
        layers.setdefault(row["series"], set()).add(row["layer"])
    has_layers = x_name != "layer" and max(map(len, layers.values())) > 1
    found: dict[str, dict[Any, TableRow]] = {}
    for row in rows:
        name = row["series"]
        if has_layers and row["layer"] is not None:
            name += f", {metrics.LAYER.phrase.format(row['layer'])}"
        found.setdefault(name, {})[row["x"]] = row
    return found


def _capacity(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    numbers = [column for column in columns.CAPACITY if column.name in SHOWN_OF_CAPACITY]
    shown = shown_as_is(numbers) | {"wall": itemgetter("wall")}
    largest = [row for row in rows if row["batch_size"] == row["largest_batch"]]
    by_bounds = grouped(largest, itemgetter("context", "memory_bytes"))
    for (context, memory), group in sorted(by_bounds.items()):
        own, notes = _own_settings(group)
        words = f"{title}: {context:,.0f} tokens a sequence, {memory / metrics.GIB:.4g} GiB"
        yield sheet_of(words, own, shown, notes=notes)


SHEETS = {"capacity": _capacity, "latency": _latency, "accuracy": _accuracy, "analysis": _analysis}
