"""How far two numbers of the same name are apart: two runs of the same settings, here and there.

Where both were measured on the same windows or questions the standard error is that of the paired difference, else that
of two independent numbers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.records.samples import clustered_stderr
from harness.tables.accuracy import is_part
from harness.tables.columns import TableRow

Record = Mapping[str, Any]
Key = tuple[Any, ...]
"""What a number is of, by `NAMES`, and its metric."""

NAMES = (
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "series", "layer", "x_name", "x",
)  # fmt: skip
"""The columns of a row that say what its numbers are of."""
EXPONENTIAL = {"perplexity": "nll", "perplexity_full": "nll_full"}
"""Metrics that are the exponential of the mean of what their samples hold."""
CLOSE = 1e-6
"""Relative; samples whose mean is this near to a metric are what it is the mean of."""
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for inputs that are neither code nor the data that is asked about."""
MACHINE = ("python", "platform", "cpu", "device", "device_name", "packages")


class Number(NamedTuple):
    """A measured number. metric: its column, or the metric of its row."""

    value: float
    stderr: float | None
    metric: str
    row: TableRow
    record: Record

    @property
    def key(self) -> Key:
        """What it is of: the same in two results for the same number."""
        return (*(self.row.get(name) for name in NAMES), self.metric)


class Change(NamedTuple):
    """A number in both results. num_pairs: windows or questions of the paired difference; 0: not paired."""

    before: Number
    after: Number
    stderr: float | None
    num_pairs: int = 0

    @property
    def difference(self) -> float:
        """What is there afterwards less what was there before."""
        return self.after.value - self.before.value

    @property
    def is_equal(self) -> bool:
        """Up to rounding."""
        return math.isclose(self.before.value, self.after.value, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def sigmas(self) -> float | None:
        """The difference in standard errors, without its sign; None where there is none."""
        return abs(self.difference) / self.stderr if self.stderr else None

    @property
    def ratio(self) -> float | None:
        """Afterwards to before; None of numbers that have none."""
        before, after = self.before.value, self.after.value
        return after / before if before > 0 and after > 0 else None

    @property
    def is_of_speed(self) -> bool:
        """Whether it was timed or counted while decoding live."""
        return "metric" not in self.before.row

    @property
    def causes(self) -> list[str]:
        """What else differs between the two runs, in words."""
        return _causes(self.before.record, self.after.record)


def change(before: Number, after: Number) -> Change:
    """The two as one, with the standard error of their difference."""
    values = _values(before), _values(after)
    if all(values) and _same_questions(before, after):
        differences = [two - one for one, two in zip(*values, strict=True)]
        clusters = [sample.get("context", index) for index, sample in enumerate(_samples(before))]
        return Change(before, after, clustered_stderr(differences, clusters), len(differences))
    errors = (before.stderr, after.stderr)
    return Change(before, after, None if None in errors else math.hypot(*(error or 0 for error in errors)))


def _samples(number: Number) -> Sequence[Mapping[str, Any]]:
    """The windows or questions behind a number; none of a chunk of a text, or where a run keeps none."""
    if "task" not in number.row or is_part(number.row):
        return []
    samples = number.record["samples"]
    return samples.get(number.row["task"]) or samples.get("windows") or []


def _values(number: Number) -> list[float]:
    """What a number is the mean of, by window or question; none where the samples do not say."""
    name = EXPONENTIAL.get(number.metric, number.metric)
    samples = _samples(number)
    values = [float(value) for sample in samples if isinstance(value := sample.get(name), int | float)]
    if not values or len(values) < len(samples):
        return []
    mean = sum(values) / len(values)
    if number.metric in EXPONENTIAL:  # to first order about the mean, as its own standard error is
        values, mean = [number.value * value for value in values], math.exp(mean)
    return values if math.isclose(mean, number.value, rel_tol=CLOSE, abs_tol=CLOSE) else []


def _same_questions(one: Number, two: Number) -> bool:
    """Whether both are of the same windows or questions: as many, of the same numbers, in the same data."""
    numbers = [[sample.get("question") for sample in _samples(number)] for number in (one, two)]
    return numbers[0] == numbers[1] and "data" not in _differ(one.record["inputs"], two.record["inputs"])


def _differ(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """What has another digest, of the inputs that both name: code, weights, calibration, data."""
    names = [name for name in one if two.get(name, one[name]) != one[name]]
    return list(dict.fromkeys("code" if name.startswith("code:") else INPUTS.get(name, "data") for name in names))


def _causes(before: Record, after: Record) -> list[str]:
    """What differs of inputs, precision and environment, in words."""
    causes = _differ(before["inputs"], after["inputs"])
    if before["config"]["model"].get("dtype") != after["config"]["model"].get("dtype"):
        causes.append("precision")
    if any(before["environment"].get(name) != after["environment"].get(name) for name in MACHINE):
        causes.append("environment")
    return causes
