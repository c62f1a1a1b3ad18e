"""What the samples of records say of two runs on the same windows or questions: their difference, and its error.

A method and the full cache find the same windows hard, so that their difference is known far better than either value.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Difference(NamedTuple):
    """A mean of differences; stderr None with a single window or context."""

    mean: float
    stderr: float | None


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


def surprise(record: Record) -> Difference:
    """Negative log-likelihood less the full cache's on the same windows of a text, nats a token."""
    windows = record["samples"]["windows"]
    return _mean([window["nll"] - window["nll_full"] for window in windows], range(len(windows)))


def accuracy(record: Record, full: Record | None, task: str) -> Difference | None:
    """Accuracy less that of the record `full` on the same questions; None where there are none to compare."""
    own, other = record["samples"][task], [] if full is None else full["samples"].get(task, [])
    if [each["question"] for each in own] != [each["question"] for each in other]:
        return None
    hits = [float(one["acc"]) - float(two["acc"]) for one, two in zip(own, other, strict=True)]
    return _mean(hits, [each["context"] for each in own])


def _mean(values: Sequence[float], clusters: Sequence[Any]) -> Difference:
    return Difference(sum(values) / len(values), clustered_stderr(values, clusters))
