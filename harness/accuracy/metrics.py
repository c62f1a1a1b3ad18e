"""What lm-eval found out about a task, as a record keeps it: metrics with their errors, and a sample a question.

A metric is named as lm-eval prints it, `exact_match,strict-match`, or plainly, `acc`, where no filter has a name. Its
value is lm-eval's. Where that is the mean of a number a question has, the standard error is clustered by context.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval.api.group import Group
from lm_eval.api.task import Task

from harness.accuracy.requests import AnyRequest
from harness.data.ruler import facts
from harness.records.samples import clustered_stderr
from harness.sizes import ReadStats

NO_FILTER = "none"
OTHER_LENGTH = -1
"""How a task of several lengths scores a question under the metric of another length."""

Metrics = dict[str, Any]
Logged = Sequence[Mapping[str, Any]]
"""lm-eval's samples of one task: one a question and filter."""


class Metric(NamedTuple):
    """A metric of one task. by_question: what each question has, where `value` is their mean, else empty."""

    label: str
    value: float | None
    stderr: float | None
    by_question: Mapping[int, float]


def judged(results: Mapping[str, Any], logged: Logged) -> list[Metric]:
    """What lm-eval's `results` of a task say, with the standard errors of means."""
    found = []
    for key, value in results.items():
        name, _, filtered = key.partition(",")
        answers = [sample for sample in logged if sample["filter"] == filtered and _counts(name, sample)]
        if answers:
            found.append(_metric(name, filtered, _number(value), answers))
    return found


def as_recorded(metrics: Sequence[Metric]) -> Metrics:
    """By name, each with its `_stderr`, which is None where there is none."""
    return {
        name: value
        for metric in metrics
        for name, value in ((metric.label, metric.value), (f"{metric.label}_stderr", metric.stderr))
    }


def samples_of(
    task: Task, logged: Logged, metrics: Sequence[Metric], requests: Mapping[int | None, AnyRequest]
) -> list[dict[str, Any]]:
    """One entry a question, in lm-eval's order; requests: the first of each question, by its number.

    Enough to recompute the metrics and to look at what went wrong: question, context, what it has under each metric
    that is a mean; of given choices their log_likelihoods, predicted and gold; of text that the model wrote text,
    filtered (by filter) and target; of a whole text its log_likelihood; context_tokens, prefill_len; of RULER's
    `facts`.
    """
    questions: dict[int, list[Mapping[str, Any]]] = {}
    for sample in logged:
        questions.setdefault(sample["doc_id"], []).append(sample)
    return [
        {"question": number, "context": context_of(answers[0])}
        | _answer(task, answers)
        | {metric.label: metric.by_question[number] for metric in metrics if number in metric.by_question}
        | _lengths(requests.get(number))
        | facts(task.task_name, answers[0]["doc"])
        for number, answers in questions.items()
    ]


def group_metrics(group: Group, tasks: Mapping[str, Metrics], reads: Mapping[str, ReadStats]) -> Metrics:
    """A group's own metrics by its rule in lm-eval, and what was read for all of its tasks.

    tasks: the metrics of its leaf tasks by name. `tasks` in the answer names them.
    """
    names = [task.task_name for task in group.get_all_tasks()]
    found: Metrics = {}
    for key, value in group.aggregate({name: _for_lm_eval(tasks[name]) for name in names}).items():
        name, _, filtered = key.partition(",")
        if filtered:
            stderr = name.removesuffix("_stderr")
            label = name_of(stderr, filtered) + name[len(stderr) :]
            found[label] = _number(value)
    read = sum((reads[name] for name in names), ReadStats())
    found |= {"num_samples": sum(tasks[name]["num_samples"] for name in names), "tasks": names}
    return found | read.sizes


def name_of(metric: str, filtered: str) -> str:
    """A metric's name in records and tables."""
    return metric if filtered == NO_FILTER else f"{metric},{filtered}"


def context_of(sample: Mapping[str, Any]) -> Any:
    """Which text a question is about; one that shares its text with no other is its own."""
    doc = sample["doc"]
    return doc.get("context_id", sample["doc_id"]) if isinstance(doc, Mapping) else sample["doc_id"]


def _for_lm_eval(metrics: Metrics) -> Any:
    """A task's metrics under lm-eval's names, for `Group.aggregate`; an error that is unknown is left out."""
    named: Metrics = {"sample_len": metrics["num_samples"]}
    for label, value in metrics.items():
        if f"{label}_stderr" in metrics and value is not None:
            name, _, filtered = label.partition(",")
            filtered = filtered or NO_FILTER
            named[f"{name},{filtered}"] = value
            named[f"{name}_stderr,{filtered}"] = metrics[f"{label}_stderr"]
    return named


def _counts(metric: str, sample: Mapping[str, Any]) -> bool:
    """Whether a question has a say in a metric; one named by a length leaves out those of other lengths."""
    return metric in sample and not (metric.isdigit() and sample[metric] == OTHER_LENGTH)


def _metric(name: str, filtered: str, value: float | None, answers: Logged) -> Metric:
    label, numbers = name_of(name, filtered), [_number(sample[name]) for sample in answers]
    values = [number for number in numbers if number is not None]
    if value is None or len(values) < len(numbers) or not math.isclose(sum(values) / len(values), value, abs_tol=1e-9):
        return Metric(label, value, None, {})
    stderr = clustered_stderr(values, [context_of(sample) for sample in answers])
    return Metric(label, value, stderr, dict(zip((sample["doc_id"] for sample in answers), values, strict=True)))


def _number(value: Any) -> float | None:
    """A finite number; None for what is none, such as the pair of F1 over all questions or an error of N/A."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _answer(task: Task, answers: Logged) -> dict[str, Any]:
    """What the model answered to one question, and what would be right."""
    sample = answers[0]
    if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
        return _choice(task, sample)
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"log_likelihood": float(sample["filtered_resps"][0])}
    text = sample["resps"][0][0]
    filtered = {each["filter"]: _plain(each["filtered_resps"][0]) for each in answers}
    return {"text": _plain(text), "filtered": filtered, "target": _plain(sample["target"])}


def _choice(task: Task, sample: Mapping[str, Any]) -> dict[str, Any]:
    choices = _choices(task, sample["doc"])
    # What follows the choices, of some tasks, are the same without their context.
    scores = [float(answer[0]) for answer in sample["filtered_resps"]][: len(choices) or None]
    predicted = max(range(len(scores)), key=scores.__getitem__)
    return {"log_likelihoods": scores, "predicted": predicted, "gold": _gold(task, sample, choices)}


def _choices(task: Task, doc: Any) -> list[str]:
    has_choices = task.config.doc_to_choice is not None
    return list(task.doc_to_choice(doc)) if has_choices else []


def _gold(task: Task, sample: Mapping[str, Any], choices: Sequence[str]) -> Any:
    """Index of the right choice, or indices. A task of one continuation (LAMBADA) asks whether it is the likeliest:
    its choice 0."""
    gold = task.doc_to_text(sample["doc"]) if getattr(task, "multiple_input", 0) else sample["target"]
    if isinstance(gold, str):
        return (choices.index(gold) if gold in choices else None) if choices else 0
    return gold


def _lengths(request: AnyRequest | None) -> dict[str, int]:
    return {} if request is None else {"context_tokens": request.context_len, "prefill_len": request.prefill_len}


def _plain(value: Any) -> Any:
    """Text, numbers and lists of them, as JSON can hold them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
