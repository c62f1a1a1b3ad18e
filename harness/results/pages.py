"""Table rows as pages for people: rounded, with units and standard errors; in Markdown, a terminal,
or the report.

Rows of a record and rows read from a CSV give the same pages. Seconds become ms and bytes GiB here,
and only here.
"""

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

from harness.errors import printable, shortened
from harness.results.columns import (
    ASKED_SIZE,
    BOARD_TASKS,
    DEVICE_FRAC,
    EXEMPT_LAYERS,
    FRONT,
    KL,
    LABEL,
    LATENCY,
    LAYER,
    METRICS,
    MISSING,
    NUM_CONTEXTS,
    NUM_FEWSHOT,
    NUM_SAMPLES,
    OF_SOME_RUNS,
    RESIDENT_FRAC,
    SEQ_LEN,
    SETTINGS,
    SIZE,
    STEP,
    UNMET_SIZE,
    Column,
    TableRow,
    grouped,
    has_any,
    is_depth,
    is_part,
    published_rows,
    quantity,
    rank,
)
from harness.results.leaderboard import FRONTIER, HIGHER, REFERENCES, has_its_size, size_of
from harness.results.student import critical_value

WORDS = (LABEL.heading, SETTINGS.heading)
"""Headings of columns of words, aligned left. All other columns are numbers."""
HEADING_LETTERS, MAX_WIDTH, GAP = 13, 160, 2
HEADING_PADDING = 2  # what tabulate adds to a heading
WORD_LETTERS = 44
"""Longest cell of words in a terminal."""
MARKUP = re.compile(r"[\\`*|$]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)")
"""Characters that Markdown would interpret."""
SCORES = ("acc", "exact_match", "perplexity")
"""Metrics of `METRICS` that every run on a task or text measures, as it does any metric that is not
in `METRICS`."""
BRIEF = (
    *SCORES,
    "generated_tokens",
    "at_limit",
    "kl_nats",
    "top1_agreement",
    "text_perplexity",
    "first_divergence",
    "repetition",
)
"""Metrics of `METRICS` that a terminal shows."""
BRIEF_SPEED = ("prefill_s", "tokens_per_s", "step_p50_s", "h2d_bytes", "peak_device_bytes")
BRIEF_SHAPE = ("batch_size", "prompt_len", "gen_len", "size", "unmet_size")
MAX_COLUMNS = 6
"""Values of x that a page shows of an analysis."""
OWN = "*"
"""Mark of one's own runs in a table that also has shipped rows."""
OTHER_SIZE, OUTSIDE_MARK, MODELLED = "§", "†", "‡"
DIFFERENCE_NOTE = (
    "The difference to the full cache on the same questions or windows is in brackets, ± its standard error. "
    "*No difference ≥ x* means that its 95 % interval (Student's t) contains zero, and that a difference of x would "
    "have been detected four times in five. "
)
SIZE_NOTE = "Size is the share of the full cache that a decode step reads, and that crosses the link if the cache is offloaded."
NOTES = {
    "accuracy": f"{SIZE_NOTE} *Read on device* is the share that is read in device memory, including the method's "
    "index. *Kept on device* is the method's own memory there, as a share of the full cache at the end. Two numbers "
    f"are a range over the columns. ± is one standard error, over questions or windows. {DIFFERENCE_NOTE}"
    "Settings are those that differ from the defaults.",
    "latency": f"{SIZE_NOTE} *To device* and *to host* are the bytes that crossed the link in all decode steps. *Read "
    "on device* is what was read in device memory, including the method's index. *KV on device* is the memory of the "
    "cache and the method there, including buffers. Settings are those that differ from the defaults.",
    "board": f"{SIZE_NOTE} Each table is sorted by KL, the divergence from the full cache's predictions: less is "
    "better. A method stands there with the number of exempt layers that is *best* by KL of those that ran (`make "
    "leaderboard` runs 0, 1 and 2), and with its *paper's*. Bold is the best of the methods of that size, without the "
    f"two reference methods. ± is one standard error, over windows or contexts. {DIFFERENCE_NOTE}The decode step runs "
    "over an emulated link. More columns, and the settings, are in `tables/leaderboard.csv` and in the report.",
    "analysis": "± is one standard error over heads, or over layers for a number of the whole model. At most "
    f"{MAX_COLUMNS} values of x are shown; the CSV has all.",
}
"""The meaning of the columns, by shape of table."""
MODELLED_NOTE = (
    f"Predicted by the cost model (`harness/paper/costmodel`), not measured. {SIZE_NOTE} The segments (attention to "
    "other) are those of one block in the last decode step."
)


class Sheet(NamedTuple):
    """One table: a title, the headings, and the cells as text.

    scores: headings of metrics that every run measures, so an empty cell is a gap. bold: cells, as
    (line, column). notes: lines below the table. details: further text of each line, for a report.
    """

    title: str
    header: list[str]
    lines: list[list[str]]
    scores: Collection[str] = ()
    bold: Collection[tuple[int, int]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()


def sheets_of(rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """A table per model, source and shape of row; chunks of texts below, each quantity of an
    analysis apart."""
    for title, of_title in grouped(rows, _title).items():
        for shape, own in grouped(of_title, _shape).items():
            notes = []
            if len({bool(row.get("shipped")) for row in own}) > 1:
                notes = [f"{OWN} One's own run; the other rows are shipped with the project."]
                name = "series" if shape == "analysis" else "label"
                own = [
                    row if row.get("shipped") else row | {name: f"{row[name]} {OWN}"} for row in own
                ]
            for sheet in SHAPES[shape](title, own):
                yield sheet._replace(notes=[*sheet.notes, *notes])


def _title(row: TableRow) -> str:
    if row["source"] == "modelled" and "platform" in row:
        return f"{row['model']} on {row['platform']}, modelled"
    return f"{row['model']}, {row['source']}" if _shape(row) == "latency" else str(row["model"])


def _shape(row: TableRow) -> str:
    marks = {"series": "analysis", "metric": "accuracy", "asked_size": "board"}
    return next((shape for mark, shape in marks.items() if mark in row), "latency")


def render_markdown(name: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of a table, with the paper's numbers at its end."""
    note = NOTES[_shape(rows[0]) if rows else "accuracy"]
    header = ["model", "series", "x_name", "x", "metric", "value", "kind"]
    lines = [
        [row[each] or MISSING for each in header]
        for row in published_rows()
        if row["figure"] == name
    ]
    published = [Sheet("the paper's numbers", header, lines)] if lines else []
    return _markdown(name, note, [*sheets_of(rows), *published])


def render_modelled(figure: str, rows: Sequence[TableRow]) -> str:
    """The whole `.md` file of the cost model's predictions of a figure."""
    return _markdown(f"{figure}, modelled", MODELLED_NOTE, sheets_of(rows))


def render_terminal(rows: Sequence[TableRow]) -> str:
    """The tables for a terminal, with the most important columns; "" without rows."""
    hidden = {each.name for each in LATENCY if each.digits is not None} - {
        *BRIEF_SPEED,
        *BRIEF_SHAPE,
    }
    shown = [
        {name: value for name, value in row.items() if name not in hidden}
        if _shape(row) == "latency"
        else row
        for row in rows
        if _shape(row) != "accuracy" or is_brief(row)
    ]
    return "\n\n".join(map(_terminal, sheets_of(shown)))


def is_brief(row: TableRow) -> bool:
    """Whether a terminal shows a row of accuracy."""
    return not is_part(row) and _is_among(BRIEF, row["metric"])


def _is_among(names: Sequence[str], metric: str) -> bool:
    name = metric.partition(",")[0]
    return name in names or name not in METRICS


# Accuracy: a line per method and settings, a column per task and metric


def _accuracy(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """Whole tasks and texts, then chunks of texts, then each task with needles by their depth."""
    if whole := [row for row in rows if not is_part(row)]:
        yield _accuracy_sheet(title, whole)
    if chunks := [row for row in rows if is_part(row) and not is_depth(row)]:
        yield _accuracy_sheet(f"{title}, by range of tokens", chunks)
    for task, own in grouped(
        filter(is_depth, rows), lambda row: row["task"].partition("[")[0]
    ).items():
        yield _accuracy_sheet(
            f"{title}, {task}: right answers (%) by length and depth of the needle", own
        )


def _cell(row: TableRow) -> tuple[str, str]:
    return row["task"], row["metric"]


def _accuracy_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    columns = grouped(rows, _cell)
    shared = {key: _shared_settings(own) for key, own in columns.items()}
    headings = {
        key: _heading(columns[key][0]) for key in sorted(columns, key=lambda key: rank(key[1]))
    }
    _add_conditions(headings, columns)
    lines: list[tuple[tuple[str, str, str], dict[tuple[str, str], TableRow]]] = []
    for own in grouped(
        rows, lambda row: (row["run_id"], row["method"], row["label"], row["settings"])
    ).values():
        cells = {_cell(row): row for row in own}
        settings = [
            pair for pair in _pairs(own[0]) if any(pair not in shared[key] for key in cells)
        ]
        identity = (own[0]["method"], own[0]["label"], ", ".join(settings))
        for (
            other,
            joined,
        ) in lines:  # a run joins the first line of its identity whose cells are free
            if other == identity and joined.keys().isdisjoint(cells):
                joined.update(cells)
                break
        else:
            lines.append((identity, cells))

    def order(
        line: tuple[tuple[str, str, str], dict[tuple[str, str], TableRow]],
    ) -> tuple[Any, ...]:
        (_, label, settings), cells = line
        size = min(row["size"] or 0 for row in cells.values())
        return (
            size < 1,
            label,
            size,
            max(row["seq_len"] or 0 for row in cells.values()),
            settings,
        )  # full cache first

    beside = (UNMET_SIZE, *OF_SOME_RUNS, DEVICE_FRAC, RESIDENT_FRAC)
    sizes = [SIZE, *(each for each in beside if has_any(rows, each))]
    return Sheet(
        title,
        [LABEL.heading, SETTINGS.heading, *(each.heading for each in sizes), *headings.values()],
        [
            [
                label, settings or MISSING,
                *(_range(each, [row.get(each.name) for row in cells.values()]) for each in sizes),
                *(_value(cells[key]) if key in cells else MISSING for key in headings),
            ]
            for (_, label, settings), cells in sorted(lines, key=order)
        ],
        scores=[heading for key, heading in headings.items() if _is_among(SCORES, key[1])],
        notes=_note_on_settings(pair for own in shared.values() for pair in own),
    )  # fmt: skip


def _heading(row: TableRow) -> str:
    if is_depth(row) and row["metric"].isdecimal():
        return f"{int(row['metric']):,} tokens, {row['task'].partition(', ')[2].removesuffix(']')}"
    return f"{row['task']} {quantity(row['metric']).heading}"


def _pairs(row: TableRow) -> list[str]:
    return pairs_of_settings(row.get("settings"))


def pairs_of_settings(settings: str | None) -> list[str]:
    """The settings of a row, `a=[1, 2], b=3`, as its parts."""
    return [pair for pair in re.split(r", (?=[\w.]+=)", settings or "") if pair]


def _shared_settings(rows: Sequence[TableRow]) -> list[str]:
    """Settings that all rows of a column share, if there are several; they tell none apart."""
    first, *others = map(_pairs, rows)
    return [pair for pair in first if all(pair in other for other in others)] if others else []


def _note_on_settings(shared: Iterable[str]) -> list[str]:
    said = ", ".join(dict.fromkeys(shared))
    return [f"Settings of all runs: {said}."] if said else []


def _range(column: Column, values: Sequence[float | None]) -> str:
    """A size, or the smallest and the largest if they differ when rounded."""
    known = [value for value in values if value is not None]
    return "-".join(dict.fromkeys(map(column.show, (min(known), max(known))))) if known else MISSING


def _add_conditions(
    headings: dict[tuple[str, str], str], columns: Mapping[tuple[str, str], list[TableRow]]
) -> None:
    """Add number of samples, shots and length that all cells of a column share to the headings, if
    columns differ."""
    for condition in (NUM_SAMPLES, NUM_FEWSHOT, SEQ_LEN):
        values = {key: {row.get(condition.name) for row in rows} for key, rows in columns.items()}
        shared = {
            key: found.pop() for key, found in values.items() if len(found) == 1 and found != {None}
        }
        if len(set(shared.values())) > 1:
            for key, value in shared.items():
                headings[key] += f", {condition.phrase.format(value)}"


def _value(row: TableRow) -> str:
    difference = row.get("difference")
    stderr = row["stderr"] if difference is None else row.get("difference_stderr")
    contexts = row.get(NUM_CONTEXTS.name)
    return show_difference(
        quantity(row["metric"]), row["value"], stderr, difference, row.get("detectable"), contexts
    )


def show_difference(
    column: Column,
    value: float | None,
    stderr: float | None,
    difference: float | None,
    detectable: float | None,
    num_contexts: float | None = None,
) -> str:
    """`value` and its difference to the full cache: "37.5 (-50.0 ± 6.1)" or "62.5 (no difference ≥
    8.2)".

    stderr: of the difference, or of the value if there is no difference. num_contexts: as of
    `critical_value`.
    """
    if difference is None:
        return column.show(value, stderr)
    if (
        stderr is not None
        and detectable is not None
        and abs(difference) <= critical_value(num_contexts) * stderr
    ):
        return f"{column.show(value)} (no difference ≥ {column.show(detectable)})"
    return f"{column.show(value)} ({'+' * (difference > 0)}{column.show(difference, stderr)})"


# Speed: a line per timed cell


def _latency(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    """The full cache first, then by label and shape. A column needs a number, `size` does not."""
    shared = _shared_settings(rows)
    rows = [
        row | {"settings": ", ".join(pair for pair in _pairs(row) if pair not in shared)}
        for row in rows
    ]

    def order(row: TableRow) -> tuple[Any, ...]:
        size = row.get("size") or 0
        return (
            size < 1,
            row["label"],
            row["batch_size"],
            row["prompt_len"],
            row["gen_len"],
            size,
            row["settings"],
        )

    words = [LABEL, SETTINGS] if any(row["settings"] for row in rows) else [LABEL]
    numbers = [
        SIZE,
        UNMET_SIZE,
        DEVICE_FRAC,
        *(each for each in LATENCY if each.digits is not None),
    ]
    shown = [each for each in dict.fromkeys(numbers) if each == SIZE or has_any(rows, each)]
    lines = [
        [row[each.name] or MISSING for each in words]
        + [each.show(row.get(each.name)) for each in shown]
        for row in sorted(rows, key=order)
    ]
    yield Sheet(
        title, [each.heading for each in (*words, *shown)], lines, notes=_note_on_settings(shared)
    )


# Analyses: a table per run and quantity, a line per series


def _analysis(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    for (_, metric, x_name), own in grouped(
        rows, lambda row: (row["run_id"], row["metric"], row["x_name"])
    ).items():
        shown = quantity(metric)
        values = sorted({row["x"] for row in own if row["x"] is not None})
        count = min(MAX_COLUMNS, len(values))
        columns = [
            values[index * (len(values) - 1) // max(1, count - 1)] for index in range(count)
        ] or [None]
        layered = len({(row["series"], row["layer"]) for row in own}) > len(
            {row["series"] for row in own}
        )
        lines: dict[str, dict[Any, TableRow]] = {}
        for row in own:
            of_layer = layered and x_name != "layer" and row["layer"] is not None
            name = (
                f"{row['series']}, {LAYER.phrase.format(row['layer'])}"
                if of_layer
                else row["series"]
            )
            lines.setdefault(name, {})[row["x"]] = row
        cells = [
            [
                name,
                *(
                    shown.show(line[x]["value"], line[x]["stderr"]) if x in line else MISSING
                    for x in columns
                ),
            ]
            for name, line in lines.items()
        ]
        header = [LABEL.heading, *(shown.heading if x is None else f"{x:,g}" for x in columns)]
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        yield Sheet(f"{title}: {shown.heading}{by}", header, cells)


# The leaderboard: a table per asked size


def _board(title: str, rows: Sequence[TableRow]) -> Iterator[Sheet]:
    def words(row: TableRow) -> str:
        if row["experiment"] == FRONTIER:
            return "not beaten in size or in step time"
        return (
            "sizes of their own"
            if row["asked_size"] is None
            else f"size {ASKED_SIZE.show(row['asked_size'])} %"
        )

    shown = [row for row in rows if row["exempt_choice"]]
    for group, own in grouped(shown, words).items():
        closest_first = sorted(
            own, key=lambda row: math.inf if row.get(KL.name) is None else row[KL.name]
        )
        yield _board_sheet(f"{title}, {group}", closest_first)


def _board_sheet(title: str, rows: Sequence[TableRow]) -> Sheet:
    shown = [
        each
        for each in (EXEMPT_LAYERS, SIZE, KL, *BOARD_TASKS, STEP, FRONT)
        if any(row.get(each.name) not in (None, "") for row in rows)
    ]
    labels = [
        row["label"]
        + OUTSIDE_MARK * bool(row.get("outside"))
        + OTHER_SIZE * (not has_its_size(row))
        for row in rows
    ]
    lines = [
        [label, *(_board_cell(each, row) for each in shown)]
        for label, row in zip(labels, rows, strict=True)
    ]
    legend = {
        OUTSIDE_MARK: "Better than {upper} or worse than {lower}, the reference methods, in some column, so that the "
        "95 % interval of the difference is without zero; the CSV says which, in the column outside.".format(
            **REFERENCES
        ),
        OTHER_SIZE: "The method cannot have this size. It runs at the nearest one and is compared with no other.",
        MODELLED: "Modelled from the compute and the bytes of a step that was timed at another size.",
    }  # fmt: skip
    marks = {cell[-1] for line in lines for cell in line} | {
        label[at] for label in labels for at in (-1, -2)
    }
    return Sheet(
        title, [LABEL.heading, *(each.heading for each in shown)], lines,
        bold={(line, 1 + at) for at, each in enumerate(shown) for line in _best(each, rows)},
        notes=[f"{mark} {words}" for mark, words in legend.items() if mark in marks],
        details=["; ".join(filter(None, [row["settings"], row.get("outside")])) for row in rows],
    )  # fmt: skip


def _board_cell(column: Column, row: TableRow) -> str:
    value, stderr = row.get(column.name), row.get(f"{column.name}_stderr")
    if column == SIZE:  # that of the text and those of the tasks
        sizes = [size_of(row, each) for each in (KL, *BOARD_TASKS)]
        return _range(SIZE, [None if math.isnan(size) else size for size in sizes])
    if column in BOARD_TASKS:
        parts = (
            row.get(f"{column.name}_{part}")
            for part in ("difference", "detectable", NUM_CONTEXTS.name)
        )
        return show_difference(column, value, stderr, *parts)
    if column == EXEMPT_LAYERS:
        return MISSING if value is None else f"{column.show(value)}, {row['exempt_choice']}"
    if column == STEP:
        return STEP.show(value) + MODELLED * (row.get("step_source") == "modelled")
    return value or MISSING if column == FRONT else column.show(value, stderr)


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
    if column in (EXEMPT_LAYERS, SIZE, FRONT) or not values:
        return []
    best = (max if column.name in HIGHER else min)(values.values())
    return [line for line, value in values.items() if value == best]


SHAPES = {"latency": _latency, "accuracy": _accuracy, "analysis": _analysis, "board": _board}


# Text


def _markdown(title: str, note: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: title, note, tables."""
    parts = [f"# {title}", note]
    for sheet in sheets:
        cells = [
            [
                f"**{cell}**" if (row, column) in sheet.bold else cell
                for column, cell in enumerate(map(_escaped, line))
            ]
            for row, line in enumerate(sheet.lines)
        ]
        header = list(map(_escaped, sheet.header))
        table = tabulate(
            cells, header, "pipe", colalign=_sides(sheet.header, WORDS), disable_numparse=True
        )
        parts += [f"## {_escaped(sheet.title)}", table, *map(_escaped, sheet.notes)]
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Words as Markdown that shows them literally, in one line."""
    return MARKUP.sub(r"\\\g<0>", printable(text))


def _sides(header: Sequence[str], words: Collection[str]) -> list[str]:
    return ["left" if heading in words else "right" for heading in header]


def _terminal(sheet: Sheet) -> str:
    """A table for a terminal, in parts that fit its width, or `MAX_WIDTH` letters if the output is
    no terminal.

    Each part repeats the columns of words.
    """
    lines = [[shortened(printable(cell), WORD_LETTERS) for cell in line] for line in sheet.lines]
    header = list(map(printable, sheet.header))
    widths = [
        GAP
        + max(
            [HEADING_PADDING + max(map(len, _wrapped(heading))), *(len(line[at]) for line in lines)]
        )
        for at, heading in enumerate(header)
    ]
    max_width = shutil.get_terminal_size((MAX_WIDTH, 0)).columns
    words = [at for at, heading in enumerate(header) if heading in WORDS]
    parts = [words]
    for at in (at for at in range(len(header)) if at not in words):
        if (
            len(parts[-1]) > len(words)
            and sum(widths[each] for each in (*parts[-1], at)) > max_width
        ):
            parts.append(words)
        parts[-1] = [*parts[-1], at]
    texts = []
    for number, part in enumerate(parts):
        cells = [[line[at] for at in part] for line in lines]
        texts.append(
            aligned(sheet.title + ", continued" * bool(number), [header[at] for at in part], cells)
        )
    return "\n\n".join(texts)


def aligned(
    title: str,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    words: Collection[str] = WORDS,
) -> str:
    """A table in columns, its headings wrapped; words: headings of the columns that are aligned
    left."""
    wrapped, sides = ["\n".join(_wrapped(heading)) for heading in header], _sides(header, words)
    return f"{printable(title)}\n{tabulate(lines, wrapped, 'simple', colalign=sides, disable_numparse=True)}"


def _wrapped(heading: str) -> list[str]:
    return textwrap.wrap(heading, HEADING_LETTERS)
