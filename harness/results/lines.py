"""The lines of an accuracy table: one for each method and settings, with a score in each column.

Runs of a method on texts and on tasks share a line.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from harness.results.columns import TableRow, grouped
from harness.settings.kinds import KINDS
from harness.settings.task_config import SamplingConfig, TaskConfig

Key = tuple[str, str]
"""Task and metric of a column."""
SIZES = {*KINDS["perplexity"].depends_on} ^ {*KINDS["tasks"].depends_on}
"""Settings of texts alone or of tasks alone, such as `num_windows`: no part of a method."""
SIZES |= {field.name for group in (TaskConfig, SamplingConfig) for field in fields(group)}


class Line(NamedTuple):
    """A line of a table. settings: the method's, and those in which the runs of a column differ.
    rows: by column."""

    label: str
    method: str
    settings: tuple[str, ...]
    rows: dict[Key, TableRow]


def pairs_of_settings(settings: str | None) -> list[str]:
    """The settings of a row, `a=[1, 2], b=3`, as its parts."""
    return list(filter(None, re.split(r", (?=[\w.]+=)", settings or "")))


def is_size(pair: str) -> bool:
    """Whether a setting such as `num_windows=8` or `corpus.spread=True` is of `SIZES`."""
    return re.split(r"[.=]", pair, maxsplit=1)[0] in SIZES


def shared(of_rows: Iterable[Iterable[str]]) -> set[str]:
    """The settings that all of several rows have."""
    return set.intersection(*map(set, of_rows))


def lines_of(rows: Sequence[TableRow]) -> list[Line]:
    """The lines of accuracy rows: the full cache first, the others by label, budget, length and
    settings.

    Two runs on one task with the same settings have a line each.
    """
    alike = {}
    for key, of_column in grouped(rows, _key).items():
        alike[key] = shared(pairs_of_settings(row["settings"]) for row in of_column)
    found: dict[Any, Line] = {}
    for row in rows:
        key, own = _key(row), []
        for pair in pairs_of_settings(row["settings"]):
            if pair not in alike[key] or not is_size(pair):
                own.append(pair)
        name = row["label"], row["method"], tuple(own)
        repeat = 0
        while key in found.setdefault((name, repeat), Line(*name, {})).rows:
            repeat += 1
        found[name, repeat].rows[key] = row
    return sorted(found.values(), key=_order)


def _key(row: TableRow) -> Key:
    return row["task"], row["metric"]


def _order(line: Line) -> tuple[Any, ...]:
    rows = line.rows.values()
    budget = min(row["budget"] or 0 for row in rows)
    length = max(row["seq_len"] or 0 for row in rows)
    return budget < 1, line.label, budget, length, line.settings
