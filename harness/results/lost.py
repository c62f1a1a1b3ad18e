"""`kv-harness samples RUN`: the questions that the full cache answers and a run does not.

    python run.py samples 3f2a0c4d --task kv_recall
    python run.py samples outputs/runs/fig11/3f2a.../record.json --gained --json

It reads records alone: no model is loaded. The full cache's run is the one that tables compare with
(`Baselines`), question by question. A metric counts if each of its numbers is 0 or 1, in both runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.errors import UserError, exit_code, nearest, printable, shortened
from harness.results.archive import opened
from harness.results.metrics import MISSING, WAYS
from harness.results.record import Record, in_words, read_all, read_record
from harness.results.samples import Baselines, Sample, is_full
from harness.settings.paths import COMMAND, RESULTS

Compared = dict[str, Any]
"""A task of two runs as JSON has it: task, full_run (its run_id), num_questions, num_full and
num_own (right ones by metric), lost and gained (questions), read_where_lost and read_elsewhere
(mean share of the needle that the run read, by whether the question was lost)."""
NO_SCORES = ("generated_tokens", "at_limit", "unknown_less_known")
"""Metrics of a task that say nothing of right and wrong, and of `WAYS` the difference of two."""
ANSWER_LETTERS, WIDTH = 240, 100
"""Letters that are shown of an answer, and letters of a line."""


def main(argv: Sequence[str]) -> int:
    """Print what was asked for; returns the exit code, 2 for a user's mistake."""
    return exit_code(partial(_print, parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    """The words of the command."""
    parser = argparse.ArgumentParser(
        prog=f"{COMMAND} samples",
        description="List the questions that the full cache answers and a run does not.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run_id of a table, or its beginning, or a record.json")
    add("--task", help="one task of the run (default: all)")
    add("--gained", action="store_true", help="list what the run alone answers instead")
    add("--json", action="store_true", help="print JSON")
    where = "a results folder or an archive of one (default %(default)s)"
    add("--results-dir", default=RESULTS, metavar="DIR", help=where)
    return parser


def _print(asked: argparse.Namespace) -> None:
    path, source = Path(asked.run).absolute(), Path(asked.results_dir)
    is_file = path.name == "record.json"
    with opened(path.parents[3] if is_file else source) as results:
        finished = [record for record in read_all(results) if record["status"] == "finished"]
    record = read_record(path) if is_file else _find(asked.run, finished, source)
    config, settings = record["config"], record["settings"]
    model, label = config["model"]["name"], config["label"]
    tasks = compared(record, Baselines(finished), asked.task)
    if asked.json:
        about = {"run_id": record["run_id"], "model": model, "label": label, "settings": settings}
        print(json.dumps(about | {"tasks": tasks}, indent=1))
        return
    words = ", ".join(filter(None, [label, in_words(settings), model]))
    for task in tasks:
        runs = f"run {record['run_id']}, full cache {task['full_run']}"
        print(printable(f"{task['task']}: {words} ({runs})"))
        print(in_text(task, task["gained"] if asked.gained else task["lost"]))


def _find(run: str, finished: Sequence[Record], source: Path) -> Record:
    """The record of a run; UserError where none or several are meant."""
    found = {record["run_id"]: record for record in finished if record["run_id"].startswith(run)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise UserError(f"RUN={run}: begins {len(found)} run_ids: {', '.join(sorted(found))}")
    known = []
    for record in finished:
        if tasks_with_questions(record) and not is_full(record):
            known.append(record["run_id"])
    none = "it has none of a method on questions, and shipped tables have no records"
    hint = nearest(run, known) if known else none
    raise UserError(f"RUN={run}: no finished run of {source}; {hint}")


def compared(record: Record, full: Baselines, task: str | None = None) -> list[Compared]:
    """The tasks of a run, or one task, beside a run of the full cache on the same questions.

    Raises UserError where there is none, and for a run without questions.
    """
    where, tasks = f"run {record['run_id']}", tasks_with_questions(record)
    if not tasks:
        what = f"is {record['status']} and of kind={record['kind']}"
        raise UserError(f"{where}: {what}; only finished runs on tasks have questions")
    if is_full(record):
        raise UserError(f"{where}: is the full cache's own; name a run of a method")
    if task is not None and task not in tasks:
        raise UserError(f"--task={task}: {nearest(task, tasks)}")
    found: list[Compared] = []
    for name in tasks if task is None else [task]:
        beside = (of_task(record, other, name) for other in full.runs_for(record))
        found += itertools.islice(filter(None, beside), 1)
    if not found:
        raise UserError(
            f"{where}: no run of the full cache answered the same questions of "
            f"{task or ', '.join(tasks)}, or none of its metrics is of right and wrong; "
            f"`{COMMAND} method=full ...` with the same settings makes one"
        )
    return found


def tasks_with_questions(record: Record) -> list[str]:
    """The tasks of a run whose samples are questions."""
    if record["table"] != "accuracy":
        return []
    samples = record["samples"].items()
    return [task for task, of_task in samples if of_task and "question" in of_task[0]]


def of_task(record: Record, full: Record, task: str) -> Compared | None:
    """None where the two runs did not answer the same questions, or no metric is of right and
    wrong."""
    own, other = record["samples"][task], full["samples"].get(task, ())
    if [sample["question"] for sample in own] != [sample["question"] for sample in other]:
        return None
    pairs = list(zip(own, other, strict=True))
    metrics = [name for name in record["metrics"].get(task, ()) if _is_right_or_wrong(name, pairs)]
    if not metrics:
        return None
    lost, gained = [], []
    read: dict[bool, list[float]] = {True: [], False: []}
    for one, two in pairs:
        fewer = [name for name in metrics if (one.get(name) or 0) < (two.get(name) or 0)]
        more = [name for name in metrics if (one.get(name) or 0) > (two.get(name) or 0)]
        lost += [_question(one, two, fewer)] if fewer else []
        gained += [_question(one, two, more)] if more else []
        share = _of_way(one, metrics[0]).get("needle_read")
        if share is not None:
            read[bool(fewer)].append(share)
    return {
        "task": task,
        "full_run": full["run_id"],
        "num_questions": len(own),
        "num_full": {name: sum(two.get(name) == 1 for _, two in pairs) for name in metrics},
        "num_own": {name: sum(one.get(name) == 1 for one, _ in pairs) for name in metrics},
        "lost": lost,
        "gained": gained,
        "read_where_lost": fmean(read[True]) if read[True] else None,
        "read_elsewhere": fmean(read[False]) if read[False] else None,
    }


def _is_right_or_wrong(metric: str, pairs: Sequence[tuple[Sample, Sample]]) -> bool:
    if metric.partition(",")[0] in NO_SCORES:
        return False
    numbers = {(one.get(metric), two.get(metric)) for one, two in pairs}
    known = numbers - {(None, None)}
    return bool(known) and known <= {(0, 0), (0, 1), (1, 0), (1, 1)}


def _question(own: Sample, full: Sample, metrics: Sequence[str]) -> dict[str, Any]:
    """A question and its two answers; None for what a record lacks. metrics: under which the two
    differ."""
    of_own, of_full = _of_way(own, metrics[0]), _of_way(full, metrics[0])
    return {
        "question": own["question"],
        "metrics": metrics,
        "context_text": of_own.get("context_text"),
        "question_text": of_own.get("question_text"),
        "right": _shown(of_own, "gold_text", "target"),
        "full": _shown(of_full, "predicted_text", "text"),
        "answer": _shown(of_own, "predicted_text", "text"),
        "needle_tokens": of_own.get("needle_tokens"),
        "needle_read": of_own.get("needle_read"),
        "needle_read_max": of_own.get("needle_read_max"),
    }


def _of_way(sample: Sample, metric: str) -> Sample:
    """What a sample says of an answer; of turns, whose questions are answered in two ways, in that
    of the metric."""
    way = metric.partition(",")[0]
    part: Sample = sample.get(way, {}) if way in WAYS else sample
    return part


def _shown(sample: Sample, *names: str) -> str | None:
    """An answer as text: the first of these that the sample has."""
    for name in names:
        if name in sample:
            value = sample[name]
            words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            return shortened(" ".join(words.split()), ANSWER_LETTERS)
    return None


def in_text(task: Compared, shown: Sequence[Mapping[str, Any]]) -> str:
    """A task's numbers, and the questions that are shown, as text for a terminal."""
    lines = []
    for metric, num_full in task["num_full"].items():
        lines.append(
            f"{metric}: of {task['num_questions']} questions the full cache has {num_full} right, "
            f"this run {task['num_own'][metric]}"
        )
    lines.append(f"lost {len(task['lost'])}, gained {len(task['gained'])}")
    if task["read_where_lost"] is not None and task["read_elsewhere"] is not None:
        lines.append(
            f"of the needle {_percent(task['read_where_lost'])} is read where a question is lost, "
            f"{_percent(task['read_elsewhere'])} elsewhere"
        )
    for question in shown:
        needle = None
        if question["needle_read"] is not None:
            needle = (
                f"{_percent(question['needle_read'])} of {question['needle_tokens']} tokens read, "
                f"{_percent(question['needle_read_max'])} in the layer that read most"
            )
        lines += ["", f"question {question['question']} ({', '.join(question['metrics'])})"]
        for name, text in (
            ("context", question["context_text"]),
            ("question", question["question_text"]),
            ("right", question["right"]),
            ("full", question["full"]),
            ("method", question["answer"]),
            ("needle", needle),
        ):
            shown_text = printable(text or MISSING)
            begin, below = f"  {name:<10}", " " * 12
            lines.append(
                textwrap.fill(shown_text, WIDTH, initial_indent=begin, subsequent_indent=below)
            )
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
