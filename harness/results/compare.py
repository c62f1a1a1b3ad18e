"""Compare two results, folders or archives: which numbers moved, and by how many standard errors.

    python -m harness.results.compare before.zip after.zip

A number of A is matched with the number of B of the same `KEYS`; of several such runs the newest
counts. If both were measured on the same questions, windows or prompts, the standard error is that
of the paired difference, else that of two independent numbers. Speed is compared by ratio.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError, exit_code, printable, shortened
from harness.results import columns
from harness.results.archive import opened
from harness.results.metrics import MISSING
from harness.results.record import CODE, Record, read_all
from harness.results.samples import Measured, paired, samples_of
from harness.results.table_rows import with_rows

if TYPE_CHECKING:
    import pandas as pd

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
SPREAD = ["stderr", "pairs", "differs"]
INPUTS = {"model": "weights", "method": "code", "calibration": "calibration"}
"""Words for the inputs that are neither code nor data."""
PART = "]"
"""How the task of a chunk of a text or of a needle's depth ends, such as `offline[256:512]`."""
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
    frame[SPREAD] = frame[is_both].apply(_spread, axis=1, result_type="expand")
    frame = frame.astype({"stderr": float, "pairs": float}).fillna({"differs": ""})
    frame["z"] = frame["difference"] / frame["stderr"].where(frame["stderr"] > 0)
    of_speed = (frame["task"] == "") & (frame["series"] == "") & (frame["before"] != 0)
    frame["ratio"] = (frame["after"] / frame["before"]).where(of_speed)
    largest = frame[["before", "after"]].abs().max(axis=1)
    frame["moved"] = frame["difference"].abs() > (1e-9 * largest).clip(lower=1e-12)
    order = frame.assign(by_z=frame["z"].abs(), by_share=frame["difference"].abs() / largest)
    order = order.sort_values(["by_z", "by_share"], ascending=False, kind="stable")
    return order[[*KEYS, "_merge", *VALUES, "moved"]].reset_index(drop=True)


def _read(source: Path) -> pd.DataFrame:
    """Every number of a folder's or an archive's finished runs: `KEYS`, value, stderr, record; of
    several runs the newest. Raises UserError where there is none."""
    import pandas as pd

    rows = []
    with opened(source) as folder:
        for record, of_record in with_rows(read_all(folder), weights=False):
            rows += [row | {"record": record, "started": record["started"]} for row in of_record]
    if not rows:
        none = "no finished run in it, and tables alone do not say what was run"
        raise UserError(f"{source}: {none}")
    names = [*NAMES, "metric", "value", "stderr", "record", "started", *{*SHARES, *SPEED}]
    frame = pd.DataFrame(rows, columns=names, dtype=object).sort_values("started", kind="stable")
    is_timed = frame["metric"].isna()
    is_whole = frame["task"].notna() & ~frame["task"].str.endswith(PART, na=False)
    about = [*NAMES, "record"]
    parts = (
        frame.loc[~is_timed, [*about, "metric", "value", "stderr"]],
        frame.loc[~is_timed & is_whole, [*about, *SHARES]].melt(about, var_name="metric"),
        frame.loc[is_timed, [*about, *SPEED]].melt(about, var_name="metric"),
    )
    numbers = pd.concat(parts, ignore_index=True).dropna(subset="value")
    numbers[NAMES] = numbers[NAMES].where(numbers[NAMES].notna(), "")
    numbers = numbers.astype({"value": float, "stderr": float})
    return numbers.drop_duplicates(KEYS, keep="last")


def _spread(number: pd.Series) -> tuple[float, float, str]:
    """Of a number of both: the standard error of the difference, the number of pairs if it is of
    pairs, and what differs between the two runs."""
    task, one, two = number["task"], number["record_a"], number["record_b"]
    differs = _what_differs(one, two)
    if "data" not in differs and task and not task.endswith(PART):
        before = Measured(number["value_a"], samples_of(one, task))
        found = paired(Measured(number["value_b"], samples_of(two, task)), before, number["metric"])
        if found:
            return found.stderr, found.num_pairs, " ".join(differs)
    return math.hypot(number["stderr_a"], number["stderr_b"]), math.nan, " ".join(differs)


def _what_differs(one: Record, two: Record) -> list[str]:
    """In words, what differs between two runs: code, weights, calibration, data, precision,
    environment."""
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
    return list(dict.fromkeys(words))


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
