"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

    python -m harness.results.compare before.zip after.zip

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest
counts. If both were measured on the same questions, windows or prompts, the standard error is that
of the paired difference, else that of two independent numbers.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.errors import UserError, exit_code, printable
from harness.results import columns
from harness.results.archive import opened
from harness.results.metrics import MISSING
from harness.results.record import CODE, Record, current, read_all
from harness.results.samples import KEY, OF_METHODS, differences_of, samples_of
from harness.results.table_rows import frames_of

NAMES = [
    "experiment", "platform", "source", "model", "method", "label", "settings", "task", "first",
    "stop", "depth", "batch_size", "prompt_len", "gen_len", "memory_bytes", "series", "layer",
    "x_name", "x",
]  # fmt: skip
"""Columns that say what a number was measured of."""
KEYS = [*NAMES, "metric"]
VALUES = ["before", "after", "difference", "stderr", "z", "pairs"]
"""z: the difference in standard errors. pairs: questions or windows that both were measured on."""
SHARES = ["budget", "device_frac", "resident_frac"]
MAX_SHOWN = 40
Records = Mapping[str, Record]


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives.

    Returns:
        A row per number of either: `KEYS`, `VALUES`, moved (it is not equal), and _merge: "both",
        "left_only" (A) or "right_only" (B). The largest change in standard errors comes first.

    Raises:
        UserError: one cannot be read or has no finished run, or the two have no run in common.
    """
    (first, of_a), (second, of_b) = _read(before), _read(after)
    frame = first.merge(second, how="outer", on=KEYS, suffixes=("_a", "_b"), indicator=True)
    is_both = frame["_merge"] == "both"
    if not is_both.any():
        raise UserError(f"no run is both in A={before} and in B={after}")
    scored = frame[is_both & frame["task"].ne("")]
    runs = scored[["run_id_a", "run_id_b"]].drop_duplicates()
    frame = frame.merge(_paired(runs, of_a, of_b), how="left", on=["run_id_b", *KEY[1:], "depth"])
    frame["before"], frame["after"] = (frame[f"value_{side}"].where(is_both) for side in "ab")
    frame["difference"] = frame["after"] - frame["before"]
    is_paired = np.isclose(frame["paired"], frame["difference"])  # the means of the same questions
    of_two = np.hypot(frame["stderr_a"], frame["stderr_b"])
    frame["stderr"] = frame["difference_stderr"].where(is_paired, of_two)
    frame["pairs"] = frame["num_pairs"].where(is_paired)
    frame["z"] = frame["difference"] / frame["stderr"].where(frame["stderr"] > 0)
    largest = frame[["before", "after"]].abs().max(axis=1)
    frame["moved"] = frame["difference"].abs() > (1e-9 * largest).clip(lower=1e-12)
    order = frame["z"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order, [*KEYS, "_merge", *VALUES, "moved"]]


def _read(source: Path) -> tuple[pd.DataFrame, Records]:
    """Every number of a folder's or an archive's finished runs: `KEYS`, value, stderr, run_id; of
    several runs the newest. Then the records by run_id. Raises UserError where there is none."""
    with opened(source) as folder:
        records = sorted(current(read_all(folder)), key=lambda record: record["started"])
    if not records:
        none = "no finished run in it, and tables alone do not say what was run"
        raise UserError(f"{source}: {none}")
    numbers = []
    for shape, frame in frames_of(records, weights=False).items():
        about = [name for name in [*NAMES, "run_id"] if name in frame]
        others = SHARES
        if "metric" in frame:
            numbers.append(frame[[*about, "metric", "value", "stderr"]])
        else:
            others = [name for name in frame if name not in {*about, *columns.WORDS}]
        if shape != "analysis":
            numbers.append(frame[[*about, *others]].melt(about, var_name="metric"))
    found = pd.concat(numbers, ignore_index=True).dropna(subset="value")
    found[NAMES] = found[NAMES].astype(object).where(found[NAMES].notna(), "")
    return found.drop_duplicates(KEYS, keep="last"), {run["run_id"]: run for run in records}


def _paired(runs: pd.DataFrame, of_a: Records, of_b: Records) -> pd.DataFrame:
    """The differences of B's runs to A's, by run_id_b, task and metric, where both read the same
    data and answered the same questions, or read the same windows or prompts."""
    is_alike = [_data(of_a[a]) == _data(of_b[b]) for a, b in runs.to_numpy()]
    runs = runs[np.array(is_alike, dtype=bool)]
    own, other = (
        samples_of(map(records.get, runs[name].unique())).rename(columns={"run_id": name})
        for records, name in ((of_b, "run_id_b"), (of_a, "run_id_a"))
    )
    pairs = own.drop(columns="full").merge(runs, on="run_id_b")
    other = other.drop(columns=["full", "context"]).rename(columns={"value": "full"})
    pairs = pairs.merge(other, how="left", on=["run_id_a", *KEY[1:], "question"])
    found = differences_of(pairs.rename(columns={"run_id_b": "run_id"}))
    found = found.rename(columns={"run_id": "run_id_b", "difference": "paired"}).assign(depth="")
    found["first"] = found["first"].astype(object).fillna("")
    return found[["run_id_b", *KEY[1:], "depth", "paired", "difference_stderr", "num_pairs"]]


def _data(record: Record) -> dict[str, str]:
    """The digests of the texts and questions of a run."""
    names = {name for name in record["inputs"] if not name.startswith(CODE)}
    return {name: record["inputs"][name] for name in names - {"model", *OF_METHODS}}


def text_of(frame: pd.DataFrame) -> str:
    """The numbers that moved, the largest change first, and how many one of the two has alone."""
    count, moved = frame["_merge"].value_counts(), frame[frame["moved"]]
    lines = [
        f"{count['both']} numbers in both: {len(moved)} moved; "
        f"{count['left_only']} only in A, {count['right_only']} only in B"
    ]
    if len(moved):
        shown = moved[[*VALUES, "metric", *NAMES]].rename(columns={"before": "A", "after": "B"})
        shown = shown.replace("", None).dropna(axis=1, how="all").head(MAX_SHOWN)
        table = shown.to_markdown(
            index=False, tablefmt="simple", floatfmt=".6g", missingval=MISSING
        )
        lines += ["", *table.splitlines(), f"{len(shown)} of {len(moved)} that moved"]
    return "\n".join(map(printable, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser("python -m harness.results.compare", description=__doc__)
    parser.add_argument("before", metavar="A", type=Path, help="a results folder or an archive")
    parser.add_argument("after", metavar="B", type=Path, help="another")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(text_of(compare(args.before, args.after))))


if __name__ == "__main__":
    sys.exit(main())
