"""This harness against what one would use in its place, job by job, with one model and one number of threads.

    python -m benchmarks.peers                       all jobs, 30 minutes; peers without their packages are skipped
    python -m benchmarks.peers --make-peers          first make the environment of kvpress, quanto and HQQ
    python -m benchmarks.peers --peers-python ~/peers/bin/python --jobs question sweep
    python -m benchmarks.peers --quick --threads 2 model=qwen2.5-coder-0.5b
    python -m benchmarks.peers --jobs decode platform=cuda model=opt-13b model.weights=random

job         ours                                            peer
perplexity  windows of the offline text, full cache         a forward pass of transformers, loss by torch
question    a question to a cache that was reduced          kvpress's pipeline
            before, by SnapKV, Expected Attention
choices     5-shot multiple choice, the full cache,         lm-eval's HFLM at its fastest batch size
            and the methods of --methods
texts       generated answers, as above                     the same
decode      live steps of the full cache                    transformers' DynamicCache
quantized   live steps of int4                              transformers' QuantizedCache by quanto, by HQQ
sweep       four methods on one prompt, whose dense pass    kvpress's pipeline, once for each press
            they share

Both sides take turns, `--rounds` times; a ratio is the median over the rounds of ours / peer, so that below 1 ours is
faster. A call is timed as a user makes it: with the tokenizing, and here with the checks of the model and the set-up of
the method. Models are loaded before. Where both have one rule the results must be equal: texts, log-likelihoods within
1e-3, losses within 1e-4. Exit code 1 if they are not.

Settings are those of every run, such as the model. kvpress asks for an older transformers than this project's, so it,
quanto and HQQ run under an interpreter of their own: `--peers-python`, or the one that `--make-peers` makes in the
cache folder with the very torch that runs here.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from tabulate import tabulate
from torch.nn.functional import cross_entropy
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import machine
from benchmarks.peer_process import PACKAGES, Peer, PeerError, decode
from benchmarks.timing import Timed, Took, in_turn, keep_freed_memory, ratios
from harness.data.generated import offline_sentences
from harness.data.tasks import load_suite
from harness.data.text import offline_text, token_ids, windows_of
from harness.decode.session import LiveSession
from harness.errors import UserError, exit_code, nearest, reason, refused
from harness.files import cache_dir, write_atomic
from harness.model.attach import attach
from harness.model.dense_prompts import DensePrompts
from harness.model.load import LoadedModel, load_model
from harness.replay.setup import prepare
from harness.run.compose import load
from harness.scoring.answers import Request
from harness.scoring.evaluation import ReplayEngine
from harness.scoring.lm import Prefill
from harness.scoring.perplexity import run_perplexity
from harness.speed.timed_run import SharedPrompt, run_shared_prompt
from methods.base import TokenCounts

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
ALL_BYTES = 2**40
"""Room for shared prompts: all there is."""


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


QUICK = Sizes(
    rounds=2, windows=1, window=512, contexts=(512,), answer=8, questions=1, texts=4, text_context=100,
    text_new=8, batches=(1,), prompt=256, steps=8,
)  # fmt: skip


class Comparison(NamedTuple):
    """A line of the table. ours, theirs: what each round took. is_equal: None where the rules differ."""

    job: str
    case: str
    peer: str
    ours: list[Took]
    theirs: list[Took]
    is_equal: bool | None


@dataclass
class Bench:
    """What the jobs share.

    skipped: a line for each peer that is not there. failed: a line for each job that ended early.
    """

    loaded: LoadedModel
    settings: Sequence[str]
    sizes: Sizes
    methods: Sequence[str] = ()
    data_root: str | None = None
    peer: Peer | None = None
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def config(self, *settings: str) -> Any:
        """The checked settings of a run."""
        return load([*settings, *self.settings])

    def text_ids(self, count: int, first: int = 0) -> list[int]:
        """Tokens of the offline text."""
        found = token_ids(offline_text(), self.loaded.reader)[first : first + count]
        if len(found) < count:
            raise UserError(f"the offline text has no {count} tokens from token {first} on; choose smaller sizes")
        return found

    def has(self, peer: str, job: str) -> bool:
        """Whether the peers' interpreter has a package. If not, a line says so, and how to get it."""
        why = "no interpreter: give --peers-python PATH, or --make-peers once"
        if self.peer is not None:
            try:
                version = self.peer.call("version", peer=peer)
            except PeerError as error:
                raise UserError(f"--peers-python: {error}") from error
            if version is not None:
                return True
            why = f"{PACKAGES[peer]} is not installed under {self.peer.command[0]}"
        self.skipped.append(f"{job}: {peer} is skipped, {why}")
        say(self.skipped[-1])
        return False


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def paired(
    bench: Bench, job: str, case: str, contestants: dict[str, Callable[[], Any]]
) -> tuple[dict[str, list[Took]], dict[str, Any]]:
    """Run the contestants in turn, after a round that is not timed."""
    say(f"{job}: {case}, {', '.join(contestants)}")
    return in_turn(contestants, bench.sizes.rounds, warm_up=True)


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
    times, losses = paired(bench, "perplexity", case, {OURS: ours, peer: theirs})
    pairs = zip(losses[OURS], losses[peer], strict=True)
    is_equal = all(abs(own - other) < LOSS for own, other in pairs)
    yield Comparison("perplexity", case, peer, times[OURS], times[peer], is_equal)


def press_of(method: str) -> list[Any]:
    """kvpress's class of a method, and its settings."""
    name, settings, _ = PRESSES[method]
    return [name, settings | {"compression_ratio": EVICTED}]


def answer(bench: Bench, method: str, tokens: Sequence[Sequence[int]], prompts: DensePrompts | None = None) -> str:
    """Our answer to a question that a method did not know. tokens: of the context and of the question."""
    context, question = tokens
    kept = int(len(context) * (1 - EVICTED))  # as kvpress counts
    own = [f"method={method}", f"method.kept_tokens={kept}", "method.dense_layers=0", *PRESSES[method][2]]
    config = bench.config("experiment=tasks", *own)
    new = bench.sizes.answer
    ids = (*context, *question)
    request = Request(ids, len(ids), len(context), len(ids) + new, ("question", 0), max_new_tokens=new)
    loaded = replace(bench.loaded, prompts=prompts)
    (written,) = ReplayEngine(config, loaded, "question", io.StringIO()).generate([request])
    return bench.loaded.tokenizer.decode(written.tokens, skip_special_tokens=True)


def question(bench: Bench) -> Iterator[Comparison]:
    """A question to a cache that was reduced before."""
    if not bench.has("kvpress", "question"):
        return
    for length in bench.sizes.contexts:
        context = bench.loaded.tokenizer.decode(bench.text_ids(length))
        tokens = bench.peer.call("tokens", context=context, question=QUESTION)
        for method in ASKED:
            asked = {"context": context, "question": QUESTION, "presses": [press_of(method)]}
            theirs = partial(bench.peer.call, "ask", **asked, max_new_tokens=bench.sizes.answer)
            case = f"{method}, {length} tokens"
            contestants = {OURS: partial(answer, bench, method, tokens), "kvpress": theirs}
            times, texts = paired(bench, "question", case, contestants)
            is_equal = [texts[OURS]] == texts["kvpress"]
            yield Comparison("question", case, "kvpress", times[OURS], times["kvpress"], is_equal)


def sweep(bench: Bench) -> Iterator[Comparison]:
    """Several methods on one prompt. Ours share its dense pass, which runs anew in each round."""
    if not bench.has("kvpress", "sweep"):
        return
    length = bench.sizes.contexts[0]
    context = bench.loaded.tokenizer.decode(bench.text_ids(length))
    tokens = bench.peer.call("tokens", context=context, question=QUESTION)

    def ours() -> list[str]:
        prompts = DensePrompts(ALL_BYTES)
        return [answer(bench, method, tokens, prompts) for method in PRESSES]

    asked = {"context": context, "question": QUESTION, "presses": [press_of(method) for method in PRESSES]}
    theirs = partial(bench.peer.call, "ask", **asked, max_new_tokens=bench.sizes.answer)
    case = f"{len(PRESSES)} methods, {length} tokens"
    times, texts = paired(bench, "sweep", case, {OURS: ours, "kvpress": theirs})
    yield Comparison("sweep", case, "kvpress", times[OURS], times["kvpress"], texts[OURS] == texts["kvpress"])


def our_lm(bench: Bench, method: str, task: str) -> TemplateLM:
    """A method as lm-eval's model."""
    config = bench.config("experiment=tasks", f"method={method}")
    engine = ReplayEngine(config, bench.loaded, task, io.StringIO())
    return engine.lm(Prefill("dense"))


def against_hflm(
    bench: Bench, job: str, case: str, call: str, requests: Sequence[Instance], equal: Callable[[Any, Any], bool]
) -> Iterator[Comparison]:
    """The full cache and other methods against HFLM at its fastest batch size, by CPU seconds of a first round."""
    fastest, least = None, None
    for size in BATCH_SIZES:
        if size > len(requests) and size > 1:
            continue
        lm = HFLM(pretrained=bench.loaded.model, tokenizer=bench.loaded.tokenizer, batch_size=size)
        run = partial(getattr(lm, call), requests, disable_tqdm=True)
        began = Took.now()
        run()
        took = Took.now().since(began)
        say(f"{job}: {case}, HFLM at batch {size}: {took.cpu_s:.1f} CPU seconds")
        if least is None or took.cpu_s < least:
            least, fastest = took.cpu_s, (f"HFLM, batch {size}", run)
    peer, theirs = fastest
    contestants = {OURS: partial(getattr(our_lm(bench, "full", job), call), requests)}
    for method in bench.methods:
        contestants[method] = partial(getattr(our_lm(bench, method, job), call), requests)
    times, answers = paired(bench, job, case, contestants | {peer: theirs})
    yield Comparison(job, f"{case}, full", peer, times[OURS], times[peer], equal(answers[OURS], answers[peer]))
    for method in bench.methods:
        yield Comparison(job, f"{case}, {method}", peer, times[method], times[peer], None)


def choices(bench: Bench) -> Iterator[Comparison]:
    """Multiple choice with 5 examples: of a folder of data OpenBookQA and COPA, else ends of the offline sentences."""
    if bench.data_root is None:
        count = bench.sizes.questions
        yield from against_hflm(bench, "choices", f"{count} questions", "loglikelihood", endings(count), same_scores)
        return
    tasks = [f"data.root={bench.data_root}", "data=local", "tasks=[openbookqa,copa]"]
    config = bench.config("experiment=tasks", "method=full", *tasks, f"num_samples={bench.sizes.questions}")
    suite = load_suite(config, bench.loaded)
    for name in config.tasks:
        task = suite.tasks[name]
        task.build_all_requests(limit=config.num_samples)
        case = f"{config.num_samples} of {name}"
        yield from against_hflm(bench, "choices", case, "loglikelihood", task.instances, same_scores)


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
    yield from against_hflm(bench, "texts", case, "generate_until", requests, list.__eq__)


def live_steps(bench: Bench, prompt: SharedPrompt, config: Any) -> Timed:
    """Live steps of ours from a prompt on, its cache on the device. The result is the new tokens of each sequence."""
    sizes = bench.sizes
    count = sizes.warm_up + sizes.steps
    num_prompt = prompt.prompt.ids.shape[1]
    rows = [TokenCounts(cached, num_prompt, num_prompt + count) for cached in range(num_prompt, num_prompt + count)]
    with attach(bench.loaded.model) as attached:
        setup = prepare(config, bench.loaded, attached, lambda: rows)
        session = LiveSession(
            attached, setup.method, max_new_tokens=count + 1, codec=setup.codec, calibration=setup.calibration
        )
        with closing(session):
            found = [session.start(prompt.prompt).argmax(-1)]
            for step in range(count):
                if step == sizes.warm_up:
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

        def theirs(prompt: SharedPrompt = prompt) -> Timed:
            cache = DynamicCache(config=model.config)
            for layer, states in enumerate(prompt.prompt.layers):
                cache.update(states.key, states.value, layer)
            token = model.get_output_embeddings()(prompt.prompt.hidden).argmax(-1)
            return decode(model, cache, token, bench.sizes.warm_up, bench.sizes.steps)

        contestants = {OURS: partial(live_steps, bench, prompt, config), peer: theirs}
        times, tokens = paired(bench, "decode", case, contestants)
        yield Comparison("decode", case, peer, times[OURS], times[peer], tokens[OURS] == tokens[peer])


def quantized(bench: Bench) -> Iterator[Comparison]:
    """Steps of a cache in 4 bits. transformers' keeps the last 128 tokens as they are, and decodes all others anew."""
    backends = [backend for backend in ("quanto", "hqq") if bench.has(backend, "quantized")]
    if not backends:
        return
    config = bench.config("experiment=latency", "method=int4", "placement=device")
    sizes = bench.sizes
    for case, prompt in prompts(bench):
        contestants: dict[str, Callable[[], Any]] = {OURS: partial(live_steps, bench, prompt, config)}
        for backend in backends:
            asked = {"ids": prompt.prompt.ids.tolist(), "warm_up": sizes.warm_up, "steps": sizes.steps}
            contestants[backend] = partial(bench.peer.call, "decode", backend=backend, **asked)
        times, _ = paired(bench, "quantized", case, contestants)
        for backend in backends:
            yield Comparison("quantized", case, f"QuantizedCache, {backend}", times[OURS], times[backend], None)


JOBS: dict[str, Callable[[Bench], Iterator[Comparison]]] = {
    "perplexity": perplexity,
    "question": question,
    "choices": choices,
    "texts": texts,
    "decode": decode_full,
    "quantized": quantized,
    "sweep": sweep,
}


# Table


def row_of(found: Comparison) -> dict[str, Any]:
    """A line of the table, for a program."""
    row: dict[str, Any] = {"job": found.job, "case": found.case, "peer": found.peer}
    for clock in ("cpu_s", "wall_s"):
        ours = [getattr(took, clock) for took in found.ours]
        theirs = [getattr(took, clock) for took in found.theirs]
        ratio, between = ratios(ours, theirs)
        row |= {f"ours_{clock}": statistics.median(ours), f"peer_{clock}": statistics.median(theirs)}
        row |= {f"{clock}_ratio": ratio, f"{clock}_ratio_spread": between}
    return row | {"rounds": len(found.ours), "equal": found.is_equal}


def table(found: Sequence[Comparison]) -> str:
    """The lines as Markdown."""
    header = [
        "job",
        "case",
        "peer",
        "CPU s, ours",
        "peer",
        "ours / peer",
        "wall s, ours",
        "peer",
        "ours / peer",
        "equal",
    ]
    lines = []
    for comparison in found:
        row = row_of(comparison)
        line = [row["job"], row["case"], row["peer"]]
        for clock in ("cpu_s", "wall_s"):
            line += [f"{row[f'ours_{clock}']:.2f}", f"{row[f'peer_{clock}']:.2f}"]
            line.append(f"{row[f'{clock}_ratio']:.2f} ({row[f'{clock}_ratio_spread']})")
        lines.append([*line, {True: "yes", False: "NO", None: "-"}[row["equal"]]])
    return tabulate(lines, header, "pipe", disable_numparse=True)


def write(folder: str | None, found: Sequence[Comparison], lines: Sequence[str]) -> str:
    """Returns the table below the first line and above the others, and writes it to a folder if one is given."""
    title, *others = lines
    shown = "\n\n".join([title, table(found), *others])
    if folder is not None:
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        rows = [row_of(comparison) for comparison in found]
        write_atomic(out / "peers.csv", pd.DataFrame(rows).to_csv(index=False))
        write_atomic(out / "peers.md", f"{shown}\n")
    return shown


# The command


def peers_command(folder: Path) -> list[list[str]]:
    """The commands that make the peers' environment, with the torch that runs here."""
    python = str(folder / "bin" / "python")
    packages = [f"torch=={torch.__version__}", "kvpress==0.5.5", "optimum-quanto", "hqq"]
    return [[sys.executable, "-m", "venv", "--clear", str(folder)], [python, "-m", "pip", "install", *packages]]


def peers_python(options: argparse.Namespace) -> str | None:
    """The peers' interpreter: the one that was given, or the environment in the cache folder if it is there."""
    if options.peers_python is not None:
        if not Path(options.peers_python).is_file():
            raise UserError(f"--peers-python {options.peers_python}: there is no such file; give an interpreter's path")
        return options.peers_python
    folder = cache_dir() / "peers"
    if options.make_peers:
        for command in peers_command(folder):
            say(" ".join(command))
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                raise UserError(f"--make-peers: the last command ended with code {error.returncode}") from error
    python = folder / "bin" / "python"
    return str(python) if python.is_file() else None


def compare(options: argparse.Namespace) -> list[str]:
    """Run the jobs, and print and write the table. Returns a line for each that failed or is not equal to its peer."""
    for name in options.jobs:
        if name not in JOBS:
            raise UserError(f"--jobs {' '.join(options.jobs)}: {name!r} is none; {nearest(name, JOBS)}")
    for option in ("rounds", "threads"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise UserError(f"--{option} {value}: must be at least 1")
    sizes = QUICK if options.quick else Sizes()
    if options.rounds is not None:
        sizes = sizes._replace(rounds=options.rounds)
    say(machine())
    kept = not options.returned and keep_freed_memory()  # before anything large is allocated
    torch.set_num_threads(options.threads)
    with refused("the settings"):
        config = load(["experiment=tasks", "method=full", *options.settings])
    python = peers_python(options)
    loaded = load_model(config.model)
    memory = "stays mapped" if kept else "goes back to the system"
    title = f"{loaded.name}, {options.threads} threads, {sizes.rounds} rounds; memory that is freed {memory}"
    found: list[Comparison] = []
    with TemporaryDirectory() as folder:
        bench = Bench(loaded, options.settings, sizes, options.methods, options.data_root)
        if python is not None:
            disable_progress_bar()
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
            bench.peer = Peer(python, folder, options.threads, kept)
        for name in options.jobs:
            try:
                for comparison in JOBS[name](bench):
                    found.append(comparison)
                    ratio = row_of(comparison)["cpu_s_ratio"]
                    say(f"  {comparison.case}: {ratio:.2f} of {comparison.peer}'s CPU seconds")
                    write(options.out, found, [title])
            except (PeerError, ValueError) as error:  # the other jobs are of use
                bench.failed.append(f"{name}: failed, {reason(error)}")
                say(bench.failed[-1])
        if bench.peer is not None:
            bench.peer.close()
    print(write(options.out, found, [title, *bench.skipped, *bench.failed]))
    unequal = [f"{line.job}, {line.case}: not equal to {line.peer}" for line in found if line.is_equal is False]
    return [*bench.failed, *unequal]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a job failed or results that must be equal differ, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=str(__doc__).splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes and two rounds, in a few minutes")
    parser.add_argument("--rounds", type=int, help="timed rounds; default 3, with --quick 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=["h2o", "infinigen2"], help="beside the full cache, in tasks")
    parser.add_argument("--data-root", metavar="DIR", help="folder with openbookqa/ and copa/ as JSON lines")
    parser.add_argument("--peers-python", metavar="PATH", help="interpreter with kvpress, optimum-quanto and hqq")
    parser.add_argument("--make-peers", action="store_true", help="make that interpreter in the cache folder first")
    parser.add_argument("--returned", action="store_true", help="freed memory goes back to the system, as by default")
    parser.add_argument("--out", metavar="DIR", help="folder for peers.csv and peers.md")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings of every run, such as the model")
    options = parser.parse_intermixed_args(argv)
    jobs_and_settings = [*options.jobs, *options.settings]
    options.jobs = [word for word in jobs_and_settings if "=" not in word]
    options.settings = [word for word in jobs_and_settings if "=" in word]
    problems: list[str] = []
    code = exit_code(lambda: problems.extend(compare(options)))
    for problem in problems:
        say(problem)
    return code or int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
