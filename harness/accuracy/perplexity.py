"""Windows of a text under a method: perplexity, per-chunk perplexity, and fidelity to the full cache.

Each window's first `prefill_len` rows attend densely; the rest are decode rows, scored against the next token and
against a dense pass of the same window, which is computed once and shared by all methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from harness.accuracy.fidelity import RowScores, score_rows
from harness.data.text import corpus_ids, first_window_offset, window_ids
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.load import LoadedModel
from harness.records.samples import clustered_stderr
from harness.replay import ReplaySession
from harness.resources import Kept
from harness.settings.config import RunConfig
from harness.settings.experiment import Outcome
from harness.setup import Setup, prepare
from harness.sizes import ReadStats
from methods.base import Row
from methods.full import Full

CHUNK = 256
"""Rows t in [256 i, 256 (i + 1)) form chunk i (Fig 12)."""

References = Kept[tuple[Tensor, Tensor]]
"""Dense passes of a model's windows: every method of a sweep is compared with the same one."""


@dataclass(frozen=True)
class Window:
    """A scored window: per-row scores of the method, the full cache's nll, and what was read."""

    scores: RowScores
    full_nll: Tensor
    reads: ReadStats


def run_perplexity(config: RunConfig, loaded: LoadedModel, references: References | None = None) -> Outcome:
    """All windows of `config` under its method.

    references: those of this model that there are; further ones are put there.

    Raises UserError for a text shorter than the windows, a window longer than the model's limit, a method that the
    lengths do not fit, or one that never ran.
    """
    if config.seq_len > loaded.max_length:
        raise UserError(f"seq_len={config.seq_len}: {loaded.name} takes at most {loaded.max_length} tokens")
    ids = corpus_ids(config.corpus, config.data, loaded.tokenizer)
    offset = first_window_offset(config.corpus, config.calibration)
    windows = window_ids(ids, seq_len=config.seq_len, num_windows=config.num_windows, offset=offset)
    references = Kept() if references is None else references
    with attach(loaded.model) as attached:
        prompt, length = max(1, config.prefill_len), config.seq_len
        rows = [Row(cached, prompt, length) for cached in range(config.prefill_len, length - 1)]
        setup = prepare(config, loaded, attached, lambda: rows)
        scored = []
        for window in tqdm(windows, desc="windows", unit="window", leave=False, disable=None):
            key = (tuple(window), config.prefill_len)
            full_nll, reference = references.get(key, partial(full_pass, attached, window, config.prefill_len))
            scored.append(_score(attached, setup, window, config.prefill_len, full_nll, reference))
    outcome = summarize(scored, config)
    return replace(outcome, methods=dict.fromkeys(outcome.metrics, asdict(setup.method)))


def _score(
    attached: Attached, setup: Setup, window: Sequence[int], prefill_len: int, full_nll: Tensor, reference: Tensor
) -> Window:
    # Row 0 sees only itself, so it can always be run as the prompt: prefill_len = 0 scores it too.
    prompt = max(1, prefill_len)
    ids = torch.tensor([window], device=attached.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    session = ReplaySession(
        attached,
        setup.method,
        codec=setup.codec,
        calibration=setup.calibration,
        final_lengths=torch.tensor([len(window)], device=attached.device),
        num_columns=len(window),
        measure_recall=True,
    )
    hidden = session.prefill(ids[:, :prompt], real[:, :prompt])[0]
    # The window's last row predicts nothing, so it is not run.
    hidden = torch.cat([hidden, session.decode(ids[:, prompt:-1], real[:, prompt:-1])[0]])[prefill_len:]
    session.reads.check_fired()
    return Window(score_rows(attached, hidden, ids[0, prefill_len + 1 :], reference), full_nll, session.reads)


def full_pass(attached: Attached, window: Sequence[int], prefill_len: int) -> tuple[Tensor, Tensor]:
    """The full cache's nll [rows] and hidden states [rows, hidden_size] on a window's scored rows."""
    ids = torch.tensor([window], device=attached.device)
    lengths = torch.tensor([len(window)], device=attached.device)
    session = ReplaySession(attached, Full(), final_lengths=lengths, num_columns=len(window))
    hidden = session.prefill(ids[:, :-1], torch.ones_like(ids[:, :-1], dtype=torch.bool))[0, prefill_len:]
    return score_rows(attached, hidden, ids[0, prefill_len + 1 :]).nll, hidden


def summarize(windows: Sequence[Window], config: RunConfig) -> Outcome:
    """Means over all scored rows; standard errors over windows (None with a single window)."""
    reads = sum((window.reads for window in windows), ReadStats(code_bits=windows[0].reads.code_bits))
    metrics: dict[str, float | None] = {"num_samples": len(windows)}
    _add(metrics, "perplexity", [window.scores.nll for window in windows], math.exp)
    _add(metrics, "perplexity_full", [window.full_nll for window in windows], math.exp)
    _add(metrics, "kl_nats", [window.scores.kl for window in windows])
    _add(metrics, "top1_agreement", [window.scores.agrees for window in windows])
    for name in ("attention_recall", *reads.sizes):
        metrics[name] = getattr(reads, name)
        metrics[f"{name}_stderr"] = _stderr([getattr(window.reads, name) for window in windows])
    samples = {"windows": [_raw(window) for window in windows]}
    return Outcome({config.corpus.title: metrics}, samples, chunks=_chunks(windows, config.prefill_len, config.seq_len))


def _add(
    metrics: dict[str, float | None], name: str, rows: Sequence[Tensor | None], of: Callable[[float], float] = float
) -> None:
    parts = [part for part in rows if part is not None]
    metrics[name] = of(float(torch.cat(parts).mean()))
    metrics[f"{name}_stderr"] = _stderr([of(float(part.mean())) for part in parts])


def _stderr(values: Sequence[float | None]) -> float | None:
    """Standard error of a mean over windows."""
    known = [value for value in values if value is not None]
    return clustered_stderr(known, range(len(known))) if known else None


def _raw(window: Window) -> dict[str, Any]:
    kl, agrees = window.scores.kl, window.scores.agrees
    return {
        "nll": float(window.scores.nll.mean()),
        "nll_full": float(window.full_nll.mean()),
        "kl_nats": None if kl is None else float(kl.mean()),
        "top1_agreement": None if agrees is None else float(agrees.mean()),
        "attention_recall": window.reads.attention_recall,
        "size": window.reads.size,
    }


def _chunks(windows: Sequence[Window], prefill_len: int, seq_len: int) -> list[dict[str, Any]]:
    chunks = []
    for chunk in range(prefill_len // CHUNK, math.ceil((seq_len - 1) / CHUNK)):
        begin = max(chunk * CHUNK - prefill_len, 0)
        stop = (chunk + 1) * CHUNK - prefill_len
        parts = [(window.scores.nll[begin:stop], window.full_nll[begin:stop]) for window in windows]
        metrics: dict[str, float | None] = {}
        _add(metrics, "perplexity", [own for own, _ in parts], math.exp)
        num_tokens = sum(len(own) for own, _ in parts)
        pairs = [{"nll": float(own.mean()), "nll_full": float(full.mean())} for own, full in parts]
        first, end = CHUNK * chunk, CHUNK * (chunk + 1)
        about = {"first": first, "stop": end, "num_tokens": num_tokens}
        chunks.append(about | {"metrics": metrics, "windows": pairs})
    return chunks
