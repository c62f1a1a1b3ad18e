"""Small made-up analysis tables, one per figure."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.tables.columns import ANALYSIS, names

Row = dict[str, Any]
LAYERS = (0, 18)


def write_analysis(results: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    common = {"experiment": name, "model": "tiny", "source": "measured", "run_id": "0" * 16, "stderr": 0.01}
    path = results / "tables" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names(ANALYSIS), restval="")
        writer.writeheader()
        writer.writerows(common | dict(row) for row in rows)


def points(series: str, metric: str, x_name: str, values: Mapping[float, float], layer: int | None = None) -> list[Row]:
    place = {"series": series, "metric": metric, "x_name": x_name, "layer": layer}
    return [place | {"x": x, "value": value} for x, value in values.items()]


def write_fig2(results: Path) -> None:
    rows = []
    for x_name, xs in (("seq_len", (1024, 2048, 4096)), ("batch_size", (1, 4, 16))):
        rows += points("KV cache", "bytes", x_name, {x: x * 2.0**24 for x in xs})
        rows += points("weights", "bytes", x_name, dict.fromkeys(xs, 2.0**31))
    write_analysis(results, "fig2", (row | {"stderr": None, "source": "modelled"} for row in rows))


def write_fig4(results: Path) -> None:
    rows = []
    for layer in LAYERS:
        rows += points("H2O", "cosine_similarity", "token", {10: 1.0, 500: 0.9, 1990: 0.7}, layer)
        rows += points("Oracle", "cosine_similarity", "token", {10: 1.0, 500: 0.99, 1990: 0.98}, layer)
    write_analysis(results, "fig4", rows)


def fig5_rows() -> list[Row]:
    rows = []
    for layer in LAYERS:
        name = f"layer {layer}"
        rows += points(name, "share_of_queries", "key_tokens", {0: 0.5, 32: 0.25, 64: 0.0, 96: 0.25}, layer)
        rows += points(name, "key_tokens_for_0.9", "query_token", {500: 80.0, 1000: 140.0, 1500: 150.0}, layer)
    return rows


def write_fig5(results: Path) -> None:
    write_analysis(results, "fig5", fig5_rows())


def write_fig7(results: Path) -> None:
    rows = []
    for metric in ("query_magnitude", "key_magnitude"):
        rows += points("before skewing", metric, "column_rank", {0: 2.0, 1: 1.5, 2: 1.0}, 18)
        rows += points("after skewing", metric, "column_rank", {0: 4.0, 1: 0.5, 2: 0.2}, 18)
    write_analysis(results, "fig7", rows)


def write_fig20(results: Path) -> None:
    rows = []
    for layer in LAYERS:
        shares = {2048: 0.1, 4096: 0.2, 8192: 0.4}
        rows += points(f"layer {layer}", "share_of_sparse_queries", "seq_len", shares, layer)
    for key, value in ((7, 0.01), (1200, 0.02)):
        rows += points(f"key {key}", "attention_weight", "query_token", {6000: value, 7000: 2 * value}, 18)
    write_analysis(results, "fig20", rows)


WRITERS = {"fig2": write_fig2, "fig4": write_fig4, "fig5": write_fig5, "fig7": write_fig7, "fig20": write_fig20}
