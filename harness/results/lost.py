"""Which questions were lost: those that the full cache answers and a method does not.

The full cache's run is the one that tables compare with (`Baselines`), question by question. A
metric counts if each of its numbers is 0 or 1, in both runs. Records of an older version lack the
texts of questions and what was read of the needle; `OfTask.missing` says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from harness.errors import shortened
from harness.results import columns
from harness.results.metrics import WAYS
from harness.results.record import Record
from harness.results.samples import Baselines, Sample, is_full

NO_SCORES = ("generated_tokens", "at_limit")
"""Metrics of a task that say nothing of right and wrong."""
LESS = "unknown_less_known"
"""Of `WAYS`, the difference of the other two."""
ANSWER_LETTERS = 240
"""Letters that are shown of an answer."""
NO_TEXTS = "the texts of questions and answers"
NO_NEEDLE = "what was read of the sentence that holds the answer (this task does not know it)"
OLD_RECORD = "an older record; the run made again has it"


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
    others; None without any. missing: what the records lack, in words.
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
    missing: Sequence[str]


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
    if columns.values(own, "question") != columns.values(other, "question"):
        return None
    pairs = list(zip(own, other, strict=True))
    metrics = []
    for metric in record["metrics"].get(task, ()):
        if _is_of_right_and_wrong(metric, pairs):
            metrics.append(metric)
    if not metrics:
        return None
    lost, gained = [], []
    read: dict[bool, list[float]] = {True: [], False: []}
    for one, two in pairs:
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
        task,
        full["run_id"],
        len(pairs),
        _num_right(metrics, other),
        _num_right(metrics, own),
        lost,
        gained,
        fmean(read[True]) if read[True] else None,
        fmean(read[False]) if read[False] else None,
        _missing(own, other, metrics),
    )


def _is_of_right_and_wrong(metric: str, pairs: Sequence[tuple[Sample, Sample]]) -> bool:
    """True if the metric has a number in some question, and 0 or 1 wherever it has one."""
    name = metric.partition(",")[0]
    if name in NO_SCORES or name == LESS:
        return False
    numbers = []
    for one, two in pairs:
        if (metric in one) != (metric in two):
            return False
        if metric in one:
            numbers += [one[metric], two[metric]]
    return bool(numbers) and all(number in (0, 1) for number in numbers)


def _num_right(metrics: Sequence[str], samples: Sequence[Sample]) -> dict[str, int]:
    counts = {}
    for metric in metrics:
        right = [sample for sample in samples if sample.get(metric) == 1]
        counts[metric] = len(right)
    return counts


def _answered(own: Sample, full: Sample, metrics: tuple[str, ...]) -> Answered:
    question = own["question"]
    own, full = _of_way(own, metrics[0]), _of_way(full, metrics[0])
    return Answered(
        question,
        metrics,
        own.get("context_text"),
        own.get("question_text"),
        _right(own),
        _answer(full),
        _answer(own),
        own.get("needle_tokens"),
        own.get("needle_read"),
        own.get("needle_read_max"),
    )


def _of_way(sample: Sample, metric: str) -> Sample:
    """What a sample says of an answer; of turns, whose questions are answered in two ways, in that
    of the metric."""
    way = metric.partition(",")[0]
    part: Sample = sample.get(way, {}) if way in WAYS else sample
    return part


def _answer(sample: Sample) -> str | None:
    """The answer as text; of an old record the number of the choice."""
    for name in ("predicted_text", "text"):
        if name in sample:
            return _shown(sample[name])
    if "predicted" in sample:
        return f"choice {sample['predicted']}"
    return None


def _right(sample: Sample) -> str | None:
    """The right answer, as `_answer`."""
    for name in ("gold_text", "target"):
        if name in sample:
            return _shown(sample[name])
    if sample.get("gold") is not None:
        return f"choice {sample['gold']}"
    return None


def _shown(value: Any) -> str:
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return shortened(" ".join(words.split()), ANSWER_LETTERS)


def _missing(own: Sequence[Sample], full: Sequence[Sample], metrics: Sequence[str]) -> list[str]:
    words = []
    first_own, first_full = _of_way(own[0], metrics[0]), _of_way(full[0], metrics[0])
    if "question_text" not in first_own:
        words.append(f"this run: {NO_TEXTS}, and what was read of the needle ({OLD_RECORD})")
    elif not any("needle_read" in _of_way(sample, metrics[0]) for sample in own):
        words.append(NO_NEEDLE)
    if "question_text" not in first_full:
        words.append(f"the full cache's run: {NO_TEXTS} ({OLD_RECORD})")
    return words
