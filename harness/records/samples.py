"""What the samples of records say of a method and the full cache on the same windows or questions: the difference, its
error, and the smallest difference that would have been seen.

A method and the full cache find the same windows and questions hard, so that their difference is known far better than
either value. `docs/design.md`, Statistics, says what each number is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]
Sample = Mapping[str, Any]

TWO_SIDED_5, POWER_80 = 1.96, 0.84
"""Quantiles of the normal distribution at 0.975 and 0.8."""
RULE_OF_THREE = 3
"""What happened to none of n happens to at most 3 / n of all, with 95 % confidence (exp(-3) = 0.05)."""


class Flips(NamedTuple):
    """Questions that the method alone has right (gained), or the full cache alone (lost).

    p: McNemar's, exact: how likely flips as unequal are where either way is as likely.
    """

    gained: int
    lost: int
    p: float


class Difference(NamedTuple):
    """A method's value less the full cache's, in the value's unit.

    stderr: of that; None with a single window or context. detectable: the smallest difference that would have been
    seen, where that is known. flips: of what is right or wrong, and nothing between.
    """

    value: float
    stderr: float | None
    detectable: float | None
    flips: Flips | None = None


def clustered_stderr(values: Sequence[float], clusters: Sequence[Any]) -> float | None:
    """Standard error of the mean of `values` whose errors are independent between clusters only; None with
    one cluster.

    With every value a cluster of its own it is lm-eval's: sample standard deviation / sqrt(n). Questions on
    one context are a cluster: they succeed and fail together (Liang and Zeger 1986, with the G / (G - 1)
    correction).
    """
    mean = sum(values) / len(values)
    residuals: dict[Any, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - mean
    groups = len(residuals)
    if groups < 2:
        return None
    return (sum(r * r for r in residuals.values()) * groups / (groups - 1)) ** 0.5 / len(values)


def mcnemar_p(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p: the binomial test of the questions that flipped against one half. 1 without any."""
    flipped = gained + lost
    tail = sum(math.comb(flipped, count) for count in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flipped)


def surprise(windows: Sequence[Sample]) -> Difference:
    """Mean negative log-likelihood, nats a token, on equally long windows of a text."""
    less = [window["nll"] - window["nll_full"] for window in windows]
    stderr = clustered_stderr(less, range(len(less)))
    return Difference(sum(less) / len(less), stderr, _detectable(stderr))


def perplexity(windows: Sequence[Sample]) -> Difference:
    """Perplexity, exp of the mean negative log-likelihood of equally long windows of a text.

    Its error is the delta method's: a window moves the difference by what it moves the two means, times the slopes of
    exp there.
    """
    own, full = ([window[name] for window in windows] for name in ("nll", "nll_full"))
    slope, slope_full = (math.exp(sum(nll) / len(nll)) for nll in (own, full))
    moves = [slope * one - slope_full * other for one, other in zip(own, full, strict=True)]
    stderr = clustered_stderr(moves, range(len(moves)))
    return Difference(slope - slope_full, stderr, _detectable(stderr))


def questions(own: Sequence[Sample], full: Sequence[Sample], metric: str) -> Difference | None:
    """The mean of `metric` over questions, its error clustered by context.

    Questions without that metric in either are of another length. None where the two did not answer the same
    questions, or where one of them has no number of that name.
    """
    if [_question(each) for each in own] != [_question(each) for each in full]:
        return None
    asked = [(one, other) for one, other in zip(own, full, strict=True) if metric in one or metric in other]
    if not asked or not all(isinstance(each.get(metric), int | float) for pair in asked for each in pair):
        return None
    pairs = [(float(one[metric]), float(other[metric])) for one, other in asked]
    less = [one - other for one, other in pairs]
    stderr = clustered_stderr(less, [one.get("context", _question(one)) for one, _ in asked])
    return Difference(sum(less) / len(less), stderr, _detectable(stderr, len(less)), _flips(pairs))


def _question(sample: Sample) -> Any:
    return sample.get("question")


def _flips(pairs: Sequence[tuple[float, float]]) -> Flips | None:
    """None where an answer can be right in part."""
    if not all(value in (0, 1) for pair in pairs for value in pair):
        return None
    gained, lost = (sum(one == won and other != won for one, other in pairs) for won in (1, 0))
    return Flips(gained, lost, mcnemar_p(gained, lost))


def _detectable(stderr: float | None, questions: int | None = None) -> float | None:
    """What a test at 5 % sees four times in five. questions: where none of them flipped there is no error to go by, and
    the rule of three bounds the share that would."""
    if stderr == 0:
        return None if questions is None else RULE_OF_THREE / questions
    return None if stderr is None else (TWO_SIDED_5 + POWER_80) * stderr
