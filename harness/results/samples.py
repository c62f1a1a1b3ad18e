"""Differences between a method and the full cache, or between two runs, on the same windows or
questions.

Hard questions are hard for both, so the paired difference is known far better than either value.
Each difference has its standard error and the smallest difference that would have been detected;
see `docs/results.md`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.results.columns import picked
from harness.results.inputs import CODE
from harness.results.record import Record, current, read_all, without_paths
from harness.settings.kinds import COMMON, find

Sample = Mapping[str, Any]
Pairs = Sequence[tuple[float, float]]

EXPONENTIAL = {
    "perplexity": "nll",
    "perplexity_full": "nll_full",
    "text_perplexity": "nll",
    "text_perplexity_full": "nll_full",
}
"""Metrics that are exp of a mean over windows or prompts, and the sample field that is averaged."""
FULL = "full"
"""Name of the method that is the full cache, if no codec is set."""
LAYERS = "layers"
"""In the samples of a run on a text, the errors of attention outputs by layer."""
OF_METHODS = {"calibration", "method"}
"""Inputs that a method may read and the full cache does not."""
MAY_DIFFER = {*COMMON, *OF_METHODS, "tasks"} - {"kind", "model"}
"""Settings in which a run and its full cache may differ: the method's own, and further tasks of the
same run."""


class Difference(NamedTuple):
    """A method's value minus the full cache's, or one run's minus another's, in the value's unit.

    stderr: None with a single window or context. detectable: smallest difference that would have
    been detected, if known. num_pairs: questions, windows or prompts. num_contexts: windows,
    prompts, or contexts of questions, whose errors are independent. gained, lost: questions that
    only the method, or only the full cache, answers correctly; None unless every answer is right or
    wrong.
    """

    value: float
    stderr: float | None
    detectable: float | None
    num_pairs: int
    num_contexts: int
    gained: int | None = None
    lost: int | None = None

    @property
    def p(self) -> float | None:
        """The two-sided p-value of a difference of 0: the paired t-test of the contexts."""
        from harness.results.stats import two_sided_p  # here, as a command's help needs no NumPy

        return two_sided_p(self.value, self.stderr, self.num_contexts - 1)


class Measured(NamedTuple):
    """A metric's value in a record, and the questions, windows or prompts behind it."""

    value: float
    samples: Sequence[Sample]


# Statistics


def clustered_stderr(values: Sequence[float], clusters: Sequence[Any]) -> float | None:
    """Standard error of the mean of `values` whose errors are independent only between clusters.

    None for one cluster. If every value is a cluster of its own, it is lm-eval's: sample standard
    deviation / sqrt(n). Questions on one context are a cluster (Liang and Zeger 1986, with the
    G / (G - 1) correction).
    """
    mean = sum(values) / len(values)
    residuals: dict[Any, float] = defaultdict(float)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - mean
    groups = len(residuals)
    if groups < 2:
        return None
    squares = sum(residual * residual for residual in residuals.values())
    return (squares * groups / (groups - 1)) ** 0.5 / len(values)


def perplexity(windows: Sequence[Sample]) -> Difference:
    """Difference of the perplexity, exp of the mean negative log-likelihood, over equally long
    windows."""
    pairs = [(window["nll"], window["nll_full"]) for window in windows]
    return _of_exponentials(pairs, range(len(windows)))


def paired(own: Measured, other: Measured, metric: str) -> Difference | None:
    """Difference of a metric if both records have the same questions, windows or prompts.

    Questions are the same by number, windows and prompts if there are as many. A question without
    that metric in either record is of another length. None if the questions differ, or if a value
    is not the mean of the samples' numbers, or exp of that mean.
    """
    questions = [sample.get("question") for sample in own.samples]
    if questions != [sample.get("question") for sample in other.samples]:
        return None
    name = EXPONENTIAL.get(metric, metric)
    pairs: list[tuple[float, float]] = []
    contexts = []
    for one, two in zip(own.samples, other.samples, strict=True):
        if name not in one and name not in two:
            continue
        first, second = one.get(name), two.get(name)
        if not isinstance(first, int | float) or not isinstance(second, int | float):
            return None
        contexts.append(one.get("context", len(pairs)))
        pairs.append((float(first), float(second)))
    if not pairs:
        return None
    for mean, value in zip(_means(pairs), (own.value, other.value), strict=True):
        expected = math.exp(mean) if metric in EXPONENTIAL else mean
        if not math.isclose(expected, value, rel_tol=1e-6, abs_tol=1e-9):
            return None
    if metric in EXPONENTIAL:
        return _of_exponentials(pairs, contexts)
    return _of_means(pairs, contexts)


def _means(pairs: Pairs) -> list[float]:
    return [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]


def _of_means(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    from harness.results.stats import unseen_rate  # here, as a command's help needs no NumPy

    differences = [one - other for one, other in pairs]
    values = set(itertools.chain.from_iterable(pairs))
    stderr, num_contexts, least = _errors(differences, contexts)
    if stderr == 0 and min(values) >= 0 and max(values) <= 1:
        least = unseen_rate(num_contexts)
    found = Difference(sum(differences) / len(pairs), stderr, least, len(pairs), num_contexts)
    if not values <= {0, 1}:
        return found
    return found._replace(gained=differences.count(1), lost=differences.count(-1))


def _over_tasks(parts: Sequence[Difference]) -> Difference:
    """The mean of tasks' differences. Tasks are strata: their errors are independent, and the tasks
    themselves are not drawn. With one context a task its error is not known; tasks then stand for
    one another, which gives too large an error rather than too small a one (collapsed strata,
    Cochran 1977, 5A.12). num_contexts: one more than the degrees of freedom."""
    from harness.results.stats import detectable

    values = [part.value for part in parts]
    num_free = sum(part.num_contexts for part in parts) - len(parts)
    if all(part.stderr is not None for part in parts):
        squares = sum((part.stderr or 0) ** 2 for part in parts)
        stderr: float | None = squares**0.5 / len(parts)
    else:
        stderr = clustered_stderr(values, range(len(parts)))
        num_free = len(parts) - 1
    least = detectable(num_free + 1) * stderr if stderr else None
    num_pairs = sum(part.num_pairs for part in parts)
    return Difference(sum(values) / len(parts), stderr, least, num_pairs, num_free + 1)


def _errors(
    differences: Sequence[float], contexts: Sequence[Any]
) -> tuple[float | None, int, float | None]:
    """The standard error of the mean, the number of contexts, and the smallest difference that a
    test at 5 % detects four times in five."""
    from harness.results.stats import detectable  # here, as a command's help needs no NumPy

    stderr, num_contexts = clustered_stderr(differences, contexts), len({*contexts})
    return stderr, num_contexts, detectable(num_contexts) * stderr if stderr else None


def _of_exponentials(pairs: Pairs, contexts: Sequence[Any]) -> Difference:
    """Difference of exp of the two means.

    Its standard error is the delta method's: a window changes the difference by its change of the
    two means, times the slope of exp there.
    """
    slope, slope_other = map(math.exp, _means(pairs))
    changes = [slope * one - slope_other * other for one, other in pairs]
    stderr, num_contexts, least = _errors(changes, contexts)
    return Difference(slope - slope_other, stderr, least, len(pairs), num_contexts)


# Samples of records


def samples_of(record: Record, name: str) -> Sequence[Sample]:
    """The questions of a task, or the windows or prompts of a text; [] if the run keeps none."""
    samples = record["samples"]
    for key in (name, "windows", "prompts"):
        if key in samples:
            found: Sequence[Sample] = samples[key]
            return found
    return []


def num_contexts(samples: Sequence[Sample], metric: str) -> int | None:
    """Windows, prompts, or contexts of questions whose numbers give `metric`.

    None if the samples do not hold it.
    """
    name = EXPONENTIAL.get(metric, metric)
    contexts = set()
    for index, sample in enumerate(samples):
        if sample.get(name) is not None:
            contexts.add(sample.get("context", index))
    return len(contexts) or None


# The full cache


def is_full(record: Record) -> bool:
    """Whether a run is of the full cache."""
    config = record["config"]
    has_codec = config["codec"] is not None or config.get("value_codec") is not None
    return config["method_name"] == FULL and not has_codec


def full_runs(*results_dirs: str | Path) -> list[Record]:
    """The full cache's finished runs in results folders, of all experiments."""
    found: list[Record] = []
    for folder in results_dirs:
        found += current(filter(is_full, read_all(folder)))
    return found


class Baselines:
    """The full cache's runs.

    A run is compared with the newest one on the same questions, whatever code made it; one of its
    own experiment comes first.

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
        tasks = record["metrics"].get(task, {}).get("tasks")
        if tasks and not is_full(record):
            return self._of_group(record, task, tasks, metric)
        own = _measured(record, task, metric)
        if is_full(record) or not any(metric in sample for sample in own.samples):
            return None
        for full in self.runs_for(record):
            found = paired(own, _measured(full, task, metric), metric)
            if found:
                return found
        return None

    def _of_group(
        self, record: Record, group: str, tasks: Sequence[str], metric: str
    ) -> Difference | None:
        """Difference of a group's metric, paired by question; None unless it is the mean of its
        tasks' values and they have equally many questions."""
        entries, parts = record["metrics"], []
        for task in tasks:
            has_metric = metric in entries.get(task, {})
            part = self.difference(record, task, metric) if has_metric else None
            if part is None:
                return None
            parts.append(part)
        mean = sum(entries[task][metric] for task in tasks) / len(tasks)
        is_mean = math.isclose(entries[group][metric], mean, rel_tol=1e-6, abs_tol=1e-9)
        if not is_mean or len({part.num_pairs for part in parts}) > 1:
            return None
        return _over_tasks(parts)

    def runs_for(self, record: Record) -> Iterator[Record]:
        """The full cache's runs on the same questions, the own experiment's first, those from
        elsewhere last."""
        for full_runs in (lambda: self._here, self._elsewhere):
            known = sorted(full_runs(), key=lambda run: run["experiment"] != record["experiment"])
            for full in known:
                if same_questions(record, full):
                    yield full


def of_windows(record: Record, windows: Sequence[Sample]) -> Difference | None:
    """Difference of the perplexity over windows that the run scored under the full cache too.

    None for the full cache itself.
    """
    if not windows or is_full(record):
        return None
    scored = all({"nll", "nll_full"} <= window.keys() for window in windows)
    return perplexity(windows) if scored else None


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(filter(is_full, records), key=lambda record: record["started"], reverse=True)


def _measured(record: Record, task: str, metric: str) -> Measured:
    value = record["metrics"].get(task, {}).get(metric, math.nan)
    return Measured(value, record["samples"].get(task, ()))


def same_questions(record: Record, full: Record) -> bool:
    """Whether two runs were asked the same questions of the same model.

    Each may have read further tasks.
    """
    names = {"kind", "model", *find(record["kind"]).depends_on} - MAY_DIFFER
    of_own, of_full = picked(record["config"], names), picked(full["config"], names)
    if without_paths(of_own) != without_paths(of_full):
        return False
    own, other = record["inputs"], full["inputs"]
    for name in own.keys() & other.keys() - OF_METHODS:
        if not name.startswith(CODE) and own[name] != other[name]:
            return False
    return True
