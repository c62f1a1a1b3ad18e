"""The three efficiencies by least squares of log(predicted / published), and the errors on figures left out of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, astuple
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.paper.costmodel.hardware import FITTED, Efficiency
from harness.paper.costmodel.published import FIGURES, Comparison, calibrate, error

LEFT_OUT = (("fig14", "fig15"), ("fig16a",), ("fig16b",), ("fig18",))
"""Figures that are left out together: fig 14 shows runs of fig 15."""
MAX_STEPS, TOLERANCE, DIFFERENCE = 20, 0.01, 0.01
"""Of the search, in logs: the last step is under TOLERANCE."""


class HeldOut(NamedTuple):
    """Figures, the efficiencies fitted without them, and their numbers as predicted by these."""

    figures: tuple[str, ...]
    efficiency: Efficiency
    comparisons: list[Comparison]

    @property
    def worst(self) -> float:
        """The largest deviation of a number, relative to the published one."""
        return max(abs(comparison.ratio - 1) for comparison in self.comparisons)


def fit(
    figures: Collection[str] = tuple(FIGURES), start: Efficiency = FITTED, *, independent_only: bool = False
) -> Efficiency:
    """The efficiencies, at most 1, that predict the numbers of `figures` best.

    Gauss-Newton in their logs; Broyden's update saves three of four predictions after the first step.
    """

    def log_ratios(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        compared = calibrate(Efficiency(*np.exp(logs).tolist()), figures)
        return np.array([math.log(each.ratio) for each in compared if each.independent or not independent_only])

    logs = np.log(astuple(start))
    off = log_ratios(logs)
    slopes = np.transpose([(off - log_ratios(logs - move)) / DIFFERENCE for move in DIFFERENCE * np.eye(len(logs))])
    for _ in range(MAX_STEPS):
        before, last = logs, off
        logs = np.minimum(logs + np.linalg.lstsq(slopes, -off)[0], 0.0)
        step = logs - before
        if np.abs(step).max() < TOLERANCE:
            break
        off = log_ratios(logs)
        slopes += np.outer(off - last - slopes @ step, step) / (step @ step)
    return Efficiency(*np.exp(logs).tolist())


def held_out() -> list[HeldOut]:
    """Each figure predicted by a fit to the others."""
    results = []
    for figures in LEFT_OUT:
        efficiency = fit([figure for figure in FIGURES if figure not in figures])
        results.append(HeldOut(figures, efficiency, calibrate(efficiency, figures)))
    return results


def render_errors() -> str:
    """The fit, its errors on the numbers it was made from, and on figures left out; in words for a terminal."""
    comparisons = calibrate()
    independent = [comparison for comparison in comparisons if comparison.independent]
    lines = [
        f"used:                       {_words(FITTED, 2)}",
        f"fitted to all {len(comparisons)}:           {_words(fit(), 3)}",
        f"to the {len(independent)} independent ones: {_words(fit(independent_only=True), 3)}",
        f"in-sample, root mean square of log(predicted / published): {error(comparisons):.1%} over all "
        f"{len(comparisons)} numbers, {error(independent):.1%} over the {len(independent)} independent ones",
        "",
        f"{'predicted by a fit to the other figures':59} {'rms':>6} {'worst':>6}",
    ]
    for result in held_out():
        name = f"{' and '.join(result.figures):15} ({_words(result.efficiency, 2)})"
        lines.append(f"{name:59} {error(result.comparisons):6.1%} {result.worst:6.1%}")
    return "\n".join(lines)


def _words(efficiency: Efficiency, digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in asdict(efficiency).items())
