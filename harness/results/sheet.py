"""A table for people: rounded texts with units and errors, on a page or in a terminal.

Seconds become ms and bytes GiB here (`Metric.show`), and only here.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pandas as pd
import yaml
from tabulate import tabulate

from harness.errors import printable
from harness.results.metrics import (
    APART,
    CLAIM,
    DEVICE_FRAC,
    LABEL,
    MISSING,
    RESIDENT_FRAC,
    SETTINGS,
    Metric,
    quantity,
)
from harness.results.stats import critical_value

T = TypeVar("T")
WORDS = ("method", LABEL.heading, SETTINGS.heading, CLAIM.heading, APART.heading)
"""Headings of columns of words, aligned left. All other columns are numbers."""
MARKUP = re.compile(
    r"[\\`*|$]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)"
    r"|\](?=[(\[])|:(?=//)|(?<=www)\.|@(?=[\w.-]+\.)"  # links, addresses
)
"""Characters that Markdown would interpret."""
MAX_LETTERS = 120
"""Letters of a line in a terminal."""
SPARED = (RESIDENT_FRAC.heading, DEVICE_FRAC.heading, SETTINGS.heading)
"""The columns that a wide table leaves out first."""
OWN = "*"
"""Mark of one's own runs in a table that also has shipped rows."""
OWN_NOTE = f"{OWN} One's own run; the other rows are shipped with the project."
NOTES = yaml.safe_load(Path(__file__).with_name("notes.yaml").read_text(encoding="utf-8"))


class Sheet(NamedTuple):
    """One table: a title, the cells as texts under their headings, and notes below the table."""

    title: str
    table: pd.DataFrame
    notes: Sequence[str] = ()


def sheet_of(title: str, items: Iterable[T], shown: Mapping[str, Callable[[T], str]]) -> Sheet:
    """A sheet with a line for each item. shown: what a line has under each heading."""
    lines = [[show(item) for show in shown.values()] for item in items]
    return Sheet(title, pd.DataFrame(lines, columns=list(shown)))


def texts_of(frame: pd.DataFrame, columns: Iterable[Metric]) -> pd.DataFrame:
    """The columns of a frame as texts under their headings."""
    texts = {}
    for column in columns:
        values = frame[column.name]
        if column.digits is None:
            texts[column.heading] = values.replace("", MISSING)
        else:
            texts[column.heading] = values.map(column.show)
    return pd.DataFrame(texts)


def mark_own(frame: pd.DataFrame, name: str) -> tuple[pd.DataFrame, list[str]]:
    """The frame with one's own runs marked in the column `name` where other rows are shipped, and a
    note on it."""
    if "shipped" not in frame or frame["shipped"].eq("").nunique() < 2:
        return frame, []
    marked = frame[name].where(frame["shipped"].ne(""), frame[name] + f" {OWN}")
    return frame.assign(**{name: marked}), [OWN_NOTE]


def note(name: str, **fields: object) -> str:
    """A note of `notes.yaml`. fields: what stands in it, besides the notes of several."""
    words: str = NOTES[name]
    shared = {part: NOTES[part] for part in ("budget", "difference", "interval")}
    return words.format(**shared, **fields)


# Numbers as texts

RIGHT_OR_WRONG = ("acc", "acc_norm", "exact_match")
"""Metrics that are the share of questions that were answered right."""
PERPLEXITIES = ("perplexity", "perplexity_full")
OF_WINDOWS = (*PERPLEXITIES, "kl_nats", "top1_agreement")
"""Metrics whose contexts are windows of a text."""
FEWEST_CONTEXTS = 3
"""Of an interval: with two it would go 12.7 standard errors to each side."""
COUNTED = 20
"""Fewer questions are counted: "2 of 3"."""
SCORE_DIGITS, ERROR_DIGITS, KL_DIGITS = 4, 2, 3
MAX_DECIMALS = 5
ROUNDING = 1e-6


def show_range(column: Metric, values: Iterable[float | None], between: str = " to ") -> str:
    """A value, or the smallest and the largest if they differ when rounded."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return MISSING
    least, most = column.show(min(known)), column.show(max(known))
    return least if least == most else f"{least}{between}{most}"


def with_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """Accuracy rows with the 95 % interval (Student's t) of their difference to the full cache,
    from `low` to `high` in the unit of the heading.

    With fewer than `FEWEST_CONTEXTS` contexts a row has neither it nor a standard error.
    """
    contexts, difference = rows["num_contexts"], rows["difference"]
    factor = rows["metric"].map(lambda metric: quantity(metric).factor)
    critical = [critical_value(None if math.isnan(number) else number) for number in contexts]
    half_width = (critical * rows["difference_stderr"]).mask(contexts < FEWEST_CONTEXTS)
    return rows.assign(
        low=factor * (difference - half_width),
        high=factor * (difference + half_width),
        stderr=rows["stderr"].mask(contexts < FEWEST_CONTEXTS),
    )


def decimals_of(value: float, digits: int) -> int:
    """Decimals of a number that has so many digits; none of 0."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def counted(row: pd.Series) -> str:
    """Right answers as "2 of 3", where they are few, all or none; "" elsewhere.

    A standard error says nothing of these.
    """
    number, right = row["num_samples"], row["num_samples"] * row["value"]
    is_answer = row["metric"].partition(",")[0] in RIGHT_OR_WRONG
    if not is_answer or not number > 0 or abs(right - round(right)) > ROUNDING:
        return ""
    return f"{right:.0f} of {number:.0f}" if number < COUNTED or right in (0, number) else ""


def show_value(row: pd.Series) -> str:
    """A row's value: a perplexity of any size with four digits, right answers as `counted`."""
    shown = quantity(row["metric"])
    if row["metric"] not in PERPLEXITIES or not row["value"]:
        return counted(row) or shown.show(row["value"])
    decimals = min(shown.digits or 0, decimals_of(row["value"], SCORE_DIGITS))
    return f"{row['value']:,.{decimals}f}"


def show_cell(row: pd.Series) -> str:
    """The value of a row of `with_intervals`, with the interval of its difference to the full
    cache, `487.5 (-245 to +1,195)`. Where it has none, with the difference, `487.5 (+475)`, or else
    with its standard error."""
    if row["metric"] == "kl_nats":
        return show_kl(row["value"], row["stderr"])
    text, factor = show_value(row), quantity(row["metric"]).factor
    low, high, change = row["low"], row["high"], factor * row["difference"]
    if math.isnan(change):
        if not row["stderr"] > 0 or counted(row):
            return text
        return f"{text} ± {factor * row['stderr']:,.{len(text.partition('.')[2])}f}"
    if change == 0 and not high > 0:
        return f"{text} (same)"
    if math.isnan(low):
        return f"{text} ({change:+,.{decimals_of(change, ERROR_DIGITS)}f})"
    decimals = decimals_of(max(abs(low), abs(high)), ERROR_DIGITS)
    return f"{text} ({low:+,.{decimals}f} to {high:+,.{decimals}f})"


def show_kl(value: float, stderr: float = math.nan) -> str:
    """A KL in nats with three digits, and its standard error if known."""
    decimals = min(MAX_DECIMALS, decimals_of(value, KL_DIGITS))
    text = f"{value:z.{decimals}f}"
    return f"{text} ± {stderr:.{decimals}f}" if value and not math.isnan(stderr) else text


# A page


def markdown(title: str, words: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: title, words, tables."""
    parts = [f"# {title}", words]
    for sheet in sheets:
        parts += [f"## {_escaped(sheet.title)}", pipes(sheet), *map(_escaped, sheet.notes)]
    return "\n\n".join(parts) + "\n"


def pipes(sheet: Sheet) -> str:
    """The cells of a sheet, as a table of Markdown."""
    header, *lines = _cells(sheet.table, _escaped)
    sides = _sides(sheet.table)
    return tabulate(lines, header, "pipe", colalign=sides, disable_numparse=True)


def _escaped(text: str) -> str:
    return MARKUP.sub(r"\\\g<0>", printable(text))


def _cells(table: pd.DataFrame, show: Callable[[str], str]) -> list[list[str]]:
    """The headings, then the lines."""
    return [list(map(show, line)) for line in (table.columns, *table.to_numpy())]


def _sides(table: pd.DataFrame) -> list[str]:
    return ["left" if heading in WORDS else "right" for heading in table]


# A terminal


def terminal(sheet: Sheet) -> str:
    """A sheet with lines of `MAX_LETTERS`, and what it leaves out."""
    left_out = []
    shown, notes = sheet.table, list(sheet.notes)
    while not fits(shown) and shown.shape[1] > 2:
        spared = [heading for heading in SPARED if heading in shown]
        heading = spared[0] if spared else shown.columns[-1]
        shown = shown.drop(columns=heading)
        left_out.append(heading)
    if left_out:
        notes.append(f"Not shown: {', '.join(left_out)}.")
    texts = [f"## {printable(sheet.title)}", _narrow(shown), wrapped(" ".join(notes))]
    return "\n\n".join(filter(None, texts))


def fits(table: pd.DataFrame) -> bool:
    """Whether the lines of a table are short enough for a terminal."""
    return len(_narrow(table).partition("\n")[0]) <= MAX_LETTERS


def _narrow(table: pd.DataFrame) -> str:
    """A table of Markdown. The headings go in as a line, since `tabulate` widens those of their
    own."""
    cells, sides = _cells(table, printable), _sides(table)
    text = tabulate(cells, tablefmt="pipe", colalign=sides, disable_numparse=True)
    rule, header, *lines = text.splitlines()
    return "\n".join([header, rule, *lines])


def wrapped(text: str) -> str:
    """Lines of at most `MAX_LETTERS`."""
    return textwrap.fill(printable(text), MAX_LETTERS)
