"""This harness against what one would use in its place, job by job, with one model and one number of threads.

    python -m benchmarks.peers                       the jobs that need no --peers-python, 30 minutes
    python -m benchmarks.peers --peers-python ~/peers/bin/python --jobs question sweep
    python -m benchmarks.peers --jobs replay --methods h2o quest --threads 2 model=qwen2.5-coder-0.5b seq_len=8192
    python -m benchmarks.peers platform=cuda model=opt-13b model.weights=random --jobs decode

job         ours                                            peer
perplexity  windows of the offline text, full cache         a forward pass of transformers, loss by torch
question    a question to a cache that was reduced          kvpress's pipeline
            before, by SnapKV, Expected Attention
choices     5-shot multiple choice, the full cache,         lm-eval's HFLM at its fastest batch size
            and the methods of --methods
texts       generated answers, as above                     the same
decode      live steps of the full cache                    transformers' DynamicCache
sweep       four methods on one prompt, whose dense pass    kvpress's pipeline, once for each press
            they share
replay      a window under the methods of --methods         the same under the full cache, by torch's fused
                                                            attention

Both sides take turns, `--rounds` times; a ratio is the median over the rounds of ours / peer, so that below 1 ours is
faster. A call is timed as a user makes it: with the tokenizing, and here with the checks of the model and the set-up of
the method; `replay` times the prompt, the rows and the output head alone. Models are loaded before. Where both have one
rule the results must be equal: texts, log-likelihoods within 1e-3, losses within 1e-4. Exit code 2 if they are not, or
where a job failed. The last line has the peak of this process's memory.

Settings are those of every run, such as the model. kvpress asks for an older transformers than this project's, so it
runs under an interpreter of its own, with the very torch that runs here:

    python -m venv ~/peers && ~/peers/bin/pip install torch==VERSION kvpress==0.5.5

glibc gives freed memory back to the system, and each page of it is zeroed anew. To compare without that:

    export MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TRIM_THRESHOLD_=2147483647
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks.peer_process import Peer, PeerError, Timed, Took
from harness.data.generated import offline_sentences
from harness.data.text import offline_text, token_ids, windows_of
from harness.errors import UserError, exit_code, reason
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import LoadedModel, load_model
from harness.model.passes import DensePrompts
from harness.replay.setup import Setup, prepare
from harness.results.environment import processor
from harness.run.compose import load
from harness.scoring.answers import Request
from harness.scoring.lm import ReplayLM
from harness.scoring.perplexity import run_perplexity
from harness.scoring.planning import Prefill
from harness.speed.link_rate import measure_copy_rate
from harness.speed.timed_run import SharedPrompt, run_shared_prompt

OURS = "ours"
NATS, LOSS = 1e-3, 1e-4
"""Differences of a log-likelihood and of a window's loss, in nats, that count as equal."""
QUESTION = "Which word of the text says most about it?"
EVICTED = 0.8
"""Share of a context that is evicted."""
PRESSES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "snapkv": ("SnapKVPress", {}, ["method.window=64", "method.kernel=5", "method.pooling=avg"]),
    "knorm": ("KnormPress", {}, []),
    "expected": ("ExpectedAttentionPress", {}, []),
    "keydiff": ("KeyDiffPress", {}, []),
}
"""By method: kvpress's class and its settings, and the settings that make ours the same rule."""
ASKED = ("snapkv", "expected")
BATCH_SIZES = (1, 4, 8, 16)
"""Of HFLM."""
HEAD_ROWS = 128
"""Rows of a window that pass through the output head together."""
HEADER = """\
| job | case | peer | CPU s, ours | peer | ours / peer | wall s, ours | peer | ours / peer | equal |
|:---|:---|:---|:---|:---|:---|:---|:---|:---|:---|"""


class Sizes(NamedTuple):
    """How much of each job is done. A context, prompt or window counts tokens."""

    rounds: int = 3
    windows: int = 2
    window: int = 1024
    contexts: tuple[int, ...] = (1024, 4096)
    answer: int = 24
    questions: int = 4
    texts: int = 8
    text_context: int = 200
    text_new: int = 32
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 1024
    warm_up: int = 2
    steps: int = 12


class Comparison(NamedTuple):
    """A line of the table. ours, theirs: what each round took. is_equal: None where the rules differ."""

    case: str
    peer: str
    ours: list[Took]
    theirs: list[Took]
    is_equal: bool | None


@dataclass(frozen=True)
class Bench:
    """What the jobs share."""

    loaded: LoadedModel
    settings: Sequence[str]
    sizes: Sizes
    methods: Sequence[str]
    peer: Peer | None

    def config(self, *settings: str) -> Any:
        """The checked settings of a run."""
        return load([*settings, *self.settings])

    def text_ids(self, count: int, first: int = 0) -> list[int]:
        """Tokens of the offline text."""
        found = token_ids(offline_text(), self.loaded.reader)[first : first + count]
        if len(found) < count:
            raise UserError(f"the offline text has no {count} tokens from token {first} on; choose smaller sizes")
        return found


def in_turn(
    case: str, contestants: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[Took]], dict[str, Any]]:
    """Run every contestant once a round, in every other round in reverse order, after a round that is not timed: so a
    busy machine slows all of them.

    Returns what each round took and the last result, by name. A contestant that returns `Timed` has timed itself.
    """
    say(f"{case}: {', '.join(contestants)}")
    times: dict[str, list[Took]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        order = list(contestants.items())
        if number % 2:
            order.reverse()
        for name, run in order:
            began = Took.now()
            result = run()
            took = Took.now().since(began)
            if isinstance(result, Timed):
                took, result = result
            results[name] = result
            times[name].append(took)
    return {name: rounds[1:] for name, rounds in times.items()}, results


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


# Jobs


def perplexity(bench: Bench) -> Iterator[Comparison]:
    """Windows under the full cache, and transformers' forward pass with torch's loss."""
    sizes = bench.sizes
    lengths = [f"num_windows={sizes.windows}", f"seq_len={sizes.window}", "prefill_len=0"]
    config = bench.config("experiment=perplexity", "method=full", *lengths)
    model = bench.loaded.model

    def ours() -> list[float]:
        return [window["nll"] for window in run_perplexity(config, bench.loaded).samples["windows"]]

    @torch.inference_mode()
    def theirs() -> list[float]:
        losses = []
        for window in windows_of(config, bench.loaded.reader, config.seq_len):
            ids = torch.tensor([window.ids], device=model.device)
            logits = model(ids, use_cache=False).logits[0, :-1]
            losses.append(float(cross_entropy(logits.float(), ids[0, 1:])))
        return losses

    case, peer = f"{sizes.windows} x {sizes.window} tokens", "transformers forward"
    times, losses = in_turn(case, {OURS: ours, peer: theirs}, bench.sizes.rounds)
    pairs = zip(losses[OURS], losses[peer], strict=True)
    is_equal = all(abs(own - other) < LOSS for own, other in pairs)
    yield Comparison(case, peer, times[OURS], times[peer], is_equal)


def asked(bench: Bench, methods: Sequence[str], length: int) -> Iterator[Comparison]:
    """A question to a context of so many tokens, under each method. Ours share its dense pass, which runs anew in each
    round."""
    context = bench.loaded.tokenizer.decode(bench.text_ids(length))
    tokens = bench.peer.call("tokens", context=context, question=QUESTION)

    def ours() -> list[str]:
        prompts = DensePrompts() if len(methods) > 1 else None
        return [answer(bench, method, tokens, prompts) for method in methods]

    presses = []
    for method in methods:
        name, settings, _ = PRESSES[method]
        presses.append([name, settings | {"compression_ratio": EVICTED}])
    told = {"context": context, "question": QUESTION, "presses": presses, "max_new_tokens": bench.sizes.answer}
    case = f"{methods[0] if len(methods) == 1 else f'{len(methods)} methods'}, {length} tokens"
    times, texts = in_turn(case, {OURS: ours, "kvpress": partial(bench.peer.timed, "ask", **told)}, bench.sizes.rounds)
    yield Comparison(case, "kvpress", times[OURS], times["kvpress"], texts[OURS] == texts["kvpress"])


def answer(bench: Bench, method: str, tokens: Sequence[Sequence[int]], prompts: DensePrompts | None) -> str:
    """Our answer to a question that a method did not know. tokens: of the context and of the question."""
    context, question = tokens
    kept = int(len(context) * (1 - EVICTED))  # as kvpress counts
    own = [f"method={method}", f"method.kept_tokens={kept}", "method.dense_layers=0", *PRESSES[method][2]]
    config = bench.config("experiment=tasks", *own)
    new = bench.sizes.answer
    ids = (*context, *question)
    request = Request(ids, len(ids), len(context), len(ids) + new, ("question", 0), max_new_tokens=new)
    loaded = replace(bench.loaded, prompts=prompts)
    (written,) = ReplayLM(config, loaded, "question", Prefill("dense")).generate([request])
    return bench.loaded.tokenizer.decode(written.tokens, skip_special_tokens=True)


def question(bench: Bench) -> Iterator[Comparison]:
    """A question to a cache that was reduced before."""
    for length in bench.sizes.contexts:
        for method in ASKED:
            yield from asked(bench, [method], length)


def sweep(bench: Bench) -> Iterator[Comparison]:
    """Several methods on one prompt."""
    yield from asked(bench, [*PRESSES], bench.sizes.contexts[0])


def against_hflm(
    bench: Bench, case: str, call: str, requests: Sequence[Instance], equal: Callable[[Any, Any], bool]
) -> Iterator[Comparison]:
    """The full cache and other methods against HFLM at its fastest batch size, by CPU seconds of a round."""
    theirs: dict[str, Callable[[], Any]] = {}
    for size in BATCH_SIZES:
        if size <= max(1, len(requests)):
            lm = HFLM(pretrained=bench.loaded.model, tokenizer=bench.loaded.tokenizer, batch_size=size)
            theirs[f"HFLM, batch {size}"] = partial(getattr(lm, call), requests, disable_tqdm=True)
    times, _ = in_turn(f"{case}, to find the batch size", theirs, 1)
    peer = min(times, key=lambda name: times[name][0].cpu_s)
    contestants = {peer: theirs[peer]}
    for method in ("full", *bench.methods):
        config = bench.config("experiment=tasks", f"method={method}")
        lm = ReplayLM(config, bench.loaded, case, Prefill("dense"))
        contestants[method] = partial(getattr(lm, call), requests)
    times, answers = in_turn(case, contestants, bench.sizes.rounds)
    for method in ("full", *bench.methods):
        is_equal = equal(answers[method], answers[peer]) if method == "full" else None
        yield Comparison(f"{case}, {method}", peer, times[method], times[peer], is_equal)


def choices(bench: Bench) -> Iterator[Comparison]:
    """Multiple choice with 5 examples: ends of the offline sentences."""
    count = bench.sizes.questions
    yield from against_hflm(bench, f"{count} questions", "loglikelihood", endings(count), same_scores)


def endings(count: int) -> list[Instance]:
    """Questions which of four ends a sentence has; each follows five that are answered."""
    halves = []
    for sentence in offline_sentences():
        words = sentence.split()
        if 12 <= len(words) <= 40:
            halves.append((" ".join(words[:-4]), " ".join(words[-4:])))
    drawn = random.Random(0)
    requests = []
    for number in range(count):
        chosen = drawn.sample(halves, 5 + 1 + 3)
        examples = [f"Beginning: {first}\nEnd: {last}\n\n" for first, last in chosen[:5]]
        asked = f"{''.join(examples)}Beginning: {chosen[5][0]}\nEnd:"
        for index, (_, last) in enumerate(chosen[5:]):
            arguments = (asked, f" {last}")
            requests.append(Instance("loglikelihood", {}, arguments, index, metadata=("choices", number, 1)))
    return requests


def same_scores(ours: Sequence[tuple[float, bool]], theirs: Sequence[tuple[float, bool]]) -> bool:
    """Whether log-likelihoods agree."""
    return all(abs(own[0] - other[0]) < NATS for own, other in zip(ours, theirs, strict=True))


def texts(bench: Bench) -> Iterator[Comparison]:
    """Answers that are generated, after slices of the offline text; the last slice is half as long as the first."""
    sizes = bench.sizes
    requests = []
    for number in range(sizes.texts):
        length = sizes.text_context - sizes.text_context * number // (2 * sizes.texts)
        context = bench.loaded.tokenizer.decode(bench.text_ids(length, 500 * number))
        settings = {"until": ["Question:"], "max_gen_toks": sizes.text_new}
        requests.append(Instance("generate_until", {}, (context, settings), 0, metadata=("texts", number, 1)))
    case = f"{sizes.texts} x {sizes.text_context} + {sizes.text_new} tokens"
    yield from against_hflm(bench, case, "generate_until", requests, list.__eq__)


def live_steps(bench: Bench, prompt: SharedPrompt, config: Any) -> Timed:
    """Live steps of ours from a prompt on, its cache on the device. The result is the new tokens of each sequence."""
    count = bench.sizes.warm_up + bench.sizes.steps
    with attach(bench.loaded.model) as attached:
        setup = prepare(config, bench.loaded, attached, list)
        with closing(setup.live(attached, count + 1)) as session:
            found = [session.start(prompt.prompt).argmax(-1)]
            for step in range(count):
                if step == bench.sizes.warm_up:
                    began = Took.now()
                found.append(session.decode_step(found[-1]).argmax(-1))
            tokens = torch.stack(found, 1).tolist()  # waits for a GPU
            return Timed(Took.now().since(began), tokens)


def prompts(bench: Bench) -> Iterator[tuple[str, SharedPrompt]]:
    """A batch of prompts of each size, after their dense pass."""
    for batch in bench.sizes.batches:
        length = bench.sizes.prompt
        ids = [bench.text_ids(length, 500 * number) for number in range(batch)]
        with attach(bench.loaded.model) as attached:
            prompt = run_shared_prompt(attached, torch.tensor(ids, device=attached.device))
        yield f"batch {batch}, {length} tokens, {bench.sizes.steps} steps", prompt


def decode_full(bench: Bench) -> Iterator[Comparison]:
    """Steps of the full cache and of transformers' `DynamicCache`, which makes every layer's cache anew in a step."""
    model, peer = bench.loaded.model, "DynamicCache"
    config = bench.config("experiment=latency", "method=full", "placement=device")
    for case, prompt in prompts(bench):

        @torch.inference_mode()
        def theirs(prompt: SharedPrompt = prompt) -> Timed:
            """The forward passes that `generate` makes for every token."""
            cache = DynamicCache(config=model.config)
            for layer, states in enumerate(prompt.prompt.layers):
                cache.update(states.key, states.value, layer)
            found = [model.get_output_embeddings()(prompt.prompt.hidden).argmax(-1)]
            for step in range(bench.sizes.warm_up + bench.sizes.steps):
                if step == bench.sizes.warm_up:
                    began = Took.now()
                logits = model(input_ids=found[-1][:, None], past_key_values=cache, use_cache=True).logits
                found.append(logits[:, -1].argmax(-1))
            tokens = torch.stack(found, 1).tolist()  # waits for a GPU
            return Timed(Took.now().since(began), tokens)

        contestants = {OURS: partial(live_steps, bench, prompt, config), peer: theirs}
        times, tokens = in_turn(case, contestants, bench.sizes.rounds)
        yield Comparison(case, peer, times[OURS], times[peer], tokens[OURS] == tokens[peer])


def replay(bench: Bench) -> Iterator[Comparison]:
    """A window in replay, whose decode rows the methods select for; under the full cache it is one dense pass."""
    contestants = {}
    with attach(bench.loaded.model) as attached:
        for method in dict.fromkeys(("full", *bench.methods)):
            config = bench.config("seq_len=2048", "prefill_len=256", f"method={method}")
            prompt = config.seq_len if method == "full" else config.prefill_len
            setup = prepare(config, bench.loaded, attached, list)
            ids = torch.tensor([bench.text_ids(config.seq_len, 1024)], device=attached.device)
            contestants[method] = partial(run_window, attached, setup, ids, prompt)
        case = f"{config.seq_len} tokens, prompt {config.prefill_len}"
        times, _ = in_turn(case, contestants, bench.sizes.rounds)
    for method in bench.methods:
        yield Comparison(f"{method}, {case}", "full", times[method], times["full"], None)


def run_window(attached: Attached, setup: Setup, ids: Tensor, prompt: int) -> None:
    """A window, ids [1, tokens], from its first token to its last logits; `prompt` tokens run as one dense pass."""
    real = torch.ones_like(ids, dtype=torch.bool)
    session = setup.replay(attached, real.sum(-1), ids.shape[1])
    hidden = [session.prefill(ids[:, :prompt], real[:, :prompt])]
    if prompt < ids.shape[1]:
        hidden.append(session.decode(ids[:, prompt:], real[:, prompt:]))
    for rows in torch.cat(hidden, 1)[0].split(HEAD_ROWS):
        attached.logits(rows)


JOBS: dict[str, Callable[[Bench], Iterator[Comparison]]] = {
    "perplexity": perplexity,
    "question": question,
    "choices": choices,
    "texts": texts,
    "decode": decode_full,
    "sweep": sweep,
    "replay": replay,
}
BY_PEERS = ("question", "sweep")
"""Jobs whose peer runs under the interpreter of `--peers-python`."""


# The command


def line_of(job: str, found: Comparison) -> str:
    """A line of the table, as Markdown."""
    cells = [job, found.case, found.peer]
    for clock in ("cpu_s", "wall_s"):
        ours = [getattr(took, clock) for took in found.ours]
        theirs = [getattr(took, clock) for took in found.theirs]
        ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
        cells += [f"{statistics.median(seconds):.2f}" for seconds in (ours, theirs, ratios)]
        cells[-1] += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {' | '.join(cells)} | {({True: 'yes', False: 'NO', None: '-'})[found.is_equal]} |"


def compare(options: argparse.Namespace) -> None:
    """Run the jobs and print the table, each line as it comes. Raises UserError where a job failed or is not equal to
    its peer, once the others have run."""
    torch.set_num_threads(options.threads)
    loaded = load_model(load(["experiment=tasks", "method=full", *options.settings]).model)
    sizes = Sizes()
    sizes = sizes._replace(rounds=options.rounds or sizes.rounds)
    memory = "stays mapped" if "MALLOC_TRIM_THRESHOLD_" in os.environ else "goes back to the system"
    say(f"{processor()}; a copy within memory runs at {measure_copy_rate() / 1e9:.1f} GB/s")
    print(f"{loaded.name}, {options.threads} threads, {sizes.rounds} rounds; memory that is freed {memory}\n\n{HEADER}")
    problems = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        peer = None
        if options.peers_python is not None:
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
            peer = stack.enter_context(Peer(options.peers_python, folder, options.threads))
        bench = Bench(loaded, options.settings, sizes, options.methods, peer)
        for job in options.jobs:
            if job in BY_PEERS and peer is None:
                say(f"{job} is skipped: give --peers-python PATH")
                continue
            try:
                for comparison in JOBS[job](bench):
                    print(line_of(job, comparison), flush=True)
                    if comparison.is_equal is False:
                        problems.append(f"{job}, {comparison.case}: not equal to {comparison.peer}")
            except (PeerError, ValueError) as error:  # the other jobs are of use
                problems.append(f"{job}: failed, {reason(error)}")
    say(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if problems:
        raise UserError("; ".join(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=str(__doc__).splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings of every run, such as the model")
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=JOBS)
    parser.add_argument("--rounds", type=int, help="timed rounds; default 3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=["h2o", "infinigen2"], help="beside the full cache")
    parser.add_argument("--peers-python", metavar="PATH", help="interpreter with kvpress")
    return exit_code(partial(compare, parser.parse_intermixed_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
