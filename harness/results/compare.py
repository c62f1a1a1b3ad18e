"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

    python -m harness.results.compare before.zip after.zip

The standard error is that of the paired difference on the same questions, windows or prompts where
both runs have the same settings and data, else that of two independent numbers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.errors import UserError, exit_code, printable
from harness.results import columns
from harness.results.archive import opened
from harness.results.metrics import MISSING
from harness.results.record import Record, current, read_all, settings_of
from harness.results.samples import KEY, differences_of, samples_of
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


def compare(before: Path, after: Path) -> pd.DataFrame:
    """Match the numbers of two results folders or archives: a row per number of either, with
    `KEYS`, `VALUES`, moved (it is not equal), and _merge: "both", "left_only" (A) or "right_only"
    (B). The largest change in standard errors comes first.

    Raises UserError: one cannot be read or has no finished run, or they have no run in common.
    """
    (first, of_a), (second, of_b) = _read(before), _read(after)
    frame = first.merge(second, how="outer", on=KEYS, suffixes=("_a", "_b"), indicator=True)
    is_both = frame["_merge"] == "both"
    if not is_both.any():
        raise UserError(f"no run is both in A={before} and in B={after}")
    frame = frame.merge(_paired(of_a, of_b), how="left", on=["run_id_b", *KEY[1:], "depth"])
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


def _read(source: Path) -> tuple[pd.DataFrame, list[Record]]:
    """Every number of the finished runs, by `KEYS` (of several runs the newest), and the records.
    Raises UserError where there is none."""
    with opened(source) as folder:
        records = sorted(current(read_all(folder)), key=lambda record: record["started"])
    if not records:
        none = "no finished run in it, and tables alone do not say what was run"
        raise UserError(f"{source}: {none}")
    numbers = []
    for shape, frame in frames_of(records, weights=False).items():
        about = [name for name in [*NAMES, "run_id"] if name in frame]
        others = [*frame.columns.difference([*about, *columns.WORDS], sort=False)]
        if "metric" in frame:
            numbers.append(frame[[*about, "metric", "value", "stderr"]])
            others = SHARES if shape == "accuracy" else []
        numbers.append(frame[[*about, *others]].melt(about, var_name="metric"))
    found = pd.concat(numbers, ignore_index=True).dropna(subset="value")
    found[NAMES] = found[NAMES].astype(object).where(found[NAMES].notna(), "")
    return found.drop_duplicates(KEYS, keep="last"), records


def _paired(before: Sequence[Record], after: Sequence[Record]) -> pd.DataFrame:
    """The differences of B's runs to A's of the same settings and data, whatever code made them."""
    same = ["run", *KEY[1:], "question"]
    own, other = samples_of(after), samples_of(before)
    own, other = (frame.assign(run=frame["run_id"].map(settings_of)) for frame in (own, other))
    other = other[[*same, "value"]].rename(columns={"value": "full"})
    found = differences_of(own.drop(columns="full").merge(other, how="left", on=same))
    found["first"] = found["first"].astype(object).fillna("")
    return found.rename(columns={"run_id": "run_id_b", "difference": "paired"}).assign(depth="")


def text_of(frame: pd.DataFrame) -> str:
    """The numbers that moved, the largest change first, and how many one of the two has alone."""
    count, moved = frame["_merge"].value_counts(), frame[frame["moved"]]
    alone = f"{count['left_only']} only in A, {count['right_only']} only in B"
    text = f"{count['both']} numbers in both: {len(moved)} moved; {alone}"
    if len(moved):
        shown = moved[[*VALUES, "metric", *NAMES]].rename(columns={"before": "A", "after": "B"})
        shown = shown.replace("", None).dropna(axis=1, how="all").head(MAX_SHOWN)
        table = shown.to_markdown(
            index=False, tablefmt="simple", floatfmt=".6g", missingval=MISSING
        )
        text += f"\n\n{table}\n{len(shown)} of {len(moved)} that moved"
    return "\n".join(map(printable, text.splitlines()))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what moved; returns the exit code, 2 for a user's mistake."""
    parser = argparse.ArgumentParser("python -m harness.results.compare", description=__doc__)
    parser.add_argument("before", metavar="A", type=Path, help="a results folder or an archive")
    parser.add_argument("after", metavar="B", type=Path, help="another")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(text_of(compare(args.before, args.after))))


if __name__ == "__main__":
    sys.exit(main())
