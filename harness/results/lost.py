"""`kv-harness samples RUN`: the questions that the full cache answers and a run does not.

    python run.py samples 3f2a0c4d --task kv_recall

It reads records alone: no model is loaded. The full cache's answers are those that tables compare
with. A metric counts if each of its numbers is 0 or 1, in both runs.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.errors import UserError, exit_code, nearest, printable, shortened
from harness.results.metrics import LENGTHS
from harness.results.record import flat, in_words, read_all
from harness.results.samples import with_full
from harness.settings.paths import COMMAND, RESULTS

NO_SCORES = (*LENGTHS, "unknown_less_known")
"""Metrics that say nothing of right and wrong, or are the difference of two."""
LETTERS = 240
"""That are shown of a text."""


def main(argv: Sequence[str]) -> int:
    """Print what was asked for; returns the exit code, 2 for a user's mistake."""
    about = "List the questions that the full cache answers and a run does not."
    parser = argparse.ArgumentParser(prog=f"{COMMAND} samples", description=about)
    parser.add_argument("run", metavar="RUN", help="a run_id of a table, or its beginning")
    parser.add_argument("--task", help="one task of the run (default: all)")
    where = "a results folder (default %(default)s)"
    parser.add_argument("--results-dir", default=RESULTS, type=Path, metavar="DIR", help=where)
    return exit_code(partial(_print, parser.parse_args(argv)))


def _print(asked: argparse.Namespace) -> None:
    finished = [run for run in read_all(asked.results_dir) if run["status"] == "finished"]
    known = {record["run_id"]: record for record in finished}
    found = [run for run in known if run.startswith(asked.run)]
    if len(found) != 1:
        count = f"{len(found)} finished runs in {asked.results_dir} begin so"
        raise UserError(f"RUN={asked.run}: {count}; {nearest(asked.run, known)}")
    record = known[found[0]]
    pairs = with_full([record], lambda: finished)
    is_binary = pairs["value"].isin([0, 1]) & pairs["full"].isin([0, 1])
    is_score = ~pairs["metric"].str.split(",").str[0].isin(NO_SCORES)
    pairs = pairs[is_score & is_binary.groupby([pairs["task"], pairs["metric"]]).transform("all")]
    if asked.task is not None:
        pairs = pairs[pairs["task"] == asked.task]
    if pairs.empty:
        raise UserError(
            f"run {record['run_id']}: no answers of right and wrong that a run of the full cache "
            f"gave, too; `{COMMAND} method=full ...` with the same settings makes one"
        )
    print(printable(f"{record['config']['label']}, {in_words(record['settings'])}"))
    for _, of_metric in pairs.groupby(["task", "metric"], sort=False):
        task, metric = of_metric[["task", "metric"]].iloc[0]
        own, full = of_metric["value"], of_metric["full"]
        right = f"the full cache has {full.sum():.0f} right, this run {own.sum():.0f}"
        lost = of_metric[own < full]
        counts = f"lost {len(lost)}, gained {(own > full).sum()}"
        print(f"\n{printable(task)}, {metric}: of {len(of_metric)} questions {right}; {counts}")
        samples = {sample["question"]: sample for sample in record["samples"][task]}
        for number in lost["question"]:
            print(f"\nquestion {number}")
            for name, text in flat(samples[number]).items():
                if isinstance(text, str):
                    print(f"  {name}: {printable(shortened(' '.join(text.split()), LETTERS))}")
