"""What the page of lost questions shows: the questions that the full cache answers and a method
does not, of every run whose records are there.

`report.js` fills the list from the data made here. They lie packed in the page; a question's texts
stand there once, however many methods lost it.
"""

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from harness.results.lost import OfTask, of_record
from harness.results.metrics import LABEL, MISSING, PERCENT, SIZE, Metric
from harness.results.record import BAD_VALUE_ERRORS, Record, current, in_words
from harness.results.samples import Baselines
from harness.results.sheet import Sheet, Shown, sheet_of

Json = dict[str, Any]
log = logging.getLogger(__name__)


def lost_questions(records: Mapping[str, Sequence[Record]]) -> list[Json]:
    """The sets of questions, of a model, a task and a run of the full cache; [] without records.

    records: by the folder within the results, "" for the results themselves. A set has its `name`;
    `questions`: by number context, question, right answer and the full cache's; `runs`: of each its
    `name`, by which they are ordered, and of each question that it lost [number, answer, share of
    the needle that was read, the largest of a layer].
    """
    sets: dict[tuple[str, ...], Json] = {}
    for where, of_folder in records.items():
        finished = current(of_folder)
        full = Baselines(finished)
        for record in finished:
            try:
                for task in of_record(record, full):
                    _add(sets, where, record, task)
            except BAD_VALUE_ERRORS as error:
                path = f"{record['experiment']}/{record['run_id']}/record.json"
                log.warning("%s: damaged record (%r); its questions are left out", path, error)
    for questions in sets.values():
        questions["runs"].sort(key=lambda run: run["name"])
    return list(sets.values())


def _add(sets: dict[tuple[str, ...], Json], where: str, record: Record, task: OfTask) -> None:
    """Add a run's answers to a task to the set of its questions."""
    config = record["config"]
    model = config["model"]["name"]
    key = where, model, task.task, task.full_run
    if key not in sets:
        name = ", ".join(filter(None, [task.task, model, where]))
        words = f"{task.num_questions} questions"
        others = [known for known in sets.values() if known["name"].startswith(name)]
        if others:  # other questions of the task
            words += f", set {len(others) + 1}"
        sets[key] = {
            "name": f"{name} ({words})",
            "task": f"{task.task}, {model}",
            "num_questions": task.num_questions,
            "questions": {},
            "runs": [],
        }
    own = sets[key]
    lost = []
    for answered in task.lost:
        texts = (answered.context_text, answered.question_text, answered.right, answered.full)
        own["questions"][str(answered.question)] = [text or MISSING for text in texts]
        answer, read = answered.answer or MISSING, answered.needle_read
        lost.append([answered.question, answer, read, answered.needle_read_max])
    size = record["metrics"].get(task.task, {}).get(SIZE.name)
    settings = in_words(record["settings"])
    label = config["label"] if size is None else f"{config['label']}, {SIZE.show(size)} %"
    own["runs"].append(
        {
            "name": f"{label} ({settings})" if settings else label,
            "lost": lost,
            "num_full": ", ".join(map(str, task.num_full.values())),
            "num_own": ", ".join(map(str, task.num_own.values())),
            "num_gained": len(task.gained),
            "read_where_lost": task.read_where_lost,
            "read_elsewhere": task.read_elsewhere,
            "missing": "; ".join(task.missing),
        }
    )


def lost_sheet(sets: Sequence[Json]) -> Sheet:
    """A line per run and task: how many questions were lost, and what was read of the needle. Right
    ones are by metric."""
    percent = Metric("share", "", PERCENT, 0)
    shown: Shown = {
        LABEL.heading: itemgetter("name"),
        "task": itemgetter("task"),
        "questions": lambda run: str(run["num_questions"]),
        "full cache right": itemgetter("num_full"),
        "right": itemgetter("num_own"),
        "lost": lambda run: str(len(run["lost"])),
        "gained": lambda run: str(run["num_gained"]),
        "read where lost (%)": lambda run: percent.show(run["read_where_lost"]),
        "read elsewhere (%)": lambda run: percent.show(run["read_elsewhere"]),
        "not known": lambda run: run["missing"] or MISSING,
    }
    runs = []
    for questions in sets:
        of_all = {"task": questions["task"], "num_questions": questions["num_questions"]}
        runs += [run | of_all for run in questions["runs"]]
    return sheet_of("lost questions", runs, shown)
