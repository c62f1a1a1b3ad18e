"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

    python -m harness.results.compare before.zip after.zip

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest
counts. If both were measured on the same questions, windows or prompts, the standard error is that
of the paired difference, else that of two independent numbers. Speed is compared by ratio.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.errors import UserError, exit_code, printable, shortened
from harness.results import columns
from harness.results.archive import opened
from harness.results.metrics import MISSING
from harness.results.record import CODE, current, read_all
from harness.results.samples import KEY, differences_of, samples_of
from harness.results.table_rows import frames_of

NAMES = [
    "experiment", "platform", "source", "model", "method", "label", "settings", "task",
    "batch_size", "prompt_len", "gen_len", "memory_bytes", "series", "layer", "x_name", "x",
]  # fmt: skip
"""Columns that say what a number was measured of."""
KEYS = [*NAMES, "metric"]
VALUES = ["before", "after", "difference", "stderr", "z", "pairs", "ratio", "differs"]
"""z: the difference in standard errors. pairs: questions or windows that both were measured on.
ratio: B / A, of speed. differs: what else differs between the two runs, in words."""
SHARES = ["budget", "device_frac", "resident_frac"]
SPEED = [
    column.name
    for column in dict.fromkeys((*columns.LATENCY, *columns.CAPACITY))
    if column.digits is not None and column.name not in NAMES
]
"""Numbers of a timed run, and of the largest batch of a device."""
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for the inputs that are neither code nor data."""
MACHINE = ("python", "platform", "cpu", "device", "device_name", "packages")
MAX_NAMED, MAX_SHOWN, MAX_WIDTH = 3, 40, 120


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives.

    Returns:
        A row per number of either: `KEYS`, `VALUES`, moved (it is not equal), and _merge: "both",
        "left_only" (A) or "right_only" (B). The largest change in standard errors comes first.

    Raises:
        UserError: one cannot be read or has no finished run, or the two have no run in common.
    """
    first, second = _read(before), _read(after)
    frame = first.merge(second, how="outer", on=KEYS, suffixes=("_a", "_b"), indicator=True)
    is_both = frame["_merge"] == "both"
    if not is_both.any():
        raise UserError(f"no run is in both: A has {_runs(first)}; B has {_runs(second)}")
    frame["before"] = frame["value_a"].where(is_both)
    frame["after"] = frame["value_b"].where(is_both)
    frame["difference"] = frame["after"] - frame["before"]
    frame["differs"] = frame[is_both].apply(_what_differs, axis=1)
    is_alike = is_both & ~frame["differs"].str.contains("data", na=False)
    frame = frame.merge(_paired(frame[is_alike]), how="left", on=["run_id_b", *KEY[1:]])
    is_paired = np.isclose(frame["paired"], frame["difference"])  # the means of the same questions
    of_two = np.hypot(frame["stderr_a"], frame["stderr_b"])
    frame["stderr"] = frame["paired_stderr"].where(is_paired, of_two)
    frame["pairs"] = frame["num_pairs"].where(is_paired)
    frame = frame.fillna({"differs": ""})
    frame["z"] = frame["difference"] / frame["stderr"].where(frame["stderr"] > 0)
    of_speed = (frame["task"] == "") & (frame["series"] == "") & (frame["before"] != 0)
    frame["ratio"] = (frame["after"] / frame["before"]).where(of_speed)
    largest = frame[["before", "after"]].abs().max(axis=1)
    frame["moved"] = frame["difference"].abs() > (1e-9 * largest).clip(lower=1e-12)
    order = frame.assign(by_z=frame["z"].abs(), by_share=frame["difference"].abs() / largest)
    order = order.sort_values(["by_z", "by_share"], ascending=False, kind="stable")
    return order[[*KEYS, "_merge", *VALUES, "moved"]].reset_index(drop=True)


def _read(source: Path) -> pd.DataFrame:
    """Every number of a folder's or an archive's finished runs: `KEYS`, value, stderr, run_id,
    record; of several runs the newest. Raises UserError where there is none."""
    with opened(source) as folder:
        records = sorted(current(read_all(folder)), key=lambda record: record["started"])
    if not records:
        none = "no finished run in it, and tables alone do not say what was run"
        raise UserError(f"{source}: {none}")
    of_runs = pd.Series({record["run_id"]: record for record in records}, dtype=object)
    numbers = []
    for shape, frame in frames_of(records, weights=False).items():
        frame = frame.assign(record=frame["run_id"].map(of_runs))
        about = [name for name in [*NAMES, "run_id", "record"] if name in frame]
        if "metric" in frame:
            numbers.append(frame[[*about, "metric", "value", "stderr"]])
        others = [name for name in SPEED if name in frame and "metric" not in frame]
        if shape == "accuracy":
            frame, others = frame[~columns.are_parts(frame)], SHARES
        numbers.append(frame[[*about, *others]].melt(about, var_name="metric"))
    found = pd.concat(numbers, ignore_index=True).dropna(subset="value")
    found[NAMES] = found[NAMES].astype(object).where(found[NAMES].notna(), "")
    return found.drop_duplicates(KEYS, keep="last")


def _paired(numbers: pd.DataFrame) -> pd.DataFrame:
    """The paired difference, its standard error and the number of pairs, by run_id_b, task and
    metric, where the runs answered the same questions, or read the same windows or prompts."""
    before, after = (_samples(numbers, side) for side in ("a", "b"))
    runs = numbers[["run_id_a", "run_id_b"]].drop_duplicates()
    same = ["run_id_a", *KEY[1:], "question"]
    before = before[[*same, "value"]].rename(columns={"value": "full"})
    pairs = after.drop(columns="full").merge(runs, on="run_id_b").merge(before, how="left", on=same)
    found = differences_of(pairs.rename(columns={"run_id_b": "run_id"}))
    found = found.rename(columns={"run_id": "run_id_b", "difference": "paired"})
    found = found.rename(columns={"difference_stderr": "paired_stderr"})
    return found[["run_id_b", *KEY[1:], "paired", "paired_stderr", "num_pairs"]]


def _samples(numbers: pd.DataFrame, side: str) -> pd.DataFrame:
    scored = numbers[numbers["task"] != ""].drop_duplicates(f"run_id_{side}")
    return samples_of(scored[f"record_{side}"]).rename(columns={"run_id": f"run_id_{side}"})


def _what_differs(number: pd.Series) -> str:
    """In words, what differs between two runs: code, weights, calibration, data, precision,
    environment."""
    one, two = number["record_a"], number["record_b"]
    first, second = one["inputs"], two["inputs"]
    words = []
    for name in first:
        is_code = name.startswith(CODE)
        if first[name] != second.get(name, None if is_code else first[name]):
            words.append("code" if is_code else INPUTS.get(name, "data"))
    if one["config"]["model"].get("dtype") != two["config"]["model"].get("dtype"):
        words.append("precision")
    if any(one["environment"].get(name) != two["environment"].get(name) for name in MACHINE):
        words.append("environment")
    return " ".join(dict.fromkeys(words))


# For a terminal


def text_of(frame: pd.DataFrame) -> str:
    """The numbers that moved, the largest change first, and what one of the two has alone."""
    both = frame[frame["_merge"] == "both"]
    moved = both[both["moved"]]
    lines = [f"{len(both)} numbers in both: {len(both) - len(moved)} equal, {len(moved)} moved"]
    for name, side in (("A", "left_only"), ("B", "right_only")):
        alone = frame[frame["_merge"] == side]
        if len(alone):
            lines.append(f"only in {name}: {len(alone)} numbers, of {_runs(alone)}")
    if len(moved):
        shown = moved[[*VALUES, "metric", *NAMES]].rename(columns={"before": "A", "after": "B"})
        is_known = shown.notna() & (shown != "")
        cells = shown.loc[:, is_known.any()].head(MAX_SHOWN).map(_cell)
        table = cells.to_markdown(index=False, tablefmt="simple", disable_numparse=True)
        lines += ["", table]
    if len(moved) > MAX_SHOWN:
        lines.append(f"and {len(moved) - MAX_SHOWN} that moved less")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return MISSING if math.isnan(value) else f"{value:.5g}"
    return printable(str(value))


def _runs(frame: pd.DataFrame) -> str:
    """The first few runs that the numbers are of, in words."""
    runs = frame[["experiment", "label", "model", "settings"]].drop_duplicates()
    named = []
    for run in runs.head(MAX_NAMED).to_dict("records"):
        settings = f" ({run['settings']})" if run["settings"] else ""
        words = f"{run['experiment']} of {run['label']} on {run['model']}{settings}"
        named.append(shortened(words, MAX_WIDTH))
    if len(runs) > MAX_NAMED:
        named.append("...")
    return printable(", ".join(named))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.results.compare", description="What moved from A to B."
    )
    parser.add_argument("before", metavar="A", type=Path, help="a results folder or an archive")
    parser.add_argument("after", metavar="B", type=Path, help="another")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(text_of(compare(args.before, args.after))))


if __name__ == "__main__":
    sys.exit(main())
