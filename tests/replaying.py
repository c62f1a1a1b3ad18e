"""What the tests of replay share: models, padded batches, and runs of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch

from harness.model.attach import attach
from harness.model.budgets import ReadStats
from harness.model.prompts import calibrate
from harness.replay.session import ReplaySession
from tests.cases import Case
from tests.living import calibration, tiny

LENGTH, PROMPT = 56, 19
RAGGED = ((PROMPT, LENGTH), (1, 30), (11, 24))
"""(prompt, length) of the sequences of a padded batch."""
TOLERANCE = 1e-4

every_model = pytest.mark.parametrize("model", [*map(tiny, ("llama", "gqa", "opt"))], ids=("llama", "gqa", "opt"))


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


RAGGED_IDS = [token_ids(length, seed) for seed, (_, length) in enumerate(RAGGED)]


def open_session(attached, case: Case, final_lengths, num_columns: int, **options) -> ReplaySession:
    geometry = attached.geometry
    return ReplaySession(
        attached,
        case.method,
        codec=case.codec,
        calibration=calibration(geometry.num_kv_heads, geometry.head_dim),
        final_lengths=torch.tensor(final_lengths),
        num_columns=num_columns,
        **options,
    )


def pad(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), 7)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place] = torch.tensor(tokens, dtype=torch.long)
        valid[row, place] = True
    return ids, valid


class Run(NamedTuple):
    logits: list[torch.Tensor]
    """Of each sequence's decode rows."""
    reads: ReadStats
    errors: torch.Tensor | None = None
    """Of the attention outputs, where they were measured."""


def run(attached, case: Case, sequences, prompts, *, calls=(), multiplicity=None, **options) -> Run:
    """Replay a padded batch; `calls`: columns at which the decode rows are cut into several calls."""
    batch_prompt, valid = pad([ids[:p] for ids, p in zip(sequences, prompts, strict=True)], left=True)
    rest, real = pad([ids[p:] for ids, p in zip(sequences, prompts, strict=True)], left=False)
    lengths = [len(ids) for ids in sequences]
    session = open_session(attached, case, lengths, batch_prompt.shape[1] + rest.shape[1], **options)
    session.prefill(batch_prompt, valid, multiplicity)
    edges = [0, *calls, rest.shape[1]]
    hidden = [
        session.decode(rest[:, start:stop], real[:, start:stop], multiplicity)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    logits = attached.logits(torch.cat(hidden, 1))
    errors = session.attention_errors if session.measure_errors else None
    return Run([rows[mask] for rows, mask in zip(logits, real, strict=True)], session.reads, errors)


def run_one(model, case: Case, ids=None, prompt: int = PROMPT, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, [ids or token_ids(LENGTH)], [prompt], **options)


def run_ragged(model, case: Case, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, RAGGED_IDS, [prompt for prompt, _ in RAGGED], **options)


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape
    difference = float((got - expected).abs().max())
    assert difference <= tolerance, f"largest difference {difference:.3g}"


@contextmanager
def watched(note: Callable, handlers: Iterable) -> Iterator[None]:
    """Calls note(layer, query, key, value, output) after each attention of `handlers`."""

    def watching(attention):
        def watch(handler, layer, query, key, value):
            output = attention(handler, layer, query, key, value)
            note(layer, query, key, value, output)
            return output

        return watch

    with pytest.MonkeyPatch.context() as patch:
        for handler in handlers:
            patch.setattr(handler, "attention", watching(handler.attention))
        yield


def calibrated(
    attached, method, text: list[int]
) -> tuple[dict[str, torch.Tensor], list[tuple[np.ndarray, np.ndarray]]]:
    """What a method measures of a text, and of each layer the query and key that it measures, [heads, tokens,
    head_dim]."""
    seen, measure = [], type(method).calibrate

    def noting(method, query, key, geometry, earlier):
        seen.append((query.double().numpy(), key.double().numpy()))
        return measure(method, query, key, geometry, earlier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "calibrate", noting)
        measured = calibrate(attached, method, text)
    assert len(seen) == attached.geometry.num_layers
    return measured, seen


def attention_of(model, layer: int) -> torch.nn.Module:
    """The attention module of a layer of a tiny model."""
    stack = model.model.decoder if model.config.model_type == "opt" else model.model
    return stack.layers[layer].self_attn
