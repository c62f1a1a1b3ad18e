"""What rows of the leaderboard say about one another: the Pareto fronts, and the references.

Every method should lie between the two reference methods at equal size.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import yaml

from harness.results import columns, metrics
from harness.results.columns import TableRow
from harness.results.metrics import BoardMetric
from harness.results.student import ONE_SIGMA, critical_value
from harness.settings.paths import CONF_DIR

EXPERIMENT = CONF_DIR / "experiment" / "leaderboard.yaml"
SWEEP = yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8"))["sweep"]
REFERENCES: Mapping[str, str] = SWEEP["references"]
"""Methods that every other should lie between at equal size: `upper`, `lower`."""
COSTS = {metric.front: metric.column.name for metric in metrics.BOARD_METRICS if metric.front}
"""Columns of the costs, by the front's name."""
EQUAL = 0.01
"""Sizes that differ by at most this count as equal, as when a method is sized."""
SAME_SIZE, SAME_STEP = 0.001, 0.01
"""Differences of size, absolute, and of step time, relative, that put no method before another."""

# Sizes


def size_of(row: TableRow, metric: BoardMetric) -> float | None:
    """The size at which a metric was measured; None if it was not."""
    name = f"{metric.column.name}_size" if metric.origin == "task" else metrics.SIZE.name
    size: float | None = row.get(name)
    return size


def sizes_of(row: TableRow) -> list[float | None]:
    """The size on the text, and that on each task."""
    on_tasks = [size_of(row, metric) for metric in metrics.board_metrics("task")]
    return [row.get(metrics.SIZE.name), *on_tasks]


def has_its_size(row: TableRow) -> bool:
    """Whether a method reads its asked size on the text and every task; True if none was asked."""
    return all(_is_asked(row, size) for size in sizes_of(row))


def has_its_size_on_text(row: TableRow) -> bool:
    """Whether a method reads its asked size on the text; True if none was asked."""
    return _is_asked(row, row.get(metrics.SIZE.name))


def _is_asked(row: TableRow, size: float | None) -> bool:
    asked = row["asked_size"]
    return asked is None or size is None or abs(size - asked) <= EQUAL


# Fronts


def fronts(rows: Sequence[TableRow]) -> list[str]:
    """For each row the costs for which it is on the front of its model, as in "size, step time"."""
    costs: dict[int, list[str]] = defaultdict(list)
    for of_model in columns.grouped(rows, lambda row: row["model"]).values():
        for name, column in COSTS.items():
            for row in _front(of_model, column):
                costs[id(row)].append(name)
    return [", ".join(costs[id(row)]) for row in rows]


def _front(rows: Sequence[TableRow], cost: str) -> list[TableRow]:
    """The rows that are worth their cost, found from the cheapest on.

    A row is on the front if it is certainly closer to the full cache than the closest cheaper row
    of the front, and no row of the same cost is certainly closer. A row whose own error is large
    thus excludes no other.
    """
    points = columns.having(rows, cost, metrics.KL.name)
    front: list[TableRow] = []
    for row in sorted(points, key=lambda row: row[cost]):
        tolerance = SAME_SIZE if cost == metrics.SIZE.name else SAME_STEP * row[cost]
        cheaper = [other for other in front if row[cost] - other[cost] > tolerance]
        alike = [other for other in points if abs(row[cost] - other[cost]) <= tolerance]
        closest_cheaper = min(cheaper, key=_kl, default=None)
        closest_alike = min(alike, key=_kl)
        gains = closest_cheaper is None or _certainly_closer(row, closest_cheaper)
        if gains and not _certainly_closer(closest_alike, row):
            front.append(row)
    return front


def _kl(row: TableRow) -> float:
    kl: float = row[metrics.KL.name]
    return kl


def _certainly_closer(one: TableRow, other: TableRow) -> bool:
    """Whether the KL of `one` is lower by more than chance explains.

    That is half the width of the interval of the difference that has the confidence of one
    standard error (68 %). Of a single window no error is known, and the numbers decide.
    """
    error = f"{metrics.KL.name}_stderr"
    stderr = math.hypot(one.get(error) or 0, other.get(error) or 0)
    lead = _kl(other) - _kl(one)
    if not stderr:
        return lead > 0
    num_windows = _fewest((one, other), columns.NUM_WINDOWS.name)
    return lead > critical_value(num_windows, ONE_SIGMA) * stderr


def _fewest(rows: Iterable[TableRow], column: str) -> float | None:
    """The least number of windows or contexts of `rows`; None if no row says."""
    return min(columns.values(columns.having(rows, column), column), default=None)


# References


def outside(row: TableRow, rows: Sequence[TableRow]) -> Iterator[str]:
    """In words, each score that is certainly beyond a reference of `rows` at the same size.

    Certainly: the 95 % interval of the difference is without zero.
    """
    for metric in metrics.BOARD_METRICS:
        if metric.compared:
            for side, method in REFERENCES.items():
                for reference in rows:
                    if reference["method"] == method and _are_alike(row, reference, metric):
                        yield from _beyond(row, reference, metric, side)


def _are_alike(row: TableRow, reference: TableRow, metric: BoardMetric) -> bool:
    """Whether two rows have comparable values of a metric: of one model, at equal sizes."""
    if reference is row or reference["model"] != row["model"]:
        return False
    name = metric.column.name
    if len(columns.having((row, reference), name, f"{name}_stderr")) < 2:
        return False
    own, other = size_of(row, metric), size_of(reference, metric)
    return own is not None and other is not None and abs(own - other) <= EQUAL


def _beyond(row: TableRow, reference: TableRow, metric: BoardMetric, side: str) -> Iterator[str]:
    """By how much a row is better than the upper reference, or worse than the lower, if it is."""
    column = metric.column
    gap = row[column.name] - reference[column.name]
    better_by = gap if metric.more_is_better else -gap
    beyond_by = better_by if side == "upper" else -better_by
    stderr = math.hypot(row[f"{column.name}_stderr"], reference[f"{column.name}_stderr"])
    count = columns.NUM_WINDOWS.name
    if metric.origin == "task":
        count = f"{column.name}_{metrics.NUM_CONTEXTS.name}"
    if beyond_by > critical_value(_fewest((row, reference), count)) * stderr:
        word = "better" if better_by > 0 else "worse"
        amount = column.show(abs(gap), stderr)
        yield f"{column.words} {word} than {reference['label']} by {amount}"
