"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest
counts. A run without such a counterpart, as one with more windows, is matched with the run that
differs in its settings alone, and these are named. If both were measured on the same windows or
questions, the standard error is that of the paired difference, else that of two independent
numbers. Speed is compared by ratio.

    python -m harness.results.compare before.zip after.zip --csv moved.csv
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError, exit_code, printable, shortened
from harness.files import replacing
from harness.results.archive import opened
from harness.results.columns import (
    DEVICE_FRAC,
    LATENCY,
    MISSING,
    NUM_CONTEXTS,
    RESIDENT_FRAC,
    SIZE,
    column,
    grouped,
    is_part,
    quantity,
)
from harness.results.pages import aligned, pairs_of_settings
from harness.results.record import CODE, read_all
from harness.results.samples import Measured, paired, same_questions
from harness.results.student import critical_value
from harness.results.write import with_rows

Number = Mapping[str, Any]
"""A number of one side: `KEYS`, value and stderr, and the row and the record that it is from."""
NAMES = (
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "series", "layer", "x_name", "x",
)  # fmt: skip
"""Columns that say what a number was measured of."""
KEYS = [*NAMES, "metric"]
WORDS = (
    "label",
    "task",
    "series",
    "batch_size",
    "prompt_len",
    "gen_len",
    "layer",
    "x",
    "experiment",
    "settings",
)
"""The columns of `NAMES` that people read; also the model if there are several."""
VALUES = (
    "before",
    "after",
    "difference",
    "stderr",
    "standard_errors",
    "outside",
    "pairs",
    "num_contexts",
    "ratio",
)
"""What is known of a number. standard_errors: of the difference, in units of its `stderr`. outside:
whether they are more than half the width of the 95 % interval, which depends on `num_contexts`.
pairs: windows or questions that both were measured on."""
SIZES = (SIZE, DEVICE_FRAC, RESIDENT_FRAC)
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for the inputs that are neither code nor data."""
MACHINE = ("python", "platform", "cpu", "device", "device_name", "packages")
MAX_SHOWN, MAX_NAMED, MAX_WIDTH = 40, 3, 120
OUTSIDE_MARK = "*"
OTHER_SETTINGS = "settings"
"""The cause of a number whose two runs have different settings."""


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives.

    Returns:
        A row per number of either: `KEYS`, `VALUES`, `causes` (what else differs between the runs,
        in words), of_speed, and _merge: "both", "left_only" (A) or "right_only" (B). The most
        significant change comes first.

    Raises:
        UserError: one cannot be read or has no finished run, or the two have no run in common.
    """
    sides: list[dict[Any, Number]] = []
    for source in (before, after):
        with opened(source) as folder:
            numbers: dict[Any, Number] = {
                tuple(number[name] for name in KEYS): number for number in _numbers(folder)
            }
        if not numbers:
            raise UserError(
                f"{source}: no finished run in it, and tables alone do not say what was run"
            )
        sides.append(numbers)
    first, second = sides
    matched = [(first[key], second[key]) for key in first if key in second]
    only_first = [number for key, number in first.items() if key not in second]
    only_second = [number for key, number in second.items() if key not in first]
    by_settings = _matched_by_settings(only_first, only_second)
    if not matched and not by_settings:
        raise UserError(
            f"no run is in both: A has {_runs(first.values())}; B has {_runs(second.values())}"
        )
    changes = [_change(one, two) for one, two in matched]
    changes += [_change(one, two, settings) for one, two, settings in by_settings]
    used = {id(number) for one, two, _ in by_settings for number in (one, two)}
    changes += [_of_one(number, "left_only") for number in only_first if id(number) not in used]
    changes += [_of_one(number, "right_only") for number in only_second if id(number) not in used]
    frame = pd.DataFrame(changes)
    return frame.sort_values("distance", ascending=False, kind="stable", ignore_index=True)


def _matched_by_settings(
    first: Sequence[Number], second: Sequence[Number]
) -> list[tuple[Number, Number, str]]:
    """Numbers of A and B that differ in their settings alone, and their settings in words, as in
    "size=0.1, num_windows=2 -> 8".

    A setting counts as changed if no run of A has a value that a run of B has. Two numbers belong
    together if all other settings are equal and no third number has these.
    """
    found = []
    of_second = grouped(second, _without_settings)
    for key, left in grouped(first, _without_settings).items():
        right = of_second.get(key, [])
        names = dict.fromkeys(name for number in (*left, *right) for name in _settings(number))
        changed = []
        for name in names:
            of_left, of_right = (
                {_setting(number, name) for number in side} for side in (left, right)
            )
            if of_left.isdisjoint(of_right):
                changed.append(name)
        shared = [name for name in names if name not in changed]
        of_shared = partial(_values, names=shared)
        candidates = grouped(right, of_shared)
        for values, own in grouped(left, of_shared).items():
            others = candidates.get(values, [])
            if len(own) != 1 or len(others) != 1:
                continue
            one, two = own[0], others[0]
            words = [f"{name}={value}" for name, value in _settings(one).items() if name in shared]
            words += [f"{name}={_setting(one, name)} -> {_setting(two, name)}" for name in changed]
            found.append((one, two, ", ".join(words)))
    return found


def _without_settings(number: Number) -> tuple[Any, ...]:
    return tuple(number[name] for name in KEYS if name != "settings")


def _settings(number: Number) -> dict[str, str]:
    """The settings of a number's run that are not the defaults, by name."""
    return dict(pair.split("=", 1) for pair in pairs_of_settings(number["settings"]))


def _setting(number: Number, name: str) -> str:
    """The value of a setting; of one that is the default, the one that the record's configuration
    has."""
    return _settings(number).get(name, str(number["record"]["config"].get(name, "default")))


def _values(number: Number, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_setting(number, name) for name in names)


def _runs(numbers: Iterable[Number]) -> str:
    """The first runs that numbers are of, in words."""
    runs = {}
    for number in numbers:
        settings = f" ({number['settings']})" if number["settings"] else ""
        runs[f"{number['experiment']} of {number['label']} on {number['model']}{settings}"] = True
    named = [shortened(run, MAX_WIDTH) for run in [*runs][:MAX_NAMED]]
    if len(runs) > MAX_NAMED:
        named.append("...")
    return printable(", ".join(named))


def _numbers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every number of a folder's finished runs, the oldest first: each column of a timed cell, else
    the value and, of a whole task or text, the sizes."""
    for record, rows in sorted(
        with_rows(read_all(folder), weights=False), key=lambda pair: pair[0]["started"]
    ):
        for row in rows:
            found = {row["metric"]: (row["value"], row.get("stderr"))} if "metric" in row else {}
            columns = (
                LATENCY
                if "metric" not in row
                else SIZES
                if "task" in row and not is_part(row)
                else ()
            )
            for each in columns:
                if each.digits is not None and each.name not in NAMES:
                    found[each.name] = (row.get(each.name), None)
            for metric, (value, stderr) in found.items():
                if isinstance(value, int | float):
                    key = {name: row.get(name) for name in NAMES} | {"metric": metric}
                    yield key | {"value": value, "stderr": stderr, "row": row, "record": record}


def _of_one(number: Number, side: str) -> dict[str, Any]:
    """A row of the frame for a number of A or B alone."""
    row: dict[str, Any] = (
        {name: number[name] for name in KEYS} | dict.fromkeys(VALUES) | {"_merge": side}
    )
    row["before" if side == "left_only" else "after"] = number["value"]
    return row | {"distance": -1.0, "causes": [], "of_speed": "metric" not in number["row"]}


def _change(before: Number, after: Number, settings: str | None = None) -> dict[str, Any]:
    """A row of the frame for a number of both. distance: to sort by, -1 if nothing moved. settings:
    in words, where they differ."""
    one, two = before["record"], after["record"]
    causes = _changed_inputs(one["inputs"], two["inputs"])
    same_data = "data" not in causes and (settings is None or same_questions(two, one))
    stderr, num_contexts, num_pairs = _stderr(before, after, same_data=same_data)
    if one["config"]["model"].get("dtype") != two["config"]["model"].get("dtype"):
        causes.append("precision")
    if any(one["environment"].get(name) != two["environment"].get(name) for name in MACHINE):
        causes.append("environment")
    if settings is not None:
        causes.append(OTHER_SETTINGS)
    first, second = before["value"], after["value"]
    critical = critical_value(num_contexts)
    sigmas = abs(second - first) / stderr if stderr else None
    ratio = second / first if first > 0 and second > 0 else None
    distance = -1.0
    if not math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12):
        by_ratio = math.inf if ratio is None else abs(math.log(ratio))
        distance = by_ratio if sigmas is None else sigmas / critical
    row = {name: before[name] for name in KEYS}
    if settings is not None:
        row["settings"] = settings
    return row | {
        "_merge": "both", "before": first, "after": second, "difference": second - first, "stderr": stderr,
        "standard_errors": sigmas, "outside": sigmas is not None and sigmas > critical, "pairs": num_pairs,
        "num_contexts": num_contexts, "ratio": ratio, "distance": distance, "causes": causes,
        "of_speed": "metric" not in before["row"],
    }  # fmt: skip


def _changed_inputs(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """In words, the inputs of both with different digests: code, weights, calibration, data."""
    names = [name for name in one if two.get(name, one[name]) != one[name]]
    return list(
        dict.fromkeys(
            "code" if name.startswith(CODE) else INPUTS.get(name, "data") for name in names
        )
    )


def _stderr(
    before: Number, after: Number, *, same_data: bool
) -> tuple[float | None, float | None, int | None]:
    """The standard error of the difference, the windows or contexts that it was measured on, and
    how many windows or questions were paired."""
    own, other = (Measured(number["value"], _samples(number)) for number in (after, before))
    if same_data and (found := paired(own, other, after["metric"])):
        return found.stderr, found.num_contexts, found.num_pairs
    errors = before["stderr"], after["stderr"]
    if None in errors:
        return None, None, None
    contexts = [number["row"].get(NUM_CONTEXTS.name) for number in (before, after)]
    return (
        math.hypot(*errors),
        min((count for count in contexts if count is not None), default=None),
        None,
    )


def _samples(number: Number) -> Sequence[Mapping[str, Any]]:
    """The questions, windows or prompts behind a number; [] for a chunk of a text, or if the run
    keeps none."""
    row, samples = number["row"], number["record"]["samples"]
    names = (row["task"], "windows", "prompts") if "task" in row and not is_part(row) else ()
    return next((samples[name] for name in names if name in samples), [])


def text_of(frame: pd.DataFrame) -> str:
    """For a terminal: the most significant changes, and the numbers of one of the two alone."""
    both = frame[frame["_merge"] == "both"]
    moved = both[both.distance >= 0]
    names = (*WORDS, "model") if both.model.nunique() > 1 else WORDS
    lines = [f"{len(both)} numbers in both: {len(both) - len(moved)} equal, {len(moved)} moved"]
    by_settings = both[[OTHER_SETTINGS in causes for causes in both.causes]]
    if len(by_settings):
        pairs = [
            pair
            for words in by_settings.settings
            for pair in pairs_of_settings(words)
            if " -> " in pair
        ]
        lines.append(
            _cut(
                printable(
                    f"with other settings: {len(by_settings)} ({', '.join(dict.fromkeys(pairs))})"
                )
            )
        )
    for name, side in (("A", "left_only"), ("B", "right_only")):
        alone = frame[frame["_merge"] == side]
        if len(alone):
            whole = [each for each in alone.to_dict("records") if "[" not in str(each["task"])]
            owners = list(dict.fromkeys(_owner(each, names) for each in whole))
            lines += [f"only in {name}: {len(alone)} numbers, of"]
            lines += [
                *(_cut(f"  {owner}") for owner in owners[:MAX_NAMED]),
                *["  ..."] * (len(owners) > MAX_NAMED),
            ]
    if len(moved):
        outside = int(moved.outside.sum())
        lines.append(
            f"beyond the 95 % interval, marked {OUTSIDE_MARK}: {outside} (of many numbers 1 in 20 by chance)"
        )
    causes = Counter(cause for each in moved.causes for cause in each)
    if causes:
        lines.append(
            f"of what moved differ: {', '.join(f'{cause} ({count})' for cause, count in causes.items())}"
        )
    everywhere = {cause for cause, count in causes.items() if count == len(moved)}
    known = moved.standard_errors.notna()
    for title, own in (
        ("moved, by standard errors", moved[known]),
        ("moved, without a standard error", moved[~known & ~moved.of_speed]),
        ("of speed, by ratio", moved[~known & moved.of_speed]),
    ):
        if len(own):
            lines += ["", *_table(title, own.to_dict("records"), names, everywhere)]
    return "\n".join(lines)


def _owner(number: Mapping[Any, Any], names: Sequence[str]) -> str:
    """The run and place of a number, as one line that a terminal shows as text, whoever wrote
    it."""
    known = {
        name: number[name] for name in names if not pd.isna(number[name]) and number[name] != ""
    }
    return printable(", ".join(column(name).phrase.format(value) for name, value in known.items()))


def _table(
    title: str, changes: Sequence[Mapping[Any, Any]], names: Sequence[str], everywhere: set[str]
) -> Iterator[str]:
    """The first of the changes, a line each. everywhere: causes of all changes, which are not
    repeated."""
    of_speed = changes[0]["of_speed"]
    header = (
        ["B / A", "A", "B"] if of_speed else ["standard errors", "A", "B", "B minus A", "pairs"]
    )
    lines = []
    for each in changes[:MAX_SHOWN]:
        shown = column(each["metric"])
        shown = quantity(each["metric"]) if shown.digits is None else shown
        causes = [cause for cause in each["causes"] if cause not in everywhere]
        heading = f"{shown.heading} [{', '.join(causes)}]" if causes else shown.heading
        cells = [f"{shown.factor * each[side]:.5g}" for side in ("before", "after")]
        if of_speed:
            cells = [_or_missing(each["ratio"], ".3g"), *cells]
        else:
            spread = "" if pd.isna(each["stderr"]) else f" ± {shown.factor * each['stderr']:.2g}"
            difference = f"{shown.factor * each['difference']:+.3g}{spread}"
            sigmas = _or_missing(each["standard_errors"], ".1f") + OUTSIDE_MARK * bool(
                each["outside"]
            )
            cells = [sigmas, *cells, difference, _or_missing(each["pairs"], ".0f")]
        lines.append([*cells, f"{heading}: {_owner(each, names)}"])
    yield from map(_cut, aligned(title, [*header, "of"], lines, words=["of"]).splitlines())
    if len(changes) > MAX_SHOWN:
        yield f"and {len(changes) - MAX_SHOWN} that moved less; --csv FILE has all"


def _or_missing(number: float | None, form: str) -> str:
    return MISSING if number is None or pd.isna(number) else format(number, form)


def _cut(line: str) -> str:
    line = line.rstrip()
    return (
        line
        if len(line) <= MAX_WIDTH
        else f"{line[: MAX_WIDTH - 3]}{'---' if set(line) <= {'-', ' '} else '...'}"
    )


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Every number in both, equal ones included, a row each. Raises UserError if the file cannot be
    written."""
    both = frame[frame["_merge"] == "both"]
    both = both[[*KEYS, *VALUES]].assign(differs=both.causes.map(" ".join))
    try:
        with replacing(path) as scratch:
            both.to_csv(scratch, index=False, lineterminator="\n")
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror or error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.compare", description="What moved from A to B."
    )
    parser.add_argument("before", metavar="A", help="a results folder or an archive")
    parser.add_argument("after", metavar="B", help="another")
    parser.add_argument("--csv", metavar="FILE", help="write every number that both have")
    args = parser.parse_args(argv)

    def command() -> None:
        for name, place in (("A", args.before), ("B", args.after)):
            if not place:
                raise UserError(f"{name}=: name a results folder or an archive")
        frame = compare(Path(args.before), Path(args.after))
        if args.csv:
            write_csv(Path(args.csv), frame)
        print(text_of(frame))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
