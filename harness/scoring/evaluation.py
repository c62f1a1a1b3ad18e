"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Figs 11, 13 and 17.

lm-eval makes the prompts, asks for log-likelihoods or text and decides what is right; replay
answers under the method. Any task, group or tag of lm-eval runs by its name, beside the project's
generated ones. Each leaf task is sized, run and reported on its own; a group is reported on top of
them.

A metric is named as lm-eval prints it, `exact_match,strict-match`, or plainly, `acc`, where no
filter has a name. Its value is lm-eval's. If it is the mean of one number per question, its
standard error is clustered by context.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50
"""

import io
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TextIO

from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from harness.data.generated import MARKER
from harness.data.ruler import MARKERS, facts
from harness.data.tasks import COMPLAINTS, FEWSHOT_SEED, load_suite
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.model.sizes import ReadStats
from harness.replay.setup import prepare
from harness.results.samples import clustered_stderr
from harness.scoring.answers import Document, Request, Score, Written, generate, score
from harness.scoring.lm import FEWSHOT_SEPARATOR, Prefill, ReplayLM
from harness.scoring.progress import bar
from harness.settings.config import GENERATED_TASKS, RunConfig
from harness.settings.kinds import Outcome
from methods.base import TokenCounts

ANSWER_ROWS = 16
"""Decode rows of a generated answer, evenly spaced, on which a method is sized."""
NO_FILTER = "none"
GENERATED_TOKENS, AT_LIMIT = "generated_tokens", "at_limit"
"""Metrics of every generated answer: its tokens, the one that ended it included, and whether
`max_gen_toks` did."""
UNKNOWN, KNOWN, LESS = "unknown", "known", "unknown_less_known"
"""Whether the method knew the question when it reduced the cache, and the difference; see
`run_turns`."""
OTHER_LENGTH = -1
"""Score of a question under the metric of another length, in a task of several lengths."""

Metrics = dict[str, Any]
Samples = list[dict[str, Any]]
Logged = Sequence[Mapping[str, Any]]
"""lm-eval's samples of one task: one a question and filter."""
ByQuestion = dict[str, dict[int, float]]
"""Of each metric that is the mean of one number a question, these numbers by question."""


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


def run_tasks(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """All tasks of `config` under its method.

    Returns:
        metrics by leaf task: lm-eval's, each with `_stderr`; `SHARES`, num_samples, num_fewshot,
        and with too_long=truncate num_truncated, the questions whose context has lost its
        beginning. By group: lm-eval's own aggregates, `SHARES` over its tasks, num_samples, and
        their names as `tasks`. samples by leaf task: one entry a question.

    Raises:
        UserError: missing or malformed data, a context longer than the model's limit, settings
            under which a task cannot be scored, a task whose code ends the process, or a method
            that never ran.
    """
    with _lm_eval(f"tasks={','.join(config.tasks)}"):
        suite = load_suite(config, loaded)
    _check_sampling(config, suite.tasks.values())
    outcome = Outcome({})
    reads, results = {}, {}
    for name, task in suite.tasks.items():
        engine = ReplayEngine(config, loaded, name, sys.stderr)
        prefill = prefill_of(name, config, writes=_generates(task))
        results[name], outcome.metrics[name], outcome.samples[name] = _run_task(
            task, config, loaded, engine, prefill
        )
        outcome.methods[name], reads[name] = asdict(engine.method), engine.reads
    for group in suite.groups.values():
        if group.has_aggregation:
            names = [task.task_name for task in group.get_all_tasks()]
            by_rule = group.aggregate(results).items()
            found: Metrics = {
                _plain_name(key): _number(value) for key, value in by_rule if "," in key
            }
            found |= {
                "num_samples": sum(outcome.metrics[name]["num_samples"] for name in names),
                "tasks": names,
            }
            outcome.metrics[group.name] = (
                found | sum((reads[name] for name in names), ReadStats()).sizes
            )
    return outcome


def run_turns(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """Every task of `config` twice: once with the question known when the method reduces the cache,
    and once with several questions to one cache, of which none was known.

    Known: the dense prompt is the whole context of the question, as in serving. Unknown: it ends
    before the question. The questions with one such prompt are turns: each goes on from a copy of
    the session after the prompt, so that none sees another.

    Returns:
        metrics by task: for each metric of lm-eval that is a mean, `unknown,METRIC`, `known,METRIC`
        and the difference `unknown_less_known,METRIC`, paired by question; each with its standard
        error, clustered by prompt. `SHARES` of the unknown questions, `known_size` of the others,
        num_contexts, num_samples. samples by task: one entry a question, with its numbers and what
        `run_tasks` says of it both ways.

    Raises UserError as `run_tasks`, and for a task without questions.
    """
    with _lm_eval(f"tasks={','.join(config.tasks)}"):
        suite = load_suite(config, loaded)
    _check_sampling(config, suite.tasks.values())
    outcome = Outcome({})
    for name, task in suite.tasks.items():
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise UserError(
                f"task {name}: scores whole texts, which ask no question; kind=turns cannot run it"
            )
        marker = _marker(name, config)
        ways = {
            UNKNOWN: Prefill("question", marker, in_turns=True),
            KNOWN: Prefill("dense", marker),
        }
        engines = {way: ReplayEngine(config, loaded, name, sys.stderr) for way in ways}
        runs = {way: _run_task(task, config, loaded, engines[way], ways[way])[1:] for way in ways}
        prompts = {request.document[1]: request.prompt for request in engines[UNKNOWN].requests}
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts.values()))}
        contexts = {question: numbers[prompt] for question, prompt in prompts.items()}
        outcome.metrics[name], outcome.samples[name] = _both_ways(name, runs, contexts)
        sizes, known = (engines[way].reads.sizes for way in (UNKNOWN, KNOWN))
        outcome.metrics[name] |= (
            {"num_contexts": len(numbers)} | sizes | {"known_size": known["size"]}
        )
        outcome.methods[name] = asdict(engines[UNKNOWN].method)
    return outcome


def _both_ways(
    name: str, runs: Mapping[str, tuple[Metrics, Samples]], contexts: Mapping[Any, int]
) -> tuple[Metrics, Samples]:
    """Metrics and samples of a task whose questions were answered both ways. contexts: the prompt
    of each question."""
    (unknown, samples), (_, others) = runs[UNKNOWN], runs[KNOWN]
    by_question: ByQuestion = defaultdict(dict)
    for metric in unknown:
        for sample, other in zip(samples, others, strict=True):
            if (
                f"{metric}_stderr" in unknown and metric in sample
            ):  # a mean over questions, and this is one of them
                question, value, of_known = sample["question"], sample[metric], other[metric]
                by_question[f"{UNKNOWN},{metric}"][question] = value
                by_question[f"{KNOWN},{metric}"][question] = of_known
                by_question[f"{LESS},{metric}"][question] = value - of_known
    if not by_question:
        raise UserError(
            f"task {name}: no metric of it is a mean over questions; kind=turns cannot compare them"
        )
    metrics = {_plain_name(key): value for key, value in _means(by_question, contexts).items()}
    joined = []
    for sample, other in zip(samples, others, strict=True):
        entry = {"question": sample["question"], "context": contexts[sample["question"]]}
        joined.append(
            entry | _of(sample["question"], by_question) | {UNKNOWN: sample, KNOWN: other}
        )
    return metrics | {each: unknown[each] for each in ("num_samples", "num_fewshot")}, joined


class ReplayEngine:
    """Answers the requests of one task. requests, reads: of all answers so far; method: as it was
    sized for the last of them."""

    def __init__(self, config: RunConfig, loaded: LoadedModel, task: str, bar_file: TextIO) -> None:
        self.config = config
        self.loaded = loaded
        self.task = task
        self.bar_file = bar_file
        self.requests: list[Request] = []
        self.reads = ReadStats()
        self.method = config.method

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods, in the order of `requests`."""
        return self._answer(score, requests)

    def generate(self, requests: Sequence[Request]) -> list[Written]:
        """Generated answers, in the order of `requests`."""
        return self._answer(partial(generate, tokenizer=self.loaded.tokenizer), requests)

    def _answer(
        self, answer: Callable[..., tuple[list[Any], ReadStats]], requests: Sequence[Request]
    ) -> list[Any]:
        answered = bar(total=len(requests), desc=self.task, unit="answer", file=self.bar_file)
        with attach(self.loaded.model, self.loaded.prompts) as attached, answered:
            setup = prepare(self.config, self.loaded, attached, lambda: decode_rows(requests))
            self.method = setup.method
            answers, reads = answer(requests, attached, setup, answered.update)
        self.requests += requests
        self.reads += reads
        return answers


def decode_rows(requests: Sequence[Request]) -> list[TokenCounts]:
    """The decode rows on which a method will run, from tokens alone; every request is a sequence of
    its own.

    A generated answer counts with its longest length, as its end is not known before, and by some
    of its rows.
    """
    rows = []
    for request in requests:
        stride = max(1, request.num_rows // ANSWER_ROWS) if request.max_new_tokens else 1
        cached = range(request.prefill_len, request.prefill_len + request.num_rows, stride)
        rows += [TokenCounts(each, request.prefill_len, request.final_length) for each in cached]
    return rows


def _check_sampling(config: RunConfig, tasks: Iterable[Task]) -> None:
    """Raise UserError for settings of sampling that no task can follow."""
    asked, tasks = config.sampling, list(tasks)
    if not any(_generates(task) for task in tasks):
        for name in ("temperature", "top_p", "top_k", "repeats"):
            if (value := getattr(asked, name)) not in (None, 0 if name == "temperature" else 1):
                raise UserError(
                    f"{name}={value}: no answer of {', '.join(config.tasks)} is generated; leave it out"
                )
    for task in tasks:
        if asked.repeats > 1 and (own := task.config.repeats) > 1 and _generates(task):
            raise UserError(
                f"repeats={asked.repeats}: task {task.task_name} joins {own} answers to a question by its own rule "
                "(repeats in its YAML); leave repeats out"
            )


def _generates(task: Task) -> bool:
    return task.OUTPUT_TYPE == "generate_until"


def prefill_of(name: str, config: RunConfig, *, writes: bool) -> Prefill:
    """Which rows of a task's requests are dense. writes: the model writes the answers."""
    mode = config.prefill_of(name, writes=writes)
    if mode == "artifact" and config.size is not None:
        raise UserError(
            f"size={config.size}: not with prefill=artifact (task {name}), whose decode rows depend on the size "
            "itself; leave prefill out, which is dense with a size, or set the method's own settings in place of size"
        )
    # Under a codec every row past the first reads coded tokens, even where none is dropped.
    coded = config.method.reads_all and config.codec is not None
    return Prefill(mode, _marker(name, config), 0.0 if coded else config.method.artifact_budget())


def _marker(name: str, config: RunConfig) -> str:
    """The text with which a task's question starts."""
    return config.task.question_marker or (
        MARKER if name in GENERATED_TASKS else MARKERS.get(name, FEWSHOT_SEPARATOR)
    )


def _run_task(
    task: Task, config: RunConfig, loaded: LoadedModel, engine: ReplayEngine, prefill: Prefill
) -> tuple[Metrics, Metrics, Samples]:
    """Metrics under lm-eval's names, for a group, then those of the task under plain ones, and its
    samples."""
    name, too_long = engine.task, config.task.too_long
    lm = ReplayLM(
        loaded, prefill, engine.score, generator=engine.generate, mean=config.scoring == "mean", too_long=too_long,
        sampling=config.sampling, seed=config.seed,
    )  # fmt: skip
    repeats: list[Repeat] = []
    with _lm_eval(f"task {name}"):
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
                fewshot_as_multiturn=config.task.fewshot_as_multiturn,
            )
            logged = results["samples"][name]
            repeats.append(Repeat(logged, *_measured(results["results"][name], logged)))
    found, by_question = _joined(repeats)
    for_group = {key: value for key, value in found.items() if value is not None}
    lengths, of_question = _lengths(lm.written, repeats[0].contexts)
    found, by_question = found | lengths, by_question | of_question
    first = {request.document[1]: request for request in reversed(lm.requests)}
    samples = _samples(task, repeats, by_question, first, lm.written)
    metrics = {_plain_name(key): value for key, value in found.items()}
    metrics |= {"num_samples": len(samples), "num_fewshot": task.config.num_fewshot}
    if too_long == "truncate":
        metrics["num_truncated"] = len(lm.truncated)
    return for_group | {"sample_len": len(samples)}, metrics | engine.reads.sizes, samples


@contextmanager
def _lm_eval(what: str) -> Iterator[None]:
    """Run lm-eval and the code of tasks: without their progress bars, and with a user's mistakes as
    UserError."""
    COMPLAINTS.stream = sys.stderr
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except SystemExit as error:
        raise UserError(
            f"{what}: its code ended the process by sys.exit({error.code!r}); remove that call"
        ) from error
    except OverflowError as error:
        raise UserError(
            f"{what}: a metric overflows ({error}), as perplexity does where the model does not fit the text; "
            "choose another model"
        ) from error
    finally:
        COMPLAINTS.stream = None


def _measured(results: Mapping[str, Any], logged: Logged) -> tuple[Metrics, ByQuestion]:
    """lm-eval's `results` of a task under its names, with standard errors of means; None for no
    number.

    Returns also, for each metric that is the mean of one number a question, these numbers by
    question.
    """
    metrics: Metrics = {}
    by_question = {}
    for key, result in results.items():
        name, _, filtered = key.partition(",")
        # A metric named by a length leaves out questions of other lengths.
        answers = [
            sample
            for sample in logged
            if sample["filter"] == filtered
            and name in sample
            and not (name.isdigit() and sample[name] == OTHER_LENGTH)
        ]
        if not answers:
            continue
        value, numbers = _number(result), [_number(sample[name]) for sample in answers]
        values = [number for number in numbers if number is not None]
        metrics |= {key: value, f"{name}_stderr,{filtered}": None}
        if value is None or len(values) < len(numbers):
            continue
        if math.isclose(sum(values) / len(values), value, abs_tol=1e-9):
            metrics[f"{name}_stderr,{filtered}"] = clustered_stderr(
                values, [_context(sample) for sample in answers]
            )
            by_question[key] = dict(
                zip((sample["doc_id"] for sample in answers), values, strict=True)
            )
    return metrics, by_question


def _joined(repeats: Sequence[Repeat]) -> tuple[Metrics, ByQuestion]:
    """The metrics of all repeats: each the mean over repeats.

    The standard error of a mean is over questions, each with its mean over repeats.
    `repeats_stderr` is that over repeats of the same questions: sample standard deviation /
    sqrt(number of repeats). Where every answer is right or wrong, `pass@k` is there for k = 2, 4,
    8, ... and the number of repeats.
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
        asked = {question: [answer[question] for answer in answers] for question in answers[0]}
        of_question = {key: {question: sum(each) / count for question, each in asked.items()}}
        if all(value in (0, 1) for each in asked.values() for value in each):
            for k in sorted(
                {count, *(2**power for power in range(1, count.bit_length()) if 2**power <= count)}
            ):
                passed = {
                    question: pass_at(k, count, round(sum(each)))
                    for question, each in asked.items()
                }
                of_question[f"{name}_pass@{k},{filtered}"] = passed
        by_question |= of_question
        metrics |= _means(of_question, contexts)
    return metrics, by_question


def pass_at(k: int, count: int, right: int) -> float:
    """Probability that one of k answers is right, where `right` of `count` were: 1 - C(count -
    right, k) / C(count, k), the unbiased estimate of Chen et al. (2021, arXiv 2107.03374, equation
    1)."""
    return 1 - math.comb(count - right, k) / math.comb(count, k)


def _lengths(
    written: Sequence[Mapping[Document, Sequence[Written]]], contexts: Mapping[int, Any]
) -> tuple[Metrics, ByQuestion]:
    """Tokens of the generated answers, and the share of answers that `max_gen_toks` ended; of a
    question, the mean over its answers. {} of a task that generates none."""
    of_question: dict[int, list[Written]] = defaultdict(list)
    for repeat in written:
        for (_, question), answers in repeat.items():
            assert question is not None, "lm-eval numbers its questions"
            of_question[question] += answers
    if not of_question:
        return {}, {}
    tokens = {
        question: sum(len(each.tokens) for each in all_) / len(all_)
        for question, all_ in of_question.items()
    }
    at_limit = {
        question: sum(each.at_limit for each in all_) / len(all_)
        for question, all_ in of_question.items()
    }
    lengths = {f"{GENERATED_TOKENS},{NO_FILTER}": tokens, f"{AT_LIMIT},{NO_FILTER}": at_limit}
    return _means(lengths, contexts), lengths


def _means(by_question: ByQuestion, contexts: Mapping[int, Any]) -> Metrics:
    """The mean of each metric, and its standard error clustered by context."""
    metrics: Metrics = {}
    for key, values in by_question.items():
        name, _, filtered = key.partition(",")
        metrics[key] = sum(values.values()) / len(values)
        stderr = clustered_stderr([*values.values()], [contexts[question] for question in values])
        metrics[f"{name}_stderr,{filtered}"] = stderr
    return metrics


def _plain_name(key: str) -> str:
    """The name of lm-eval's `acc,none` and `acc_stderr,none` without a filter that has no name."""
    name, _, filtered = key.partition(",")
    if filtered == NO_FILTER:
        return name
    metric = name.removesuffix("_stderr").removesuffix("_repeats")
    return f"{metric},{filtered}{name[len(metric) :]}"


def _number(value: Any) -> float | None:
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


def _samples(
    task: Task,
    repeats: Sequence[Repeat],
    by_question: ByQuestion,
    requests: Mapping[int | None, Request],
    written: Sequence[Mapping[Document, Sequence[Written]]],
) -> Samples:
    """One entry a question, in lm-eval's order; requests: the first of each question, by its
    number.

    Enough to recompute the metrics and to look at what went wrong: question, context, its number
    under each metric that is a mean; of given choices their log_likelihoods, predicted and gold; of
    text that the model wrote text, filtered (by filter) and target; of a whole text its
    log_likelihood; context_tokens, prefill_len; of RULER's `facts`. With several repeats, whose
    first is the text, `repeats` has all of them.
    """
    grouped = [_by_number(repeat.logged) for repeat in repeats]
    samples = []
    for number, answers in grouped[0].items():
        entry = {"question": number, "context": _context(answers[0])} | _answer(task, answers)
        if len(repeats) > 1:
            entry["repeats"] = [_answer(task, of_repeat[number]) for of_repeat in grouped]
            for own, repeat, texts in zip(entry["repeats"], repeats, written, strict=True):
                (answer,) = texts[task.task_name, number]
                own |= {GENERATED_TOKENS: len(answer.tokens), AT_LIMIT: answer.at_limit}
                own |= _of(number, repeat.by_question)
        entry |= _of(number, by_question)
        if (request := requests.get(number)) is not None:
            entry |= {"context_tokens": request.context_len, "prefill_len": request.prefill_len}
        samples.append(entry | facts(task.task_name, answers[0]["doc"]))
    return samples


def _by_number(logged: Logged) -> dict[int, list[Mapping[str, Any]]]:
    questions: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in logged:
        questions[sample["doc_id"]].append(sample)
    return questions


def _of(number: int, by_question: ByQuestion) -> dict[str, float]:
    """A question's numbers under their plain names."""
    return {
        _plain_name(key): values[number] for key, values in by_question.items() if number in values
    }


def _answer(task: Task, answers: Logged) -> dict[str, Any]:
    """The model's answer to one question, and the right one."""
    sample = answers[0]
    if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
        choices = (
            list(task.doc_to_choice(sample["doc"])) if task.config.doc_to_choice is not None else []
        )
        # Some tasks ask for the choices again, without their context, after them.
        scores = [float(answer[0]) for answer in sample["filtered_resps"]][: len(choices) or None]
        predicted = max(range(len(scores)), key=scores.__getitem__)
        gold = (
            task.doc_to_text(sample["doc"])
            if getattr(task, "multiple_input", 0)
            else sample["target"]
        )
        if isinstance(gold, str):
            # A task of one continuation (LAMBADA) asks whether it is the likeliest: its choice 0.
            gold = (choices.index(gold) if gold in choices else None) if choices else 0
        return {"log_likelihoods": scores, "predicted": predicted, "gold": gold}
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"log_likelihood": float(sample["filtered_resps"][0])}
    text, *others = sample["resps"][0]  # others: of a task that asks for several answers
    filtered = {each["filter"]: _plain(each["filtered_resps"][0]) for each in answers}
    more = {"more_texts": _plain(others)} if others else {}
    return {"text": _plain(text), "filtered": filtered, "target": _plain(sample["target"])} | more


def _plain(value: Any) -> Any:
    """Text, numbers and lists of them, as JSON can hold them."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
