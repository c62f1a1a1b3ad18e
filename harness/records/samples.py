"""What samples say of a method and the full cache, or of two runs, on the same windows or questions: the difference,
its error, and the smallest difference that would have been seen.

A method and the full cache find the same windows and questions hard, so that their difference is known far better than
either value. `docs/design.md`, Statistics, says what each number is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Sample = Mapping[str, Any]
Pairs = Sequence[tuple[float, float]]

TWO_SIDED_5, POWER_80 = 1.96, 0.84
"""Quantiles of the normal distribution at 0.975 and 0.8."""
RULE_OF_THREE = 3
"""What happened to none of n happens to at most 3 / n of all, with 95 % confidence (exp(-3) = 0.05)."""


EXPONENTIAL = {
    "perplexity": "nll", "perplexity_full": "nll_full", "text_perplexity": "nll", "text_perplexity_full": "nll_full",
}  # fmt: skip
"""Metrics that are exp of a mean, and what of a window or prompt that is the mean of."""


class Flips(NamedTuple):
    """Questions that the method alone has right (gained), or the full cache alone (lost).

    p: McNemar's, exact: how likely flips as unequal are where either way is as likely.
    """

    gained: int
    lost: int
    p: float


class Difference(NamedTuple):
    """A method's value less the full cache's, or one run's less another's, in the value's unit.

    stderr: of that; None with a single window or context. detectable: the smallest difference that would have been
    seen, where that is known. num_pairs: questions or windows. flips: of what is right or wrong, and nothing between.
    """

    value: float
    stderr: float | None
    detectable: float | None
    num_pairs: int
    flips: Flips | None = None


class Measured(NamedTuple):
    """A metric's value in a record, with the questions, windows or prompts that it was measured on."""

    value: float
    samples: Sequence[Sample]


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
    return _of_means(_nlls(windows), range(len(windows)))


def perplexity(windows: Sequence[Sample]) -> Difference:
    """Perplexity, exp of the mean negative log-likelihood of equally long windows of a text."""
    return _of_exponentials(_nlls(windows), range(len(windows)))


def paired(own: Measured, other: Measured, metric: str) -> Difference | None:
    """How far a metric is apart where two records have the same questions, by number, or as many windows or prompts.

    Questions without that metric in either are of another length. None where the two are not on the same questions, or
    where a value is not the mean, or its exponential, of numbers that all samples hold.
    """
    if [each.get("question") for each in own.samples] != [each.get("question") for each in other.samples]:
        return None
    name = EXPONENTIAL.get(metric, metric)
    asked = [pair for pair in zip(own.samples, other.samples, strict=True) if any(name in each for each in pair)]
    if not asked or not all(isinstance(each.get(name), int | float) for pair in asked for each in pair):
        return None
    pairs = [(float(one[name]), float(two[name])) for one, two in asked]
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    if metric in EXPONENTIAL:
        means = [math.exp(mean) for mean in means]
    if not all(map(_is_close, means, (own.value, other.value))):
        return None
    contexts = [one.get("context", index) for index, (one, _) in enumerate(asked)]
    return (_of_exponentials if metric in EXPONENTIAL else _of_means)(pairs, contexts)


def _is_close(mean: float, value: float) -> bool:
    return math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9)


def _nlls(windows: Sequence[Sample]) -> Pairs:
    return [(window["nll"], window["nll_full"]) for window in windows]


def _of_means(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    less = [one - other for one, other in pairs]
    stderr = clustered_stderr(less, contexts)
    detectable = _detectable(stderr)
    if stderr == 0 and all(0 <= value <= 1 for pair in pairs for value in pair):
        detectable = RULE_OF_THREE / len(pairs)  # of the share of questions that would differ, by 1 at most
    return Difference(sum(less) / len(less), stderr, detectable, len(pairs), _flips(pairs))


def _of_exponentials(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    """Of exp of the two means. Its error is the delta method's: a window moves the difference by what it moves the two
    means, times the slopes of exp there."""
    slope, slope_other = (math.exp(sum(values) / len(pairs)) for values in zip(*pairs, strict=True))
    moves = [slope * one - slope_other * other for one, other in pairs]
    stderr = clustered_stderr(moves, contexts)
    return Difference(slope - slope_other, stderr, _detectable(stderr), len(pairs))


def _flips(pairs: Pairs) -> Flips | None:
    """None where an answer can be right in part."""
    if not all(value in (0, 1) for pair in pairs for value in pair):
        return None
    gained, lost = (sum(one == won and other != won for one, other in pairs) for won in (1, 0))
    return Flips(gained, lost, mcnemar_p(gained, lost))


def _detectable(stderr: float | None) -> float | None:
    """What a test at 5 % sees four times in five; None without an error to go by."""
    return (TWO_SIDED_5 + POWER_80) * stderr if stderr else None
