"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Figs 11, 13 and 17.

lm-eval makes the prompts, asks for log-likelihoods or text and decides what is right; replay answers under the method.
Any task, group or tag of lm-eval runs by its name, beside the project's generated ones. Each leaf task is sized, run
and reported on its own; a group is reported on top of them.

A metric is named as lm-eval prints it, `exact_match,strict-match`, or plainly, `acc`, where no filter has a name. Its
value is lm-eval's. If it is the mean of one number per question, its standard error is clustered by context.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50
"""

import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from tqdm import tqdm

from harness.accuracy.answers import Request, Score, generate, score
from harness.accuracy.lm import FEWSHOT_SEPARATOR, Prefill, ReplayLM
from harness.data.generated import MARKER
from harness.data.ruler import MARKERS, facts
from harness.data.tasks import COMPLAINTS, load_suite
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.records.samples import clustered_stderr
from harness.settings.config import GENERATED_TASKS, RunConfig
from harness.settings.experiment import Outcome
from harness.setup import prepare
from harness.sizes import ReadStats
from methods.base import Row

ANSWER_ROWS = 16
"""Decode rows of a generated answer, evenly spaced, on which a method is sized."""
NO_FILTER = "none"
OTHER_LENGTH = -1
"""Score of a question under the metric of another length, in a task of several lengths."""

Metrics = dict[str, Any]
Logged = Sequence[Mapping[str, Any]]
"""lm-eval's samples of one task: one a question and filter."""


def run_tasks(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """All tasks of `config` under its method.

    Returns:
        metrics by leaf task: lm-eval's, each with `_stderr`; `SHARES`, num_samples, num_fewshot, and with
        too_long=truncate num_truncated, the questions whose context has lost its beginning. By group: lm-eval's
        own aggregates, `SHARES` over its tasks, num_samples, and their names as `tasks`. samples by leaf task: one
        entry a question.

    Raises:
        UserError: missing or malformed data, a context longer than the model's limit, settings under which a task
            cannot be scored, a task whose code ends the process, or a method that never ran.
    """
    with _lm_eval(f"tasks={','.join(config.tasks)}"):
        suite = load_suite(config, loaded)
    outcome = Outcome({})
    reads, results = {}, {}
    for name, task in suite.tasks.items():
        engine = ReplayEngine(config, loaded, name, sys.stderr)
        results[name], outcome.metrics[name], outcome.samples[name] = _run_task(task, config, loaded, engine)
        outcome.methods[name], reads[name] = asdict(engine.method), engine.reads
    for group in suite.groups.values():
        if group.has_aggregation:
            names = [task.task_name for task in group.get_all_tasks()]
            by_rule = group.aggregate(results).items()
            found: Metrics = {_plain_name(key): _number(value) for key, value in by_rule if "," in key}
            found |= {"num_samples": sum(outcome.metrics[name]["num_samples"] for name in names), "tasks": names}
            outcome.metrics[group.name] = found | sum((reads[name] for name in names), ReadStats()).sizes
    return outcome


class ReplayEngine:
    """Answers the requests of one task. reads: of all answers so far; method: as it was sized for the last of them."""

    def __init__(self, config: RunConfig, loaded: LoadedModel, task: str, bar_file: TextIO) -> None:
        self.config = config
        self.loaded = loaded
        self.task = task
        self.bar_file = bar_file
        self.reads = ReadStats()
        self.method = config.method

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods, in the order of `requests`."""
        return self._answer(score, requests)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Greedy answers as tokens, in the order of `requests`."""
        return self._answer(partial(generate, tokenizer=self.loaded.tokenizer), requests)

    def _answer(self, answer: Callable[..., tuple[list[Any], ReadStats]], requests: Sequence[Request]) -> list[Any]:
        bar = tqdm(total=len(requests), desc=self.task, unit="answer", leave=False, disable=None, file=self.bar_file)
        with attach(self.loaded.model) as attached, bar:
            setup = prepare(self.config, self.loaded, attached, lambda: decode_rows(requests))
            self.method = setup.method
            answers, reads = answer(requests, attached, setup, bar.update)
        self.reads += reads
        return answers


def decode_rows(requests: Sequence[Request]) -> list[Row]:
    """The decode rows on which a method will run, from tokens alone; every request is a sequence of its own.

    A generated answer counts with its longest length, as its end is not known before, and by some of its rows.
    """
    rows = []
    for request in requests:
        stride = max(1, request.num_rows // ANSWER_ROWS) if request.max_new_tokens else 1
        cached = range(request.prefill_len, request.prefill_len + request.num_rows, stride)
        rows += [Row(each, request.prefill_len, request.final_length) for each in cached]
    return rows


def prefill_of(task: Task, name: str, config: RunConfig) -> Prefill:
    """Which rows of the task's requests are dense."""
    mode = config.prefill_of(name, writes=task.OUTPUT_TYPE == "generate_until")
    if mode == "artifact" and config.size is not None:
        raise UserError(
            f"size={config.size}: not with prefill=artifact (task {name}), whose decode rows depend on the size "
            "itself; set the method's own size, or use prefill=dense or question"
        )
    # Under a codec every row past the first reads coded tokens, even where none is dropped.
    coded = config.method.reads_all and config.codec is not None
    budget = 0.0 if coded else config.method.artifact_budget()
    marker = MARKER if name in GENERATED_TASKS else MARKERS.get(name, FEWSHOT_SEPARATOR)
    return Prefill(mode, config.task.question_marker or marker, budget)


def _run_task(
    task: Task, config: RunConfig, loaded: LoadedModel, engine: ReplayEngine
) -> tuple[Metrics, Metrics, list[dict[str, Any]]]:
    """Metrics under lm-eval's names, for a group, then those of the task under plain ones, and its samples."""
    name, too_long = engine.task, config.task.too_long
    prefill, is_mean = prefill_of(task, name, config), config.scoring == "mean"
    lm = ReplayLM(loaded, prefill, engine.score, generator=engine.generate, mean=is_mean, too_long=too_long)
    with _lm_eval(f"task {name}"):
        results = evaluate(
            lm,
            {"tasks": {name: task}},
            limit=config.num_samples_of(name),
            bootstrap_iters=0,  # the standard errors of means are computed here, by context
            log_samples=True,
            system_instruction=config.task.system_instruction,
            apply_chat_template=config.task.apply_chat_template,
            fewshot_as_multiturn=config.task.fewshot_as_multiturn,
        )
    logged = results["samples"][name]
    found, by_question = _measured(results["results"][name], logged)
    first = {request.document[1]: request for request in reversed(lm.requests)}
    samples = _samples(task, logged, by_question, first)
    metrics = {_plain_name(key): value for key, value in found.items()}
    metrics |= {"num_samples": len(samples), "num_fewshot": task.config.num_fewshot}
    if too_long == "truncate":
        metrics["num_truncated"] = len(lm.truncated)
    for_group = {key: value for key, value in found.items() if value is not None} | {"sample_len": len(samples)}
    return for_group, metrics | engine.reads.sizes, samples


@contextmanager
def _lm_eval(what: str) -> Iterator[None]:
    """Run lm-eval and the code of tasks: without their progress bars, and with a user's mistakes as UserError."""
    COMPLAINTS.stream = sys.stderr
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except SystemExit as error:
        raise UserError(f"{what}: its code ended the process by sys.exit({error.code!r}); remove that call") from error
    except OverflowError as error:
        raise UserError(
            f"{what}: a metric overflows ({error}), as perplexity does where the model does not fit the text; "
            "choose another model"
        ) from error
    finally:
        COMPLAINTS.stream = None


def _measured(results: Mapping[str, Any], logged: Logged) -> tuple[Metrics, dict[str, dict[int, float]]]:
    """lm-eval's `results` of a task under its names, with standard errors of means; None for no number.

    Returns also, for each metric that is the mean of one number a question, these numbers by question.
    """
    metrics: Metrics = {}
    by_question = {}
    for key, result in results.items():
        name, _, filtered = key.partition(",")
        # A metric named by a length leaves out questions of other lengths.
        answers = [
            sample
            for sample in logged
            if sample["filter"] == filtered and name in sample and not (name.isdigit() and sample[name] == OTHER_LENGTH)
        ]
        if not answers:
            continue
        value, numbers = _number(result), [_number(sample[name]) for sample in answers]
        values = [number for number in numbers if number is not None]
        metrics |= {key: value, f"{name}_stderr,{filtered}": None}
        if value is None or len(values) < len(numbers):
            continue
        if math.isclose(sum(values) / len(values), value, abs_tol=1e-9):
            metrics[f"{name}_stderr,{filtered}"] = clustered_stderr(values, [_context(sample) for sample in answers])
            by_question[key] = dict(zip((sample["doc_id"] for sample in answers), values, strict=True))
    return metrics, by_question


def _plain_name(key: str) -> str:
    """The name of lm-eval's `acc,none` and `acc_stderr,none` without a filter that has no name."""
    name, _, filtered = key.partition(",")
    if filtered == NO_FILTER:
        return name
    metric = name.removesuffix("_stderr")
    return f"{metric},{filtered}{name[len(metric) :]}"


def _number(value: Any) -> float | None:
    """A finite number; None for anything else, such as the pair of F1 over all questions or an error of N/A."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _context(sample: Mapping[str, Any]) -> Any:
    """The text that a question is about; a question that shares its text with no other is its own."""
    doc = sample["doc"]
    return doc.get("context_id", sample["doc_id"]) if isinstance(doc, Mapping) else sample["doc_id"]


def _samples(
    task: Task,
    logged: Logged,
    by_question: Mapping[str, Mapping[int, float]],
    requests: Mapping[int | None, Request],
) -> list[dict[str, Any]]:
    """One entry a question, in lm-eval's order; requests: the first of each question, by its number.

    Enough to recompute the metrics and to look at what went wrong: question, context, its number under each metric
    that is a mean; of given choices their log_likelihoods, predicted and gold; of text that the model wrote text,
    filtered (by filter) and target; of a whole text its log_likelihood; context_tokens, prefill_len; of RULER's
    `facts`.
    """
    questions: dict[int, list[Mapping[str, Any]]] = {}
    for sample in logged:
        questions.setdefault(sample["doc_id"], []).append(sample)
    samples = []
    for number, answers in questions.items():
        entry = {"question": number, "context": _context(answers[0])} | _answer(task, answers)
        entry |= {_plain_name(key): values[number] for key, values in by_question.items() if number in values}
        if (request := requests.get(number)) is not None:
            entry |= {"context_tokens": request.context_len, "prefill_len": request.prefill_len}
        samples.append(entry | facts(task.task_name, answers[0]["doc"]))
    return samples


def _answer(task: Task, answers: Logged) -> dict[str, Any]:
    """The model's answer to one question, and the right one."""
    sample = answers[0]
    if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
        choices = list(task.doc_to_choice(sample["doc"])) if task.config.doc_to_choice is not None else []
        # Some tasks ask for the choices again, without their context, after them.
        scores = [float(answer[0]) for answer in sample["filtered_resps"]][: len(choices) or None]
        predicted = max(range(len(scores)), key=scores.__getitem__)
        gold = task.doc_to_text(sample["doc"]) if getattr(task, "multiple_input", 0) else sample["target"]
        if isinstance(gold, str):
            # A task of one continuation (LAMBADA) asks whether it is the likeliest: its choice 0.
            gold = (choices.index(gold) if gold in choices else None) if choices else 0
        return {"log_likelihoods": scores, "predicted": predicted, "gold": gold}
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"log_likelihood": float(sample["filtered_resps"][0])}
    text = sample["resps"][0][0]
    filtered = {each["filter"]: _plain(each["filtered_resps"][0]) for each in answers}
    return {"text": _plain(text), "filtered": filtered, "target": _plain(sample["target"])}


def _plain(value: Any) -> Any:
    """Text, numbers and lists of them, as JSON can hold them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
