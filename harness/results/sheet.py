"""A table for people: rounded texts with units and standard errors, as Markdown or in a terminal.

Seconds become ms and bytes GiB here (`Metric.show`), and only here.
"""

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from tabulate import tabulate

from harness.errors import printable, shortened
from harness.results.columns import TableRow
from harness.results.metrics import (
    APART,
    CLAIM,
    LABEL,
    MISSING,
    NUM_CONTEXTS,
    POSITIVE,
    SETTINGS,
    Metric,
    quantity,
)
from harness.results.stats import critical_value

T = TypeVar("T")
WORDS = (LABEL.heading, SETTINGS.heading, CLAIM.heading, APART.heading)
"""Headings of columns of words, aligned left. All other columns are numbers."""
HEADING_LETTERS, MAX_WIDTH, GAP = 13, 160, 2
HEADING_PADDING = 2  # what tabulate adds to a heading
WORD_LETTERS = 44
"""Longest text of a line in a terminal."""
MARKUP = re.compile(
    r"[\\`*|$]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)"
    r"|\](?=[(\[])|:(?=//)|(?<=www)\.|@(?=[\w.-]+\.)"  # links, addresses
)
"""Characters that Markdown would interpret."""
RIGHT_OR_WRONG = ("acc", "acc_norm", "exact_match")
"""Metrics that are the share of questions that were answered right."""
OF_WINDOWS = ("perplexity", "perplexity_full", "kl_nats", "top1_agreement")
"""Metrics whose contexts are windows of a text."""
ROUNDING = 1e-6
OWN = "*"
"""Mark of one's own runs in a table that also has shipped rows."""
OWN_NOTE = f"{OWN} One's own run; the other rows are shipped with the project."
NOTES = yaml.safe_load(Path(__file__).with_name("notes.yaml").read_text(encoding="utf-8"))


def note(name: str, **fields: object) -> str:
    """A note of `notes.yaml`. fields: what stands in it, besides the notes of several."""
    words: str = NOTES[name]
    shared = {part: NOTES[part] for part in ("budget", "difference", "interval")}
    return words.format(**shared, **fields)


class Sheet(NamedTuple):
    """One table: a title, the headings, the lines as text, and notes below the table."""

    title: str
    header: list[str]
    lines: list[list[str]]
    notes: Sequence[str] = ()


Shown = dict[str, Callable[[TableRow], str]]
"""The columns of a sheet: by heading, what shows a row there."""


def sheet_of(
    title: str, rows: Iterable[T], shown: Mapping[str, Callable[[T], str]], **parts: Any
) -> Sheet:
    """A sheet with a line for each row, or group of rows. parts: further fields of the sheet."""
    lines = [[show(row) for show in shown.values()] for row in rows]
    return Sheet(title, list(shown), lines, **parts)


def shown_as_is(columns: Iterable[Metric]) -> Shown:
    """Columns that show a row's own number or words."""
    return {column.heading: partial(_cell, column) for column in columns}


def _cell(column: Metric, row: TableRow) -> str:
    value = row.get(column.name)
    return str(value or MISSING) if column.digits is None else column.show(value)


def mark_own(rows: Sequence[TableRow], name: str) -> tuple[Sequence[TableRow], list[str]]:
    """Mark one's own runs in the column `name` where other rows are shipped; with a note on it."""
    if len({bool(row.get("shipped")) for row in rows}) < 2:
        return rows, []
    marked = []
    for row in rows:
        marked.append(row if row.get("shipped") else row | {name: f"{row[name]} {OWN}"})
    return marked, [OWN_NOTE]


def show_range(column: Metric, values: Iterable[float | None], between: str = "-") -> str:
    """A value, or the smallest and the largest if they differ when rounded."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    least, most = column.show(min(known)), column.show(max(known))
    return least if least == most else f"{least}{between}{most}"


FEWEST_CONTEXTS = 3
"""Of an interval: with two it would go 12.7 standard errors to each side."""
COUNTED = 20
"""Fewer questions are counted: "2 of 3"."""
SCORE_DIGITS, ERROR_DIGITS = 4, 2


class Interval(NamedTuple):
    """The 95 % interval (Student's t) of a difference, in the unit of its heading."""

    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0

    def show(self) -> str:
        """`-245 to +1,195`, with two digits of the end that is farther from zero."""
        decimals = decimals_of(max(abs(self.low), abs(self.high)), ERROR_DIGITS)
        return f"{self.low:+,.{decimals}f} to {self.high:+,.{decimals}f}"


def decimals_of(value: float, digits: int) -> int:
    """Decimals of a number that has so many digits; none of 0."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def interval_of(row: TableRow) -> Interval | None:
    """The interval of a row's difference to the full cache; None where none is known."""
    difference, stderr = row.get("difference"), row.get("difference_stderr")
    contexts = row.get(NUM_CONTEXTS.name)
    if difference is None or stderr is None or (contexts or FEWEST_CONTEXTS) < FEWEST_CONTEXTS:
        return None
    factor, half_width = quantity(row["metric"]).factor, critical_value(contexts) * stderr
    return Interval(factor * (difference - half_width), factor * (difference + half_width))


def counted(row: TableRow) -> str | None:
    """Right answers as "2 of 3", where they are few, all or none; None elsewhere.

    A standard error says nothing of these.
    """
    value, number = row["value"], row.get("num_samples")
    if row["metric"].partition(",")[0] not in RIGHT_OR_WRONG or not number:
        return None
    right = value * number
    if abs(right - round(right)) > ROUNDING or number >= COUNTED and 0 < right < number:
        return None
    return f"{right:.0f} of {number:.0f}"


def show_value(row: TableRow) -> str:
    """A row's value: a perplexity of any size with four digits, right answers as `counted`."""
    shown = quantity(row["metric"])
    if shown.unit is not POSITIVE or not row["value"]:
        return counted(row) or shown.show(row["value"])
    decimals = min(shown.digits or 0, decimals_of(row["value"], SCORE_DIGITS))
    return f"{row['value']:,.{decimals}f}"


def show_score(row: TableRow) -> str:
    """A row's value with its difference to the full cache, `487.5; +475 (95 %: -245 to +1,195)`,
    or with its standard error where there is no difference."""
    shown, difference = quantity(row["metric"]), row.get("difference")
    text = show_value(row)
    if difference is None:
        stderr, contexts = row["stderr"], row.get(NUM_CONTEXTS.name) or FEWEST_CONTEXTS
        if not stderr or counted(row) or contexts < FEWEST_CONTEXTS:
            return text
        decimals = len(text.partition(".")[2])
        return f"{text} ± {shown.factor * stderr:,.{decimals}f}"
    stderr, contexts = row.get("difference_stderr"), row.get(NUM_CONTEXTS.name)
    change, interval = shown.factor * difference, interval_of(row)
    if not change and not stderr:
        return f"{text}; the same"
    change_text = f"{change:+,.{decimals_of(change, ERROR_DIGITS)}f}"
    if stderr == 0:
        return f"{text}; {change_text} on each"
    if interval is None:
        part = "window" if row["metric"] in OF_WINDOWS else "context"
        plural = "s" * (contexts != 1)
        why = f"{contexts:.0f} {part}{plural}: no interval" if contexts else "no interval"
        return f"{text}; {change_text} ({why})"
    return f"{text}; {change_text} (95 %: {interval.show()})"


# Text


def markdown(title: str, words: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: title, words, tables."""
    parts = [f"# {title}", words]
    for sheet in sheets:
        parts += [f"## {_escaped(sheet.title)}", pipes(sheet), *map(_escaped, sheet.notes)]
    return "\n\n".join(parts) + "\n"


def pipes(sheet: Sheet) -> str:
    """The headings and lines of a sheet, as a table of Markdown."""
    lines = [list(map(_escaped, line)) for line in sheet.lines]
    header = list(map(_escaped, sheet.header))
    sides = _sides(sheet.header)
    return tabulate(lines, header, "pipe", colalign=sides, disable_numparse=True)


def _escaped(text: str) -> str:
    return MARKUP.sub(r"\\\g<0>", printable(text))


def _sides(header: Iterable[str]) -> list[str]:
    return ["left" if heading in WORDS else "right" for heading in header]


def terminal(sheet: Sheet) -> str:
    """A table for a terminal, in parts that fit its width, with wrapped headings.

    The width is `MAX_WIDTH` letters if the output is no terminal. Each part repeats the columns of
    words.
    """
    header = list(map(printable, sheet.header))
    wrapped = [textwrap.wrap(heading, HEADING_LETTERS) for heading in header]
    lines = []
    for line in sheet.lines:
        lines.append([shortened(printable(text), WORD_LETTERS) for text in line])
    widths = []
    for at, heading in enumerate(wrapped):
        cells = [len(line[at]) for line in lines]
        widths.append(GAP + max(HEADING_PADDING + max(map(len, heading)), *cells))
    texts: list[str] = []
    for part in _parts(header, widths):
        title = f"{sheet.title}, continued" if texts else sheet.title
        shown = [[line[at] for at in part] for line in lines]
        headings = ["\n".join(wrapped[at]) for at in part]
        sides = _sides(header[at] for at in part)
        table = tabulate(shown, headings, "simple", colalign=sides, disable_numparse=True)
        texts.append(f"{printable(title)}\n{table}")
    return "\n\n".join(texts)


def _parts(header: Sequence[str], widths: Sequence[int]) -> list[list[int]]:
    """The numbers of the columns in parts that fit the terminal."""
    max_width = shutil.get_terminal_size((MAX_WIDTH, 0)).columns
    words = [at for at, heading in enumerate(header) if heading in WORDS]
    parts = [words]
    for at, heading in enumerate(header):
        if heading in WORDS:
            continue
        width = widths[at] + sum(widths[number] for number in parts[-1])
        if len(parts[-1]) > len(words) and width > max_width:
            parts.append(words)
        parts[-1] = [*parts[-1], at]
    return parts
