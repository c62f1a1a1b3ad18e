"""Quality against what it costs, from the leaderboard's rows: a step's seconds over any link, and the Pareto fronts.

A step at a size that was not timed, or over another link, is modelled from what was measured of the method: seconds of
its compute, and bytes over the link, in proportion to `size`. As in live decoding, rows that are asked for a layer
ahead travel beside the compute, and rows that a layer's own query names, `late_bytes`, are waited for.
"""

from collections.abc import Mapping, Sequence

from harness.errors import UserError
from harness.tables.columns import KL, SIZE, STEP, TableRow

COSTS = {"link bytes": SIZE.name, "step time": STEP.name}
"""What a front is of, and its column."""


def step_seconds(row: Mapping[str, float], bytes_per_s: float) -> float:
    """Seconds of a decode step of `row` over a link of that rate."""
    late_s = row["late_bytes"] / bytes_per_s
    return max(row["compute_s"], row["link_bytes"] / bytes_per_s - late_s) + late_s


def fronts(rows: Sequence[TableRow]) -> list[str]:
    """For each row the costs at which no other row of its model is as cheap and as close to the full cache."""
    of_rows: list[list[str]] = [[] for _ in rows]
    for words, cost in COSTS.items():
        points = [(row["model"], row.get(cost), row.get(KL.name)) for row in rows]
        for found, point in zip(of_rows, points, strict=True):
            if None not in point and not any(_beats(other, point) for other in points):
                found.append(words)
    return [", ".join(found) for found in of_rows]


def _beats(one: tuple, other: tuple) -> bool:
    """Whether one point of a model is nowhere worse than another, and somewhere better."""
    model, *values = one
    if model != other[0] or None in values:
        return False
    pairs = list(zip(values, other[1:], strict=True))
    return all(own <= its for own, its in pairs) and any(own < its for own, its in pairs)


def fastest(rows: Sequence[TableRow], bytes_per_s: float, max_kl: float) -> TableRow:
    """The row with the shortest step among those within the bound.

    Raises UserError where none is, with the one that comes closest.
    """
    closest = min(rows, key=lambda row: row[KL.name])
    if closest[KL.name] > max_kl:
        named = f"{closest['label']} reading {closest[SIZE.name]:.1%}, has {KL.show(closest[KL.name])}"
        raise UserError(f"max_kl={max_kl:g}: nothing holds it; the closest, {named} nats")
    within = (row for row in rows if row[KL.name] <= max_kl)
    return min(within, key=lambda row: step_seconds(row, bytes_per_s))
