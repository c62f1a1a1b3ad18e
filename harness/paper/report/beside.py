"""Results of several models side by side: a line per method and size, and a column per quantity and model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from harness.paper.report.charts.scores import is_score
from harness.tables.columns import ASKED_SIZE, BOARD_TASKS, KL, LABEL, MISSING, SETTINGS, TOP1, TableRow, quantity, rank
from harness.tables.text import Sheet

T = TypeVar("T")
OF_BOARD = (KL, TOP1, *BOARD_TASKS)

Key = tuple[str, str]
"""A label, and the size or the settings that tell its runs apart."""
Scores = dict[str, dict[Key, str]]
"""Of one model: by quantity, the cell of every run."""


def side_by_side(models: Mapping[str, Sequence[TableRow]]) -> Sheet | None:
    """The runs and quantities that more than one model has; None without any.

    models: by name, the rows of accuracy tables or of leaderboards.
    """
    scores = {name: _scores(rows) for name, rows in models.items()}
    quantities = _shared([list(own) for own in scores.values()])
    keys = _shared([[key for name in quantities for key in own.get(name, ())] for own in scores.values()])
    if not keys:
        return None
    header = [LABEL.heading, SETTINGS.heading, *(f"{name}, {model}" for name in quantities for model in scores)]
    lines = [
        [*key, *(own.get(name, {}).get(key, MISSING) for name in quantities for own in scores.values())] for key in keys
    ]
    return Sheet(" and ".join(scores), header, lines)


def _shared(lists: Sequence[Sequence[T]]) -> list[T]:
    """What stands in more than one of the lists, in their order."""
    distinct = dict.fromkeys(item for items in lists for item in items)
    return [item for item in distinct if sum(item in items for items in lists) > 1]


def _scores(rows: Sequence[TableRow]) -> Scores:
    found: Scores = {}
    for name, key, cell in _cells(rows):
        found.setdefault(name, {})[key] = cell
    return found


def _cells(rows: Sequence[TableRow]) -> Iterator[tuple[str, Key, str]]:
    for row in rows:
        if ASKED_SIZE.name in row:
            size = MISSING if row[ASKED_SIZE.name] is None else f"{ASKED_SIZE.show(row[ASKED_SIZE.name])} %"
            for shown in OF_BOARD:
                if row.get(shown.name) is not None:
                    stderr = row.get(f"{shown.name}_stderr")
                    yield shown.heading, (row["label"], size), shown.show(row[shown.name], stderr)
    scored = [row for row in rows if "task" in row and is_score(row)]
    for row in sorted(scored, key=lambda row: rank(row["metric"])):
        shown = quantity(row["metric"])
        key = row["label"], row.get(SETTINGS.name) or MISSING
        yield f"{row['task']} {shown.heading}", key, shown.show(row["value"], row["stderr"])
