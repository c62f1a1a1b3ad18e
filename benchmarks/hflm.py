"""Full cache through replay against lm-eval's stock HFLM: same log-likelihoods, in less time.

Both score the same requests of OpenBookQA (4 choices) and COPA (2 choices), 5-shot, on the same model and
threads. A time is that of `lm.loglikelihood(requests)`: tokenizing and scoring, with the model loaded and the
prompts built. HFLM runs at batch sizes 1, 8 and 16 and its fastest counts. All take turns, `--repeats` times,
after a warm-up on a few requests; medians are compared. Replay gains by running each context once for all its
choices, by batching contexts of like length, and by applying the output head to scored rows only.

    python -m benchmarks.hflm --data-root DIR --questions 40

Exit code 1 where a log-likelihood differs by 1e-3 or more, or an accuracy differs. The targets for speed are
printed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from harness.accuracy.encoding import Prefill
from harness.accuracy.engine import ReplayEngine
from harness.accuracy.lm import ReplayLM
from harness.data.tasks import load_suite
from harness.errors import exit_code
from harness.model.load import LoadedModel, load_model
from harness.settings.compose import load
from harness.settings.run import RunConfig

TARGETS = {"openbookqa": 2.5, "copa": 1.5}  # times faster than HFLM
HFLM_BATCH_SIZES = (1, 8, 16)
TOLERANCE = 1e-3  # nats
WARM_UP = 8  # requests

Answers = list[tuple[float, bool]]


class Comparison(NamedTuple):
    """One task: largest difference of a log-likelihood in nats, accuracies, and median seconds by contestant."""

    largest_difference: float
    accuracy: dict[str, float]
    seconds: dict[str, float]


def compare(task_name: str, config: RunConfig, loaded: LoadedModel, repeats: int) -> Comparison:
    """Score the first `config.num_samples` questions of a task with replay and with HFLM, in turn."""
    task = load_suite(config, loaded).tasks[task_name]
    task.build_all_requests(limit=config.num_samples)
    contestants: dict[str, Callable[[], TemplateLM]] = {"replay": lambda: replay(task_name, config, loaded)}
    for batch_size in HFLM_BATCH_SIZES:
        contestants[f"HFLM, batch {batch_size}"] = partial(
            HFLM, pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size
        )
    times: dict[str, list[float]] = {name: [] for name in contestants}
    answers: dict[str, Answers] = {}
    for make in contestants.values():
        make().loglikelihood(task.instances[:WARM_UP], disable_tqdm=True)
    for _ in range(repeats):
        for name, make in contestants.items():
            lm = make()
            start = time.perf_counter()
            answers[name] = lm.loglikelihood(task.instances, disable_tqdm=True)
            times[name].append(time.perf_counter() - start)
    own, stock = answers["replay"], answers["HFLM, batch 1"]
    return Comparison(
        largest_difference=max(abs(a[0] - b[0]) for a, b in zip(own, stock, strict=True)),
        accuracy={
            "replay": accuracy(task, task.instances, own),
            "HFLM": accuracy(task, task.instances, stock),
        },
        seconds={name: statistics.median(values) for name, values in times.items()},
    )


def replay(task_name: str, config: RunConfig, loaded: LoadedModel) -> ReplayLM:
    """The full cache in replay."""
    engine = ReplayEngine(config, loaded, task_name, sys.stderr)
    return ReplayLM(loaded, Prefill("dense"), engine.score, generator=engine.generate)


def accuracy(task: Any, instances: Sequence[Instance], answers: Answers) -> float:
    """lm-eval's own verdict on the answers, averaged over questions."""
    by_question: dict[int, tuple[dict[str, Any], Answers]] = {}
    for instance, answer in zip(instances, answers, strict=True):
        by_question.setdefault(instance.doc_id, (instance.doc, []))[1].append(answer)
    return statistics.mean(task.process_results(doc, each)["acc"] for doc, each in by_question.values())


def report(task_name: str, result: Comparison) -> bool:
    """Print one task's comparison; returns whether both agree."""
    own = result.seconds["replay"]
    fastest = min((name for name in result.seconds if name != "replay"), key=lambda name: result.seconds[name])
    ratio = result.seconds[fastest] / own
    target = TARGETS[task_name]
    print(f"{task_name}:")
    print(f"  largest log-likelihood difference {result.largest_difference:.1e} nats (below {TOLERANCE:g} wanted)")
    print(f"  accuracy {', '.join(f'{name} {value:.4f}' for name, value in result.accuracy.items())}")
    print(f"  seconds  {', '.join(f'{name} {value:.2f}' for name, value in result.seconds.items())}")
    print(f"  {ratio:.2f} times as fast as {fastest} (target {target}: {'met' if ratio >= target else 'missed'})")
    return result.largest_difference < TOLERANCE and len(set(result.accuracy.values())) == 1


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both tasks; returns the exit code, 1 where they disagree and 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder with openbookqa/ and copa/ as JSON lines")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    agree: list[bool] = []
    return exit_code(lambda: agree.extend(run(options))) or int(not all(agree))


def run(options: argparse.Namespace) -> Iterator[bool]:
    """Whether the two agree, by task."""
    torch.set_num_threads(options.threads)
    settings = ["experiment=tasks", "method=full", "data=local", f"data.root={options.data_root}"]
    config = load([*settings, f"num_samples={options.questions}", "tasks=[openbookqa,copa]"])
    loaded = load_model(config.model)
    print(f"{loaded.name}, {options.questions} questions, {options.threads} threads, {options.repeats} repeats")
    for task in config.tasks:
        yield report(task, compare(task, config, loaded, options.repeats))


if __name__ == "__main__":
    sys.exit(main())
