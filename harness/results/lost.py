"""`kv-harness samples RUN`: the questions that the full cache answers and a run does not.

    python run.py samples 3f2a0c4d --task kv_recall

It reads records alone: no model is loaded. The full cache's answers are those that tables compare
with. A metric counts if each of its numbers is 0 or 1, in both runs.
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from harness.errors import UserError, exit_code, nearest, printable, shortened
from harness.results.metrics import MISSING, WAYS
from harness.results.record import Record, in_words, read_all
from harness.results.samples import Sample, with_full
from harness.settings.paths import COMMAND, RESULTS

NO_SCORES = ("generated_tokens", "at_limit", "unknown_less_known")
"""Metrics that say nothing of right and wrong, or are the difference of two."""
ANSWER_LETTERS, WIDTH = 240, 100
"""Letters that are shown of an answer, and letters of a line."""


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
    answers = compared(record, finished, asked.task)
    print(printable(f"{record['config']['label']}, {in_words(record['settings'])}"))
    for _, pairs in answers.groupby("task", sort=False):
        print("\n".join(_lines(pairs, record, known[pairs["full_run"].iloc[0]])))


def compared(record: Record, finished: Sequence[Record], task: str | None = None) -> pd.DataFrame:
    """The answers of a run beside the full cache's, of one task or all: columns of `with_full`.

    Raises UserError where none can be compared.
    """
    pairs = with_full([record], lambda: finished)
    pairs = pairs[~pairs["metric"].str.split(",").str[0].isin(NO_SCORES)]
    is_binary = pairs["value"].isin([0, 1]) & pairs["full"].isin([0, 1])
    pairs = pairs[is_binary.groupby([pairs["task"], pairs["metric"]]).transform("all")]
    if task is not None:
        if task not in record["samples"]:
            raise UserError(f"--task={task}: {nearest(task, record['samples'])}")
        pairs = pairs[pairs["task"] == task]
    if pairs.empty:
        raise UserError(
            f"run {record['run_id']}: no answers of right and wrong that a run of the full cache "
            f"gave, too; `{COMMAND} method=full ...` with the same settings makes one"
        )
    return pairs


def _lines(pairs: pd.DataFrame, record: Record, full: Record) -> Iterator[str]:
    """The numbers of a task, and its lost questions, as text for a terminal."""
    task = pairs["task"].iloc[0]
    yield printable(f"{task} (run {record['run_id']}, full cache {full['run_id']})")
    for metric, of_metric in pairs.groupby("metric", sort=False):
        own, other = of_metric["value"], of_metric["full"]
        yield (
            f"{metric}: of {len(of_metric)} questions the full cache has {other.sum():.0f} right, "
            f"this run {own.sum():.0f}; lost {(own < other).sum()}, gained {(own > other).sum()}"
        )
    runs = record["samples"][task], full["samples"][task]
    samples = [{sample["question"]: sample for sample in of_run} for of_run in runs]
    lost = pairs[pairs["value"] < pairs["full"]]
    for number, metrics in lost.groupby("question")["metric"]:
        yield f"\nquestion {number} ({', '.join(metrics)})"
        yield from _question(*(_of_way(of_run[number], metrics.iloc[0]) for of_run in samples))


def _question(own: Sample, full: Sample) -> Iterator[str]:
    """A question, its right answer and the two that were given."""
    texts = {
        "context": own.get("context_text"),
        "question": own.get("question_text"),
        "right": _answer(own, "gold_text", "target"),
        "full": _answer(full, "predicted_text", "text"),
        "method": _answer(own, "predicted_text", "text"),
    }
    for name, text in texts.items():
        begin, shown = f"  {name:<10}", printable(text or MISSING)
        yield textwrap.fill(shown, WIDTH, initial_indent=begin, subsequent_indent=" " * 12)


def _of_way(sample: Sample, metric: str) -> Sample:
    """The sample; of turns, whose questions are answered in two ways, its part of the metric's."""
    way = metric.partition(",")[0]
    part: Sample = sample[way] if way in WAYS else sample
    return part


def _answer(sample: Sample, *names: str) -> str | None:
    """An answer as text: the first of these that the sample has."""
    given = [sample[name] for name in names if name in sample]
    return shortened(" ".join(str(given[0]).split()), ANSWER_LETTERS) if given else None
