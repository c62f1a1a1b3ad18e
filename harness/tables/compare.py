"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest counts. If both were
measured on the same windows or questions, the standard error is that of the paired difference, else that of two
independent numbers. Speed is compared by ratio.

    python -m harness.tables.compare before.zip after.zip --csv moved.csv
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError, exit_code, printable
from harness.files import replacing
from harness.records.archive import opened
from harness.records.record import CODE, read_all
from harness.records.samples import Measured, paired
from harness.tables.columns import DEVICE_FRAC, LATENCY, MISSING, RESIDENT_FRAC, SIZE, column, is_part, quantity
from harness.tables.pages import aligned
from harness.tables.write import with_rows

NAMES = (
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "series", "layer", "x_name", "x",
)  # fmt: skip
"""Columns that say what a number was measured of."""
KEYS = [*NAMES, "metric"]
WORDS = ("label", "task", "series", "batch_size", "prompt_len", "gen_len", "layer", "x", "experiment", "settings")
"""The columns of `NAMES` that people read; also the model if there are several."""
VALUES = ("before", "after", "difference", "stderr", "standard_errors", "pairs", "ratio")
SIZES = (SIZE, DEVICE_FRAC, RESIDENT_FRAC)
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for the inputs that are neither code nor data."""
MACHINE = ("python", "platform", "cpu", "device", "device_name", "packages")
MAX_SHOWN, MAX_NAMED, MAX_WIDTH = 40, 3, 120
FAR = 2
"""Standard errors that one number of twenty exceeds by chance."""


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives.

    Returns:
        A row per number of either: `KEYS`, `VALUES`, `causes` (what else differs between the runs, in words), of_speed,
        and _merge: "both", "left_only" (A) or "right_only" (B). The most significant change comes first.

    Raises:
        UserError: one cannot be read, or has no finished run.
    """
    frames = []
    for source in (before, after):
        with opened(source) as folder:
            numbers = list(_numbers(folder))
        if not numbers:
            raise UserError(f"{source}: no finished run in it, and tables alone do not say what was run")
        frames.append(pd.DataFrame(numbers, dtype=object).drop_duplicates(KEYS, keep="last"))
    frame = frames[0].merge(frames[1], on=KEYS, how="outer", suffixes=("_before", "_after"), indicator=True, sort=False)
    changes = pd.DataFrame([_change(each) for each in frame.to_dict("records")], index=frame.index)
    frame = frame[[*KEYS, "_merge"]].join(changes)
    return frame.sort_values("distance", ascending=False, kind="stable", ignore_index=True)


def _numbers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every number of a folder's finished runs, the oldest first: each column of a timed cell, else the value and, of a
    whole task or text, the sizes."""
    for record, rows in sorted(with_rows(read_all(folder), weights=False), key=lambda pair: pair[0]["started"]):
        for row in rows:
            found = {row["metric"]: (row["value"], row.get("stderr"))} if "metric" in row else {}
            columns = LATENCY if "metric" not in row else SIZES if "task" in row and not is_part(row) else ()
            for each in columns:
                if each.digits is not None and each.name not in NAMES:
                    found[each.name] = (row.get(each.name), None)
            for metric, (value, stderr) in found.items():
                if isinstance(value, int | float):
                    key = {name: row.get(name) for name in NAMES} | {"metric": metric}
                    yield key | {"value": value, "stderr": stderr, "row": row, "record": record}


def _change(pair: Mapping[Any, Any]) -> dict[str, Any]:
    """`VALUES` and the rest for one number; distance: to sort by, -1 if nothing moved."""
    before, after = pair["value_before"], pair["value_after"]
    found: dict[str, Any] = {"before": before, "after": after, "distance": -1.0, "causes": [], "of_speed": False}
    if pair["_merge"] != "both":
        return found
    one, two = pair["record_before"], pair["record_after"]
    causes = _changed_inputs(one["inputs"], two["inputs"])
    stderr, num_pairs = _stderr(pair, same_data="data" not in causes)
    if one["config"]["model"].get("dtype") != two["config"]["model"].get("dtype"):
        causes.append("precision")
    if any(one["environment"].get(name) != two["environment"].get(name) for name in MACHINE):
        causes.append("environment")
    sigmas = abs(after - before) / stderr if stderr else None
    ratio = after / before if before > 0 and after > 0 else None
    if not math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12):
        by_ratio = math.inf if ratio is None else abs(math.log(ratio))
        found["distance"] = by_ratio if sigmas is None else sigmas
    return found | {
        "difference": after - before, "stderr": stderr, "standard_errors": sigmas, "pairs": num_pairs, "ratio": ratio,
        "of_speed": "metric" not in pair["row_before"], "causes": causes,
    }  # fmt: skip


def _changed_inputs(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """In words, the inputs of both with different digests: code, weights, calibration, data."""
    names = [name for name in one if two.get(name, one[name]) != one[name]]
    return list(dict.fromkeys("code" if name.startswith(CODE) else INPUTS.get(name, "data") for name in names))


def _stderr(pair: Mapping[Any, Any], *, same_data: bool) -> tuple[float | None, int | None]:
    """The standard error of the difference, and how many windows or questions were paired."""
    own, other = (Measured(pair[f"value_{side}"], _samples(pair, side)) for side in ("after", "before"))
    if same_data and (found := paired(own, other, pair["metric"])):
        return found.stderr, found.num_pairs
    errors = pair["stderr_before"], pair["stderr_after"]
    return (None if any(map(pd.isna, errors)) else math.hypot(*errors)), None


def _samples(pair: Mapping[Any, Any], side: str) -> Sequence[Mapping[str, Any]]:
    """The questions, windows or prompts behind a number; [] for a chunk of a text, or if the run keeps none."""
    row, samples = pair[f"row_{side}"], pair[f"record_{side}"]["samples"]
    names = (row["task"], "windows", "prompts") if "task" in row and not is_part(row) else ()
    return next((samples[name] for name in names if name in samples), [])


def text_of(frame: pd.DataFrame) -> str:
    """For a terminal: the most significant changes, and the numbers of one of the two alone."""
    both = frame[frame["_merge"] == "both"]
    moved = both[both.distance >= 0]
    names = (*WORDS, "model") if both.model.nunique() > 1 else WORDS
    lines = [f"{len(both)} numbers in both: {len(both) - len(moved)} equal, {len(moved)} moved"]
    for name, side in (("A", "left_only"), ("B", "right_only")):
        alone = frame[frame["_merge"] == side]
        if len(alone):
            whole = [each for each in alone.to_dict("records") if "[" not in str(each["task"])]
            owners = list(dict.fromkeys(_owner(each, names) for each in whole))
            lines += [f"only in {name}: {len(alone)} numbers, of"]
            lines += [*(_cut(f"  {owner}") for owner in owners[:MAX_NAMED]), *["  ..."] * (len(owners) > MAX_NAMED)]
    if len(moved):
        far = int((moved.standard_errors > FAR).sum())
        lines.append(f"moved by more than {FAR} standard errors: {far} (of many numbers 1 in 20 does by chance)")
    causes = Counter(cause for each in moved.causes for cause in each)
    if causes:
        lines.append(f"of what moved differ: {', '.join(f'{cause} ({count})' for cause, count in causes.items())}")
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
    """The run and place of a number, as one line that a terminal shows as text, whoever wrote it."""
    known = {name: number[name] for name in names if not pd.isna(number[name]) and number[name] != ""}
    return printable(", ".join(column(name).phrase.format(value) for name, value in known.items()))


def _table(
    title: str, changes: Sequence[Mapping[Any, Any]], names: Sequence[str], everywhere: set[str]
) -> Iterator[str]:
    """The first of the changes, a line each. everywhere: causes of all changes, which are not repeated."""
    of_speed = changes[0]["of_speed"]
    header = ["B / A", "A", "B"] if of_speed else ["standard errors", "A", "B", "B minus A", "pairs"]
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
            cells = [_or_missing(each["standard_errors"], ".1f"), *cells, difference, _or_missing(each["pairs"], ".0f")]
        lines.append([*cells, f"{heading}: {_owner(each, names)}"])
    yield from map(_cut, aligned(title, [*header, "of"], lines, words=["of"]).splitlines())
    if len(changes) > MAX_SHOWN:
        yield f"and {len(changes) - MAX_SHOWN} that moved less; --csv FILE has all"


def _or_missing(number: float | None, form: str) -> str:
    return MISSING if number is None or pd.isna(number) else format(number, form)


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 3]}{'---' if set(line) <= {'-', ' '} else '...'}"


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Every number in both, equal ones included, a row each. Raises UserError if the file cannot be written."""
    both = frame[frame["_merge"] == "both"]
    both = both[[*KEYS, *VALUES]].assign(differs=both.causes.map(" ".join))
    try:
        with replacing(path) as scratch:
            both.to_csv(scratch, index=False, lineterminator="\n")
    except OSError as error:
        raise UserError(f"--csv {path}: cannot be written ({error.strerror or error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m harness.tables.compare", description="What moved from A to B.")
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
