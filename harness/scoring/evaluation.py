"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Figs 11, 13 and 17.

lm-eval makes the prompts, asks for log-likelihoods or text and decides what is right; replay
answers under the method. Each leaf task has its budget met, is run and reported on its own; a
group is reported on top of them.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50

A metric is named as lm-eval prints it, `exact_match,strict-match`, or plainly, `acc`, where no
filter has a name. Its value is lm-eval's. If it is the mean of one number per question, its
standard error is clustered by context.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from typing import Any, NamedTuple

from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import evaluate

from harness.data.generated import MARKER
from harness.data.ruler import MARKERS, ONE_NEEDLE, facts
from harness.data.tasks import FEWSHOT_SEED, Suite, load_suite
from harness.errors import UserError, shortened
from harness.model.budgets import ReadStats
from harness.model.load import LoadedModel
from harness.results.samples import clustered_stderr
from harness.scoring.answers import Document, Request, Written
from harness.scoring.lm import ReplayLM
from harness.scoring.planning import Prefill, QuestionFinder
from harness.scoring.progress import say
from harness.settings.config import GENERATED_TASKS, REASONING_TASKS, RunConfig
from harness.settings.kinds import Outcome

UNKNOWN, KNOWN, LESS = "unknown", "known", "unknown_less_known"
"""Whether the method knew the question when it reduced the cache, and the difference; see
`run_turns`."""
NO_FILTER = "none"
GENERATED_TOKENS, AT_LIMIT, ANSWER_BYTES = "generated_tokens", "at_limit", "answer_bytes"
"""Metrics of every generated answer: its tokens, the one that ended it included, and whether
`max_gen_toks` did."""
QUESTION_LETTERS = CONTEXT_LETTERS = 240
"""Letters that a sample keeps at most of a question and of its context."""
BESIDE_LETTERS = 90
"""Letters that it keeps of a context on either side of a right answer that stands there once."""
ANSWER_LETTERS = 80
"""Letters that it keeps of a choice."""
OTHER_LENGTH = -1
"""Score of a question under the metric of another length, in a task of several lengths."""

Metrics = dict[str, Any]
Samples = list[dict[str, Any]]
Logged = Sequence[Mapping[str, Any]]
"""lm-eval's samples of one task: one a question and filter."""
ByQuestion = dict[str, dict[int, float]]
"""Of each metric that is the mean of one number a question, these numbers by question."""


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
    both_ways = []
    for sample, other in zip(samples, others, strict=True):
        question = sample["question"]
        entry = {"question": question, "context": contexts[question]}
        both = {UNKNOWN: sample, KNOWN: other}
        both_ways.append(entry | numbers_of(question, by_question) | both)
    return metrics, both_ways


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
    found, by_question = joined(repeats)
    for_group = {key: value for key, value in found.items() if value is not None}
    first = {request.document[1]: request for request in reversed(lm.requests)}
    lengths = lengths_of(lm.written, first, lm.reads.budget * lm.token_bytes)
    of_lengths = means(lengths, repeats[0].contexts)
    found, by_question = found | of_lengths, by_question | lengths
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


# Metrics


class Repeat(NamedTuple):
    """All questions of a task, answered once. metrics: lm-eval's, under its names, with standard
    errors of means."""

    logged: Logged
    metrics: Metrics
    by_question: ByQuestion

    @property
    def contexts(self) -> dict[int, Any]:
        """The text that each question is about."""
        return {sample["doc_id"]: _context(sample) for sample in self.logged}


def measured(results: Mapping[str, Any], logged: Logged) -> Repeat:
    """lm-eval's `results` of a task under its names, with standard errors of means; None for no
    number."""
    metrics: Metrics = {}
    by_question: ByQuestion = {}
    for key, result in results.items():
        name, _, filtered = key.partition(",")
        answers = []
        for sample in logged:
            # A metric named by a length leaves out questions of others.
            other_length = name.isdigit() and sample.get(name) == OTHER_LENGTH
            if sample["filter"] == filtered and name in sample and not other_length:
                answers.append(sample)
        if not answers:
            continue
        value, error = number_of(result), f"{name}_stderr,{filtered}"
        metrics |= {key: value, error: None}
        numbers = [number_of(sample[name]) for sample in answers]
        known = [number for number in numbers if number is not None]
        if value is None or len(known) < len(answers):
            continue
        if math.isclose(sum(known) / len(known), value, abs_tol=1e-9):
            metrics[error] = clustered_stderr(known, [_context(sample) for sample in answers])
            questions = [sample["doc_id"] for sample in answers]
            by_question[key] = dict(zip(questions, known, strict=True))
    return Repeat(logged, metrics, by_question)


def joined(repeats: Sequence[Repeat]) -> tuple[Metrics, ByQuestion]:
    """The metrics of all repeats: each the mean over repeats.

    The standard error of a mean is over questions, each with its mean over repeats.
    `repeats_stderr` is that over repeats of the same questions: sample standard deviation /
    sqrt(number of repeats).
    """
    if len(repeats) == 1:
        return repeats[0].metrics, repeats[0].by_question
    contexts, count = repeats[0].contexts, len(repeats)
    metrics: Metrics = {}
    by_question: ByQuestion = {}
    for key in repeats[0].metrics:
        name, _, filtered = key.partition(",")
        values = [repeat.metrics.get(key) for repeat in repeats]
        if f"{name}_stderr,{filtered}" not in repeats[0].metrics:  # it is such an error itself
            continue
        metrics |= {key: None, f"{name}_stderr,{filtered}": None}
        known = [value for value in values if value is not None]
        if len(known) < count:
            continue
        metrics[key] = sum(known) / count
        metrics[f"{name}_repeats_stderr,{filtered}"] = clustered_stderr(known, range(count))
        answers = [repeat.by_question[key] for repeat in repeats if key in repeat.by_question]
        if len(answers) < count:
            continue
        by_question[key] = {}
        for question in answers[0]:
            total = sum(answer[question] for answer in answers)
            by_question[key][question] = total / count
    return metrics | means(by_question, contexts), by_question


def lengths_of(
    written: Sequence[Mapping[Document, Sequence[Written]]],
    requests: Mapping[int | None, Request],
    read_bytes: float,
) -> ByQuestion:
    """Tokens of the generated answers, the share of answers that `max_gen_toks` ended, and the
    bytes that the steps of an answer read; of a question, the mean over its answers. {} of a task
    that generates none.

    requests: the first of each question, by its number. read_bytes: of a cached token in a step,
    the mean over the run.
    """
    of_question: dict[int, list[Written]] = defaultdict(list)
    for repeat in written:
        for (_, question), answers in repeat.items():
            assert question is not None, "lm-eval numbers its questions"
            of_question[question] += answers
    if not of_question:
        return {}
    tokens, at_limit, read = {}, {}, {}
    for question, answers in of_question.items():
        tokens[question] = sum(len(answer.tokens) for answer in answers) / len(answers)
        at_limit[question] = sum(answer.at_limit for answer in answers) / len(answers)
        cached = 0  # tokens, in all steps: the first token follows from the context
        for answer in answers:
            first = requests[question].context_len
            cached += sum(range(first, first + len(answer.tokens) - 1))
        read[question] = read_bytes * cached / len(answers)
    found = {GENERATED_TOKENS: tokens, AT_LIMIT: at_limit, ANSWER_BYTES: read}
    return {f"{name},{NO_FILTER}": by_question for name, by_question in found.items()}


def means(by_question: ByQuestion, contexts: Mapping[int, Any]) -> Metrics:
    """The mean of each metric, and its standard error clustered by context."""
    metrics: Metrics = {}
    for key, values in by_question.items():
        name, _, filtered = key.partition(",")
        metrics[key] = sum(values.values()) / len(values)
        stderr = clustered_stderr([*values.values()], [contexts[question] for question in values])
        metrics[f"{name}_stderr,{filtered}"] = stderr
    return metrics


def plain_name(key: str) -> str:
    """The name of lm-eval's `acc,none` and `acc_stderr,none` without a filter that has no name."""
    name, _, filtered = key.partition(",")
    if filtered == NO_FILTER:
        return name
    metric = name.removesuffix("_stderr").removesuffix("_repeats")
    return f"{metric},{filtered}{name[len(metric) :]}"


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else, such as the pair of F1 over all questions or an
    error of N/A."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _context(sample: Mapping[str, Any]) -> Any:
    """The text that a question is about; a question that shares its text with no other is its
    own."""
    doc = sample["doc"]
    return doc.get("context_id", sample["doc_id"]) if isinstance(doc, Mapping) else sample["doc_id"]


# Samples


def samples_of(
    task: Task,
    repeats: Sequence[Repeat],
    by_question: ByQuestion,
    requests: Mapping[int | None, Request],
    written: Sequence[Mapping[Document, Sequence[Written]]],
    *,
    finder: QuestionFinder,
) -> Samples:
    """One entry a question, in lm-eval's order: enough to recompute the metrics and to look at what
    went wrong. With several repeats, whose first is the text, `repeats` has all of them.

    requests: the first of each question, by its number. finder: of questions in prompts.
    """
    grouped: list[dict[int, list[Mapping[str, Any]]]] = []
    for repeat in repeats:
        grouped.append(defaultdict(list))
        for sample in repeat.logged:
            grouped[-1][sample["doc_id"]].append(sample)
    samples = []
    for number, answers in grouped[0].items():
        entry = {"question": number, "context": _context(answers[0])} | _answer(task, answers)
        if len(repeats) > 1:
            entry["repeats"] = [_answer(task, of_repeat[number]) for of_repeat in grouped]
            for own, repeat, texts in zip(entry["repeats"], repeats, written, strict=True):
                for answer in texts.get((task.task_name, number), ()):
                    own |= {GENERATED_TOKENS: len(answer.tokens), AT_LIMIT: answer.at_limit}
                own |= numbers_of(number, repeat.by_question)
        entry |= numbers_of(number, by_question)
        request = requests.get(number)
        if request is not None:
            entry |= {"context_tokens": request.context_len, "prefill_len": request.prefill_len}
        entry |= facts(task.task_name, answers[0]["doc"])
        if task.OUTPUT_TYPE != "loglikelihood_rolling":
            entry |= _texts(task, answers[0], finder, entry.get("gold_text"))
        samples.append(entry)
    return samples


def _texts(
    task: Task, sample: Mapping[str, Any], finder: QuestionFinder, gold_text: str | None
) -> dict[str, str]:
    """The question and its context, in one line each; of a generated task or one needle, the
    context around the right answer. gold_text: of a choice."""
    prompt = str(sample["arguments"][0][0]).rstrip()
    context, question = finder.split(prompt, sample["doc"])
    answer = gold_text if task.task_name in GENERATED_TASKS else None
    if task.task_name in ONE_NEEDLE:
        answer = sample["doc"]["outputs"][0]
    if answer is None or answer not in context:
        shown = shortened(" ".join(context.split()), CONTEXT_LETTERS)
    else:
        begin = context.index(answer)
        first, stop = max(0, begin - BESIDE_LETTERS), begin + len(answer) + BESIDE_LETTERS
        around = " ".join(context[first:stop].split())
        shown = f"{'…' if first else ''}{around}{'…' if stop < len(context) else ''}"
    words = shortened(" ".join(question.split()), QUESTION_LETTERS)
    return {"question_text": words, "context_text": shown}


def numbers_of(number: int, by_question: ByQuestion) -> dict[str, float]:
    """A question's numbers under their plain names."""
    return {
        plain_name(key): values[number] for key, values in by_question.items() if number in values
    }


def _answer(task: Task, answers: Logged) -> dict[str, Any]:
    """The model's answer to one question, and the right one."""
    sample = answers[0]
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"log_likelihood": float(sample["filtered_resps"][0])}
    if task.OUTPUT_TYPE == "generate_until" and isinstance(sample["resps"][0][0], str):
        text, *others = sample["resps"][0]  # others: of a task that asks for several answers
        filtered = {answer["filter"]: _plain(answer["filtered_resps"][0]) for answer in answers}
        found = {"text": _plain(text), "filtered": filtered, "target": _plain(sample["target"])}
        return found | ({"more_texts": _plain(others)} if others else {})
    choices = _choices(task, sample)
    # Some tasks ask for the choices again, without their context, after them.
    scores = [float(answer[0]) for answer in sample["filtered_resps"]][: len(choices) or None]
    predicted = max(range(len(scores)), key=scores.__getitem__)
    gold = sample["target"]
    if getattr(task, "multiple_input", 0):
        gold = task.doc_to_text(sample["doc"])
    if isinstance(gold, str) and not choices:
        gold = 0  # a task of one continuation (LAMBADA) asks whether it is the likeliest
    elif isinstance(gold, str):
        texts = [choice.strip() for choice in choices]
        gold = texts.index(gold.strip()) if gold.strip() in texts else None
    found = {"log_likelihoods": scores, "predicted": predicted, "gold": gold}
    if choices:
        found["predicted_text"] = shortened(str(choices[predicted]).strip(), ANSWER_LETTERS)
        if gold in range(len(choices)):
            found["gold_text"] = shortened(str(choices[gold]).strip(), ANSWER_LETTERS)
    return found


def _choices(task: Task, sample: Mapping[str, Any]) -> list[str]:
    """The choices of a question: by the task's rule, or the continuations that its class asks for.
    [] of a task of one continuation."""
    if task.config.doc_to_choice is not None:
        return list(task.doc_to_choice(sample["doc"]))
    continuations = [str(arguments[1]) for arguments in sample["arguments"]]
    return continuations if len(continuations) > 1 else []


def _plain(value: Any) -> Any:
    """Text, numbers and lists of them, as JSON can hold them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
