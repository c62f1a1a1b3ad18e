"""What a chart shows: points with their errors, made of rows of tables. How it looks is told in `vega`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from harness.tables.columns import MODEL, SOURCE, Column, TableRow

LEAST = 1e-6
"""What a logarithmic axis shows at least: KL in nats that is smaller is the full cache's own."""
ERRORS = "Bars: one standard error."


class Axis(NamedTuple):
    """title: with the unit. log: whether it is logarithmic. zero: whether it begins at 0. words: of y, whether it has
    names below each other instead of numbers; values then lie along x."""

    title: str
    log: bool = False
    zero: bool = False
    words: bool = False


class Point(NamedTuple):
    """y: a number, or the word of an axis of words. details: what a hover answers, by what it is. stderr: None where
    nothing is known. line: the one through it, "" for none. hollow: it has another source than the chart. name: what
    stands beside it."""

    series: str
    x: float
    y: Any
    details: Mapping[str, str]
    stderr: float | None = None
    line: str = ""
    hollow: bool = False
    name: str = ""


class Level(NamedTuple):
    """A value along the whole other axis. axis: "x" or "y"."""

    axis: str
    value: float
    name: str


class Chart(NamedTuple):
    """One quantity of one setup. pane: the quantity in words, the same of all charts that stand side by side. title:
    the setup. note: what the signs mean. stacked: the points of a name are bars end to end, but for the hollow ones."""

    pane: str
    title: str
    x: Axis
    y: Axis
    points: Sequence[Point]
    levels: Sequence[Level] = ()
    note: str = ERRORS
    stacked: bool = False

    @property
    def value_axis(self) -> str:
        """The one along which values and their errors lie: "x" where the other has words."""
        return "x" if self.y.words else "y"


def grouped(rows: Sequence[TableRow], *names: str) -> Iterator[list[TableRow]]:
    """The rows with the same values of these columns, in the order in which the values appear."""
    keys = [tuple(row.get(name) for name in names) for row in rows]
    first = {key: index for index, key in reversed([*enumerate(keys)])}
    order = sorted(range(len(rows)), key=lambda index: first[keys[index]])
    for _, indices in groupby(order, key=lambda index: keys[index]):
        yield [rows[index] for index in indices]


def setup(row: TableRow, *columns: Column) -> str:
    """What a chart is of, in words: model and source first."""
    known = [column for column in columns if row.get(column.name) not in (None, "")]
    return ", ".join([row[MODEL.name], row[SOURCE.name], *(each.phrase.format(row[each.name]) for each in known)])


def details(row: TableRow, *columns: Column) -> dict[str, str]:
    """The columns of a row as people read them; of a word it is the word, and what is unknown is left out."""
    known = [column for column in columns if row.get(column.name) not in (None, "")]
    return {
        column.heading or column.name: str(row[column.name]) if column.digits is None else column.show(row[column.name])
        for column in known
    }
