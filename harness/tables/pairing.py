"""How far two numbers of the same name are apart: two runs of the same settings, here and there.

Where both were measured on the same windows or questions the standard error is that of the paired difference, else that
of two independent numbers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.records.samples import Measured, paired
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
    """A number in both results. num_pairs: questions, windows or prompts of the paired difference; 0: not paired."""

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
    found = None
    if "data" not in _differ(before.record["inputs"], after.record["inputs"]):
        own, other = (Measured(number.value, _samples(number)) for number in (after, before))
        found = paired(own, other, before.metric)
    if found is not None:
        return Change(before, after, found.stderr, found.num_pairs)
    errors = (before.stderr, after.stderr)
    return Change(before, after, None if None in errors else math.hypot(*(error or 0 for error in errors)))


def _samples(number: Number) -> Sequence[Mapping[str, Any]]:
    """The questions, windows or prompts behind a number; none of a chunk of a text, or where a run keeps none."""
    if "task" not in number.row or is_part(number.row):
        return []
    samples = number.record["samples"]
    return next((samples[name] for name in (number.row["task"], "windows", "prompts") if name in samples), [])


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
