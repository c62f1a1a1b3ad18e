"""The contract's `thorough=true`: the contract, then a search for the faults that users of such
comparisons reported in 2026.

    python run.py experiment=contract thorough=true

Three start tokens, a dropped answer prefix, a budget without effect, a quantizer that leaves the
generated tokens exact, a full cache that is not the model's own, an accuracy that is not that of
the code whose speed is measured: each is a check of the loaded model (SmolLM2 by default) that runs
now. `trust.md` of the results folder has what each saw, with the date and the digest of the code.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from harness.checks import contract
from harness.checks.contract import BrokenError
from harness.checks.two_ways import Trial, largest_difference
from harness.data.tasks import load_suite
from harness.data.text import corpus_ids, windows_of
from harness.errors import UserError
from harness.files import write_atomic
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.model.shape import read_yaml
from harness.replay.setup import prepare
from harness.results.inputs import code_digest
from harness.results.metrics import CLAIM, LABEL
from harness.results.sheet import Sheet, markdown
from harness.scoring.evaluation import prefill_of, run_task, running_lm_eval
from harness.scoring.lm import ReplayLM
from harness.scoring.perplexity import run_perplexity
from harness.settings.config import RunConfig
from harness.settings.paths import COMMAND
from methods.codecs.integers import IntegerCodec

LOOKED_AT = dict(read_yaml(Path(__file__).with_suffix(".yaml")))
SHARES = (0.05, 0.2)
PROMPT, STEPS = 256, 7
EQUAL = 1e-4
"""Largest difference of logits or log-likelihoods that rounding in float32 makes."""


class Scored(NamedTuple):
    """A task as a model scores it: token ids of each context and choice, their log-likelihoods, and
    the share of right answers."""

    ids: list[list[int]]
    scores: list[float]
    right: float


@dataclass(frozen=True)
class Subject:
    """The model that is looked at, and the settings of its runs. load: makes settings of words."""

    config: RunConfig
    loaded: LoadedModel
    load: Callable[[Sequence[str]], RunConfig]

    def run(self, *words: str) -> RunConfig:
        """The settings of a run of this model."""
        return replace(self.load(words), model=self.config.model, data=self.config.data)

    @contextmanager
    def trial(self, *words: str) -> Iterator[Trial]:
        """A run with these settings on a prompt of the corpus and `STEPS` rows after it."""
        config = self.run("experiment=latency", "placement=device", *words)
        text = self.run("experiment=perplexity")
        ids = corpus_ids(text.corpus, text.data, self.loaded.reader)[: PROMPT + STEPS]
        with attach(self.loaded.model) as attached:
            setup = prepare(config, self.loaded, attached, list)
            trial = Trial(attached, None, setup, (PROMPT,), steps=STEPS)
            tokens = torch.tensor([ids], device=attached.device)
            trial.batch = tokens, torch.ones_like(tokens, dtype=torch.bool)
            yield trial

    @cached_property
    def scored(self) -> tuple[Scored, Scored]:
        """One task here, and by lm-eval's own model."""
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM

        task, count = "kv_recall", LOOKED_AT["questions"]
        config = self.run("experiment=tasks", "method=full", f"tasks=[{task}]")
        found = load_suite(config, self.loaded).tasks[task]
        own = HFLM(pretrained=self.loaded.model, tokenizer=self.loaded.tokenizer, batch_size=1)
        lm = ReplayLM(config, self.loaded, task, prefill_of(task, config, writes=False, task=found))

        def scored(lm: Any) -> tuple[list[float], float]:
            with running_lm_eval():
                results = evaluate(lm, {"tasks": {task: found}}, limit=count, bootstrap_iters=0)
            scores = []
            for logged in results["samples"][task]:
                scores += [float(score) for score, _ in logged["filtered_resps"]]
            return scores, results["results"][task]["acc,none"]

        here = scored(lm)
        ids = [list(request.ids) for request in lm.requests]
        there = scored(own)
        pairs = [own._encode_pair(*instance.args) for instance in found.instances]
        own_ids = [[*context, *continuation] for context, continuation in pairs]
        return Scored(ids, *here), Scored(own_ids, *there)


# The checks: each returns a line that says what it saw, or raises BrokenError with it


def one_start_token(subject: Subject) -> str:
    """Each prompt begins with as many start tokens as lm-eval's own model gives it, at most one."""
    start = getattr(subject.loaded.tokenizer, "bos_token_id", None)
    ours, theirs = subject.scored
    counts = {next(at for at, token in enumerate(ids) if token != start) for ids in ours.ids}
    same = ours.ids == theirs.ids
    listed = ", ".join(map(str, sorted(counts)))
    words = f"{len(ours.ids)} contexts with choices, token ids {_equal(same)} HFLM's"
    return _seen(same and max(counts) <= 1, f"{words}; start tokens: {listed}")


def the_answer_begins_as_the_task_says(subject: Subject) -> str:
    """The prompt of a task of RULER ends with the words that begin its answer."""
    tasks, length = ",".join(LOOKED_AT["prefixed"]), LOOKED_AT["prompt"]
    words = ("experiment=tasks", f"tasks=[{tasks}]", "num_samples=1", "method=full")
    config = subject.run(*words, f"metadata.max_seq_lengths=[{length}]")
    suite, tokenizer = load_suite(config, subject.loaded), subject.loaded.tokenizer
    assert tokenizer is not None, "tasks have read text by it"
    ends = []
    for name, task in suite.tasks.items():
        prefill = prefill_of(name, config, writes=True, task=task)
        lm = ReplayLM(config, subject.loaded, name, prefill)
        task.set_config("generation_kwargs", {"max_gen_toks": 1}, update=True)  # none is looked at
        run_task(task, lm)
        [document] = list(task.eval_docs)[:1]
        [request] = lm.requests
        prompt = tokenizer.decode(request.ids[: request.context_len])
        ends.append(prompt.rstrip().endswith(document["gen_prefix"].rstrip()))
    return _seen(all(ends), f"{sum(ends)} of {len(ends)} tasks of RULER ({length:,} tokens)")


def the_budget_bites(subject: Subject) -> str:
    """A method reads what was asked for, less than the prompt has; with less it is farther off."""
    holds, seen = True, []
    for method in LOOKED_AT["budgets"]:
        divergences = []
        for share in SHARES:
            config = subject.run(
                "experiment=perplexity", f"method={method}", f"budget=nearest:{share}",
                "num_windows=1", f"seq_len={LOOKED_AT['window']}", "method.dense_layers=0",
            )  # fmt: skip
            [metrics] = run_perplexity(config, subject.loaded).metrics.values()
            divergences.append(metrics["kl_nats"])
            holds &= metrics["budget"] <= share * 1.3
        holds &= divergences[0] > divergences[1] > 0
        seen.append(f"{method} {divergences[0]:.3f} and {divergences[1]:.3f}")
    shares = " and ".join(f"{100 * share:.0f} %" for share in SHARES)
    return _seen(holds, f"KL at {shares} of {LOOKED_AT['window']:,} tokens: {', '.join(seen)}")


def generated_tokens_are_quantized(subject: Subject) -> str:
    """In the first layer, whose input no codec changes, keys of decode steps are codes."""
    stored = []
    codec = IntegerCodec("int4")
    for name in ("fp32", codec.name):
        with (
            subject.trial("method=full", f"codec={name}") as trial,
            closing(trial.open_live()) as live,
        ):
            trial.force(live)
            store = live.stores[0]
            rows = store.format.unpack(store.slots[:, :, : PROMPT + STEPS])
            stored.append(rows.keys.float()[:, :, PROMPT:])
    keys, coded = stored
    words = f"{keys.shape[2]} tokens after the prompt under INT4"
    if coded.shape != keys.shape:
        return _seen(False, f"{words}: {coded.shape[2]} of them are codes")
    expected = codec.roundtrip(keys)
    error = float((coded - keys).norm() / keys.norm())
    same = torch.allclose(coded, expected, rtol=1e-3, atol=1e-3 * float(keys.abs().max()))
    words += f": {_equal(same)} their codes"
    return _seen(same and error > 0, f"{words}, {100 * error:.1f} % from exact")


def the_full_cache_is_the_models_own(subject: Subject) -> str:
    """Perplexity by the model's own forward; log-likelihoods and answers by lm-eval's HFLM."""
    loaded, (ours, theirs) = subject.loaded, subject.scored
    lengths = (f"seq_len={PROMPT + STEPS + 1}", f"prefill_len={PROMPT // 2}")
    config = subject.run("experiment=perplexity", "method=full", "num_windows=1", *lengths)
    [window] = windows_of(config, loaded.reader, config.seq_len)
    ids = torch.tensor([window.ids], device=loaded.model.device)
    labels = ids.clone()
    labels[:, : config.prefill_len + 1] = -100  # the first that a decode row predicts comes behind
    with torch.inference_mode():
        perplexity = float(loaded.model(ids, labels=labels).loss.exp())
    [metrics] = run_perplexity(config, loaded).metrics.values()
    off = abs(metrics["perplexity"] / perplexity - 1)
    scores, own_scores = torch.tensor([ours.scores, theirs.scores], dtype=torch.float64)
    apart = largest_difference(scores, own_scores)
    holds = off < EQUAL and apart < 10 * EQUAL and ours.right == theirs.right
    words = (
        f"perplexity {metrics['perplexity']:.3f}, by transformers {perplexity:.3f}; {len(scores)} "
        f"log-likelihoods within {apart:.0e} of HFLM's, the same answers right"
    )
    return _seen(holds, words)


def live_is_replay(subject: Subject) -> str:
    """Decode steps, which are timed, and replay, which is scored, give equal logits."""
    seen = []
    for method in LOOKED_AT["live"]:
        with subject.trial(f"method={method}") as trial:
            try:
                words = contract.live_is_replay(trial)
            except BrokenError as error:
                raise BrokenError(f"{method}: {error}") from error
        seen.append(f"{method} {words.removeprefix('largest difference ')}")
    return f"{STEPS} steps, the same shares, and logits within: {', '.join(seen)}"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "one start token": one_start_token,
    "the answer begins as the task says": the_answer_begins_as_the_task_says,
    "the budget bites": the_budget_bites,
    "generated tokens are quantized": generated_tokens_are_quantized,
    "the full cache is the model's own": the_full_cache_is_the_models_own,
    "live decoding is replay": live_is_replay,
}


def _seen(holds: bool, words: str) -> str:
    if not holds:
        raise BrokenError(words)
    return words


def _equal(same: bool) -> str:
    return "equal to" if same else "unlike"


def run_trust(
    config: RunConfig, loaded: LoadedModel, load: Callable[[Sequence[str]], RunConfig]
) -> None:
    """Make every check, print it, and write `trust.md` of the results folder.

    Raises UserError where one fails, and for a model that is not in float32.
    """
    subject = Subject(config, loaded, load)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if dtype != "float32":
        raise UserError(
            f"thorough=true: model.dtype={dtype}: its rounding is larger than the differences "
            "that are looked for; allowed: float32"
        )
    lines, failed = [], []
    for name, check in CHECKS.items():
        try:
            verdict, words = "holds", check(subject)
        except (BrokenError, UserError) as error:
            verdict, words = "FAILS", str(error)
            failed.append(name)
        print(f"{verdict:6} {loaded.name:13} {name}: {words}", flush=True)
        lines.append([name, verdict, words])
    sheet = Sheet("Checks", pd.DataFrame(lines, columns=[LABEL.heading, "verdict", CLAIM.heading]))
    path = Path(config.results_dir) / "trust.md"
    made = f"on {datetime.date.today()}, of {loaded.name} and code {code_digest()[:12]}"
    again = f"`{COMMAND} experiment=contract thorough=true` makes them again"
    words = f"Checks that ran {made}. {again}."
    write_atomic(path, markdown("trust", words, [sheet]))
    print(path)
    if failed:
        raise UserError(f"thorough=true: {', '.join(failed)}: does not hold")
