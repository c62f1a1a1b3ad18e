"""Texts decoded freely, step by step, under a method and under the full cache: where eviction and
small errors add up.

From each prompt, a window of the corpus, both decode `max_new_tokens` tokens, greedily or drawn by
the same random numbers. The end-of-text token is an ordinary one, so that all texts have one
length. The full cache then reads the method's text in one dense pass, which gives its prediction at
each step after the same tokens, to be compared with the method's. The model's generation config
holds as in `generate`, but for its ends.

The first token comes from the prompt's dense pass and is the same under every method. The tokens
after it are scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.data.text import windows_of
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.generation import ENDLESS, GenerationRule
from harness.model.load import LoadedModel
from harness.model.resources import Memo
from harness.model.sampling import Draft, write
from harness.replay.setup import Setup, prepare
from harness.results.samples import EXPONENTIAL, clustered_stderr
from harness.scoring.perplexity import FULL, as_perplexity, full_pass, score_rows
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from methods.base import TokenCounts

BATCH = 8
"""Prompts decoded at once, at most."""
GRAM = 4
"""Tokens of a repeated piece."""
NUM_CHUNKS = 16
"""Ranges of steps that make a curve, at most."""

AS_PERPLEXITY = {of: name for name, of in EXPONENTIAL.items() if name.startswith("text_")}
"""Numbers of a prompt that are reported as exp of their mean over prompts, and the name of that."""

Prompts = Sequence[Sequence[int]]


class Text(NamedTuple):
    """Tokens decoded from one prompt; nll: fp64 [tokens - 1], under the full cache, of those after
    the first."""

    tokens: list[int]
    nll: Tensor


class Pair(NamedTuple):
    """A method's text beside the full cache's. kl, agrees: fp64 [tokens - 1], as `RowScores` has
    them, of the steps after the first along the method's own text."""

    own: Text
    full: Text
    kl: Tensor
    agrees: Tensor


class Decoded(NamedTuple):
    """A batch's tokens, int [batch, max_new_tokens], and their reads. hidden: final states
    [batch, max_new_tokens - 1, hidden_size] that predicted the tokens after the first."""

    tokens: Tensor
    hidden: Tensor
    reads: ReadStats


def run_long_decode(
    config: RunConfig, loaded: LoadedModel, references: Memo[list[Text]] | None = None
) -> Outcome:
    """All texts of `config` under its method.

    references: kept texts of this model under the full cache; new ones are added.

    Raises UserError for a corpus shorter than the prompts, a sequence longer than the model's
    limit, or a method that never ran; ValueError for one that the lengths do not fit.
    """
    length, steps = config.prefill_len, config.max_new_tokens
    assert steps is not None, "the kind's check asks for it"
    if length + steps > loaded.max_length:
        raise UserError(
            f"prefill_len={length} and max_new_tokens={steps}: must be together at most "
            f"{loaded.max_length}, the limit of {loaded.name}"
        )
    windows = windows_of(config, loaded.reader, length, "prefill_len")
    prompts = [window.ids for window in windows]
    references = Memo() if references is None else references
    pairs: list[Pair] = []
    reads = ReadStats()

    def drafts_of(first: int, prompts: Prompts) -> list[Draft]:
        drafts = []
        for number, prompt in enumerate(prompts, first):
            settings = config.sampling.rule().settings | dict(ENDLESS)
            rule = GenerationRule(loaded.model, prompt, max_new_tokens=steps, **settings)
            drafts.append(Draft(prompt, rule, f"{config.seed}/{number}/0"))
        return drafts

    def full_texts(first: int, prompts: Prompts) -> list[Text]:
        decoded = decode_freely(attached, FULL, prompts, drafts_of(first, prompts)).tokens.tolist()
        pairs = zip(prompts, decoded, strict=True)
        return [
            Text(tokens, full_pass(attached, [*prompt, *tokens], length)[0])
            for prompt, tokens in pairs
        ]

    with attach(loaded.model) as attached:
        rows = [
            TokenCounts(cached, length, length + steps)
            for cached in range(length, length + steps - 1)
        ]
        setup = prepare(config, loaded, attached, lambda: rows)
        for first in range(0, len(prompts), BATCH):
            batch = prompts[first : first + BATCH]
            key = ("texts", tuple(map(tuple, batch)), steps, config.sampling, config.seed, first)
            full = references.get(key, partial(full_texts, first, batch))
            decoded = decode_freely(attached, setup, batch, drafts_of(first, batch))
            reads += decoded.reads
            for prompt, tokens, hidden, other in zip(
                batch, decoded.tokens, decoded.hidden, full, strict=True
            ):
                nll, reference = full_pass(attached, [*prompt, *tokens.tolist()], length)
                scores = score_rows(attached, hidden, tokens[1:], reference)
                pairs.append(Pair(Text(tokens.tolist(), nll), other, scores.kl, scores.agrees))
    shares = {"seq_len": length + steps} | reads.shares
    samples = []
    for window, pair in zip(windows, pairs, strict=True):
        samples.append({"place": window.place} | _raw(pair, loaded.reader))
    return Outcome(
        metrics={config.corpus.title: summarize(pairs) | shares},
        samples={"prompts": samples},
        methods={config.corpus.title: asdict(setup.method)},
        chunks=list(curve(pairs, steps)),
    )


def decode_freely(
    attached: Attached, setup: Setup, prompts: Prompts, drafts: Sequence[Draft]
) -> Decoded:
    """Decode `drafts`, all of one length, after prompts of one length, a row of replay a step."""
    ids = torch.tensor(prompts, device=attached.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    new = drafts[0].left
    total = ids.shape[1] + new
    session = setup.replay(attached, torch.full((len(ids),), total, device=attached.device), total)
    hidden: list[Tensor] = []

    def feed(drafts: Sequence[Draft]) -> tuple[Sequence[Draft], Tensor]:
        last = torch.tensor([draft.tokens[-1:] for draft in drafts], device=attached.device)
        hidden.append(session.decode(last, real[:, :1])[:, 0])
        return drafts, attached.logits(hidden[-1])

    logits = attached.logits(session.prefill(ids, real)[:, -1])
    for _ in bar(write(drafts, logits, feed), desc="decoding", total=new, unit="step"):
        pass
    session.reads.check_fired()
    tokens = torch.tensor([draft.tokens for draft in drafts], device=attached.device)
    return Decoded(tokens, torch.stack(hidden, 1), session.reads)


def _raw(pair: Pair, tokenizer: Any) -> dict[str, Any]:
    """A prompt's numbers, and both texts."""
    own, full = pair.own.tokens, pair.full.tokens
    words = {"text": tokenizer.decode(own), "text_full": tokenizer.decode(full)}
    return measures(pair) | words | {"tokens": own, "tokens_full": full}


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of a text's 4-grams that occurred in it before; None for a text too short to have
    one."""
    grams = list(zip(*(tokens[shift:] for shift in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else None


def measures(pair: Pair) -> dict[str, Any]:
    """One prompt's numbers: means over the steps after the first; differences are to the full
    cache's text.

    first_divergence: index of the first token in which the two texts differ; their length if they
    never do.
    """
    same = [one == other for one, other in zip(pair.own.tokens, pair.full.tokens, strict=True)]
    own, full = repetition(pair.own.tokens), repetition(pair.full.tokens)
    nll, nll_full = float(pair.own.nll.mean()), float(pair.full.nll.mean())
    return {
        "kl_nats": float(pair.kl.mean()),
        "top1_agreement": float(pair.agrees.mean()),
        "first_divergence": [*same, False].index(False),
        "nll": nll,
        "nll_full": nll_full,
        "text_nll_difference": nll - nll_full,
        "repetition": own,
        "repetition_full": full,
        "repetition_difference": None if own is None or full is None else own - full,
    }


def summarize(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Means over prompts and their standard errors (None with one prompt)."""
    prompts = [measures(pair) for pair in pairs]
    entries: dict[str, Any] = {"num_samples": len(pairs)}
    for name in prompts[0]:
        entries |= _mean(AS_PERPLEXITY.get(name, name), [prompt[name] for prompt in prompts])
    entries["never_diverged"] = sum(pair.own.tokens == pair.full.tokens for pair in pairs)
    return entries


def curve(pairs: Sequence[Pair], num_tokens: int) -> Iterator[dict[str, Any]]:
    """The chunks of a record, over the decoded tokens. The first token is not scored; a chunk of it
    alone is left out."""
    width = math.ceil(num_tokens / NUM_CHUNKS)
    for first in range(0, num_tokens, width):
        stop = min(first + width, num_tokens)
        begin = max(first, 1)
        if begin == stop:
            continue
        rows = slice(begin - 1, stop - 1)
        metrics = _mean("kl_nats", [float(pair.kl[rows].mean()) for pair in pairs])
        metrics |= _mean("text_perplexity", [float(pair.own.nll[rows].mean()) for pair in pairs])
        yield {
            "first": first,
            "stop": stop,
            "num_tokens": (stop - begin) * len(pairs),
            "metrics": metrics,
        }


def _mean(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """The mean over prompts and its standard error, of a perplexity exp of the mean; None where
    nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return {name: None, f"{name}_stderr": None}
    mean = sum(known) / len(known)
    if name in EXPONENTIAL:
        known = [as_perplexity(value, f"prompt {index + 1}") for index, value in enumerate(known)]
        mean = math.exp(mean)
    return {name: mean, f"{name}_stderr": clustered_stderr(known, range(len(known)))}
