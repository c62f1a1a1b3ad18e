"""What the explorer of the board shows: a point per method, budget and length of windows, over all
models and of each; the quantities to choose, and the looks.

`report.js` makes one Vega-Lite specification of them. Words of tables are data in it, never part of
an expression or of a field name. Colours and shapes are those of the figures
(`plots/registry.yaml`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from harness.results import columns, metrics
from harness.results.board_page import TRAFFIC, show_interval, show_ratio
from harness.results.board_rows import COSTS, MODELLED, OWN_BUDGET
from harness.results.columns import TableRow
from harness.results.metrics import Metric
from harness.results.sheet import show_range

Json = dict[str, Any]

VEGA_LITE = "6.4"
LARGEST = 1e100
AT_OWN_BUDGET = "of its own"
OTHER = {"color": "currentColor", "shape": "cross"}
"""The look of a family that the registry does not list."""


class Quantity(NamedTuple):
    """A quantity to choose. value: of a row. front: the name of a cost's front, "" for a quality.

    has_ends: rows have its interval, or the least and the largest of the models.
    """

    metric: Metric
    value: Callable[[TableRow], float | None]
    front: str = ""
    has_ends: bool = False


def _cost(metric: Metric, front: str, *, has_ends: bool = False) -> Quantity:
    return Quantity(metric, COSTS[front], front, has_ends)


def _quality(metric: Metric, *, has_ends: bool = True) -> Quantity:
    return Quantity(metric, lambda row: row.get(metric.name), has_ends=has_ends)


QUANTITIES = (
    _cost(metrics.BUDGET._replace(words="link"), "link", has_ends=True),
    _cost(TRAFFIC, "link + device"),
    _cost(metrics.RESIDENT_FRAC, "resident", has_ends=True),
    _cost(metrics.STEP, "step time"),
    _quality(metrics.KL, has_ends=False),
    _quality(metrics.RATIO._replace(logarithmic=True)),
    _quality(metrics.ANSWERS_DIFFERENCE),
)
"""The costs, then the qualities."""
WORDS: Mapping[str, str] = {
    "over": "over",
    "family": "family",
    "asked": "asked budget",
    "windows": "windows",
    "dense_numbers": "dense layers",
    "step_on": "step timed on",
    "apart": "why it is not compared",
}
"""Words of a point that a hover answers, besides its method and its quantities."""


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, which sets `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)


def explorer(rows: Sequence[TableRow], families: Mapping[str, Mapping[str, str]]) -> Json | None:
    """What `report.js` needs of the rows of boards; None without points.

    points: by field. choices: of `x`, `y`, `budget`, `windows` and `over`, from a value to its
    words. axes: title and scale of each quantity. tooltip: titles of the words that a hover
    answers, by field. fronts: the name of the front of a cost. families: their looks, those of the
    figures first.
    """
    # A method without a budget, which stands beside every budget, is one point.
    by_identity: dict[tuple[str, ...], Json] = {}
    for point in map(_point, columns.having(rows, "kl_nats")):
        identity = point["over"], point["name"], point["asked"], point["windows"]
        by_identity.setdefault(identity, point)
    points = list(by_identity.values())
    if not points:
        return None
    found = dict.fromkeys(columns.values(points, "family"))
    in_order = dict.fromkeys([*filter(found.__contains__, families), *found])
    costs: dict[str, str] = {}
    qualities: dict[str, str] = {}
    axes = {}
    tooltip = {"name": "method", **WORDS}
    for quantity in QUANTITIES:
        name, heading = quantity.metric.name, quantity.metric.heading
        if columns.having(points, name):
            choices = costs if quantity.front else qualities
            choices[name] = heading
            axes[name] = [heading, "log" if quantity.metric.logarithmic else "linear"]
            tooltip[f"text_{name}"] = heading
    return {
        "points": points,
        "choices": {
            "x": costs | qualities,
            "y": qualities | costs,
            "budget": {"": "all", **_themselves(points, "asked")},
            "windows": _themselves(points, "windows"),
            "over": _themselves(points, "over"),
        },
        "axes": axes,
        "tooltip": tooltip,
        "fronts": {each.metric.name: each.front for each in QUANTITIES if each.front},
        "families": {family: families.get(family, OTHER) for family in in_order},
    }


def _themselves(points: Sequence[Json], name: str) -> dict[str, str]:
    """The words of a field, each once, which stand for themselves: all models first, as in the
    table, budgets and lengths in order, and last a budget of a method's own."""
    words = dict.fromkeys(columns.values(points, name))
    in_order = list(words)
    if name != "over":
        in_order = sorted(words, key=lambda word: (word == AT_OWN_BUDGET, len(word), word))
    return {word: word for word in in_order}


def _point(row: TableRow) -> Json:
    """A row: numbers as the axes show them, words as a hover answers them."""
    has_own_budget = OWN_BUDGET in (row.get("apart") or "")
    asked = f"{metrics.ASKED_BUDGET.show(row['asked_budget'])} %"
    point: Json = {
        "name": row["label"],
        "label": row["label"] if has_own_budget else f"{row['label']} {asked}",
        "front": row.get("front") or "",
        "modelled": row.get("step_source") == MODELLED,
    }
    for name in WORDS:
        point[name] = row.get(name) or metrics.MISSING
    point["asked"] = AT_OWN_BUDGET if has_own_budget else asked
    point["windows"] = f"{row['seq_len']:,.0f} tokens"
    for quantity in QUANTITIES:
        name, metric = quantity.metric.name, quantity.metric
        value = quantity.value(row)
        ends = [row.get(f"{name}_low"), row.get(f"{name}_high")] if quantity.has_ends else []
        point[name] = _number(value, metric)
        for end, number in zip(("low", "high"), ends or (None, None), strict=True):
            point[f"{name}_{end}"] = _number(number, metric)
        if quantity.front:
            ranged = (value, value) if not ends or ends[0] is None else ends
            point[f"text_{name}"] = show_range(metric, ranged, " to ")
        else:
            show = show_ratio if name == metrics.RATIO.name else metric.show
            shown: TableRow = row if quantity.has_ends else {name: value}
            numbers: list[Any] = [shown.get(f"{name}{end}") for end in ("", "_low", "_high")]
            point[f"text_{name}"] = show_interval(show, *numbers)
    return point


def _number(value: float | None, column: Metric) -> float | None:
    """A number in the unit of its heading with five digits; None where no axis has a place for
    it."""
    if value is None or not abs(value) < LARGEST:
        return None
    return float(f"{column.factor * value:.5g}")
