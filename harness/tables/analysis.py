"""Analysis tables for people: a table per model and quantity, a line per series, a few values of x as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.tables.text import GIB, MISSING, Quantity, Sheet, aligned, markdown, published

Row = dict[str, Any]

MAX_COLUMNS = 6
NOTE = (
    "± is one standard error over heads (over layers, where a number is of the whole model). Of many values of x a few "
    "are shown; the CSV has all."
)
METRICS = {
    "bytes": Quantity("GiB", 1 / GIB, 2),
    "cosine_similarity": Quantity("cosine similarity", 1, 3),
    "key_tokens_for_0.9": Quantity("key tokens for 0.9 of the attention weight", 1, 1),
    "share_of_queries": Quantity("queries (%)", 100, 1),
    "share_of_sparse_queries": Quantity("queries that attend to < 1 % of the keys (%)", 100, 1),
    "attention_weight": Quantity("attention weight (%)", 100, 3),
    "query_magnitude": Quantity("mean magnitude of a column of Q", 1, 3),
    "key_magnitude": Quantity("mean magnitude of a column of K", 1, 3),
}


def render_markdown(experiment: str, rows: Sequence[Row]) -> str:
    """The whole `.md` file; what the paper gives stands at its end."""
    return markdown(experiment, NOTE, [*_sheets(rows), *published(experiment)])


def render_terminal(rows: Sequence[Row]) -> str:
    """The same tables in columns aligned by blanks, without the paper's; "" without rows."""
    return "\n\n".join(aligned(sheet) for sheet in _sheets(rows))


def _sheets(rows: Sequence[Row]) -> Iterator[Sheet]:
    keys = ("model", "source", "run_id", "metric", "x_name")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for (model, source, _, metric, x_name), own in groups.items():
        by = f", by {x_name.replace('_', ' ')}" if x_name else ""
        quantity = METRICS.get(metric, Quantity(metric, 1, 3))
        yield _sheet(f"{model}, {source}: {quantity.heading}{by}", own, quantity)


def _sheet(title: str, rows: Sequence[Row], quantity: Quantity) -> Sheet:
    columns = _evenly(sorted({row["x"] for row in rows if row["x"] is not None})) or [None]
    layered = len({(row["series"], row["layer"]) for row in rows}) > len({row["series"] for row in rows})
    lines: dict[str, dict[Any, Row]] = {}
    for row in rows:
        of_layer = layered and row["x_name"] != "layer"
        name = f"{row['series']}, layer {row['layer']}" if of_layer else row["series"]
        lines.setdefault(name, {})[row["x"]] = row
    header = ["label", *(quantity.heading if x is None else f"{x:,g}" for x in columns)]
    cells = [[name, *(_cell(line.get(x), quantity) for x in columns)] for name, line in lines.items()]
    return Sheet(title, header, cells)


def _cell(row: Row | None, quantity: Quantity) -> str:
    return MISSING if row is None else quantity.show(row["value"], row["stderr"])


def _evenly(values: Sequence[float]) -> list[Any]:
    """At most `MAX_COLUMNS` of the values, first and last among them."""
    count = min(MAX_COLUMNS, len(values))
    return [values[index * (len(values) - 1) // max(1, count - 1)] for index in range(count)]
