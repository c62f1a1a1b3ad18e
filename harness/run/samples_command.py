"""`kv-harness samples RUN`: the questions that the full cache answers and a run does not.

    python run.py samples 3f2a0c4d --task kv_recall
    python run.py samples outputs/runs/fig11/3f2a.../record.json --gained --json

It reads records alone: no model is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import UserError, exit_code, nearest, printable
from harness.results.archive import opened
from harness.results.lost import Answered, OfTask, of_record, tasks_with_questions
from harness.results.metrics import MISSING
from harness.results.record import BAD_VALUE_ERRORS, Record, in_words, read_all, read_record
from harness.results.samples import Baselines, is_full
from harness.settings.paths import COMMAND, RESULTS

RECORD = "record.json"
BROKEN_PIPE = 141
"""Exit code of a command whose reader has left: 128 + SIGPIPE, as a shell has it."""
LABEL_LETTERS = 10
WIDTH = 100
"""Letters of a line."""


def main(argv: Sequence[str]) -> int:
    """Print what was asked for; returns the exit code, 2 for a user's mistake."""
    try:
        code = exit_code(partial(_print, parser().parse_args(argv)))
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def parser() -> argparse.ArgumentParser:
    """The words of the command."""
    parser = argparse.ArgumentParser(
        prog=f"{COMMAND} samples",
        description="List the questions that the full cache answers and a run does not.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run_id of a table, or its beginning, or a record.json"
    )
    parser.add_argument("--task", help="one task of the run (default: all)")
    parser.add_argument(
        "--gained",
        action="store_true",
        help="list the questions that the run alone answers instead",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--results-dir",
        default=RESULTS,
        metavar="DIR",
        help="a results folder or an archive of one (default %(default)s)",
    )
    return parser


def _print(asked: argparse.Namespace) -> None:
    source = Path(asked.results_dir)
    path = Path(asked.run)
    if path.name == RECORD and len(path.parents) > 3:
        source = path.parents[3]
    with opened(source) as results:
        records = list(read_all(results))
        record = _find(asked.run, records, source)
        try:
            tasks = _tasks(record, records, asked.task)
        except UserError:
            raise
        except BAD_VALUE_ERRORS as error:
            damage = f"holds values that no run writes ({error!r})"
            raise UserError(f"run {record['run_id']}: {damage}") from error
    if asked.json:
        print(json.dumps(as_json(record, tasks), indent=1))
        return
    for task in tasks:
        print(in_text(record, task, task.gained if asked.gained else task.lost))


def _find(run: str, records: Sequence[Record], results_dir: Path) -> Record:
    """The record of a run; UserError where none or several are meant."""
    if Path(run).name == RECORD:
        try:
            return read_record(Path(run))
        except FileNotFoundError as error:
            raise UserError(f"RUN={run}: no such file") from error
    found = {}
    for record in records:
        if record["run_id"].startswith(run) and record["status"] == "finished":
            found[record["run_id"]] = record
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise UserError(f"RUN={run}: begins {len(found)} run_ids: {', '.join(sorted(found))}")
    known = []
    for record in records:
        is_method = record["status"] == "finished" and not is_full(record)
        if is_method and tasks_with_questions(record):
            known.append(record["run_id"])
    if not known:
        raise UserError(
            f"RUN={run}: {results_dir}/runs has no finished run of a method on questions; shipped "
            "tables have no records"
        )
    raise UserError(f"RUN={run}: no finished run of {results_dir}; {nearest(run, known)}")


def _tasks(record: Record, records: Sequence[Record], task: str | None) -> list[OfTask]:
    """The tasks that are asked for; UserError where there are none."""
    where = f"run {record['run_id']}"
    known = tasks_with_questions(record)
    if record["status"] != "finished":
        raise UserError(f"{where}: is {record['status']}; only a finished run keeps questions")
    if not known:
        raise UserError(f"{where}: of kind={record['kind']}, which keeps no questions")
    if task is not None and task not in known:
        raise UserError(f"--task={task}: {nearest(task, known)}")
    if is_full(record):
        raise UserError(f"{where}: is the full cache's own; name a run of a method")
    finished = [other for other in records if other["status"] == "finished"]
    found = []
    for of_task in of_record(record, Baselines(finished)):
        if task in (None, of_task.task):
            found.append(of_task)
    if not found:
        names = task or ", ".join(known)
        raise UserError(
            f"{where}: no run of the full cache answered the same questions of {names}, or none "
            f"of its metrics is of right and wrong; `{COMMAND} method=full ...` with the same "
            "settings makes one"
        )
    return found


def as_json(record: Record, tasks: Sequence[OfTask]) -> dict[str, Any]:
    """What is known, as JSON holds it."""
    listed = []
    for task in tasks:
        entry = task._asdict()
        entry["lost"] = [answered._asdict() for answered in task.lost]
        entry["gained"] = [answered._asdict() for answered in task.gained]
        listed.append(entry)
    return {
        "run_id": record["run_id"],
        "model": record["config"]["model"]["name"],
        "label": record["config"]["label"],
        "settings": record["settings"],
        "tasks": listed,
    }


def in_text(record: Record, task: OfTask, shown: Sequence[Answered]) -> str:
    """A task's questions as text for a terminal."""
    config = record["config"]
    settings = in_words(record["settings"])
    about = ", ".join(filter(None, [config["label"], settings, config["model"]["name"]]))
    runs = f"run {record['run_id']}, full cache {task.full_run}"
    lines = [printable(f"{task.task}: {about} ({runs})")]
    for metric, num_full in task.num_full.items():
        lines.append(
            f"{metric}: of {task.num_questions} questions the full cache has {num_full} right, "
            f"this run {task.num_own[metric]}"
        )
    lines.append(f"lost {len(task.lost)}, gained {len(task.gained)}")
    if task.read_where_lost is not None and task.read_elsewhere is not None:
        lines.append(
            f"of the needle {100 * task.read_where_lost:.0f} % is read where a question is lost, "
            f"{100 * task.read_elsewhere:.0f} % elsewhere"
        )
    for answered in shown:
        lines += ["", f"question {answered.question} ({', '.join(answered.metrics)})"]
        for label, text in _fields(answered):
            lines.append(_field(label, text))
    return "\n".join(lines) + "\n"


def _fields(answered: Answered) -> list[tuple[str, str]]:
    found = [
        ("context", answered.context_text),
        ("question", answered.question_text),
        ("right", answered.right),
        ("full", answered.full),
        ("method", answered.answer),
        ("needle", needle_in_words(answered)),
    ]
    return [(label, text or MISSING) for label, text in found]


def needle_in_words(answered: Answered) -> str | None:
    """What the method read of the sentence that holds the answer; None where it is not known."""
    if answered.needle_read is None or answered.needle_read_max is None:
        return None
    return (
        f"{100 * answered.needle_read:.0f} % of {answered.needle_tokens} tokens read, "
        f"{100 * answered.needle_read_max:.0f} % in the layer that read most"
    )


def _field(label: str, text: str) -> str:
    indent = " " * (LABEL_LETTERS + 2)
    first = f"  {label:<{LABEL_LETTERS}}"
    return textwrap.fill(printable(text), WIDTH, initial_indent=first, subsequent_indent=indent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
