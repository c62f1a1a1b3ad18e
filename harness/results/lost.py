"""Which questions were lost: those that the full cache answers and a method does not.

The full cache's run is the one that tables compare with (`Baselines`), question by question. A
metric counts if each of its numbers is 0 or 1, in both runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from harness.errors import shortened
from harness.results.columns import values
from harness.results.metrics import WAYS
from harness.results.record import Record
from harness.results.samples import Baselines, Sample, is_full

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
