"""What finished runs show, for a terminal: a table of each figure, and what it says in sentences.

A table has at most `MAX_ROWS` lines of `MAX_LETTERS`; all numbers are in the CSV. A run alone is
printed from top to bottom. Every sentence is made of the numbers of its table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from harness.errors import printable
from harness.results import columns, metrics
from harness.results.columns import TableRow, grouped, having
from harness.results.lines import Key, Line, is_size, lines_of, pairs_of_settings, shared
from harness.results.metrics import BUDGET, DEVICE_FRAC, MISSING, RESIDENT_FRAC, Metric, quantity
from harness.results.samples import FULL
from harness.results.sheet import (
    FEWEST_CONTEXTS,
    OF_WINDOWS,
    RIGHT_OR_WRONG,
    Sheet,
    decimals_of,
    interval_of,
    show_range,
    show_score,
    show_value,
)

MAX_ROWS, MAX_LETTERS = 20, 120
KL, PERPLEXITY, TOP1 = "kl_nats", "perplexity", "top1_agreement"
SHOWN = (
    KL, PERPLEXITY, "acc", "exact_match", "text_perplexity", "first_divergence", "repetition",
    "generated_tokens", "at_limit",
)  # fmt: skip
"""Metrics of `METRICS` that a table shows, in its order."""
SHARES = {"budget": BUDGET, "device": DEVICE_FRAC, "resident": RESIDENT_FRAC}
SPARED = "resident"
"""The column that a wide table leaves out first."""
SAME_BUDGET = 0.1
"""Budgets that differ by at most this share are compared in a sentence."""
KL_DIGITS, MAX_DECIMALS = 3, 5
MAX_NAMES, MAX_TASKS = 4, 2
"""Methods and tasks that a sentence names."""
WORSE, BETTER, UNSURE = "worse for certain (95 %)", "better for certain", "not told apart"
OF_SHARES = (
    "budget: share (%) of the full cache that a step reads; device: of it, read in device memory; "
    "resident: what the method keeps there."
)
OF_ANSWERS = "Tasks: right answers (%)."
OF_KL = "KL ± its standard error."
INTERVALS = "In brackets: the 95 % interval of the difference to the full cache."
MARKS = "*: the 95 % interval of the difference to the full cache is without zero."


class Figure(NamedTuple):
    """The runs of one table. name: their experiments. names: of the lines, as `names_of`."""

    name: str
    model: str
    lines: Sequence[Line]
    names: Sequence[str]

    def rows(self, key: Key) -> Iterator[tuple[str, TableRow]]:
        """Row of each line with a score in a column, and a name that no other line has."""
        for name, line in zip(self.names, self.lines, strict=True):
            if key in line.rows:
                is_alone = self.names.count(name) == 1
                yield name if is_alone else f"{name} at {_share(line, BUDGET)} %", line.rows[key]


# Which runs make a table


def figures_of(rows: Sequence[TableRow]) -> Iterator[Figure]:
    """The tables of accuracy rows: of each model and experiment. Experiments with the same methods,
    one on texts and one on tasks, have one together."""
    for model, of_model in grouped(rows, lambda row: row["model"]).items():
        parts: list[tuple[list[str], list[TableRow]]] = []
        for experiment, of_experiment in grouped(of_model, lambda row: row["experiment"]).items():
            for names, together in parts:
                has_other_tasks = not _tasks(together) & _tasks(of_experiment)
                if has_other_tasks and _methods(together) == _methods(of_experiment):
                    names.append(experiment)
                    together += of_experiment
                    break
            else:
                parts.append(([experiment], list(of_experiment)))
        for names, together in parts:
            lines = lines_of(together)
            if len(lines) > 1:
                lines = [*_full_cache(lines), *lines]
            yield Figure(", ".join(names), model, lines, names_of(lines))


def _tasks(rows: Iterable[TableRow]) -> set[str]:
    return {row["task"] for row in rows}


def _methods(rows: Iterable[TableRow]) -> set[tuple[str, ...]]:
    """Label and settings of each method, without the sizes of texts and tasks."""
    found = set()
    for row in rows:
        pairs = pairs_of_settings(row["settings"])
        found.add((row["label"], *(pair for pair in pairs if not is_size(pair))))
    return found


def is_full(line: Line) -> bool:
    """Whether a line is of the full cache."""
    return line.method == FULL and all(row["budget"] == 1 for row in line.rows.values())


def _full_cache(lines: Sequence[Line]) -> list[Line]:
    """The line of the full cache where it has no run here: what the others were compared with."""
    if any(map(is_full, lines)):
        return []
    found = {}
    for key in columns_of(lines):
        rows = having((line.rows[key] for line in lines if key in line.rows), "difference")
        values = [row["value"] - row["difference"] for row in rows]
        if key[1] == KL:  # of the full cache to itself
            rows, values = [line.rows[key] for line in lines if key in line.rows], [0.0]
        if rows and math.isclose(min(values), max(values), rel_tol=1e-9):
            full = {"method": FULL, "value": values[0], "stderr": None, "difference": None}
            shares = {"budget": 1.0, "device_frac": 1.0, "resident_frac": 0.0}
            found[key] = rows[0] | full | shares
    has_compared = any(metric != KL for _, metric in found)
    return [Line("Full cache", FULL, (), found)] if has_compared else []


def names_of(lines: Sequence[Line]) -> list[str]:
    """The label of each line, with the settings that tell it from others of that label. The asked
    budget stands among them where the one that was read does not tell them apart. Two runs with
    the same settings are told apart by a prime."""
    known = {}
    for label, alike in grouped(lines, lambda line: line.label).items():
        known[label] = shared(line.settings for line in alike)
    whole, brief = [], []
    for line in lines:
        own = [pair for pair in line.settings if pair not in known[line.label]]
        short = [pair for pair in own if not pair.startswith("budget=")]
        whole.append(", ".join([line.label, *own]))
        brief.append((", ".join([line.label, *short]), _share(line, BUDGET)))
    names: list[str] = []
    for name, short_name in zip(whole, brief, strict=True):
        chosen = short_name[0] if brief.count(short_name) == 1 else name
        again = names.count(printable(chosen)) if whole.count(name) > 1 else 0
        names.append(printable(chosen) + again * "'")
    return names


def columns_of(lines: Sequence[Line]) -> list[Key]:
    """The columns of a table: what was measured on texts, then on tasks."""
    found = dict.fromkeys(key for line in lines for key in line.rows)
    shown = []
    for task, metric in found:
        name = metric.partition(",")[0]
        if name in SHOWN or name not in metrics.METRICS:
            shown.append((task, metric))
    places = {name: place for place, name in enumerate(SHOWN)} | {"exact_match": SHOWN.index("acc")}
    return sorted(shown, key=lambda key: places.get(key[1].partition(",")[0], SHOWN.index("acc")))


# The table


def printed(rows: Sequence[TableRow]) -> str:
    """Accuracy rows as tables with their sentences; chunks of texts are left to the CSV."""
    texts = []
    explained: set[str] = set()
    for figure in figures_of([row for row in rows if not columns.is_part(row)]):
        if len(figure.lines) == 1:
            texts.append(_vertical(figure))
        else:
            parts = [f"## {_title(figure)}", _table(figure, explained), _said(figure)]
            texts.append("\n\n".join(filter(None, parts)))
    return "\n\n".join(texts)


def _title(figure: Figure) -> str:
    parts = []
    for task, of_task in grouped(columns_of(figure.lines), lambda key: key[0]).items():
        rows = [row for _, row in figure.rows(of_task[0])]
        samples, lengths = _each(rows, "num_samples"), _each(rows, "seq_len")
        if of_task[0][1] in OF_WINDOWS:
            parts.append(f"{task}: {samples} window{'s' * (samples != '1')} of {lengths} tokens")
        else:
            parts.append(f"{task}: {samples} question{'s' * (samples != '1')}")
    return printable(f"{figure.name}, {figure.model} ({'; '.join(parts)})")


def _each(rows: Iterable[TableRow], name: str) -> str:
    """The values of a column, "512 or 2,048"."""
    return " or ".join(f"{value:,.0f}" for value in sorted({row.get(name) or 0 for row in rows}))


def _table(figure: Figure, explained: set[str]) -> str:
    """The table with intervals, or with marks where these are too wide, and what it leaves out.

    explained: what the tables above have said; added to.
    """
    chosen, keys = _closest(figure), columns_of(figure.lines)
    frame = _frame(figure, has_intervals=True).iloc[chosen]
    has_intervals = width_of(frame) <= MAX_LETTERS
    if not has_intervals:
        frame = _frame(figure, has_intervals=False).iloc[chosen]
    frame, left_out = fitted(frame)

    rows = [row for line in figure.lines for row in line.rows.values()]
    notes = [OF_SHARES]
    if any(map(_is_answer, keys)):
        notes.append(OF_ANSWERS)
    if any(metric == KL for _, metric in keys):
        notes.append(OF_KL)
    if any(map(interval_of, rows)):
        notes.append(INTERVALS if has_intervals else MARKS)
    notes = [words for words in notes if words not in explained]
    explained.update(notes)
    few = {row.get("num_contexts") or FEWEST_CONTEXTS for row in rows}
    if min(few) < FEWEST_CONTEXTS:
        notes.append(f"{min(few):.0f} windows or contexts: no interval.")
    if len(chosen) < len(figure.lines):
        notes.append(f"{len(chosen)} of {len(figure.lines)} lines, the closest to the full cache.")
    if left_out:
        notes.append(f"Not shown: {', '.join(left_out)}.")
    return "\n\n".join(filter(None, [markdown(frame), wrapped(" ".join(notes))]))


def _is_answer(key: Key) -> bool:
    return key[1].partition(",")[0] in RIGHT_OR_WRONG


def _closest(figure: Figure) -> list[int]:
    """The numbers of the lines to show: all, or the closest to the full cache in the first
    column."""
    places = list(range(len(figure.lines)))
    if len(places) <= MAX_ROWS:
        return places
    key = columns_of(figure.lines)[0]
    sign = 1 if key[1] in (KL, PERPLEXITY) else -1

    def distance(place: int) -> tuple[bool, float]:
        row = figure.lines[place].rows.get(key)
        return not is_full(figure.lines[place]), math.inf if row is None else sign * row["value"]

    return sorted(places, key=distance)[:MAX_ROWS]


def _frame(figure: Figure, *, has_intervals: bool) -> pd.DataFrame:
    """The cells of a table."""
    keys = columns_of(figure.lines)
    cells: dict[str, list[str]] = {"method": list(figure.names)}
    for heading, column in SHARES.items():
        cells[heading] = [_share(line, column) for line in figure.lines]
    for key in keys:
        of_lines = [line.rows.get(key) for line in figure.lines]
        cells[heading_of(key, keys)] = [_cell(row, has_intervals) for row in of_lines]
    return pd.DataFrame(cells)


def _share(line: Line, column: Metric) -> str:
    return show_range(column, [row.get(column.name) for row in line.rows.values()])


def heading_of(key: Key, keys: Collection[Key]) -> str:
    """The heading of a column among all of a table: of a task its name where that is enough."""
    task, metric = key
    shown = quantity(metric)
    if metric in (KL, PERPLEXITY, TOP1):
        is_alone = sum(other == metric for _, other in keys) <= 1
        return shown.heading if is_alone else f"{task} {shown.heading}"
    of_task = [other for name, other in keys if name == task]
    if of_task == [metric] and _is_answer(key):
        return task
    return f"{task} {shown.heading}"


def _cell(row: TableRow | None, has_intervals: bool) -> str:
    if row is None:
        return MISSING
    if row["metric"] == KL:
        return show_kl(row)
    text, interval = show_value(row), interval_of(row)
    if interval is None:
        return text
    if not has_intervals:
        return f"{text}*" if interval.is_certain else text
    is_same = interval.low == interval.high == 0
    return f"{text} (same)" if is_same else f"{text} ({interval.show()})"


def show_kl(row: TableRow) -> str:
    """A KL in nats with three digits, and its standard error."""
    value, stderr = row["value"], row["stderr"]
    decimals = min(MAX_DECIMALS, decimals_of(value, KL_DIGITS))
    text = f"{value:z.{decimals}f}"
    if not value or stderr is None or (row.get("num_contexts") or math.inf) < FEWEST_CONTEXTS:
        return text
    return f"{text} ± {stderr:.{decimals}f}"


def markdown(frame: pd.DataFrame) -> str:
    """A frame of words as a table of Markdown, the first column aligned left."""
    widths = _widths(frame)
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    rows: list[list[str]] = [list(map(str, frame)), rule, *frame.to_numpy().tolist()]
    lines = []
    for cells in rows:
        padded = [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def _widths(frame: pd.DataFrame) -> list[int]:
    rows: list[list[str]] = [list(map(str, frame)), *frame.to_numpy().tolist()]
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def width_of(frame: pd.DataFrame) -> int:
    """Letters of a line of `markdown`."""
    return sum(_widths(frame)) + 3 * frame.shape[1] + 1


def wrapped(text: str) -> str:
    """Lines of at most `MAX_LETTERS`, none of which begins with a %."""
    return textwrap.fill(text.replace(" %", "\u00a0%"), MAX_LETTERS).replace("\u00a0", " ")


def fitted(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """A frame without so many columns, the last ones, that its lines are short enough; and their
    headings."""
    left_out: list[str] = []
    while width_of(frame) > MAX_LETTERS and frame.shape[1] > 2:
        name = SPARED if SPARED in frame else str(frame.columns[-1])
        frame = frame.drop(columns=name)
        left_out.append(name)
    return frame, left_out


def _vertical(figure: Figure) -> str:
    """A run alone, a line for each number."""
    (line,) = figure.lines
    rows = list(line.rows.values())
    cells = {"settings": ", ".join(line.settings)}
    beside = (metrics.UNMET_BUDGET, *metrics.OF_SOME_RUNS)
    for column in (BUDGET, *columns.with_values(beside, rows), DEVICE_FRAC, RESIDENT_FRAC):
        cells[column.heading] = _share(line, column)
    keys = columns_of(figure.lines)
    for key in [*keys, *(key for key in line.rows if key[1] == TOP1)]:
        row = line.rows[key]
        cells[heading_of(key, keys)] = show_kl(row) if row["metric"] == KL else show_score(row)
    return vertical(f"{_title(figure)}\n{figure.names[0]}", cells)


def vertical(title: str, cells: Mapping[str, str]) -> str:
    """A title, and a line for each heading that has a value."""
    known = {heading: text for heading, text in cells.items() if text not in ("", MISSING)}
    width = max(map(len, known))
    return "\n".join([title, *(f"  {heading:{width}}  {text}" for heading, text in known.items())])


# What the table says


def said(rows: Sequence[TableRow]) -> str:
    """What accuracy rows show in sentences, a paragraph for each table of theirs."""
    whole = [row for row in rows if not columns.is_part(row)]
    return "\n\n".join(filter(None, map(_said, figures_of(whole))))


def _said(figure: Figure) -> str:
    """What the table shows: by KL, at one budget, in perplexity and in answers. "" where nothing
    is compared."""
    sentences: list[str] = []
    keys = columns_of(figure.lines)
    for key in keys:
        rows = {name: row for name, row in figure.rows(key) if not _is_full_row(row)}
        if key[1] == KL and len(rows) > 1 and not sentences:
            sentences += [_nearest(rows), _at_one_budget(rows)]
    for words, of_kind in (
        ("Perplexity", [key for key in keys if key[1] == PERPLEXITY]),
        ("Answers", list(filter(_is_answer, keys))),
    ):
        compared = _compared(figure, of_kind)
        if compared:
            sentences.append(f"{words}: {compared}.")
    return wrapped(" ".join(sentences))


def _is_full_row(row: TableRow) -> bool:
    return row["method"] == FULL and row["budget"] == 1


def _nearest(rows: Mapping[str, TableRow]) -> str:
    """Which method is closest to the full cache, and which farthest."""
    in_order = sorted(rows, key=lambda name: rows[name]["value"])
    near, far = in_order[0], in_order[-1]
    return (
        f"By KL {near} is closest to the full cache ({_kl(rows[near])} nats; it reads "
        f"{BUDGET.show(rows[near]['budget'])} % of it), {far} farthest ({_kl(rows[far])}; "
        f"{BUDGET.show(rows[far]['budget'])} %)."
    )


def _kl(row: TableRow) -> str:
    return show_kl(row | {"stderr": None})


def _at_one_budget(rows: Mapping[str, TableRow]) -> str:
    """The KL of the largest group of methods that read about the same, or that none do."""
    groups = []
    for row in rows.values():
        near: dict[str, str] = {}
        for name in sorted(rows, key=lambda name: rows[name]["value"]):
            if abs(rows[name]["budget"] - row["budget"]) <= SAME_BUDGET * row["budget"]:
                near.setdefault(rows[name]["label"], name)
        groups.append(near.values())
    chosen = {name: rows[name] for name in max(groups, key=len)}
    if len(chosen) < 2:
        read = show_range(BUDGET, [row["budget"] for row in rows.values()], " to ")
        at_one = "budget=0.2 compares at one budget what can have it"
        return f"They read different shares, {read} % of the cache; {at_one}."
    read = show_range(BUDGET, [row["budget"] for row in chosen.values()], " to ")
    listed = " / ".join(f"{row['label']} {_kl(row)}" for row in chosen.values())
    return f"At about the same budget ({read} %): {listed} nats."


def _compared(figure: Figure, keys: Sequence[Key]) -> str:
    """For each column the full cache's value, and which lines certainly differ from it."""
    parts = []
    for key in keys:
        rows = {name: row for name, row in figure.rows(key) if interval_of(row)}
        if not rows:
            continue
        row = next(iter(rows.values()))
        full = show_value(row | {"value": row["value"] - row["difference"]})
        if _is_answer(key):
            full += f" % of {key[0]}"
        parts.append(f"the full cache has {full}; {_certain(rows, key)}")
    if len(parts) > MAX_TASKS:
        parts[MAX_TASKS:] = [f"{len(parts) - MAX_TASKS} further tasks are in the table"]
    return "; ".join(parts)


def _certain(rows: Mapping[str, TableRow], key: Key) -> str:
    sides: dict[str, list[str]] = {WORSE: [], BETTER: [], UNSURE: []}
    for name, row in rows.items():
        interval = interval_of(row)
        if interval is None or not interval.is_certain:
            sides[UNSURE].append(name)
        else:
            is_worse = (row["difference"] > 0) == (key[1] == PERPLEXITY)
            sides[WORSE if is_worse else BETTER].append(name)
    words = []
    for side, names in sides.items():
        listed = " / ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} of {len(rows)}"
        if names:
            words.append(f"{side}: {listed}")
    return ", ".join(words)


# Runs of other kinds: their sheets, as narrow


def printed_sheet(sheet: Sheet) -> str:
    """A sheet with at most `MAX_ROWS` lines of `MAX_LETTERS`, and what it leaves out. A number that
    all lines share stands in the title; one line alone is printed from top to bottom."""
    title = printable(sheet.title)
    if len(sheet.lines) == 1:
        return vertical(title, dict(zip(sheet.header, sheet.lines[0], strict=True)))
    lines = [list(map(printable, line)) for line in sheet.lines]
    frame = pd.DataFrame(lines, columns=list(map(printable, sheet.header)))
    alike = [name for name in frame.columns[1:] if frame[name].nunique() == 1]
    parts = [title, *(f"{name} {frame[name].iloc[0]}" for name in alike)]
    shown, left_out = fitted(frame.drop(columns=alike).head(MAX_ROWS))
    notes = list(sheet.notes)
    if len(frame) > MAX_ROWS:
        notes.append(f"{MAX_ROWS} of {len(frame)} lines.")
    if left_out:
        notes.append(f"Not shown: {', '.join(left_out)}.")
    texts = [f"## {', '.join(parts)}", markdown(shown), wrapped(" ".join(notes)), _fastest(frame)]
    return "\n\n".join(filter(None, texts))


def _fastest(frame: pd.DataFrame) -> str:
    """The shortest and the longest decode step of a table of timed runs."""
    heading = metrics.TPOT.heading
    timed = frame[frame.get(heading, pd.Series(MISSING, frame.index)) != MISSING]
    if len(timed) < 2:
        return ""
    in_order = timed.loc[timed[heading].astype(float).sort_values().index]
    near, far = in_order.iloc[0], in_order.iloc[-1]
    return (
        f"A decode step is shortest with {near.iloc[0]} ({near[heading]} ms) and longest with "
        f"{far.iloc[0]} ({far[heading]} ms)."
    )
