"""The full cache in replay against lm-eval's stock HFLM: the same log-likelihoods and texts, and how long they take.

    python -m benchmarks.hflm scores --data-root DIR --questions 40     OpenBookQA (4 choices) and COPA (2), 5-shot
    python -m benchmarks.hflm texts --requests 16 --context 200 --new 32   texts after slices of the offline text

Both answer the same requests with the same model and threads. A time is that of `lm.loglikelihood(requests)` or
`lm.generate_until(requests)`: the model is loaded and the prompts are built. HFLM runs at several batch sizes and its
fastest counts. All take turns, `--repeats` times; medians are compared.

Exit code 1 where a log-likelihood differs by 1e-3 or more, or an accuracy or a text differs. Speed targets are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from benchmarks.timing import in_turn
from harness.data.tasks import load_suite
from harness.data.text import offline_text, token_ids
from harness.errors import exit_code
from harness.model.load import LoadedModel, load_model
from harness.run.compose import load
from harness.scoring.evaluation import ReplayEngine
from harness.scoring.lm import Prefill, ReplayLM
from harness.settings.config import RunConfig

TARGETS = {"openbookqa": 2.5, "copa": 1.5, "texts": 1 / 1.5}  # times as fast as HFLM
TOLERANCE = 1e-3  # nats
WARM_UP = 8  # requests


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code: 1 where the two disagree, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hflm", description=str(__doc__).splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    commands = parser.add_subparsers(dest="command", required=True)
    scores = commands.add_parser("scores")
    scores.add_argument("--data-root", required=True, help="folder with openbookqa/ and copa/ as JSON lines")
    scores.add_argument("--questions", type=int, default=40)
    texts = commands.add_parser("texts")
    texts.add_argument("--requests", type=int, default=16)
    texts.add_argument("--context", type=int, default=200, help="tokens of the longest context")
    texts.add_argument("--new", type=int, default=32, help="tokens to generate")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    agree: list[bool] = []
    compare = compare_scores if options.command == "scores" else compare_texts
    return exit_code(lambda: agree.extend(compare(options))) or int(not all(agree))


def contestants(config: RunConfig, loaded: LoadedModel, task: str, batch_sizes: Sequence[int]) -> dict[str, TemplateLM]:
    """Replay of the full cache, and HFLM by batch size."""
    engine = ReplayEngine(config, loaded, task, sys.stderr)
    lms: dict[str, TemplateLM] = {"replay": ReplayLM(loaded, Prefill("dense"), engine.score, generator=engine.generate)}
    for size in batch_sizes:
        lms[f"HFLM, batch {size}"] = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=size)
    return lms


def compare_scores(options: argparse.Namespace) -> Iterator[bool]:
    """Whether log-likelihoods and accuracies agree, by task."""
    settings = ["experiment=tasks", "method=full", "data=local", f"data.root={options.data_root}"]
    config = load([*settings, f"num_samples={options.questions}", "tasks=[openbookqa,copa]"])
    loaded = load_model(config.model)
    suite = load_suite(config, loaded)
    print(f"{loaded.name}, {options.questions} questions, {options.threads} threads, {options.repeats} repeats")
    for name in config.tasks:
        task = suite.tasks[name]
        task.build_all_requests(limit=config.num_samples)
        lms = contestants(config, loaded, name, (1, 8, 16))
        for lm in lms.values():
            lm.loglikelihood(task.instances[:WARM_UP], disable_tqdm=True)
        seconds, answers = in_turn(calls(lms, "loglikelihood", task.instances), options.repeats)
        own, stock = answers["replay"], answers["HFLM, batch 1"]
        difference = max(abs(ours[0] - theirs[0]) for ours, theirs in zip(own, stock, strict=True))
        accuracies = [accuracy(task, each) for each in (own, stock)]
        print(f"{name}:\n  largest log-likelihood difference {difference:.1e} nats (below {TOLERANCE:g} wanted)")
        print(f"  accuracy: replay {accuracies[0]:.4f}, HFLM {accuracies[1]:.4f}")
        report_speed(name, seconds)
        yield difference < TOLERANCE and accuracies[0] == accuracies[1]


def compare_texts(options: argparse.Namespace) -> Iterator[bool]:
    """Whether the texts agree. Contexts have `--context` tokens, the last one half as many."""
    config = load(["experiment=tasks", "method=full"])
    loaded, count = load_model(config.model), options.requests
    tokens = token_ids(offline_text(), loaded.tokenizer)
    requests = []
    for number in range(count):
        length = options.context - options.context * number // (2 * count)
        context = loaded.tokenizer.decode(tokens[number * 1000 :][:length])
        settings = {"until": ["Question:"], "max_gen_toks": options.new}
        requests.append(Instance("generate_until", {}, (context, settings), 0, metadata=("text", number, 1)))
    lms = contestants(config, loaded, "texts", sorted({1, 8, count}))
    seconds, texts = in_turn(calls(lms, "generate_until", requests), options.repeats)
    differing = sum(own != other for own, other in zip(texts["replay"], texts["HFLM, batch 1"], strict=True))
    print(f"texts that differ from HFLM's: {differing} of {count}")
    report_speed("texts", seconds)
    yield not differing


def calls(lms: dict[str, TemplateLM], method: str, requests: list[Instance]) -> dict[str, Callable[[], Any]]:
    """The timed call of each contestant."""
    return {name: lambda lm=lm: getattr(lm, method)(requests, disable_tqdm=True) for name, lm in lms.items()}


def accuracy(task: Any, answers: list[tuple[float, bool]]) -> float:
    """lm-eval's own verdict on the answers, averaged over questions."""
    by_question: dict[int, tuple[dict[str, Any], list]] = {}
    for instance, answer in zip(task.instances, answers, strict=True):
        by_question.setdefault(instance.doc_id, (instance.doc, []))[1].append(answer)
    return statistics.mean(task.process_results(doc, each)["acc"] for doc, each in by_question.values())


def report_speed(name: str, seconds: dict[str, list[float]]) -> None:
    """Print medians, and the ratio to HFLM at its fastest."""
    medians = {each: statistics.median(values) for each, values in seconds.items()}
    stock = min(medians.keys() - {"replay"}, key=medians.__getitem__)
    ratio, target = medians[stock] / medians["replay"], TARGETS[name]
    print(f"  seconds: {', '.join(f'{each} {value:.2f}' for each, value in medians.items())}")
    print(f"  {ratio:.2f} times as fast as {stock} (target {target:.2g}: {'met' if ratio >= target else 'missed'})")


if __name__ == "__main__":
    sys.exit(main())
