"""Table rows as pages for people: rounded, with units and standard errors; in Markdown, a terminal, or the report.

Rows of a record and rows read from a CSV give the same pages. Seconds become ms and bytes GiB here, and only here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.records.samples import TWO_SIDED_5
from harness.tables.columns import (
    ASKED_SIZE,
    BOARD_TASKS,
    DETECTABLE,
    DEVICE_FRAC,
    DIFFERENCE,
    DIFFERENCE_STDERR,
    FRONT,
    KL,
    LABEL,
    LATENCY,
    LAYER,
    METRICS,
    MISSING,
    NUM_FEWSHOT,
    NUM_SAMPLES,
    OF_SOME_MODELS,
    OUTSIDE,
    RESIDENT_FRAC,
    SEQ_LEN,
    SETTINGS,
    SHIPPED,
    SIZE,
    STEP,
    TOP1,
    Column,
    TableRow,
    has_any,
    published_rows,
    quantity,
    rank,
)
from harness.tables.leaderboard import FRONTIER, HIGHER, REFERENCES, has_its_size, size_of
from harness.tables.rows import is_depth, is_part
from harness.tables.text import Sheet, markdown, terminal

SCORES = ("acc", "exact_match", "perplexity")
"""Metrics of `METRICS` that every run on a task or text measures, as it does any metric that is not in `METRICS`."""
BRIEF = (*SCORES, "kl_nats", "top1_agreement", "text_perplexity", "first_divergence", "repetition")
"""Metrics of `METRICS` that a terminal shows."""
BRIEF_SPEED = ("prefill_s", "tokens_per_s", "step_p50_s", "h2d_bytes", "peak_device_bytes")
BRIEF_SHAPE = ("batch_size", "prompt_len", "gen_len", SIZE.name)
MAX_COLUMNS = 6
"""Values of x that a page shows of an analysis."""
OWN = "*"
"""Mark of one's own runs in a table that also has shipped rows."""
OTHER_SIZE, OUTSIDE_MARK, MODELLED = "§", "†", "‡"
DIFFERENCE_NOTE = (
    "The difference to the full cache on the same questions or windows is in brackets, ± its standard error. "
    "*No difference ≥ x* means that its 95 % interval contains zero, and that a difference of x would have been "
    "detected four times in five. "
)
SIZE_NOTE = (
    "Size is the share of the full cache that a decode step reads, and that crosses the link if the cache is offloaded."
)
NOTES = {
    "accuracy": f"{SIZE_NOTE} *Read on device* is the share that is read in device memory, including the method's "
    "index. *Kept on device* is the method's own memory there, as a share of the full cache at the end. Two numbers "
    f"are a range over the columns. ± is one standard error, over questions or windows. {DIFFERENCE_NOTE}"
    "Settings are those that differ from the defaults.",
    "latency": f"{SIZE_NOTE} *To device* and *to host* are the bytes that crossed the link in all decode steps. *Read "
    "on device* is what was read in device memory, including the method's index. *KV on device* is the memory of the "
    "cache and the method there, including buffers. Settings are those that differ from the defaults.",
    "board": f"{SIZE_NOTE} Each table is sorted by KL, the divergence from the full cache's predictions: less is "
    "better. Bold is the best of the methods of that size, without the two reference methods. ± is one standard error, "
    f"over windows or contexts. {DIFFERENCE_NOTE}The decode step runs over an emulated link. More columns, and the "
    "settings, are in `tables/leaderboard.csv` and in the report.",
    "analysis": "± is one standard error over heads, or over layers for a number of the whole model. At most "
    f"{MAX_COLUMNS} values of x are shown; the CSV has all.",
}
"""The meaning of the columns, by shape of table."""
MODELLED_NOTE = (
    f"Predicted by the cost model (`harness/paper/costmodel`), not measured. {SIZE_NOTE} The segments (attention to "
    "other) are those of one block in the last decode step."
)


def sheets_of(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per model, source and shape of row; chunks of texts below, each quantity of an analysis apart."""
    groups: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        groups.setdefault((_title(row), _shape(row)), []).append(row)
    for title in dict.fromkeys(title for title, _ in groups):
        for shape, make in SHAPES.items():
            own = groups.get((title, shape), [])
            if len({bool(row.get(SHIPPED.name)) for row in own}) > 1:
                note = f"{OWN} One's own run; the other rows are shipped with the project."
                name = "series" if shape == "analysis" else LABEL.name
                marked = [row if row.get(SHIPPED.name) else row | {name: f"{row[name]} {OWN}"} for row in own]
                yield from (sheet._replace(notes=[*sheet.notes, note]) for sheet in make(title, marked))
            elif own:
                yield from make(title, own)


def render_markdown(name: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of a table, with the paper's numbers at its end."""
    note = NOTES[_shape(rows[0]) if rows else "accuracy"]
    return markdown(name, note, [*sheets_of(rows), *_published(name)])


def render_modelled(figure: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of the cost model's predictions of a figure."""
    return markdown(f"{figure}, modelled", MODELLED_NOTE, sheets_of(rows))


def render_terminal(rows: Sequence[TableRow]) -> str:
    """The tables for a terminal, with the most important columns; "" without rows."""
    hidden = {each.name for each in LATENCY if each.digits is not None} - {*BRIEF_SPEED, *BRIEF_SHAPE}
    shown = [
        {name: value for name, value in row.items() if name not in hidden} if _shape(row) == "latency" else row
        for row in rows
        if _shape(row) != "accuracy" or is_brief(row)
    ]
    return "\n\n".join(map(terminal, sheets_of(shown)))


def is_brief(row: TableRow) -> bool:
    """Whether a terminal shows a row of accuracy."""
    return not is_part(row) and _is_among(BRIEF, row["metric"])


def _is_among(names: Sequence[str], metric: str) -> bool:
    name = metric.partition(",")[0]
    return name in names or name not in METRICS


def _title(row: TableRow) -> str:
    if row["source"] == "modelled" and "platform" in row:
        return f"{row['model']} on {row['platform']}, modelled"
    return f"{row['model']}, {row['source']}" if _shape(row) == "latency" else str(row["model"])


def _shape(row: TableRow) -> str:
    marks = {"series": "analysis", "metric": "accuracy", ASKED_SIZE.name: "board"}
    return next((shape for mark, shape in marks.items() if mark in row), "latency")


def _published(name: str) -> Iterator[Sheet]:
    rows = [row for row in published_rows() if row["figure"] == name]
    if rows:
        header = ["model", "series", "x_name", "x", "metric", "value", "kind"]
        yield Sheet("the paper's numbers", header, [[row[each] or MISSING for each in header] for row in rows])


# Accuracy: a line per method and settings, a column per task and metric


class _Line(NamedTuple):
    """identity: method, label and settings."""

    identity: tuple[str, str, str]
    cells: dict[tuple[str, str], TableRow]

    @property
    def order(self) -> tuple[Any, ...]:
        """The full cache first, then by label, size and length."""
        rows = self.cells.values()
        size = min(row[SIZE.name] or 0 for row in rows)
        return (size < 1, self.identity[1], size, max(row[SEQ_LEN.name] or 0 for row in rows), self.identity[2])


def _accuracy(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """Whole tasks and texts, then chunks of texts, then each task with needles by their depth."""
    whole = [row for row in rows if not is_part(row)]
    chunks = [row for row in rows if is_part(row) and not is_depth(row)]
    depths = [row for row in rows if is_depth(row)]
    if whole:
        yield _accuracy_sheet(title, whole)
    if chunks:
        yield _accuracy_sheet(f"{title}, by range of tokens", chunks)
    for task in dict.fromkeys(row["task"].partition("[")[0] for row in depths):
        own = [row for row in depths if row["task"].startswith(f"{task}[")]
        yield _accuracy_sheet(f"{title}, {task}: right answers (%) by length and depth of the needle", own, _place)


def _heading(task: str, metric: str) -> str:
    return f"{task} {quantity(metric).heading}"


def _place(task: str, metric: str) -> str:
    return f"{int(metric):,} tokens, {task.partition(', ')[2].removesuffix(']')}"


def _accuracy_sheet(title: str, rows: Sequence[TableRow], heading: Callable[[str, str], str] = _heading) -> Sheet:
    cells: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["metric"]), []).append(row)
    shared = {key: _shared_settings(own) for key, own in cells.items()}
    keys = sorted(cells, key=lambda key: rank(key[1]))
    conditions = _conditions(cells)
    headings = {key: heading(*key) + conditions[key] for key in keys}
    sizes = [SIZE, *(each for each in (*OF_SOME_MODELS, DEVICE_FRAC, RESIDENT_FRAC) if has_any(rows, each))]
    lines = []
    for line in sorted(_lines(rows, shared), key=lambda line: line.order):
        ranges = [_range(each, list(line.cells.values())) for each in sizes]
        values = [_value(line.cells[key]) if key in line.cells else MISSING for key in keys]
        lines.append([line.identity[1], line.identity[2] or MISSING, *ranges, *values])
    header = [LABEL.heading, SETTINGS.heading, *(each.heading for each in sizes), *headings.values()]
    scores = [headings[key] for key in keys if _is_among(SCORES, key[1])]
    said = dict.fromkeys(pair for own in shared.values() for pair in own)
    return Sheet(title, header, lines, scores, notes=[f"Settings of all runs: {', '.join(said)}."] if said else [])


def _pairs(settings: str | None) -> list[str]:
    """`a=[1, 2], b=3` as its parts."""
    return [pair for pair in re.split(r", (?=[\w.]+=)", settings or "") if pair]


def _shared_settings(rows: Sequence[TableRow]) -> list[str]:
    """Settings that all rows of a column share, if there are several; they tell none apart."""
    first, *others = ([*_pairs(row[SETTINGS.name])] for row in rows)
    return [pair for pair in first if all(pair in other for other in others)] if others else []


def _lines(rows: Sequence[TableRow], shared: Mapping[tuple[str, str], Sequence[str]]) -> list[_Line]:
    """A run joins the first line of its method, label and settings whose cells are free."""
    runs: dict[Any, list[TableRow]] = {}
    for row in rows:
        runs.setdefault((row["run_id"], row["method"], row["label"], row[SETTINGS.name]), []).append(row)
    lines: list[_Line] = []
    for (_, method, label, settings), own in runs.items():
        cells = {(row["task"], row["metric"]): row for row in own}
        told = [pair for pair in _pairs(settings) if any(pair not in shared[key] for key in cells)]
        identity = (method, label, ", ".join(told))
        free = (line for line in lines if line.identity == identity and line.cells.keys().isdisjoint(cells))
        line = next(free, None)
        if line is None:
            lines.append(line := _Line(identity, {}))
        line.cells.update(cells)
    return lines


def _range(column: Column, rows: Sequence[TableRow]) -> str:
    """A size, or the smallest and the largest if they differ when rounded."""
    sizes = [row[column.name] for row in rows if row.get(column.name) is not None]
    return "-".join(dict.fromkeys(map(column.show, (min(sizes), max(sizes))))) if sizes else MISSING


def _conditions(cells: Mapping[tuple[str, str], Sequence[TableRow]]) -> dict[tuple[str, str], str]:
    """For the headings: number of samples, shots and length that all cells of a column share, if columns differ."""
    words = dict.fromkeys(cells, "")
    for condition in (NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN):
        values = {key: {row.get(condition.name) for row in rows} for key, rows in cells.items()}
        shared = {key: found.pop() for key, found in values.items() if len(found) == 1 and found != {None}}
        if len(set(shared.values())) > 1:
            for key, value in shared.items():
                words[key] += f", {condition.phrase.format(value)}"
    return words


def _value(row: TableRow) -> str:
    difference = row.get(DIFFERENCE.name)
    stderr = row["stderr"] if difference is None else row.get(DIFFERENCE_STDERR.name)
    return show_difference(quantity(row["metric"]), row["value"], stderr, difference, row.get(DETECTABLE.name))


def show_difference(
    column: Column, value: float | None, stderr: float | None, difference: float | None, detectable: float | None
) -> str:
    """`value` and its difference to the full cache: "37.5 (-50.0 ± 6.1)" or "62.5 (no difference ≥ 8.2)".

    stderr: of the difference, or of the value if there is no difference.
    """
    if difference is None:
        return column.show(value, stderr)
    if stderr is not None and detectable is not None and abs(difference) <= TWO_SIDED_5 * stderr:
        return f"{column.show(value)} (no difference ≥ {column.show(detectable)})"
    return f"{column.show(value)} ({'+' * (difference > 0)}{column.show(difference, stderr)})"


# Speed: a line per timed cell


def _latency(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The full cache first, then by label and shape. A column needs a number, `size` does not."""
    numbers = [each for each in LATENCY if each.digits is not None]
    shown = [each for each in dict.fromkeys((SIZE, DEVICE_FRAC, *numbers)) if each == SIZE or has_any(rows, each)]
    shared = _shared_settings([row | {SETTINGS.name: row.get(SETTINGS.name)} for row in rows])
    settings = [", ".join(pair for pair in _pairs(row.get(SETTINGS.name)) if pair not in shared) for row in rows]
    words = [LABEL, SETTINGS] if any(settings) else [LABEL]

    def order(at: int) -> tuple[Any, ...]:
        row, size = rows[at], rows[at].get(SIZE.name) or 0
        return (size < 1, row["label"], *(row[name] for name in BRIEF_SHAPE[:3]), size, settings[at])

    lines = []
    for at in sorted(range(len(rows)), key=order):
        named = [rows[at]["label"], settings[at] or MISSING][: len(words)]
        lines.append(named + [each.show(rows[at].get(each.name)) for each in shown])
    notes = [f"Settings of all runs: {', '.join(shared)}."] if shared else []
    yield Sheet(title, [each.heading for each in (*words, *shown)], lines, notes=notes)


# Analyses: a table per run and quantity, a line per series


def _analysis(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    groups: dict[tuple[Any, ...], list[TableRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ("run_id", "metric", "x_name")), []).append(row)
    for (_, metric, x_name), own in groups.items():
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        yield _analysis_sheet(f"{title}: {quantity(metric).heading}{by}", own, quantity(metric))


def _analysis_sheet(title: str, rows: Sequence[TableRow], shown: Column) -> Sheet:
    values = sorted({row["x"] for row in rows if row["x"] is not None})
    count = min(MAX_COLUMNS, len(values))
    columns = [values[index * (len(values) - 1) // max(1, count - 1)] for index in range(count)] or [None]
    layered = len({(row["series"], row["layer"]) for row in rows}) > len({row["series"] for row in rows})
    lines: dict[str, dict[Any, TableRow]] = {}
    for row in rows:
        of_layer = layered and row["x_name"] != "layer" and row["layer"] is not None
        name = f"{row['series']}, {LAYER.phrase.format(row['layer'])}" if of_layer else row["series"]
        lines.setdefault(name, {})[row["x"]] = row
    header = [LABEL.heading, *(shown.heading if x is None else f"{x:,g}" for x in columns)]
    cells = [
        [name, *(shown.show(line[x]["value"], line[x]["stderr"]) if x in line else MISSING for x in columns)]
        for name, line in lines.items()
    ]
    return Sheet(title, header, cells)


# The leaderboard: a table per asked size


class _Field(NamedTuple):
    """A column of the page. best: one of its cells is in bold."""

    heading: str
    column: Column
    show: Callable[[TableRow], str]
    best: bool = True


def _board(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    for words, own in groups.items():
        yield _board_sheet(f"{title}, {words}", sorted(own, key=lambda row: _or_last(row.get(KL.name))))


def _or_last(value: float | None) -> float:
    return float("inf") if value is None else value


def _group(row: TableRow) -> str:
    if row["experiment"] == FRONTIER:
        return "not beaten in size or in step time"
    return "sizes of their own" if row["asked_size"] is None else f"size {ASKED_SIZE.show(row['asked_size'])} %"


def _board_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    fields = [field for field in FIELDS if any(row.get(field.column.name) not in (None, "") for row in rows)]
    labels = [
        row["label"] + OUTSIDE_MARK * bool(row.get(OUTSIDE.name)) + OTHER_SIZE * (not has_its_size(row)) for row in rows
    ]
    lines = [[label, *(field.show(row) for field in fields)] for label, row in zip(labels, rows, strict=True)]
    bold = {(line, 1 + at) for at, field in enumerate(fields) if field.best for line in _best(field.column, rows)}
    legend = {
        OUTSIDE_MARK: "Better than {upper} or worse than {lower}, the reference methods, by more than two standard "
        "errors in some column; the CSV says which, in the column outside.".format(**REFERENCES),
        OTHER_SIZE: "The method cannot have this size. It runs at the nearest one and is compared with no other.",
        MODELLED: "Modelled from the compute and the bytes of a step that was timed at another size.",
    }  # fmt: skip
    shown = {cell[-1] for line in lines for cell in line} | {label[at] for label in labels for at in (-1, -2)}
    return Sheet(
        title, [LABEL.heading, *(field.heading for field in fields)], lines, bold=bold,
        notes=[f"{mark} {words}" for mark, words in legend.items() if mark in shown],
        details=["; ".join(filter(None, [row["settings"], row.get(OUTSIDE.name)])) for row in rows],
    )  # fmt: skip


def _best(column: Column, rows: Sequence[TableRow]) -> list[int]:
    """The lines with the best value, of methods at the asked size."""
    values = {
        line: row[column.name]
        for line, row in enumerate(rows)
        if row["asked_size"] is not None
        and row["method"] not in REFERENCES.values()
        and row.get(column.name) is not None
        and has_its_size(row)
    }
    best = (max if column.name in HIGHER else min)(values.values(), default=None)
    return [line for line, value in values.items() if value == best]


def _sizes(row: TableRow) -> str:
    """The size, or the smallest and the largest over text and tasks."""
    sizes = [size for size in (size_of(row, column) for column in (KL, *BOARD_TASKS)) if size == size]
    return "-".join(dict.fromkeys(map(SIZE.show, (min(sizes), max(sizes))))) if sizes else MISSING


def _plain(column: Column) -> Callable[[TableRow], str]:
    return lambda row: column.show(row.get(column.name), row.get(f"{column.name}_stderr"))


def _task(column: Column) -> Callable[[TableRow], str]:
    parts = ("", "_stderr", "_difference", "_detectable")
    return lambda row: show_difference(column, *(row.get(f"{column.name}{part}") for part in parts))


def _step(row: TableRow) -> str:
    return STEP.show(row.get(STEP.name)) + MODELLED * (row.get("step_source") == "modelled")


FIELDS = (
    _Field(SIZE.heading, SIZE, _sizes, best=False),
    *(_Field(column.heading, column, _plain(column)) for column in (KL, TOP1)),
    *(_Field(column.heading, column, _task(column)) for column in BOARD_TASKS),
    _Field(STEP.heading, STEP, _step),
    _Field(FRONT.heading, FRONT, lambda row: row.get(FRONT.name) or MISSING, best=False),
)
SHAPES = {"latency": _latency, "accuracy": _accuracy, "analysis": _analysis, "board": _board}
