"""The cost model beside the paper: every published latency, speedup and throughput, on the paper's
machine, and the fit of the three efficiencies to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from harness.files import write_atomic
from harness.model.shape import load_shape
from harness.paper.costmodel.predict import FITTED, Case, Efficiency, load_platform, predict
from harness.results.columns import csv_of, published, with_columns
from harness.results.metrics import SEGMENTS
from harness.results.pages import render_markdown

PLATFORM = "a6000-pcie3"
GEN_LEN = 128
TOTAL_LEN = 2048
BASELINES = ("uvm", "uvm+h2o", "offload", "offload+int4", "offload+h2o")
"""The systems over which the paper gives its smallest and largest speedups."""
OFFLOADED = ("offload", "offload-pageable", "offload+int4", "offload+h2o", "infinigen")
COMPARED = ("uvm", "uvm+h2o", *OFFLOADED)


class PaperBar(NamedTuple):
    """A bar of the paper's figures: a run on a platform to be chosen."""

    label: str
    model: str = "opt-13b"
    batch_size: int = 8
    total_len: int = TOTAL_LEN


FIGURES: Mapping[str, list[PaperBar]] = {
    "fig14": [PaperBar(label, batch_size=20) for label in COMPARED],
    "fig15": [PaperBar(label, batch_size=at) for at in (4, 8, 12, 16, 20) for label in COMPARED],
    "fig16a": [
        PaperBar(label, total_len=at) for at in (512, 1024, 1536, 2048) for label in OFFLOADED
    ],
    "fig16b": [
        PaperBar(label, model, batch_size=4)
        for model in ("opt-6.7b", "opt-13b", "opt-30b")
        for label in OFFLOADED
    ],
    "fig18": [PaperBar(label) for label in (*OFFLOADED, "ideal")],
}
"""The figures that the cost model predicts, and the bars of each."""

LEFT_OUT = (("fig14", "fig15"), ("fig16a",), ("fig16b",), ("fig18",))
"""Figures that are left out of the fit together: fig 14 shows runs of fig 15."""


@cache
def _predict(bar: PaperBar, efficiency: Efficiency) -> dict[str, Any]:
    platform, shape = load_platform(PLATFORM), load_shape(bar.model)
    prompt_len = bar.total_len - GEN_LEN
    return predict(
        Case(platform, shape, bar.label, bar.batch_size, prompt_len, GEN_LEN, efficiency)
    )


def figure_rows(figure: str) -> pd.DataFrame:
    """The latency table of a figure, modelled on the paper's machine."""
    rows = pd.DataFrame([_predict(bar, FITTED) for bar in FIGURES[figure]])
    return with_columns(rows.assign(experiment=figure), "latency")


def write_tables(results_dir: str | Path) -> list[Path]:
    """Write `tables/<figure>-modelled.csv` and `.md` for every figure. Returns the paths of the
    CSVs. Raises UserError for a folder that cannot be written.
    """
    paths = []
    for figure in FIGURES:
        table = figure_rows(figure)
        paths.append(Path(results_dir) / "tables" / f"{figure}-modelled.csv")
        write_atomic(paths[-1], csv_of(table, "latency"))
        write_atomic(paths[-1].with_suffix(".md"), render_markdown(paths[-1].stem, table))
    return paths


def quantity(row: pd.Series, efficiency: Efficiency) -> float | None:
    """The quantity of a published row about one of `FIGURES`, predicted, in the row's unit; None if
    the row is not about time."""
    figure, series, metric = row["figure"], row["series"], row["metric"]
    total_len = int(row["x"]) if row["x_name"] == "seq_len" else TOTAL_LEN
    batch_size = {"fig14": 20, "fig16b": 4}.get(figure, 8)
    if row["x_name"] == "batch_size":
        batch_size = int(row["x"])

    def run(label: str, batch: int = batch_size) -> dict[str, Any]:
        return _predict(PaperBar(label, row["model"], batch, total_len), efficiency)

    def block_s(label: str) -> float:
        return sum(run(label)[segment.name] or 0 for segment in SEGMENTS)

    def speedups() -> list[float]:
        found = []
        for size in sorted({bar.batch_size for bar in FIGURES[figure]}):
            for other in BASELINES:
                found.append(run(other, size)["total_s"] / run(series, size)["total_s"])
        return found

    quantities = {
        "speedup_min": lambda: min(speedups()),
        "speedup_max": lambda: max(speedups()),
        "total_latency": lambda: run(series)["total_s"],
        "tokens_per_s": lambda: run(series)["tokens_per_s"],
        "speedup_over_offload": lambda: run("offload")["total_s"] / run(series)["total_s"],
        "block_latency": lambda: 1e3 * block_s(series),  # ms
        "transfer_share": lambda: run(series)["transfer_s"] / block_s(series),
        "slowdown_vs_ideal": lambda: block_s(series) / block_s("ideal"),
    }
    return quantities[metric]() if metric in quantities else None


# The fit


def calibrate(
    efficiency: Efficiency = FITTED, figures: Collection[str] = tuple(FIGURES)
) -> pd.DataFrame:
    """Every published number of `figures` that the cost model predicts, in the order of the file.

    Beside the file's columns are `predicted`, and `ratio` of predicted to published.
    """
    numbers = published().query("figure in @figures").astype({"value": float})
    predicted = [quantity(row, efficiency) for _, row in numbers.iterrows()]
    numbers = numbers.assign(predicted=np.array(predicted, float)).dropna(subset="predicted")
    return numbers.assign(ratio=numbers.predicted / numbers.value)


def fit(figures: Collection[str] = tuple(FIGURES)) -> Efficiency:
    """The efficiencies that predict the numbers of `figures` best, in least squares of the logs."""

    def log_ratios(logs: NDArray[np.float64]) -> pd.Series:
        return np.log(calibrate(Efficiency(*np.exp(logs).tolist()), figures).ratio)

    # MINPACK's, as it saves most predictions of the slopes.
    found = least_squares(log_ratios, np.log(FITTED), method="lm", diff_step=0.01, xtol=1e-3)
    return Efficiency(*np.exp(found.x).tolist())


def render(compared: pd.DataFrame) -> str:
    """A table for a terminal: predicted, published, and the ratio of the two."""
    words = compared.rename(columns={"value": "published"})
    shown = ["figure", "series", "x", "metric", "predicted", "published", "unit", "ratio"]
    return words[shown].to_string(index=False, float_format="{:.4g}".format)


def render_errors() -> str:
    """The fit, its errors in-sample and on figures left out of it, as text for a terminal."""
    compared = calibrate()
    lines = [
        f"used:             {_words(FITTED, 2)}",
        f"fitted to all {len(compared)}: {_words(fit(), 3)}",
        f"in-sample, root mean square of log(predicted / published): {_rms(compared):.1%}",
        "",
        f"{'predicted by a fit to the other figures':59} {'rms':>6} {'worst':>6}",
    ]
    for figures in LEFT_OUT:
        efficiency = fit([figure for figure in FIGURES if figure not in figures])
        left_out = calibrate(efficiency, figures)
        worst = (left_out.ratio - 1).abs().max()
        name = f"{' and '.join(figures):15} ({_words(efficiency, 2)})"
        lines.append(f"{name:59} {_rms(left_out):6.1%} {worst:6.1%}")
    return "\n".join(lines)


def _rms(compared: pd.DataFrame) -> float:
    """Root mean square of the log ratio, which the fit minimises."""
    return float(np.sqrt(np.square(np.log(compared.ratio)).mean()))


def _words(efficiency: Efficiency, digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in efficiency._asdict().items())
