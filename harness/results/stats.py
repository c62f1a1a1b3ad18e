"""Statistics of tables: Student's t, means whose errors are clustered by place of a text, the test
of two methods, Holm's correction, and ranks with an interval.

A standard error that was estimated from n independent values is itself uncertain. The interval of
95 % is 12.7 standard errors wide to each side with two values, 4.3 with three, 3.2 with four, and
1.96 with many.

Within a model, and in the tests of pairs, models and texts are fixed: a number speaks of those that
ran. The places of a text are the sample. The same place of a text on several models is one cluster,
since what is hard there is hard for all models. A mean over models has the interval that models
drawn from many would have (`Design.over_models`). The formulas are in `docs/results.md`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

CONFIDENCE_95 = 0.95
OF_INTERVAL = (1 + CONFIDENCE_95) / 2
"""The probability of a value below the upper end of an interval."""
LEVEL = 1 - CONFIDENCE_95
"""Of the tests, after Holm's correction over all pairs."""
ROUNDING = 1e-12
"""A standard error that is smaller, in units of the largest value, is rounding."""


def critical_value(num_contexts: float | None, probability: float = OF_INTERVAL) -> float:
    """Standard errors to either side of an interval of 95 %.

    num_contexts: independent values, which are windows, prompts, or contexts whose questions are
    one cluster: one more than the degrees of freedom. Infinite with fewer than two. None where a
    table does not say: the normal distribution's value, 1.96.
    """
    if num_contexts is None:
        return quantile(math.inf, probability)
    return quantile(int(num_contexts) - 1, probability) if num_contexts >= 2 else math.inf


def detectable(num_contexts: float | None, power: float = 0.8) -> float:
    """Standard errors of the smallest difference that a test at 5 % detects with `power`.

    It is the sum of both quantiles, 2.8 with many contexts.
    """
    return critical_value(num_contexts) + critical_value(num_contexts, power)


@cache
def quantile(degrees: float, probability: float) -> float:
    """The value that Student's t stays below with `probability`. degrees: of freedom, at least 1;
    infinite for the normal distribution."""
    from scipy.special import stdtrit  # here, as a command's help needs no statistics

    return float(stdtrit(degrees, probability))


def two_sided_p(value: float, stderr: float | None, degrees: float | None) -> float | None:
    """The probability that a mean of 0 is found at least as far from 0 as `value`, by Student's t.

    Without a standard error None. With one of 0, where all values are alike: 1 if they are 0, else
    None, as t has no value then.
    """
    from scipy.special import stdtr

    if stderr is None or degrees is None:
        return None
    if stderr == 0:
        return 1.0 if value == 0 else None
    return float(2 * stdtr(degrees, -abs(value / stderr)))


def unseen_rate(num_contexts: int) -> float:
    """The largest rate of contexts in which something happens that happened in none of so many,
    with 95 % confidence (Clopper and Pearson 1934); about 3 / num_contexts with many."""
    return float(1 - LEVEL ** (1 / num_contexts))


class Estimate(NamedTuple):
    """A mean over models and parts.

    stderr: None where a model has a single cluster of some part. degrees: of freedom of Student's
    t; None where stderr is. num_clusters: places of texts, or contexts of questions.
    """

    value: float
    stderr: float | None
    degrees: int | None
    num_clusters: int

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval."""
        if self.stderr is None or self.degrees is None:
            return None
        return quantile(self.degrees, OF_INTERVAL) * self.stderr

    @property
    def p(self) -> float | None:
        """The two-sided p-value of a mean of 0."""
        return two_sided_p(self.value, self.stderr, self.degrees)


class Design:
    """Where values were measured, and what each weighs: all models alike, in a model all parts
    alike, in a part of a model by `counts`.

    models, parts, clusters: one entry for each value. A part is a text or a task. A cluster is a
    place of a text or a context of questions; clusters of two parts are never the same.
    counts: questions behind a value; None: 1 each.
    """

    def __init__(
        self,
        models: Sequence[Hashable],
        parts: Sequence[Hashable],
        clusters: Sequence[Hashable],
        counts: Sequence[float] | None = None,
    ) -> None:
        strata = list(zip(models, parts, strict=True))
        places = list(zip(parts, clusters, strict=True))
        self._model = _numbered(models)
        self._stratum = _numbered(strata)
        self._cluster = _numbered(places)
        self._part = _numbered([part for part, _ in dict.fromkeys(places)])
        self.num_clusters = len(self._part)

        asked = np.ones(len(strata)) if counts is None else np.asarray(counts, dtype=float)
        self._shares = asked / np.bincount(self._stratum, asked)[self._stratum]
        parts_of_model = np.bincount(_numbered([model for model, _ in dict.fromkeys(strata)]))
        self.weights = self._shares * (1 / (len(parts_of_model) * parts_of_model[self._model]))

        stratum_of_cluster, _ = np.unique([self._stratum, self._cluster], axis=1)
        size = np.bincount(stratum_of_cluster)
        self._scale = None
        if size.min() > 1:  # sqrt(n / (n - 1)) of each value, n the clusters of its stratum
            self._scale = np.sqrt(size / (size - 1))[self._stratum]

        # Kish's effective number of clusters: some places may have fewer models than others.
        of_clusters = np.bincount(self._cluster, self.weights)
        of_parts = np.bincount(self._part, of_clusters)
        self._degrees = of_parts**2 / np.bincount(self._part, of_clusters**2) - 1

    def mean(self, values: ArrayLike) -> float:
        """The weighted mean."""
        return _total(self.weights * np.asarray(values))

    def estimate(self, values: ArrayLike) -> Estimate:
        """The weighted mean of `values`, its standard error and its degrees of freedom."""
        values = np.asarray(values)
        found = Estimate(self.mean(values), None, None, self.num_clusters)
        if self._scale is None:
            return found
        means = np.bincount(self._stratum, self._shares * values)
        residuals = self._scale * (values - means[self._stratum])
        of_clusters = np.bincount(self._cluster, self.weights * residuals)
        of_parts = np.bincount(self._part, of_clusters**2)
        variance = _total(of_parts)
        # Rounding leaves residuals of equal values that are not quite 0.
        if math.sqrt(variance) <= ROUNDING * np.abs(values).max():
            return found._replace(stderr=0.0, degrees=_whole(_total(self._degrees)))
        degrees = variance**2 / _total(of_parts**2 / self._degrees)
        return found._replace(stderr=math.sqrt(variance), degrees=_whole(degrees))

    def over_models(self, values: ArrayLike) -> Estimate:
        """The mean of the models' means, with the error that models drawn from many would have.

        The standard error is the models' sample standard deviation / sqrt(models), with a degree of
        freedom fewer than models. Of one model it is `estimate`.
        """
        totals = np.bincount(self._model, self.weights * np.asarray(values))
        means = totals / np.bincount(self._model, self.weights)
        found = self.estimate(values)
        if len(means) < 2:
            return found
        stderr = statistics.stdev(means.tolist()) / math.sqrt(len(means))
        return found._replace(stderr=stderr, degrees=len(means) - 1)


def _whole(degrees: float) -> int:
    return max(1, math.floor(degrees + 1e-9))


def _numbered(keys: Sequence[Hashable]) -> Array:
    """The number of each key, in the order in which distinct keys come."""
    numbers: dict[Hashable, int] = {}
    for key in keys:
        numbers.setdefault(key, len(numbers))
    return np.array([numbers[key] for key in keys])


def _total(values: Array) -> float:
    """The sum, one value after another, so that tables are the same on every machine."""
    return float(np.cumsum(values)[-1])


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's corrected p-values (1979): the k-th smallest of m times m - k + 1, at least the one
    before it, at most 1.

    None, of a pair that cannot be tested, stays None and counts in m.
    """
    known = [(p, index) for index, p in enumerate(p_values) if p is not None]
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(sorted(known)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[index] = largest
    return corrected


class Pair(NamedTuple):
    """Two methods: the mean logarithm of the first's KL over the second's, by their numbers.

    p_holm: corrected over all pairs that were compared with this one; None without an error.
    """

    first: int
    second: int
    estimate: Estimate
    p_holm: float | None

    @property
    def closer(self) -> int | None:
        """The number of the method that is certainly closer; None where they are not told apart."""
        if self.p_holm is None or self.p_holm > LEVEL:
            return None
        return self.first if self.estimate.value < 0 else self.second


def compare_all(design: Design, logs: Sequence[Sequence[float]]) -> list[Pair]:
    """All pairs of methods, with Holm's correction over all of them.

    logs: for each method the logarithms of its KL, in the order of the design's values.
    """
    found = []
    for first, second in itertools.combinations(range(len(logs)), 2):
        estimate = design.estimate(np.subtract(logs[first], logs[second]))
        found.append(Pair(first, second, estimate, None))
    corrected = holm([pair.estimate.p for pair in found])
    return [pair._replace(p_holm=p) for pair, p in zip(found, corrected, strict=True)]


class Rank(NamedTuple):
    """A method's place by its ratio, and the places that it may have."""

    value: int
    low: int
    high: int


def ranks(ratios: Sequence[float], pairs: Sequence[Pair]) -> list[Rank]:
    """For each method its place, from 1 + the methods certainly closer to n - those certainly
    farther.

    Equal ratios share a place.
    """
    lows, highs = [1] * len(ratios), [len(ratios)] * len(ratios)
    for pair in pairs:
        if pair.closer is not None:
            other = pair.second if pair.closer == pair.first else pair.first
            lows[other] += 1
            highs[pair.closer] -= 1
    places = [1 + sum(other < ratio for other in ratios) for ratio in ratios]
    return list(map(Rank, places, lows, highs))
