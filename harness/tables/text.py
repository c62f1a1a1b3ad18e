"""Tables as text: Markdown, and aligned columns for a terminal."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from tabulate import tabulate

from harness.errors import printable, shortened
from harness.tables.columns import LABEL, SETTINGS

WORDS = (LABEL.heading, SETTINGS.heading)
"""Headings of columns of words, aligned left. All other columns are numbers."""
HEADING_LETTERS, MAX_WIDTH, GAP = 13, 160, 2
HEADING_PADDING = 2  # what tabulate adds to a heading
WORD_LETTERS = 44
"""Longest cell of words in a terminal."""
MARKUP = re.compile(r"[\\`*|$]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)")
"""Characters that Markdown would interpret."""


class Sheet(NamedTuple):
    """One table: a title, the headings, and the cells as text.

    scores: headings of metrics that every run measures, so an empty cell is a gap. bold: cells, as (line, column).
    notes: lines below the table. details: further text of each line, for a report.
    """

    title: str
    header: list[str]
    lines: list[list[str]]
    scores: Collection[str] = ()
    bold: Collection[tuple[int, int]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()


def markdown(title: str, note: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: title, note, tables."""
    parts = [f"# {title}", note]
    for sheet in sheets:
        cells = [
            [f"**{cell}**" if (row, column) in sheet.bold else cell for column, cell in enumerate(map(_escaped, line))]
            for row, line in enumerate(sheet.lines)
        ]
        table = tabulate(
            cells, list(map(_escaped, sheet.header)), "pipe", colalign=_sides(sheet), disable_numparse=True
        )
        parts += [f"## {_escaped(sheet.title)}", table, *map(_escaped, sheet.notes)]
    return "\n\n".join(parts) + "\n"


def terminal(sheet: Sheet) -> str:
    """A table for a terminal, in parts that fit its width, or `MAX_WIDTH` letters if the output is no terminal.

    Each part repeats the columns of words. Headings wrap to `HEADING_LETTERS`.
    """
    lines = [[shortened(printable(cell), WORD_LETTERS) for cell in line] for line in sheet.lines]
    sheet = sheet._replace(header=list(map(printable, sheet.header)), lines=lines)
    parts = _parts(sheet, shutil.get_terminal_size((MAX_WIDTH, 0)).columns)
    return "\n\n".join(aligned(part.title, part.header, part.lines, _sides(part)) for part in parts)


def aligned(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """A table in columns; sides: "left" or "right" for each."""
    wrapped = ["\n".join(textwrap.wrap(heading, HEADING_LETTERS)) for heading in header]
    return f"{printable(title)}\n{tabulate(lines, wrapped, 'simple', colalign=sides, disable_numparse=True)}"


def _parts(sheet: Sheet, max_width: int) -> Iterator[Sheet]:
    widths = [
        GAP
        + max(
            HEADING_PADDING + max(map(len, textwrap.wrap(heading, HEADING_LETTERS))),
            *(len(line[at]) for line in sheet.lines),
        )
        for at, heading in enumerate(sheet.header)
    ]
    words = [at for at, heading in enumerate(sheet.header) if heading in WORDS]
    parts = [words]
    for at in range(len(widths)):
        if at not in words:
            if len(parts[-1]) > len(words) and sum(widths[each] for each in (*parts[-1], at)) > max_width:
                parts.append(words)
            parts[-1] = [*parts[-1], at]
    for number, part in enumerate(parts):
        title = sheet.title + ", continued" * bool(number)
        yield Sheet(title, [sheet.header[at] for at in part], [[line[at] for at in part] for line in sheet.lines])


def _sides(sheet: Sheet) -> list[str]:
    return ["left" if heading in WORDS else "right" for heading in sheet.header] if sheet.lines else []


def _escaped(text: str) -> str:
    """Words as Markdown that shows them literally, in one line."""
    return MARKUP.sub(r"\\\g<0>", printable(text))
