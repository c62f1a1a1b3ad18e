"""Full cache generated in replay against lm-eval's stock HFLM: the same texts, and how long they take.

Both continue the same contexts, slices of the offline text of unlike lengths, by the same number of tokens, on the
same model and threads. A time is that of `lm.generate_until(requests)`, with the model loaded. HFLM runs at batch sizes
1 and 8 and at one batch of all, and its fastest counts. All take turns, `--repeats` times; medians are compared.

    python -m benchmarks.generation --requests 16 --context 200 --new 32

Exit code 1 where a text differs or replay takes more than 1.5 times as long.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from harness.accuracy.encoding import Prefill
from harness.accuracy.engine import ReplayEngine
from harness.accuracy.lm import ReplayLM
from harness.data.text import offline_text, token_ids
from harness.model.load import LoadedModel, load_model
from harness.settings.compose import load
from harness.settings.run import RunConfig

MOST = 1.5  # times as long as HFLM


def replay(config: RunConfig, loaded: LoadedModel) -> ReplayLM:
    """The full cache in replay."""
    engine = ReplayEngine(config, loaded, "generation", sys.stderr)
    return ReplayLM(loaded, Prefill("dense"), engine.score, generator=engine.generate)


def instances(loaded: LoadedModel, options: argparse.Namespace) -> list[Instance]:
    """Contexts of `--context` tokens, the last half as long as the first."""
    tokens = token_ids(offline_text(), loaded.tokenizer)
    lengths = [
        options.context - options.context * number // (2 * options.requests) for number in range(options.requests)
    ]
    contexts = [loaded.tokenizer.decode(tokens[number * 1000 :][:length]) for number, length in enumerate(lengths)]
    settings = {"until": ["Question:"], "max_gen_toks": options.new}
    return [
        Instance("generate_until", {}, (context, dict(settings)), 0, metadata=("text", number, 1))
        for number, context in enumerate(contexts)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=200, help="tokens of the longest context")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    config = load(["experiment=tasks", "method=full"])
    loaded = load_model(config.model)
    contestants: dict[str, Callable[[], TemplateLM]] = {"replay": partial(replay, config, loaded)}
    for size in sorted({1, 8, options.requests}):
        stock = partial(HFLM, pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=size)
        contestants[f"HFLM, batch {size}"] = stock
    return compare(contestants, instances(loaded, options), options.repeats)


def compare(contestants: dict[str, Callable[[], TemplateLM]], requests: list[Instance], repeats: int) -> int:
    """Let all generate in turn, print median seconds and the ratio; returns the exit code."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    texts: dict[str, list[str]] = {}
    for _ in range(repeats):
        for name, make in contestants.items():
            lm = make()
            start = time.perf_counter()
            texts[name] = lm.generate_until(requests, disable_tqdm=True)
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    fastest = min((name for name in seconds if name != "replay"), key=seconds.__getitem__)
    ratio = seconds["replay"] / seconds[fastest]
    differing = sum(own != other for own, other in zip(texts["replay"], texts["HFLM, batch 1"], strict=True))
    print(f"texts that differ from HFLM's: {differing} of {len(requests)}")
    print(f"seconds: {', '.join(f'{name} {value:.2f}' for name, value in seconds.items())}")
    print(f"replay takes {ratio:.2f} times as long as {fastest} (at most {MOST} wanted)")
    return int(bool(differing) or ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
