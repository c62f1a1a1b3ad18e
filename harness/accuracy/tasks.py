"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Fig 11 and Fig 13.

lm-eval makes the prompts, asks for log-likelihoods or text and decides what is right; replay answers under the method.
Any task, group or tag of lm-eval runs by its name, beside the project's generated ones. Each leaf task is sized, run
and reported on its own; a group is reported on top of them.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50
"""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from typing import Any

from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from tqdm import tqdm

from harness.accuracy.encoding import FEWSHOT_SEPARATOR, Prefill
from harness.accuracy.engine import ReplayEngine
from harness.accuracy.lm import ReplayLM
from harness.accuracy.metrics import as_recorded, group_metrics, judged, samples_of
from harness.data.generated import MARKER
from harness.data.ruler import MARKERS
from harness.data.suite import COMPLAINTS, load_suite
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.settings.config import GENERATED_TASKS, RunConfig
from harness.settings.experiment import Outcome


def run_tasks(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """All tasks of `config` under its method.

    Returns:
        metrics by leaf task: lm-eval's, each with `_stderr`; `SHARES`, num_samples, num_fewshot, and with
        too_long=truncate num_truncated, the questions whose context has lost its beginning. By group: lm-eval's
        own aggregates, `SHARES` over its tasks, num_samples, and their names as `tasks`. samples by leaf task: one
        entry a question.

    Raises:
        UserError: missing or malformed data, a context longer than the model's limit, settings under which a task
            cannot be scored, or a method that never ran.
    """
    with redirect_stderr(io.StringIO()):  # progress bars of lm-eval and of its data sets
        suite = load_suite(config, loaded)
    _show(COMPLAINTS.take())
    outcome = Outcome({})
    reads = {}
    for name, task in suite.tasks.items():
        engine = ReplayEngine(config, loaded, name, sys.stderr)
        outcome.metrics[name], outcome.samples[name] = _run_task(task, config, loaded, engine)
        _show(COMPLAINTS.take())
        outcome.methods[name], reads[name] = asdict(engine.method), engine.reads
    for group in suite.groups:
        if group.has_aggregation:
            outcome.metrics[group.name] = group_metrics(group, outcome.metrics, reads)
    return outcome


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        tqdm.write(line, file=sys.stderr)


def _run_task(
    task: Task, config: RunConfig, loaded: LoadedModel, engine: ReplayEngine
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    name = engine.task
    lm = ReplayLM(
        loaded,
        prefill_of(task, name, config),
        engine.score,
        generator=engine.generate,
        mean=config.scoring == "mean",
        too_long=config.task.too_long,
    )
    with redirect_stderr(io.StringIO()):  # lm-eval's own progress bars, one a step
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
    judgement = judged(results["results"][name], logged)
    first = {request.document[1]: request for request in reversed(lm.requests)}
    samples = samples_of(task, logged, judgement, first)
    metrics = as_recorded(judgement) | {"num_samples": len(samples), "num_fewshot": task.config.num_fewshot}
    if config.task.too_long == "truncate":
        metrics["num_truncated"] = lm.num_truncated
    return metrics | engine.reads.sizes, samples


def prefill_of(task: Task, name: str, config: RunConfig) -> Prefill:
    """Which rows of the task's requests are dense."""
    mode = config.prefill_of(name, writes=task.OUTPUT_TYPE == "generate_until")
    if mode == "artifact" and config.size is not None:
        raise UserError(
            f"size={config.size}: not with prefill=artifact (task {name}), whose decode rows "
            "depend on the size itself; set the method's own size, or use prefill=dense or question"
        )
    # Under a codec every row past the first reads coded tokens, even where none is dropped.
    coded = config.method.reads_all and config.codec is not None
    budget = 0.0 if coded else config.method.artifact_budget()
    marker = MARKER if name in GENERATED_TASKS else MARKERS.get(name, FEWSHOT_SEPARATOR)
    return Prefill(mode, config.task.question_marker or marker, budget)
