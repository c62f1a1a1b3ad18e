"""Windows of a text under a method: perplexity, per-chunk perplexity, and fidelity to the full
cache.

Each window's first `prefill_len` rows attend densely; the rest are decode rows, scored against the
next token and against the full cache on the same window, which runs once and is shared by all
methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from harness.model.load import LoadedModel
from harness.model.resources import Memo
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup, prepare
from harness.results.metrics import ATTENTION_ERROR, ATTENTION_ERROR_P95
from harness.results.samples import LAYERS, clustered_stderr
from harness.scoring.progress import bar
from harness.settings.config import RunConfig
from harness.settings.kinds import Outcome
from methods.base import TokenCounts
from methods.full import Full

HEAD_CHUNK = 128
"""Rows that pass the output head at once; only final hidden states of a window are kept."""
MAX_NLL = 300.0
"""Nats a token of which perplexity, exp of it, and its square are numbers; a model that fits a text
has below 20."""
CHUNK = 256
"""Rows t in [256 i, 256 (i + 1)) form chunk i (Fig 12)."""
FULL = Setup(Full(), codec=None, calibration=None)


Reference = tuple[Tensor, Tensor]
"""Of the full cache on the scored rows of a window: nll, fp64 [rows] on the CPU, and final hidden
states [rows, hidden_size]."""


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


def run_perplexity(
    config: RunConfig, loaded: LoadedModel, references: Memo[Reference] | None = None
) -> Outcome:
    """All windows of `config` under its method.

    references: kept passes of the full cache over this model's windows; new ones are added.

    Raises UserError for a text shorter than the windows, a window longer than the model's limit, a
    method that the lengths do not fit or that never ran, and a perplexity that overflows.
    """
    if config.seq_len > loaded.max_length:
        raise UserError(
            f"seq_len={config.seq_len}: {loaded.name} takes at most {loaded.max_length} tokens"
        )
    windows = windows_of(config, loaded.reader, config.seq_len)
    references = Memo() if references is None else references
    with attach(loaded.model, loaded.prompts) as attached:
        prompt, length = max(1, config.prefill_len), config.seq_len
        rows = [
            TokenCounts(cached, prompt, length) for cached in range(config.prefill_len, length - 1)
        ]
        setup = prepare(config, loaded, attached, lambda: rows)
        scored = []
        is_full = setup.method.reads_all and setup.codec is None
        score = _score_full if is_full else _score
        for window in bar(windows, desc="windows", unit="window"):
            scored.append(score(attached, setup, window, config.prefill_len, references))
    outcome = summarize(scored, config)
    return replace(outcome, methods=dict.fromkeys(outcome.metrics, asdict(setup.method)))


def _score(
    attached: Attached,
    setup: Setup,
    window: TextWindow,
    prefill_len: int,
    references: Memo[Reference],
) -> Window:
    """A window under a method, beside the full cache's pass over it, which runs if it is not
    kept."""
    key = (tuple(window.ids), prefill_len)
    full_nll, reference = references.get(key, partial(full_pass, attached, window.ids, prefill_len))
    hidden, ids, session = _hidden(attached, setup, window.ids, prefill_len)
    scores = score_rows(attached, hidden, ids[0, prefill_len + 1 :], reference)
    return _window(window, session, scores, full_nll)


def _score_full(
    attached: Attached,
    setup: Setup,
    window: TextWindow,
    prefill_len: int,
    references: Memo[Reference],
) -> Window:
    """A window under the full cache: one pass, which is kept for the methods that follow."""
    hidden, ids, session = _hidden(attached, setup, window.ids, prefill_len)
    key = (tuple(window.ids), prefill_len)
    nll, _ = references.get(key, partial(_reference, attached, hidden, ids, prefill_len))
    scores = RowScores(nll, kl=torch.zeros_like(nll), agrees=torch.ones_like(nll))
    return _window(window, session, scores, nll)


def _window(
    window: TextWindow, session: ReplaySession, scores: RowScores, full_nll: Tensor
) -> Window:
    session.reads.check_fired()
    errors, dense_layers = session.attention_errors, session.method.dense_layers
    return Window(window.place, scores, full_nll, session.reads, errors, dense_layers)


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
    prompt = max(1, prefill_len)
    ids = torch.tensor([window], device=attached.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    session = setup.replay(
        attached,
        torch.tensor([len(window)], device=attached.device),
        len(window),
        measure_recall=True,
        measure_errors=True,
    )
    hidden = session.prefill(ids[:, :prompt], real[:, :prompt])[0]
    hidden = torch.cat([hidden, session.decode(ids[:, prompt:-1], real[:, prompt:-1])[0]])[
        prefill_len:
    ]
    return hidden, ids, session


def as_perplexity(nll: float, where: str) -> float:
    """exp of a mean negative log-likelihood in nats; UserError, which names `where`, for one that
    is no number."""
    if not nll <= MAX_NLL:
        raise UserError(
            f"{where}: perplexity overflows, the mean negative log-likelihood is {nll:.4g} nats a "
            f"token (at most {MAX_NLL:g}): the model does not fit the text; choose another model, "
            "model.dtype or corpus"
        )
    return math.exp(nll)


def summarize(windows: Sequence[Window], config: RunConfig) -> Outcome:
    """Means over all scored rows; standard errors over windows (None with a single window)."""
    reads = sum((window.reads for window in windows), ReadStats())
    metrics: dict[str, float | None] = {"num_samples": len(windows)}
    _add(metrics, "perplexity", [window.scores.nll for window in windows])
    _add(metrics, "perplexity_full", [window.full_nll for window in windows])
    _add(metrics, "kl_nats", [window.scores.kl for window in windows])
    _add(metrics, "top1_agreement", [window.scores.agrees for window in windows])
    for name in ("attention_recall", *reads.shares):
        metrics[name] = getattr(reads, name)
        metrics[f"{name}_stderr"] = _stderr([getattr(window.reads, name) for window in windows])
    num_layers = len(windows[0].errors)
    dense_layers = min(windows[0].dense_layers, num_layers - 1)
    errors = [window.errors[dense_layers:] for window in windows]
    metrics |= error_metrics(errors)
    layers = []
    for layer in range(num_layers):
        of_layer = [window.errors[layer] for window in windows]
        layers.append({"layer": layer} | error_metrics(of_layer))
    samples: dict[str, Any] = {"windows": []}
    for window, of_window in zip(windows, errors, strict=True):
        samples["windows"].append(_raw(window) | error_means(of_window))
    samples[LAYERS] = layers
    return Outcome(
        {config.corpus.title: metrics},
        samples,
        chunks=_chunks(windows, config.prefill_len, config.seq_len),
    )


def _add(
    metrics: dict[str, float | None], name: str, rows: Sequence[Tensor], where: str = ""
) -> None:
    """The mean over all rows, and its error over windows; of a perplexity exp of the mean. where:
    of the rows."""
    means = [float(part.mean()) for part in rows]
    value = float(torch.cat(list(rows)).mean())
    if name.startswith("perplexity"):
        means = [
            as_perplexity(mean, f"window {index + 1}{where}") for index, mean in enumerate(means)
        ]
        value = math.exp(value)
    metrics |= {name: value, f"{name}_stderr": _stderr(means)}


def error_means(errors: Tensor) -> dict[str, float]:
    """Mean and 95th percentile of relative errors, over all rows, heads and layers of them."""
    values = errors.double().numpy()
    return {
        ATTENTION_ERROR.name: float(values.mean()),
        ATTENTION_ERROR_P95.name: float(np.quantile(values, 0.95)),
    }


def error_metrics(errors: Sequence[Tensor]) -> dict[str, float | None]:
    """`error_means` of all windows together, each with its standard error over windows.

    errors: of each window, fp32 of any equal shape.
    """
    of_windows = [error_means(of_window) for of_window in errors]
    metrics: dict[str, float | None] = {}
    for name, value in error_means(torch.stack(list(errors))).items():
        values = [of_window[name] for of_window in of_windows]
        metrics |= {name: value, f"{name}_stderr": _stderr(values)}
    return metrics


def _stderr(values: Sequence[float | None]) -> float | None:
    """Standard error of a mean over windows."""
    known = [value for value in values if value is not None]
    return clustered_stderr(known, range(len(known))) if known else None


def _raw(window: Window) -> dict[str, Any]:
    return {
        "place": window.place,
        "nll": float(window.scores.nll.mean()),
        "nll_full": float(window.full_nll.mean()),
        "kl_nats": float(window.scores.kl.mean()),
        "top1_agreement": float(window.scores.agrees.mean()),
        "attention_recall": window.reads.attention_recall,
        "budget": window.reads.budget,
    }


def _chunks(windows: Sequence[Window], prefill_len: int, seq_len: int) -> list[dict[str, Any]]:
    chunks = []
    for chunk in range(prefill_len // CHUNK, math.ceil((seq_len - 1) / CHUNK)):
        first, stop = CHUNK * chunk, CHUNK * (chunk + 1)
        rows = slice(max(first - prefill_len, 0), stop - prefill_len)
        own, full = (
            [window.scores.nll[rows] for window in windows],
            [window.full_nll[rows] for window in windows],
        )
        metrics: dict[str, float | None] = {}
        _add(metrics, "perplexity", own, f", rows {first} to {stop - 1}")
        pairs = [
            {"nll": float(one.mean()), "nll_full": float(two.mean())}
            for one, two in zip(own, full, strict=True)
        ]
        num_tokens = sum(map(len, own))
        chunks.append(
            {
                "first": first,
                "stop": stop,
                "num_tokens": num_tokens,
                "metrics": metrics,
                "windows": pairs,
            }
        )
    return chunks
