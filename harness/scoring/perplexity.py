"""Texts under a method, scored against the next token and against the full cache: windows of a
corpus as they are (perplexity and fidelity), or texts that the method decodes after them.

A window's first `prefill_len` rows attend densely; the rest are decode rows. The full cache's pass
over a window runs once and is shared by all methods.

With `max_new_tokens` the windows are prompts. From each the method and the full cache decode so
many tokens, greedily or drawn by the same random numbers: where eviction and small errors add up.
The end-of-text token is an ordinary one, so that all texts have one length; else the model's
generation config holds as in `generate`. The full cache then reads the method's text in one dense
pass, which gives its prediction at each step after the same tokens. The first token comes from the
prompt's dense pass and is the same under every method; the tokens after it are scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.text import TextWindow, windows_of
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.generation import ENDLESS, Draft, GenerationRule, write
from harness.model.load import LoadedModel, Memo
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup, prepare
from harness.results.metrics import ATTENTION_ERROR, ATTENTION_ERROR_P95
from harness.results.samples import EXPONENTIAL, LAYERS, clustered_stderr
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from methods.base import TokenCounts
from methods.full import Full

HEAD_CHUNK = 128
"""Rows that pass the output head at once; only final hidden states of a window are kept."""
CHUNK = 256
"""Rows t in [256 i, 256 (i + 1)) form chunk i (Fig 12)."""
BATCH = 8
"""Texts decoded at once, at most."""
GRAM = 4
"""Tokens of a repeated piece."""
NUM_CHUNKS = 16
"""Ranges of steps that make a curve, at most."""
AS_PERPLEXITY = {of: name for name, of in EXPONENTIAL.items() if name.startswith("text_")}
"""Numbers of a text that are reported as exp of their mean over texts, and the name of that."""
FULL = Setup(Full(), codec=None, calibration=None)

Reference = tuple[Tensor, Tensor]
"""Of the full cache on the scored rows of a window: nll, fp64 [rows] on the CPU, and final hidden
states [rows, hidden_size]."""
Prompts = Sequence[Sequence[int]]
Metrics = dict[str, float | None]


def run_perplexity(
    config: RunConfig, loaded: LoadedModel, references: Memo[Any] | None = None
) -> Outcome:
    """All windows of `config` under its method, or with `max_new_tokens` texts decoded after them.

    references: kept passes and texts of the full cache over this model's windows; new ones are
    added. Raises UserError for a corpus shorter than the windows, a sequence longer than the
    model's limit, and a method that the lengths do not fit or that never ran.
    """
    prompt, new = config.prefill_len, config.max_new_tokens
    name, length, lengths = "seq_len", config.seq_len, f"seq_len={config.seq_len}"
    if new is not None:
        name, length = "prefill_len", prompt
        lengths = f"prefill_len={prompt} and max_new_tokens={new}"
    total = length + (new or 0)
    if total > loaded.max_length:
        raise UserError(f"{lengths}: {loaded.name} takes at most {loaded.max_length} tokens")
    windows = windows_of(config, loaded.reader, length, name)
    references = Memo() if references is None else references
    with attach(loaded.model, loaded.prompts if new is None else None) as attached:
        rows = [TokenCounts(cached, max(1, prompt), total) for cached in range(prompt, total - 1)]
        setup = prepare(config, loaded, attached, lambda: rows)
        if new is None:
            shown = bar(windows, desc="windows", unit="window")
            scored = [_score(attached, setup, window, prompt, references) for window in shown]
            outcome = summarize(scored, config)
        else:
            outcome = _decoded(attached, setup, windows, config, loaded, references)
    return replace(outcome, methods=dict.fromkeys(outcome.metrics, asdict(setup.method)))


# Scores of rows


class RowScores(NamedTuple):
    """Per scored row, fp64 [rows] on the CPU.

    nll: negative log-likelihood of the next token, nats. kl: KL(full || method), nats. agrees: 1
    where the most likely token is the full cache's.
    """

    nll: Tensor
    kl: Tensor
    agrees: Tensor


@torch.inference_mode()
def score_rows(attached: Attached, hidden: Tensor, targets: Tensor, reference: Tensor) -> RowScores:
    """Score rows against the tokens that follow them and against the full cache.

    hidden, reference: final hidden states [rows, hidden_size] of the method and of the full cache;
    targets: int [rows], the token that follows each row.
    """
    parts = []
    chunks = [tensor.split(HEAD_CHUNK) for tensor in (hidden, reference, targets)]
    for rows, of_full, following in zip(*chunks, strict=True):
        log_probs = attached.logits(rows).log_softmax(-1)
        full = attached.logits(of_full).log_softmax(-1)
        kl = (full.exp() * full.sub(log_probs)).sum(-1)
        parts.append((_nll(log_probs, following), kl, full.argmax(-1) == log_probs.argmax(-1)))
    columns = zip(*parts, strict=True)
    return RowScores(*(torch.cat(column).double().cpu() for column in columns))


def _nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    return -log_probs.gather(-1, targets[:, None]).squeeze(-1)


@dataclass(frozen=True)
class Window:
    """A scored window: its place as in `TextWindow`, per-row scores of the method, the full cache's
    nll, the shares read, and the errors of attention outputs (`ReplaySession.attention_errors`), of
    which those of the first `dense_layers` layers are 0."""

    place: float
    scores: RowScores
    full_nll: Tensor
    reads: ReadStats
    errors: Tensor
    dense_layers: int


def _score(
    attached: Attached,
    setup: Setup,
    window: TextWindow,
    prefill_len: int,
    references: Memo[Reference],
) -> Window:
    """A window under a method, beside the full cache's pass over it, which runs if it is not kept;
    the full cache itself runs once."""
    hidden, ids, session = _hidden(attached, setup, window.ids, prefill_len)
    session.reads.check_fired()
    key = (tuple(window.ids), prefill_len)
    if session.reads_everything:
        nll, _ = references.get(key, partial(_reference, attached, hidden, ids, prefill_len))
        scores = RowScores(nll, kl=torch.zeros_like(nll), agrees=torch.ones_like(nll))
    else:
        of_full = partial(full_pass, attached, window.ids, prefill_len)
        nll, reference = references.get(key, of_full)
        scores = score_rows(attached, hidden, ids[0, prefill_len + 1 :], reference)
    errors, dense_layers = session.attention_errors, session.method.dense_layers
    return Window(window.place, scores, nll, session.reads, errors, dense_layers)


def full_pass(attached: Attached, window: Sequence[int], prefill_len: int) -> Reference:
    """The full cache's pass over a window."""
    hidden, ids, _ = _hidden(attached, FULL, window, prefill_len)
    return _reference(attached, hidden, ids, prefill_len)


@torch.inference_mode()
def _reference(attached: Attached, hidden: Tensor, ids: Tensor, prefill_len: int) -> Reference:
    parts = []
    targets = ids[0, prefill_len + 1 :]
    for rows, following in zip(hidden.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True):
        parts.append(_nll(attached.logits(rows).log_softmax(-1), following))
    return torch.cat(parts).double().cpu(), hidden


def _hidden(
    attached: Attached, setup: Setup, window: Sequence[int], prefill_len: int
) -> tuple[Tensor, Tensor, ReplaySession]:
    """A window under a method, of which the first `prefill_len` tokens are the prompt.

    Returns the final hidden states of the rows from there on [rows, hidden_size], but for the last,
    which predicts nothing; the window's ids [1, tokens]; the session, which knows what the rows
    read.
    """
    # Row 0 sees only itself, so it can always be run as the prompt: prefill_len = 0 scores it too.
    prompt, length = max(1, prefill_len), len(window)
    ids = torch.tensor([window], device=attached.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    final = torch.tensor([length], device=attached.device)
    session = setup.replay(attached, final, length, measure_recall=True, measure_errors=True)
    hidden = session.prefill(ids[:, :prompt], real[:, :prompt])[0]
    decoded = session.decode(ids[:, prompt:-1], real[:, prompt:-1])[0]
    return torch.cat([hidden, decoded])[prefill_len:], ids, session


def summarize(windows: Sequence[Window], config: RunConfig) -> Outcome:
    """Means over all scored rows; standard errors over windows (None with a single window)."""
    reads = sum((window.reads for window in windows), ReadStats())
    metrics: Metrics = {"num_samples": len(windows)}
    metrics |= _of_rows("perplexity", [window.scores.nll for window in windows])
    metrics |= _of_rows("perplexity_full", [window.full_nll for window in windows])
    metrics |= _of_rows("kl_nats", [window.scores.kl for window in windows])
    metrics |= _of_rows("top1_agreement", [window.scores.agrees for window in windows])
    for name in ("attention_recall", *reads.shares):
        shares = [getattr(window.reads, name) for window in windows]
        metrics |= _with_error(name, getattr(reads, name), shares)
    num_layers = len(windows[0].errors)
    dense_layers = min(windows[0].dense_layers, num_layers - 1)
    errors = [window.errors[dense_layers:] for window in windows]
    metrics |= error_metrics(errors)
    layers = []
    for layer in range(num_layers):
        of_layer = [window.errors[layer] for window in windows]
        layers.append({"layer": layer} | error_metrics(of_layer))
    samples = []
    for window, of_window in zip(windows, errors, strict=True):
        numbers = {
            "place": window.place,
            "nll": float(window.scores.nll.mean()),
            "nll_full": float(window.full_nll.mean()),
            "kl_nats": float(window.scores.kl.mean()),
            "top1_agreement": float(window.scores.agrees.mean()),
            "attention_recall": window.reads.attention_recall,
            "budget": window.reads.budget,
        }
        samples.append(numbers | error_means(of_window))
    return Outcome(
        {config.corpus.title: metrics},
        {"windows": samples, LAYERS: layers},
        chunks=_chunks(windows, config.prefill_len, config.seq_len),
    )


def _of_rows(name: str, rows: Sequence[Tensor]) -> Metrics:
    """The mean over all rows of the windows, and its error."""
    mean = float(torch.cat(list(rows)).mean())
    return _with_error(name, mean, [float(part.mean()) for part in rows])


def _with_error(name: str, mean: float | None, values: Sequence[float | None]) -> Metrics:
    """A mean and its standard error over windows or prompts, whose means are `values`; of a
    perplexity exp of each. None where nothing is known."""
    known = [value for value in values if value is not None]
    if name in EXPONENTIAL and mean is not None:
        known, mean = [math.exp(value) for value in known], math.exp(mean)
    error = clustered_stderr(known, range(len(known))) if known else None
    return {name: mean, f"{name}_stderr": error}


def error_means(errors: Tensor) -> Metrics:
    """Mean and 95th percentile of relative errors, over all rows, heads and layers of them."""
    values = errors.double().numpy()
    return {
        ATTENTION_ERROR.name: float(values.mean()),
        ATTENTION_ERROR_P95.name: float(np.quantile(values, 0.95)),
    }


def error_metrics(errors: Sequence[Tensor]) -> Metrics:
    """`error_means` of all windows together. errors: of each window, fp32 of any equal shape."""
    of_windows = [error_means(of_window) for of_window in errors]
    metrics: Metrics = {}
    for name, value in error_means(torch.stack(list(errors))).items():
        metrics |= _with_error(name, value, [of_window[name] for of_window in of_windows])
    return metrics


def _chunks(windows: Sequence[Window], prefill_len: int, seq_len: int) -> list[dict[str, Any]]:
    chunks = []
    for number in range(prefill_len // CHUNK, math.ceil((seq_len - 1) / CHUNK)):
        first, stop = CHUNK * number, CHUNK * (number + 1)
        rows = slice(max(first - prefill_len, 0), stop - prefill_len)
        own = [window.scores.nll[rows] for window in windows]
        full = [window.full_nll[rows] for window in windows]
        pairs = []
        for one, two in zip(own, full, strict=True):
            pairs.append({"nll": float(one.mean()), "nll_full": float(two.mean())})
        chunk = {"first": first, "stop": stop, "num_tokens": sum(map(len, own))}
        chunks.append(chunk | {"metrics": _of_rows("perplexity", own), "windows": pairs})
    return chunks


# Texts that are decoded


class Text(NamedTuple):
    """Tokens decoded from one prompt; nll: fp64 [tokens - 1], under the full cache, of those after
    the first."""

    tokens: list[int]
    nll: Tensor


class Pair(NamedTuple):
    """A method's text beside the full cache's. scores: of the method, of the steps after the first
    along its own text."""

    own: Text
    full: Text
    scores: RowScores


def _decoded(
    attached: Attached,
    setup: Setup,
    windows: Sequence[TextWindow],
    config: RunConfig,
    loaded: LoadedModel,
    references: Memo[Any],
) -> Outcome:
    """The method's text after each window, beside the full cache's."""
    length, steps = config.prefill_len, config.max_new_tokens
    assert steps is not None, "texts are decoded"
    prompts = [window.ids for window in windows]

    def decoded(setup: Setup, first: int, prompts: Prompts) -> tuple[Tensor, Tensor, ReadStats]:
        drafts = []
        for number, prompt in enumerate(prompts, first):
            settings = config.sampling.rule() | dict(ENDLESS)
            rule = GenerationRule(loaded.model, prompt, max_new_tokens=steps, **settings)
            drafts.append(Draft(prompt, rule, f"{config.seed}/{number}/0"))
        return decode_freely(attached, setup, prompts, drafts)

    def full_texts(first: int, prompts: Prompts) -> list[Text]:
        texts = []
        tokens, _, _ = decoded(FULL, first, prompts)
        for prompt, own in zip(prompts, tokens.tolist(), strict=True):
            texts.append(Text(own, full_pass(attached, [*prompt, *own], length)[0]))
        return texts

    pairs: list[Pair] = []
    reads = ReadStats()
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        key = ("texts", tuple(map(tuple, batch)), steps, config.sampling, config.seed, first)
        full = references.get(key, partial(full_texts, first, batch))
        *made, of_batch = decoded(setup, first, batch)
        reads += of_batch
        for prompt, tokens, hidden, other in zip(batch, *made, full, strict=True):
            nll, reference = full_pass(attached, [*prompt, *tokens.tolist()], length)
            scores = score_rows(attached, hidden, tokens[1:], reference)
            pairs.append(Pair(Text(tokens.tolist(), nll), other, scores))
    samples = []
    for window, pair in zip(windows, pairs, strict=True):
        texts = {"text": pair.own.tokens, "text_full": pair.full.tokens}
        words = {name: loaded.reader.decode(tokens) for name, tokens in texts.items()}
        tokens_of = {"tokens": pair.own.tokens, "tokens_full": pair.full.tokens}
        samples.append({"place": window.place} | measures(pair) | words | tokens_of)
    return Outcome(
        {config.corpus.title: summarize_texts(pairs) | {"seq_len": length + steps} | reads.shares},
        {"prompts": samples},
        chunks=list(curve(pairs, steps)),
    )


def decode_freely(
    attached: Attached, setup: Setup, prompts: Prompts, drafts: Sequence[Draft]
) -> tuple[Tensor, Tensor, ReadStats]:
    """Decode `drafts`, all of one length, after prompts of one length, a row of replay a step.

    Returns the tokens, int [batch, new]; the final states that predicted those after the first
    [batch, new - 1, hidden_size]; the reads.
    """
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
    return tokens, torch.stack(hidden, 1), session.reads


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of a text's 4-grams that occurred in it before; None for a text too short to have
    one."""
    grams = list(zip(*(tokens[shift:] for shift in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else None


def measures(pair: Pair) -> dict[str, Any]:
    """One prompt's numbers: means over the steps after the first; differences are to the full
    cache's text. first_divergence: the first token in which the texts differ, or their length."""
    same = [one == other for one, other in zip(pair.own.tokens, pair.full.tokens, strict=True)]
    own, full = repetition(pair.own.tokens), repetition(pair.full.tokens)
    nll, nll_full = float(pair.own.nll.mean()), float(pair.full.nll.mean())
    return {
        "kl_nats": float(pair.scores.kl.mean()),
        "top1_agreement": float(pair.scores.agrees.mean()),
        "first_divergence": [*same, False].index(False),
        "nll": nll,
        "nll_full": nll_full,
        "text_nll_difference": nll - nll_full,
        "repetition": own,
        "repetition_full": full,
        "repetition_difference": None if own is None or full is None else own - full,
    }


def summarize_texts(pairs: Sequence[Pair]) -> dict[str, Any]:
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
        metrics = _mean("kl_nats", [float(pair.scores.kl[rows].mean()) for pair in pairs])
        metrics |= _mean("text_perplexity", [float(pair.own.nll[rows].mean()) for pair in pairs])
        chunk = {"first": first, "stop": stop, "num_tokens": (stop - begin) * len(pairs)}
        yield chunk | {"metrics": metrics}


def _mean(name: str, values: Sequence[float | None]) -> Metrics:
    """The mean over prompts, and its error."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else None
    return _with_error(name, mean, values)
