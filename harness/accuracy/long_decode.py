"""Texts decoded freely, step by step, under a method and under the full cache: where eviction and small errors add up.

From each prompt, a window of the corpus, both decode `max_new_tokens` tokens greedily; the end-of-text token is one
like any other, so that all texts have one length. The full cache then reads the method's text in one dense pass: what
it would have predicted at each step, had it written the same so far, against what the method predicted there.

The first token comes of the prompt's dense pass, the same under every method: what is scored are the tokens after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from harness.accuracy import texts
from harness.accuracy.fidelity import score_rows
from harness.accuracy.perplexity import full_pass
from harness.accuracy.texts import Pair, Text
from harness.data.text import corpus_ids, first_window_offset, window_ids
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.load import LoadedModel
from harness.replay import ReplaySession
from harness.resources import Kept
from harness.settings.config import RunConfig
from harness.settings.experiment import Outcome
from harness.setup import Setup, prepare
from harness.sizes import ReadStats
from methods.base import Row
from methods.full import Full

BATCH = 8
"""Prompts decoded at once, at most."""

Prompts = Sequence[Sequence[int]]


class Decoded(NamedTuple):
    """A batch's tokens, int [batch, max_new_tokens], and what was read for them. hidden: final states
    [batch, max_new_tokens - 1, hidden_size] that named those after the first."""

    tokens: Tensor
    hidden: Tensor
    reads: ReadStats


def run_long_decode(config: RunConfig, loaded: LoadedModel, references: Kept[list[Text]] | None = None) -> Outcome:
    """All texts of `config` under its method.

    references: the full cache's texts of this model that there are; further ones are put there.

    Raises UserError for a corpus shorter than the prompts, a sequence longer than the model's limit, or a method that
    never ran; ValueError for one that the lengths do not fit.
    """
    prompts = _prompts(config, loaded)
    length, steps = config.prefill_len, config.max_new_tokens
    references = Kept() if references is None else references
    pairs: list[Pair] = []
    reads = ReadStats()
    with attach(loaded.model) as attached:
        rows = [Row(cached, length, length + steps) for cached in range(length, length + steps - 1)]
        setup = prepare(config, loaded, attached, lambda: rows)
        for batch in (prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH)):
            key = ("texts", tuple(map(tuple, batch)), steps)
            full = references.get(key, partial(_full_texts, attached, batch, steps))
            decoded = decode_freely(attached, setup, batch, steps)
            reads += decoded.reads
            pairs += _compare(attached, batch, decoded, full)
    sizes = {"seq_len": length + steps} | reads.sizes
    return Outcome(
        metrics={config.corpus.title: texts.summarize(pairs) | sizes},
        samples={"prompts": [_raw(pair, loaded.tokenizer) for pair in pairs]},
        methods={config.corpus.title: asdict(setup.method)},
        chunks=list(texts.curve(pairs, steps)),
    )


def decode_freely(attached: Attached, setup: Setup, prompts: Prompts, max_new_tokens: int) -> Decoded:
    """Decode the most likely tokens after prompts of one length, a row of replay a step."""
    ids = torch.tensor(prompts, device=attached.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    total = ids.shape[1] + max_new_tokens
    session = ReplaySession(
        attached,
        setup.method,
        codec=setup.codec,
        calibration=setup.calibration,
        final_lengths=torch.full((len(ids),), total, device=attached.device),
        num_columns=total,
    )
    tokens = [attached.logits(session.prefill(ids, real)[:, -1]).argmax(-1)]
    hidden = []
    for _ in tqdm(range(1, max_new_tokens), desc="decoding", unit="step", leave=False, disable=None):
        hidden.append(session.decode(tokens[-1][:, None], real[:, :1])[:, 0])
        tokens.append(attached.logits(hidden[-1]).argmax(-1))
    session.reads.check_fired()
    return Decoded(torch.stack(tokens, 1), torch.stack(hidden, 1), session.reads)


def _prompts(config: RunConfig, loaded: LoadedModel) -> Prompts:
    length, steps = config.prefill_len, config.max_new_tokens
    if length + steps > loaded.max_length:
        raise UserError(
            f"prefill_len={length} and max_new_tokens={steps}: must be together at most {loaded.max_length}, the limit "
            f"of {loaded.name}"
        )
    ids = corpus_ids(config.corpus, config.data, loaded.tokenizer)
    offset = first_window_offset(config.corpus, config.calibration)
    return window_ids(ids, seq_len=length, num_windows=config.num_windows, offset=offset, setting="prefill_len")


def _full_texts(attached: Attached, prompts: Prompts, max_new_tokens: int) -> list[Text]:
    setup = Setup(Full(), codec=None, calibration=None)
    decoded = decode_freely(attached, setup, prompts, max_new_tokens).tokens.tolist()
    return [
        Text(tokens, full_pass(attached, [*prompt, *tokens], len(prompt))[0])
        for prompt, tokens in zip(prompts, decoded, strict=True)
    ]


def _compare(attached: Attached, prompts: Prompts, decoded: Decoded, full: Sequence[Text]) -> list[Pair]:
    pairs = []
    for prompt, tokens, hidden, other in zip(prompts, decoded.tokens, decoded.hidden, full, strict=True):
        own = tokens.tolist()
        nll, reference = full_pass(attached, [*prompt, *own], len(prompt))
        scores = score_rows(attached, hidden, tokens[1:], reference)
        assert scores.kl is not None and scores.agrees is not None
        pairs.append(Pair(Text(own, nll), other, scores.kl, scores.agrees))
    return pairs


def _raw(pair: Pair, tokenizer: Any) -> dict[str, Any]:
    """A prompt's numbers, and both texts."""
    own, full = pair.own.tokens, pair.full.tokens
    words = {"text": tokenizer.decode(own), "text_full": tokenizer.decode(full)}
    return texts.measures(pair) | words | {"tokens": own, "tokens_full": full}
