"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Figs 11, 13 and 17.

lm-eval makes the prompts, asks for log-likelihoods or text and decides what is right; replay
answers under the method. Each leaf task has its budget met, is run and reported on its own; a
group is reported on top of them. `harness.scoring.metrics` makes metrics and samples of what
lm-eval logs.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from typing import Any

from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import evaluate

from harness.data.generated import MARKER
from harness.data.ruler import MARKERS
from harness.data.task_plan import Suite
from harness.data.tasks import FEWSHOT_SEED, load_suite
from harness.errors import UserError
from harness.model.budgets import ReadStats
from harness.model.load import LoadedModel
from harness.scoring.answers import Request
from harness.scoring.lm import ReplayLM
from harness.scoring.metrics import (
    ByQuestion,
    Metrics,
    Repeat,
    Samples,
    joined,
    lengths_of,
    means,
    measured,
    number_of,
    numbers_of,
    plain_name,
    samples_of,
)
from harness.scoring.planning import Prefill
from harness.scoring.progress import say
from harness.scoring.question import QuestionFinder
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from harness.settings.task_config import GENERATED_TASKS, REASONING_TASKS

UNKNOWN, KNOWN, LESS = "unknown", "known", "unknown_less_known"
"""Whether the method knew the question when it reduced the cache, and the difference; see
`run_turns`."""


def run_tasks(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """All tasks of `config` under its method.

    Returns by leaf task lm-eval's metrics, each with `_stderr`, the shares that were read, and one
    sample a question; by group lm-eval's aggregates on top. Raises UserError for missing or
    malformed data, a context longer than the model's limit, settings under which a task cannot be
    scored, and a method that never ran.
    """
    suite = _suite(config, loaded)
    outcome = Outcome({})
    reads, results = {}, {}
    for name, task in suite.tasks.items():
        prefill = prefill_of(name, config, writes=_generates(task), task=task)
        lm = ReplayLM(config, loaded, name, prefill)
        results[name], outcome.metrics[name], outcome.samples[name] = run_task(task, lm)
        outcome.methods[name], reads[name] = asdict(lm.method), lm.reads
    for group in suite.groups.values():
        if not group.has_aggregation:
            continue
        found: Metrics = {}
        for key, value in group.aggregate(results).items():
            if "," in key:
                found[plain_name(key)] = number_of(value)
        names = [task.task_name for task in group.get_all_tasks()]
        found["num_samples"] = sum(outcome.metrics[name]["num_samples"] for name in names)
        all_reads = sum((reads[name] for name in names), ReadStats())
        outcome.metrics[group.name] = found | {"tasks": names} | all_reads.shares
    return outcome


def _suite(config: RunConfig, loaded: LoadedModel) -> Suite:
    """The tasks of `config` with their questions. Raises UserError as `run_tasks`."""
    names = ",".join(config.tasks)
    say(f"tasks={names}: reading the questions and making their prompts")
    with running_lm_eval():
        suite = load_suite(config, loaded)
    _check_sampling(config, suite.tasks.values())
    return suite


def run_turns(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """Every task of `config` twice, as `prefill=both` asks: once with the question known when the
    method reduces the cache, and once with several questions to one cache, of which none was known.

    Known: the dense prompt is the whole context of the question, as in serving. Unknown: it ends
    before the question. The questions with one such prompt are turns: each goes on from a copy of
    the session after the prompt, so that none sees another.

    Returns by task, for each metric of lm-eval that is a mean, `unknown,METRIC`, `known,METRIC` and
    the difference `unknown_less_known,METRIC`, paired by question, each with its standard error
    clustered by prompt; the shares of the unknown questions, `known_budget` of the others; and
    what `run_tasks` says of each question both ways. Raises UserError as `run_tasks`, and for a
    task without questions.
    """
    suite = _suite(config, loaded)
    outcome = Outcome({})
    for name, task in suite.tasks.items():
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise UserError(f"task {name}: scores whole texts, so prefill=both cannot run it")
        finder = _finder(name, config, task)
        at_question = Prefill("question", finder, in_turns=True)
        unknown = ReplayLM(config, loaded, name, at_question)
        known = ReplayLM(config, loaded, name, Prefill("dense", finder))
        _, *of_unknown = run_task(task, unknown)
        _, *of_known = run_task(task, known)
        contexts = _contexts(unknown.requests)
        metrics, samples = _both_ways(name, of_unknown, of_known, contexts)
        metrics |= {"num_contexts": len({*contexts.values()})} | unknown.reads.shares
        metrics |= {"known_budget": known.reads.shares["budget"]}
        outcome.metrics[name], outcome.samples[name] = metrics, samples
        outcome.methods[name] = asdict(unknown.method)
    return outcome


def _contexts(requests: Sequence[Request]) -> dict[Any, int]:
    """The number of the prompt of each question, in the order in which prompts occur. Where choices
    are asked for without a prompt, too, it is that of the question's first request."""
    numbers: dict[tuple[int, ...], int] = {}
    contexts: dict[Any, int] = {}
    for request in requests:
        if request.document[1] not in contexts:
            contexts[request.document[1]] = numbers.setdefault(request.prompt, len(numbers))
    return contexts


def _both_ways(
    name: str, of_unknown: Sequence[Any], of_known: Sequence[Any], contexts: Mapping[Any, int]
) -> tuple[Metrics, Samples]:
    """Metrics and samples of a task whose questions were answered both ways.

    of_unknown, of_known: (metrics, samples) of a way. contexts: the prompt of each question.
    """
    (unknown, samples), (_, others) = of_unknown, of_known
    by_question: ByQuestion = defaultdict(dict)
    for metric in unknown:
        if f"{metric}_stderr" not in unknown:  # not a mean over questions
            continue
        for sample, other in zip(samples, others, strict=True):
            if metric not in sample:
                continue
            question, value, value_known = sample["question"], sample[metric], other[metric]
            by_question[f"{UNKNOWN},{metric}"][question] = value
            by_question[f"{KNOWN},{metric}"][question] = value_known
            by_question[f"{LESS},{metric}"][question] = value - value_known
    metrics = {plain_name(key): value for key, value in means(by_question, contexts).items()}
    metrics["num_samples"] = unknown["num_samples"]
    metrics["num_fewshot"] = unknown["num_fewshot"]
    joined = []
    for sample, other in zip(samples, others, strict=True):
        question = sample["question"]
        entry = {"question": question, "context": contexts[question]}
        both = {UNKNOWN: sample, KNOWN: other}
        joined.append(entry | numbers_of(question, by_question) | both)
    return metrics, joined


def _check_sampling(config: RunConfig, tasks: Iterable[Task]) -> None:
    """Raise UserError for settings of sampling where no answer is generated."""
    if any(_generates(task) for task in tasks):
        return
    for name, plain in {"temperature": 0, "top_p": 1, "top_k": 1, "repeats": 1}.items():
        value = getattr(config.sampling, name)
        if value not in (None, plain):
            names = ", ".join(config.tasks)
            raise UserError(f"{name}={value}: no answer of {names} is generated; leave it out")


def _generates(task: Task) -> bool:
    return task.OUTPUT_TYPE == "generate_until"


def prefill_of(name: str, config: RunConfig, *, writes: bool, task: Task | None = None) -> Prefill:
    """Which rows of a task's requests are dense. writes: the model writes the answers. task: None
    where lm-eval does not hand it over."""
    mode = config.prefill_of(name, writes=writes)
    if mode == "both":  # `run_turns` needs no mode
        raise UserError("prefill=both: only experiment=tasks asks in turns; choose another")
    if mode == "artifact" and config.budget is not None:
        raise UserError(
            f"budget={config.budget}: not with prefill=artifact (task {name}), whose decode rows "
            "depend on the budget itself; leave prefill out, which is dense with a budget, or set "
            "the method's own settings in place of budget"
        )
    # Under a codec every row past the first reads coded tokens, even where none is dropped.
    coded = config.method.reads_all and config.codec is not None
    budget = 0.0 if coded else config.method.artifact_budget()
    return Prefill(mode, _finder(name, config, task), budget)


def _finder(name: str, config: RunConfig, task: Task | None) -> QuestionFinder:
    """Finds a task's questions: by the words that the user gave, by those of the project's own
    task, or by the task itself."""
    marker = config.task.question_marker
    if marker is None and name in (*GENERATED_TASKS, *REASONING_TASKS):
        marker = MARKER
    if marker is None:
        marker = MARKERS.get(name)
    if task is None:
        return QuestionFinder(marker)
    has_preface = bool(config.task.system_instruction)
    if isinstance(task, ConfigurableTask):
        has_preface |= bool(task.config.num_fewshot or task.config.description)
    return QuestionFinder(marker, task.doc_to_text, has_preface=has_preface)


def run_task(task: Task, lm: ReplayLM) -> tuple[Metrics, Metrics, Samples]:
    """One task of a suite: its metrics under lm-eval's names, for a group, then under plain ones,
    and its samples. lm: answers it, and notes what it was asked."""
    name, config = lm.task, lm.config
    repeats: list[Repeat] = []
    with running_lm_eval():
        for lm.repeat in range(config.sampling.repeats if _generates(task) else 1):
            task.set_fewshot_seed(FEWSHOT_SEED + config.seed)  # the same examples in every repeat
            results = evaluate(
                lm,
                {"tasks": {name: task}},
                limit=config.num_samples_of(name),
                bootstrap_iters=0,  # the standard errors of means are computed here, by context
                log_samples=True,
                system_instruction=config.task.system_instruction,
                apply_chat_template=config.task.apply_chat_template,
                fewshot_as_multiturn=config.task.has_example_turns,
            )
            logged = results["samples"][name]
            repeats.append(measured(results["results"][name], logged))
    ends = lm.where_prompts_end()
    if ends is not None:
        say(ends)
    found, by_question = joined(repeats)
    for_group = {key: value for key, value in found.items() if value is not None}
    of_lengths, lengths = lengths_of(lm.written, repeats[0].contexts)
    found, by_question = found | of_lengths, by_question | lengths
    first = {request.document[1]: request for request in reversed(lm.requests)}
    samples = samples_of(task, repeats, by_question, first, lm.written, finder=lm.prefill.finder)
    metrics = {plain_name(key): value for key, value in found.items()}
    metrics |= {"num_samples": len(samples), "num_fewshot": task.config.num_fewshot}
    if config.task.too_long == "truncate":
        metrics["num_truncated"] = len(lm.truncated)
    if lm.num_dense:
        metrics["num_dense"] = lm.num_dense
    return for_group | {"sample_len": len(samples)}, metrics | lm.reads.shares, samples


@contextmanager
def running_lm_eval() -> Iterator[None]:
    """Run lm-eval and the code of tasks without their progress bars."""
    with redirect_stderr(io.StringIO()):
        yield
