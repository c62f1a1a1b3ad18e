"""Which questions were lost: those that the full cache answers and a method does not.

The full cache's run is the one that tables compare with (`Baselines`), question by question. A
metric counts if each of its numbers is 0 or 1, in both runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from harness.errors import shortened
from harness.results.columns import values
from harness.results.metrics import BUDGET, LABEL, MISSING, PERCENT, WAYS, Metric
from harness.results.record import Record, current, damage_told, in_words
from harness.results.samples import Baselines, Sample, is_full
from harness.results.sheet import Sheet, Shown, sheet_of

Json = dict[str, Any]

NO_SCORES = ("generated_tokens", "at_limit", "unknown_less_known")
"""Metrics of a task that say nothing of right and wrong, and of `WAYS` the difference of two."""
ANSWER_LETTERS = 240
"""Letters that are shown of an answer."""


class Answered(NamedTuple):
    """A question and its two answers; None for what a record lacks.

    metrics: under which the two differ. needle_tokens: of the sentence that holds the answer.
    needle_read, needle_read_max: the share of them that the method's rows read, mean over its
    layers and the largest of a layer.
    """

    question: int
    metrics: tuple[str, ...]
    context_text: str | None
    question_text: str | None
    right: str | None
    full: str | None
    answer: str | None
    needle_tokens: int | None
    needle_read: float | None
    needle_read_max: float | None


class OfTask(NamedTuple):
    """A method's answers to a task beside the full cache's.

    full_run: run_id of the full cache. num_questions: that both answered. num_full, num_own: right
    ones by metric. lost: right under the full cache alone; gained: under the method alone.
    read_where_lost, read_elsewhere: mean of `needle_read` over the lost questions, and over the
    others; None without any.
    """

    task: str
    full_run: str
    num_questions: int
    num_full: Mapping[str, int]
    num_own: Mapping[str, int]
    lost: Sequence[Answered]
    gained: Sequence[Answered]
    read_where_lost: float | None
    read_elsewhere: float | None


def of_record(record: Record, full: Baselines) -> Iterator[OfTask]:
    """Every task of a run that some run of the full cache answered too; none of the full cache
    itself."""
    if is_full(record):
        return
    for task in tasks_with_questions(record):
        for other in full.runs_for(record):
            found = of_task(record, other, task)
            if found is not None:
                yield found
                break


def tasks_with_questions(record: Record) -> list[str]:
    """The tasks of a run whose samples are questions."""
    found = []
    for task, samples in record["samples"].items():
        first = samples[0] if isinstance(samples, list) and samples else None
        if isinstance(first, Mapping) and "question" in first:
            found.append(task)
    return found


def of_task(record: Record, full: Record, task: str) -> OfTask | None:
    """None where the two runs did not answer the same questions, or no metric is of right and
    wrong."""
    own, other = record["samples"].get(task, ()), full["samples"].get(task, ())
    if values(own, "question") != values(other, "question"):
        return None
    metrics = []
    for metric in record["metrics"].get(task, ()):
        if _is_of_right_and_wrong(metric, own, other):
            metrics.append(metric)
    if not metrics:
        return None
    lost, gained = [], []
    read: dict[bool, list[float]] = {True: [], False: []}
    for one, two in zip(own, other, strict=True):
        fewer = tuple(metric for metric in metrics if one.get(metric, 0) < two.get(metric, 0))
        more = tuple(metric for metric in metrics if one.get(metric, 0) > two.get(metric, 0))
        if fewer:
            lost.append(_answered(one, two, fewer))
        if more:
            gained.append(_answered(one, two, more))
        share = _of_way(one, metrics[0]).get("needle_read")
        if share is not None:
            read[bool(fewer)].append(share)
    return OfTask(
        task=task,
        full_run=full["run_id"],
        num_questions=len(own),
        num_full={metric: _num_right(metric, other) for metric in metrics},
        num_own={metric: _num_right(metric, own) for metric in metrics},
        lost=lost,
        gained=gained,
        read_where_lost=fmean(read[True]) if read[True] else None,
        read_elsewhere=fmean(read[False]) if read[False] else None,
    )


def _is_of_right_and_wrong(metric: str, own: Sequence[Sample], full: Sequence[Sample]) -> bool:
    if metric.partition(",")[0] in NO_SCORES:
        return False
    numbers = []
    for one, two in zip(own, full, strict=True):
        if (metric in one) != (metric in two):
            return False
        if metric in one:
            numbers += [one[metric], two[metric]]
    return bool(numbers) and all(number in (0, 1) for number in numbers)


def _num_right(metric: str, samples: Sequence[Sample]) -> int:
    return [sample.get(metric) for sample in samples].count(1)


def _answered(own: Sample, full: Sample, metrics: tuple[str, ...]) -> Answered:
    of_own, of_full = _of_way(own, metrics[0]), _of_way(full, metrics[0])
    return Answered(
        question=own["question"],
        metrics=metrics,
        context_text=of_own.get("context_text"),
        question_text=of_own.get("question_text"),
        right=_shown(of_own, ("gold_text", "target")),
        full=_shown(of_full, ("predicted_text", "text")),
        answer=_shown(of_own, ("predicted_text", "text")),
        needle_tokens=of_own.get("needle_tokens"),
        needle_read=of_own.get("needle_read"),
        needle_read_max=of_own.get("needle_read_max"),
    )


def _of_way(sample: Sample, metric: str) -> Sample:
    """What a sample says of an answer; of turns, whose questions are answered in two ways, in that
    of the metric."""
    way = metric.partition(",")[0]
    part: Sample = sample.get(way, {}) if way in WAYS else sample
    return part


def _shown(sample: Sample, names: Sequence[str]) -> str | None:
    """An answer as text: the first of these that the sample has."""
    for name in names:
        if name in sample:
            value = sample[name]
            words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            return shortened(" ".join(words.split()), ANSWER_LETTERS)
    return None


# All runs, for the report: `report.js` fills its list from the data made here. They lie packed in
# the page; a question's texts stand there once, however many methods lost it.


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
            with damage_told(record, "its questions are left out"):
                for task in of_record(record, full):
                    _add(sets, where, record, task)
    for questions in sets.values():
        questions["runs"].sort(key=itemgetter("name"))
    return list(sets.values())


def _add(sets: dict[tuple[str, ...], Json], where: str, record: Record, task: OfTask) -> None:
    config = record["config"]
    model = config["model"]["name"]
    name = ", ".join(filter(None, [task.task, model, where]))
    words = f"{task.num_questions} questions"
    others = [known for known in sets.values() if known["name"].startswith(name)]
    if others:  # other questions of the task
        words += f", set {len(others) + 1}"
    empty: Json = {"name": f"{name} ({words})", "questions": {}, "runs": []}
    own = sets.setdefault((where, model, task.task, task.full_run), empty)
    lost = []
    for answered in task.lost:
        texts = (answered.context_text, answered.question_text, answered.right, answered.full)
        own["questions"][str(answered.question)] = [text or MISSING for text in texts]
        answer, read = answered.answer or MISSING, answered.needle_read
        lost.append([answered.question, answer, read, answered.needle_read_max])
    budget = record["metrics"].get(task.task, {}).get(BUDGET.name)
    settings = in_words(record["settings"])
    label = config["label"] if budget is None else f"{config['label']}, {BUDGET.show(budget)} %"
    own["runs"].append(
        {
            "name": f"{label} ({settings})" if settings else label,
            "task": f"{task.task}, {model}",
            "num_questions": str(task.num_questions),
            "lost": lost,
            "num_full": ", ".join(map(str, task.num_full.values())),
            "num_own": ", ".join(map(str, task.num_own.values())),
            "num_gained": str(len(task.gained)),
            "read_where_lost": task.read_where_lost,
            "read_elsewhere": task.read_elsewhere,
        }
    )


def lost_sheet(sets: Sequence[Json]) -> Sheet:
    """A line per run and task: how many questions were lost, and what was read of the needle. Right
    ones are by metric."""
    percent = Metric("share", "", PERCENT, 0)
    shown: Shown = {
        LABEL.heading: itemgetter("name"),
        "task": itemgetter("task"),
        "questions": itemgetter("num_questions"),
        "full cache right": itemgetter("num_full"),
        "right": itemgetter("num_own"),
        "lost": lambda run: str(len(run["lost"])),
        "gained": itemgetter("num_gained"),
        "read where lost (%)": lambda run: percent.show(run["read_where_lost"]),
        "read elsewhere (%)": lambda run: percent.show(run["read_elsewhere"]),
    }
    runs = []
    for questions in sets:
        runs += questions["runs"]
    return sheet_of("lost questions", runs, shown)
