"""Accuracy on tasks, by lm-eval: `experiment=tasks`, Fig 11 and Fig 13.

lm-eval makes the prompts, asks for log-likelihoods and decides what is right; replay computes them under the
method. Tasks come from `task_yaml/` (the paper's five and four more, from JSON lines or the hub, with
lm-eval's own prompts) or are generated. Each task is sized, run and reported on its own.

    python run.py method=h2o experiment=tasks data=local data.root=DIR tasks=[copa] num_samples=50
"""

import io
import logging
import sys
from contextlib import redirect_stderr
from dataclasses import asdict
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from harness.accuracy.encoding import FEWSHOT_SEPARATOR, Prefill
from harness.accuracy.engine import ReplayEngine
from harness.accuracy.lm import ReplayLM
from harness.accuracy.requests import AnyRequest
from harness.data.generated import CONTEXTS, MARKER
from harness.data.tasks import load_task
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.records.samples import clustered_stderr
from harness.settings.experiment import Outcome
from harness.settings.run import RunConfig
from harness.sizes import SHARES

METRICS = ("acc", "acc_norm")

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about defaults that are chosen on purpose


def run_tasks(config: RunConfig, loaded: LoadedModel) -> Outcome:
    """All tasks of `config` under its method.

    Returns:
        metrics by task: acc and, where lm-eval has it, acc_norm, each with `_stderr`; `SHARES`, num_samples,
        num_fewshot. samples by task: one entry a question.

    Raises:
        UserError: missing or malformed data, a context longer than the model's limit, settings under which a task
            cannot be scored, or a method that never ran.
    """
    outcome = Outcome({})
    for name in config.tasks:
        engine = ReplayEngine(config, loaded, name, sys.stderr)
        outcome.metrics[name], outcome.samples[name] = _run_task(name, config, loaded, engine)
        outcome.methods[name] = asdict(engine.method)
    return outcome


def _run_task(
    name: str, config: RunConfig, loaded: LoadedModel, engine: ReplayEngine
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lm = ReplayLM(
        loaded,
        _prefill(name, config),
        engine.score,
        generator=engine.generate,
        mean=config.scoring == "mean",
        too_long=config.task.too_long,
    )
    with redirect_stderr(io.StringIO()):  # lm-eval's own progress bars, one a step
        task = load_task(name, config)
        # No bootstrap: the metrics are means, whose standard errors are computed below.
        limit = config.num_samples_of(name)
        results = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0, log_samples=True)
    logged = results["samples"][name]
    metrics: dict[str, Any] = {}
    clusters = [_context(sample) for sample in logged]
    for metric in METRICS:
        if metric in logged[0]:
            values = [float(sample[metric]) for sample in logged]
            metrics[metric] = sum(values) / len(values)
            metrics[f"{metric}_stderr"] = clustered_stderr(values, clusters)
    metrics |= {"num_samples": len(logged), "num_fewshot": task.config.num_fewshot}
    metrics |= {name: getattr(engine.reads, name) for name in SHARES}
    first = {request.document[1]: request for request in reversed(lm.requests)}
    return metrics, [_raw(task, sample, first[sample["doc_id"]]) for sample in logged]


def _prefill(name: str, config: RunConfig) -> Prefill:
    mode = config.prefill_of(name)
    if mode == "artifact" and config.target_kv_frac is not None:
        raise UserError(
            f"target_kv_frac={config.target_kv_frac}: not with prefill=artifact (task {name}), whose decode rows "
            "depend on the size itself; set the method's own size, or use prefill=dense or question"
        )
    # Under a codec every row past the first reads coded tokens, even where none is dropped.
    coded = config.method.reads_all and config.codec is not None
    budget = 0.0 if coded else config.method.artifact_budget()
    return Prefill(mode, MARKER if name in CONTEXTS else FEWSHOT_SEPARATOR, budget)


def _raw(task: ConfigurableTask, sample: dict[str, Any], request: AnyRequest) -> dict[str, Any]:
    """What is kept of one question: enough to recompute the metrics and to look at what went wrong."""
    log_likelihoods = [answer[0] for answer in sample["filtered_resps"]]
    return {
        "question": sample["doc_id"],
        "context": _context(sample),
        "log_likelihoods": log_likelihoods,
        "predicted": max(range(len(log_likelihoods)), key=log_likelihoods.__getitem__),
        "gold": _gold(task, sample["doc"]),
        **{metric: sample[metric] for metric in METRICS if metric in sample},
        "context_tokens": request.context_len,
        "prefill_len": request.prefill_len,
    }


def _context(sample: dict[str, Any]) -> int:
    """Which text a question is about; one that shares its text with no other is its own."""
    return sample["doc"].get("context_id", sample["doc_id"])


def _gold(task: ConfigurableTask, doc: dict[str, Any]) -> int:
    """Index of the right choice. A task of one continuation (LAMBADA) asks whether it is the likeliest: its
    choice 0."""
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(gold, str):
        return task.doc_to_choice(doc).index(gold) if task.config.doc_to_choice else 0
    return gold
