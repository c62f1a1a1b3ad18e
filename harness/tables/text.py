"""Tables as text: Markdown, and columns aligned by blanks for a terminal."""

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from harness.errors import printable, shortened
from harness.tables.columns import LABEL, SETTINGS

WORDS = (LABEL.heading, SETTINGS.heading)
"""Headings above words, which stand on the left; all other cells are numbers."""
HEADING_LETTERS, MAX_WIDTH, GAP = 13, 160, "  "
WORD_LETTERS = 44
"""Of a cell of words in a terminal."""
MARKUP = re.compile(r"[\\`*|$]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)")
"""What Markdown would not show as it stands."""


class Sheet(NamedTuple):
    """One table: what holds for all of it, the column headings, and the cells as text.

    scores: headings of what every run measures, so that a cell without it is a gap and not a quantity that it lacks.
    bold: cells, as (line, column). notes: what stands below. details: of each line, what a reader may ask for.
    """

    title: str
    header: list[str]
    lines: list[list[str]]
    scores: Collection[str] = ()
    bold: Collection[tuple[int, int]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()


def markdown(title: str, note: str, sheets: Iterable[Sheet]) -> str:
    """A whole `.md` file: heading, note, tables."""
    parts = [f"# {title}", note]
    for sheet in sheets:
        cells = [
            [f"**{cell}**" if (row, column) in sheet.bold else cell for column, cell in enumerate(map(_escaped, line))]
            for row, line in enumerate(sheet.lines)
        ]
        table = [list(map(_escaped, sheet.header)), ["---"] * len(sheet.header), *cells]
        lines = "\n".join(f"| {' | '.join(line)} |" for line in table)
        parts += [f"## {_escaped(sheet.title)}", lines, *map(_escaped, sheet.notes)]
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Words as Markdown that shows them as they are, in one line."""
    return MARKUP.sub(r"\\\g<0>", printable(text))


def folded(sheet: Sheet) -> Iterator[Sheet]:
    """The table in parts that a terminal shows without breaking lines, each with the words that name its lines; of
    `MAX_WIDTH` letters where the output is no terminal."""
    max_width = shutil.get_terminal_size((MAX_WIDTH, 0)).columns
    widths = [len(cells[0]) + len(GAP) for cells in zip(*_cells(sheet), strict=True)]
    words = [at for at, heading in enumerate(sheet.header) if heading in WORDS]
    parts: list[list[int]] = [words]
    for at in range(len(widths)):
        if at not in words:
            if len(parts[-1]) > len(words) and sum(widths[each] for each in (*parts[-1], at)) > max_width:
                parts.append(words)
            parts[-1] = [*parts[-1], at]
    for number, part in enumerate(parts):
        title = sheet.title + ", continued" * bool(number)
        yield Sheet(title, [sheet.header[at] for at in part], [[line[at] for at in part] for line in sheet.lines])


def aligned(sheet: Sheet) -> str:
    """A table for a terminal. Headings wrap to as many lines as the longest needs; words stand left, numbers right."""
    lines = [GAP.join(cells) for cells in _cells(sheet)]
    return "\n".join([printable(sheet.title), "-" * len(lines[0]), *lines])


def _cells(sheet: Sheet) -> list[list[str]]:
    """The lines of headings, then those of the table, each cell as wide as its column."""
    wrapped = [textwrap.wrap(printable(heading), HEADING_LETTERS) for heading in sheet.header]
    lines = [[shortened(printable(cell), WORD_LETTERS) for cell in line] for line in sheet.lines]
    rows = [list(cells) for cells in zip_longest(*wrapped, fillvalue="")] + lines
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if heading in WORDS else cell.rjust(width)
            for heading, cell, width in zip(sheet.header, cells, widths, strict=True)
        ]
        for cells in rows
    ]
