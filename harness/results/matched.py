"""The numbers of two results, matched: by how much each moved, and what else differs.

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest
counts. A run without such a counterpart, as one with more windows, is matched with the run that
differs in its settings alone, and these are named. If both were measured on the same windows or
questions, the standard error is that of the paired difference, else that of two independent
numbers. Speed is compared by ratio.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.errors import UserError, printable, shortened
from harness.results import columns
from harness.results.archive import opened
from harness.results.columns import TableRow
from harness.results.pages import pairs_of_settings
from harness.results.record import CODE, Record, read_all
from harness.results.samples import Measured, Sample, paired, same_questions, samples_of
from harness.results.student import critical_value
from harness.results.table_rows import with_rows

Number = Mapping[str, Any]
"""A number of one side: `KEYS`, value and stderr, and the row and the record that it is from."""
NAMES = (
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "series", "layer", "x_name", "x",
)  # fmt: skip
"""Columns that say what a number was measured of."""
KEYS = [*NAMES, "metric"]
WITHOUT_SETTINGS = [name for name in KEYS if name != "settings"]
VALUES = (
    "before", "after", "difference", "stderr", "standard_errors", "outside", "pairs",
    "num_contexts", "ratio",
)  # fmt: skip
"""What is known of a number. standard_errors: of the difference, in units of its `stderr`. outside:
whether they are more than half the width of the 95 % interval, which depends on `num_contexts`.
pairs: windows or questions that both were measured on."""
SIZES = (columns.SIZE, columns.DEVICE_FRAC, columns.RESIDENT_FRAC)
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for the inputs that are neither code nor data."""
MACHINE = ("python", "platform", "cpu", "device", "device_name", "packages")
MAX_NAMED, MAX_WIDTH = 3, 120
OTHER_SETTINGS = "settings"
"""The cause of a number whose two runs have different settings."""


class Pair(NamedTuple):
    """A number of A and that of B. settings: of both runs in words, where they differ."""

    before: Number
    after: Number
    settings: str | None = None


class Spread(NamedTuple):
    """The standard error of a difference, and how many windows or contexts gave it; None unknown.

    num_pairs: windows or questions that both were measured on.
    """

    stderr: float | None = None
    num_contexts: float | None = None
    num_pairs: int | None = None


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives.

    Returns:
        A row per number of either: `KEYS`, `VALUES`, `causes` (what else differs between the runs,
        in words), of_speed, and _merge: "both", "left_only" (A) or "right_only" (B). The most
        significant change comes first.

    Raises:
        UserError: one cannot be read or has no finished run, or the two have no run in common.
    """
    first, second = _numbers_by_key(before), _numbers_by_key(after)
    pairs, only_first = [], []
    for key, number in first.items():
        if key in second:
            pairs.append(Pair(number, second.pop(key)))
        else:
            only_first.append(number)
    only_second = list(second.values())  # those without a counterpart
    by_settings = _matched_by_settings(only_first, only_second)
    if not pairs and not by_settings:
        raise UserError(f"no run is in both: A has {_runs(only_first)}; B has {_runs(only_second)}")
    changes = list(map(_change, (*pairs, *by_settings)))
    used: set[int] = set()
    for pair in by_settings:
        used |= {id(pair.before), id(pair.after)}
    for side, numbers in (("left_only", only_first), ("right_only", only_second)):
        for number in numbers:
            if id(number) not in used:
                changes.append(_of_one(number, side))
    frame = pd.DataFrame(changes)
    return frame.sort_values("distance", ascending=False, kind="stable", ignore_index=True)


# The numbers of one side


def _numbers_by_key(source: Path) -> dict[Any, Number]:
    """The numbers of a folder or an archive. Raises UserError where there is no finished run."""
    numbers: dict[Any, Number] = {}
    with opened(source) as folder:
        for number in _numbers(folder):
            numbers[_values(number, KEYS)] = number
    if not numbers:
        none = "no finished run in it, and tables alone do not say what was run"
        raise UserError(f"{source}: {none}")
    return numbers


def _values(number: Number, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(columns.picked(number, names).values())


def _numbers(folder: Path) -> Iterator[Number]:
    """Every number of a folder's finished runs, the oldest first."""
    pairs = with_rows(read_all(folder), weights=False)
    for record, rows in sorted(pairs, key=lambda pair: pair[0]["started"]):
        for row in rows:
            names = columns.picked(row, NAMES)
            for metric, value, stderr in _metrics(row):
                if isinstance(value, int | float):
                    number = names | {"metric": metric, "value": value, "stderr": stderr}
                    yield number | {"row": row, "record": record}


def _metrics(row: TableRow) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and standard error of the numbers of a table row.

    Each column of a timed cell, else the value and, of a whole task or text, the sizes.
    """
    if "metric" not in row:
        for column in columns.LATENCY:
            if column.digits is not None and column.name not in NAMES:
                yield column.name, row.get(column.name), None
        return
    yield row["metric"], row["value"], row.get("stderr")
    if "task" in row and not columns.is_part(row):
        for column in SIZES:
            yield column.name, row.get(column.name), None


def _runs(numbers: Iterable[Number]) -> str:
    """The first runs that numbers are of, in words."""
    runs = {}
    for number in numbers:
        settings = f" ({number['settings']})" if number["settings"] else ""
        runs[f"{number['experiment']} of {number['label']} on {number['model']}{settings}"] = True
    named = [shortened(run, MAX_WIDTH) for run in itertools.islice(runs, MAX_NAMED)]
    if len(runs) > MAX_NAMED:
        named.append("...")
    return printable(", ".join(named))


# Runs whose settings differ


def _matched_by_settings(first: Sequence[Number], second: Sequence[Number]) -> list[Pair]:
    """Numbers of A and B that differ in their settings alone, with their settings in words.

    As in "size=0.1, num_windows=2 -> 8". A setting counts as changed if no run of A has a value
    that a run of B has. Two numbers belong together if all other settings are equal and no third
    number has these.
    """
    found = []
    key_of = partial(_values, names=WITHOUT_SETTINGS)
    of_second = columns.grouped(second, key_of)
    for key, left in columns.grouped(first, key_of).items():
        right = of_second.get(key, [])
        shared, changed = _shared_and_changed(left, right)
        right_by_shared = columns.grouped(right, partial(_setting_values, names=shared))
        for values, own in columns.grouped(left, partial(_setting_values, names=shared)).items():
            others = right_by_shared.get(values, [])
            if len(own) == len(others) == 1:
                words = _words_of_settings(own[0], others[0], shared, changed)
                found.append(Pair(own[0], others[0], words))
    return found


def _shared_and_changed(
    left: Sequence[Number], right: Sequence[Number]
) -> tuple[list[str], list[str]]:
    """The names of the settings of which both sides have a value in common, and of the others."""
    shared: list[str] = []
    changed: list[str] = []
    settings = map(_settings, (*left, *right))
    for name in dict.fromkeys(itertools.chain.from_iterable(settings)):
        of_left = {_setting(number, name) for number in left}
        of_right = {_setting(number, name) for number in right}
        names = changed if of_left.isdisjoint(of_right) else shared
        names.append(name)
    return shared, changed


def _words_of_settings(
    before: Number, after: Number, shared: Sequence[str], changed: Sequence[str]
) -> str:
    words = []
    for name, value in _settings(before).items():
        if name in shared:
            words.append(f"{name}={value}")
    for name in changed:
        words.append(f"{name}={_setting(before, name)} -> {_setting(after, name)}")
    return ", ".join(words)


def _settings(number: Number) -> dict[str, str]:
    """The settings of a number's run that are not the defaults, by name."""
    return dict(pair.split("=", 1) for pair in pairs_of_settings(number["settings"]))


def _setting(number: Number, name: str) -> str:
    """The value of a setting; of a default, the one that the record's configuration has."""
    return _settings(number).get(name, str(number["record"]["config"].get(name, "default")))


def _setting_values(number: Number, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_setting(number, name) for name in names)


# Rows of the frame


def _of_one(number: Number, side: str) -> dict[str, Any]:
    """A row of the frame for a number of A or B alone."""
    row = columns.picked(number, KEYS) | dict.fromkeys(VALUES)
    row["before" if side == "left_only" else "after"] = number["value"]
    of_speed = "metric" not in number["row"]
    return row | {"_merge": side, "distance": -1.0, "causes": [], "of_speed": of_speed}


def _change(pair: Pair) -> dict[str, Any]:
    """A row of the frame for a number of both. distance: to sort by, -1 if nothing moved."""
    before, after, settings = pair
    one, two = before["record"], after["record"]
    inputs = _changed_inputs(one["inputs"], two["inputs"])
    same_data = "data" not in inputs and (settings is None or same_questions(two, one))
    spread = _spread(before, after, same_data=same_data)
    first, second = before["value"], after["value"]
    critical = critical_value(spread.num_contexts)
    sigmas = abs(second - first) / spread.stderr if spread.stderr else None
    ratio = second / first if first > 0 and second > 0 else None
    distance = -1.0
    if not math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12):
        if sigmas is not None:
            distance = sigmas / critical
        else:
            distance = math.inf if ratio is None else abs(math.log(ratio))
    row = columns.picked(before, KEYS)
    causes = [*inputs, *_changed_surroundings(one, two)]
    if settings is not None:
        row["settings"] = settings
        causes.append(OTHER_SETTINGS)
    return row | {
        "_merge": "both",
        "before": first,
        "after": second,
        "difference": second - first,
        "stderr": spread.stderr,
        "standard_errors": sigmas,
        "outside": sigmas is not None and sigmas > critical,
        "pairs": spread.num_pairs,
        "num_contexts": spread.num_contexts,
        "ratio": ratio,
        "distance": distance,
        "causes": causes,
        "of_speed": "metric" not in before["row"],
    }


def _changed_inputs(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """In words, the inputs of both with different digests: code, weights, calibration, data."""
    words = []
    for name in one:
        if two.get(name, one[name]) != one[name]:
            words.append("code" if name.startswith(CODE) else INPUTS.get(name, "data"))
    return list(dict.fromkeys(words))


def _changed_surroundings(one: Record, two: Record) -> list[str]:
    """In words, whether precision or machine of two runs differ."""
    words = []
    if one["config"]["model"].get("dtype") != two["config"]["model"].get("dtype"):
        words.append("precision")
    if columns.picked(one["environment"], MACHINE) != columns.picked(two["environment"], MACHINE):
        words.append("environment")
    return words


def _spread(before: Number, after: Number, *, same_data: bool) -> Spread:
    """The standard error of the difference: of pairs on the same data, else of two numbers."""
    if same_data:
        own = Measured(after["value"], _samples(after))
        other = Measured(before["value"], _samples(before))
        found = paired(own, other, after["metric"])
        if found:
            return Spread(found.stderr, found.num_contexts, found.num_pairs)
    errors = before["stderr"], after["stderr"]
    if None in errors:
        return Spread()
    contexts = []
    for number in (before, after):
        count = number["row"].get(columns.NUM_CONTEXTS.name)
        if count is not None:
            contexts.append(count)
    return Spread(math.hypot(*errors), min(contexts, default=None))


def _samples(number: Number) -> Sequence[Sample]:
    """The questions, windows or prompts behind a number; [] for a chunk of a text, or if the run
    keeps none."""
    row = number["row"]
    if "task" not in row or columns.is_part(row):
        return []
    return samples_of(number["record"], row["task"])
