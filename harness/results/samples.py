"""Differences between a method and the full cache, or between two runs, on the same windows or
questions.

Hard questions are hard for both, so the paired difference is known far better than either value.
Each difference has its standard error and the smallest difference that would have been detected;
see `docs/design.md`, Statistics.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.results import student
from harness.results.inputs import CODE
from harness.results.record import Record, current, read_all, without_paths
from harness.settings.kinds import COMMON, find

Sample = Mapping[str, Any]
Pairs = Sequence[tuple[float, float]]

RULE_OF_THREE = 3
"""An event that happened in none of n trials has a rate of at most 3 / n, with 95 % confidence
(exp(-3) = 0.05)."""
EXPONENTIAL = {
    "perplexity": "nll", "perplexity_full": "nll_full", "text_perplexity": "nll", "text_perplexity_full": "nll_full",
}  # fmt: skip
"""Metrics that are exp of a mean over windows or prompts, and the sample field that is averaged."""
FULL = "full"
"""Name of the method that is the full cache, if no codec is set."""
OF_METHODS = {"calibration", "method"}
"""Inputs that a method may read and the full cache does not."""
MAY_DIFFER = {*COMMON, *OF_METHODS, "tasks"} - {"kind", "model"}
"""Settings in which a run and its full cache may differ: the method's own, and further tasks of the
same run."""


class Difference(NamedTuple):
    """A method's value minus the full cache's, or one run's minus another's, in the unit of the
    value.

    stderr: None with a single window or context. num_contexts: windows, prompts, or contexts of
    questions, whose errors are independent. detectable: smallest difference that would have been
    detected, if known. num_pairs: questions, windows or prompts. gained, lost: questions that only
    the method, or only the full cache,
    answers correctly; None unless every answer is right or wrong. mcnemar_p: McNemar's exact
    p-value of counts this unequal, if either direction is equally likely.
    """

    value: float
    stderr: float | None
    detectable: float | None
    num_pairs: int
    num_contexts: int
    gained: int | None = None
    lost: int | None = None
    mcnemar_p: float | None = None


class Measured(NamedTuple):
    """A metric's value in a record, with the questions, windows or prompts that it was measured
    on."""

    value: float
    samples: Sequence[Sample]


def clustered_stderr(values: Sequence[float], clusters: Sequence[Any]) -> float | None:
    """Standard error of the mean of `values` whose errors are independent only between clusters;
    None for one cluster.

    If every value is a cluster of its own, it is lm-eval's: sample standard deviation / sqrt(n).
    Questions on one context are a cluster (Liang and Zeger 1986, with the G / (G - 1) correction).
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
    """Exact two-sided McNemar p-value: the binomial test of the flipped questions against 1/2. 1
    without any."""
    flipped = gained + lost
    tail = sum(math.comb(flipped, count) for count in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flipped)


def nll_difference(windows: Sequence[Sample]) -> Difference:
    """Difference of the mean negative log-likelihood, nats per token, over equally long windows of
    a text."""
    return _of_means(
        [(window["nll"], window["nll_full"]) for window in windows], range(len(windows))
    )


def perplexity(windows: Sequence[Sample]) -> Difference:
    """Difference of the perplexity, exp of the mean negative log-likelihood, over equally long
    windows of a text."""
    return _of_exponentials(
        [(window["nll"], window["nll_full"]) for window in windows], range(len(windows))
    )


def paired(own: Measured, other: Measured, metric: str) -> Difference | None:
    """Difference of a metric if both records have the same questions, by number, or as many windows
    or prompts.

    A question without that metric in either record is of another length. None if the questions
    differ, or if a value is not the mean of the samples' numbers, or exp of that mean.
    """
    if [each.get("question") for each in own.samples] != [
        each.get("question") for each in other.samples
    ]:
        return None
    name = EXPONENTIAL.get(metric, metric)
    asked = [
        pair
        for pair in zip(own.samples, other.samples, strict=True)
        if any(name in each for each in pair)
    ]
    if not asked or not all(
        isinstance(each.get(name), int | float) for pair in asked for each in pair
    ):
        return None
    pairs = [(float(one[name]), float(two[name])) for one, two in asked]
    means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    if metric in EXPONENTIAL:
        means = [math.exp(mean) for mean in means]
    for mean, value in zip(means, (own.value, other.value), strict=True):
        if not math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9):
            return None
    contexts = [one.get("context", index) for index, (one, _) in enumerate(asked)]
    return (_of_exponentials if metric in EXPONENTIAL else _of_means)(pairs, contexts)


def _of_means(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    differences = [one - other for one, other in pairs]
    values = [value for pair in pairs for value in pair]
    stderr, num_contexts = clustered_stderr(differences, contexts), len({*contexts})
    detectable = _detectable(stderr, num_contexts)
    if stderr == 0 and all(0 <= value <= 1 for value in values):
        detectable = RULE_OF_THREE / len(pairs)
    found = Difference(sum(differences) / len(pairs), stderr, detectable, len(pairs), num_contexts)
    if not all(value in (0, 1) for value in values):
        return found
    gained, lost = (sum(difference == sign for difference in differences) for sign in (1, -1))
    return found._replace(gained=gained, lost=lost, mcnemar_p=mcnemar_p(gained, lost))


def _of_exponentials(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    """Difference of exp of the two means. Its standard error is the delta method's: a window
    changes the difference by its change of the two means, times the slope of exp there."""
    slope, slope_other = (math.exp(sum(values) / len(pairs)) for values in zip(*pairs, strict=True))
    stderr = clustered_stderr([slope * one - slope_other * other for one, other in pairs], contexts)
    num_contexts = len({*contexts})
    return Difference(
        slope - slope_other, stderr, _detectable(stderr, num_contexts), len(pairs), num_contexts
    )


def _detectable(stderr: float | None, num_contexts: int) -> float | None:
    """Smallest difference that a test at 5 % detects four times in five."""
    return student.detectable(num_contexts) * stderr if stderr else None


def samples_of(record: Record, name: str) -> Sequence[Sample]:
    """The questions of a task, or the windows or prompts of a text; [] if the run keeps none."""
    samples = record["samples"]
    for key in (name, "windows", "prompts"):
        if key in samples:
            found: Sequence[Sample] = samples[key]
            return found
    return []


def num_contexts(samples: Sequence[Sample], metric: str) -> int | None:
    """Windows, prompts, or contexts of questions whose numbers give `metric`; None if the samples
    do not hold it."""
    name = EXPONENTIAL.get(metric, metric)
    contexts = {
        sample.get("context", index)
        for index, sample in enumerate(samples)
        if sample.get(name) is not None
    }
    return len(contexts) or None


def is_full(record: Record) -> bool:
    """Whether a run is of the full cache."""
    config = record["config"]
    return (
        config["method_name"] == FULL
        and config["codec"] is None
        and config.get("value_codec") is None
    )


def full_runs(*results_dirs: str | Path) -> list[Record]:
    """The full cache's finished runs in results folders, of all experiments."""
    return [
        record for folder in results_dirs for record in current(filter(is_full, read_all(folder)))
    ]


class Baselines:
    """The full cache's runs. A run is compared with the newest one on the same questions, whatever
    code made it; one of its own experiment comes first.

    records: finished records. elsewhere: returns further ones; called once, and only if `records`
    has no match.
    """

    def __init__(
        self, records: Iterable[Record], elsewhere: Callable[[], Iterable[Record]] = tuple
    ) -> None:
        self._here = _newest_first(records)
        self._elsewhere = cache(lambda: _newest_first(elsewhere()))

    def difference(self, record: Record, task: str, metric: str) -> Difference | None:
        """Difference of `metric` on a task or text to the full cache.

        None for the full cache itself, if it did not run on the same questions, or if the metric is
        not a mean of numbers that the samples hold. A run on a text holds the full cache's scores
        of its windows.
        """
        if metric == "perplexity":
            return of_windows(record, record["samples"].get("windows", ()))
        own = _measured(record, task, metric)
        if is_full(record) or not any(metric in sample for sample in own.samples):
            return None
        for candidates in (lambda: self._here, self._elsewhere):
            for full in sorted(
                candidates(), key=lambda full: full["experiment"] != record["experiment"]
            ):
                if same_questions(record, full) and (
                    found := paired(own, _measured(full, task, metric), metric)
                ):
                    return found
        return None


def of_windows(record: Record, windows: Sequence[Sample]) -> Difference | None:
    """Difference of the perplexity over windows that the run scored under the full cache too; None
    for the full cache itself."""
    scored = all({"nll", "nll_full"} <= window.keys() for window in windows)
    return perplexity(windows) if windows and scored and not is_full(record) else None


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(filter(is_full, records), key=lambda record: record["started"], reverse=True)


def _measured(record: Record, task: str, metric: str) -> Measured:
    return Measured(
        record["metrics"].get(task, {}).get(metric, math.nan), record["samples"].get(task, ())
    )


def same_questions(record: Record, full: Record) -> bool:
    """Whether two runs were asked the same questions of the same model. Each may have read further
    tasks."""
    names = {"kind", "model", *find(record["kind"]).depends_on} - MAY_DIFFER
    own, other = (
        without_paths({name: each["config"].get(name) for name in names}) for each in (record, full)
    )
    read, also = record["inputs"], full["inputs"]
    data = (
        name
        for name in read.keys() & also.keys()
        if not name.startswith(CODE) and name not in OF_METHODS
    )
    return own == other and all(read[name] == also[name] for name in data)
