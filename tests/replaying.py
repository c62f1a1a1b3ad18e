"""What the tests of replay share: every method and codec as a case, padded batches, and the reference's traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import reference as plain
import torch
from cases import CASES, Case, smooth
from living import calibration

from harness.model.attach import attach
from harness.model.tiny import tiny_model
from harness.replay import ReplaySession
from harness.sizes import ReadStats
from methods.codec import Codec, SplitCodec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen, Oracle
from methods.prompt_evicting import PromptEvicting
from methods.streaming import Streaming

LENGTH, PROMPT = 56, 19
RAGGED = ((PROMPT, LENGTH), (1, 30), (11, 24))
"""(prompt, length) of the sequences of a padded batch."""
TOLERANCE = 1e-4
EVICTING_ONCE = [case.method for case in CASES.values() if isinstance(case.method, PromptEvicting)]
TOO_SHORT = [method for method in EVICTING_ONCE if method.kept_tokens is None]
"""Methods that refuse a prompt of one token."""
WELL_APART = 1e-6
"""The least `Reference.margin` at which fp32 and fp64 must choose alike."""


MODELS = {
    "llama": tiny_model("llama", num_key_value_heads=4),
    "gqa": tiny_model("llama", num_key_value_heads=2),
    "opt": tiny_model("opt", word_embed_proj_dim=64),
}
WITHOUT_STEPS = [name for name, case in CASES.items() if case.codec is None or not isinstance(case.codec.values, Codec)]
"""Cases of which no value lies at the border of two codes, where rounding decides."""
REFERENCED = [
    name
    for name in WITHOUT_STEPS
    if type(CASES[name].method) in (Full, H2O, Streaming, Oracle, InfiniGen)
    and not name.startswith(("pool", "infinigen-coded", "infinigen-balanced"))
    and not isinstance(CASES[name].codec, SplitCodec)
]
"""Cases that the plain reference knows; others have one of their own."""
BATCHED = [name for name in WITHOUT_STEPS if CASES[name].method not in TOO_SHORT]
"""Cases that take the batch of `RAGGED`."""

every_referenced_case = pytest.mark.parametrize("name", REFERENCED)
every_case = pytest.mark.parametrize("name", BATCHED)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


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
    return Run([rows[mask] for rows, mask in zip(logits, real, strict=True)], session.reads)


def run_one(model, case: Case, ids=None, prompt: int = PROMPT, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, [ids or token_ids(LENGTH)], [prompt], **options)


def run_ragged(model, case: Case, **options) -> Run:
    with attach(model) as attached:
        return run(attached, case, RAGGED_IDS, [prompt for prompt, _ in RAGGED], **options)


_traces: dict[tuple, plain.Trace] = {}


def trace(model, name: str, ids=None, prompt: int = PROMPT) -> plain.Trace:
    """The reference's decode of one sequence, computed once."""
    ids = ids or token_ids(LENGTH)
    key = (id(model), name, tuple(ids), prompt)
    if key not in _traces:
        case = CASES[name]
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        with torch.inference_mode():
            reference = plain.Reference(
                model,
                case.method,
                final_length=len(ids),
                prefill_len=prompt,
                rotation=calibration(getattr(config, "num_key_value_heads", 4), head_dim)["rotation"],
                codec=case.codec and smooth,
            )
            _traces[key] = reference.run(ids)
    return _traces[key]


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
