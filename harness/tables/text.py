"""Tables as text: Markdown, and columns aligned by blanks for a terminal."""

import textwrap
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from harness.tables.columns import LABEL, SETTINGS

WORDS = (LABEL.heading, SETTINGS.heading)
"""Headings above words, which stand on the left; all other cells are numbers."""
HEADING_LETTERS = 13


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
            [f"**{cell}**" if (row, column) in sheet.bold else cell for column, cell in enumerate(line)]
            for row, line in enumerate(sheet.lines)
        ]
        table = [sheet.header, ["---"] * len(sheet.header), *cells]
        lines = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in table)
        parts += [f"## {sheet.title}", "\n".join(f"| {line} |" for line in lines), *sheet.notes]
    return "\n\n".join(parts) + "\n"


def aligned(sheet: Sheet) -> str:
    """A table for a terminal. Headings wrap to as many lines as the longest needs; words stand left, numbers right."""
    wrapped = [textwrap.wrap(heading, HEADING_LETTERS) for heading in sheet.header]
    rows = [list(cells) for cells in zip_longest(*wrapped, fillvalue="")] + sheet.lines
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        aligned = [
            cell.ljust(width) if heading in WORDS else cell.rjust(width)
            for heading, cell, width in zip(sheet.header, cells, widths, strict=True)
        ]
        lines.append("  ".join(aligned))
    return "\n".join([sheet.title, "-" * len(lines[0]), *lines])
