"""What the tests of live decoding share: every method as a case, padded batches, and both ways to run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from cases import Case
from conftest import HALF_ROTARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from harness.model.attach import Attached, attach
from harness.offload.links.emulated import EmulatedLink
from harness.offload.links.link import Link
from harness.offload.session import LiveSession
from harness.replay.session import ReplaySession
from harness.sizes import resident_share

PROMPT, STEPS = 24, 10
PROMPTS = {"even": (PROMPT,), "padded": (PROMPT, 15)}
"""Real prompt tokens of the sequences of a batch."""
TOLERANCE = 1e-4


FAMILIES = ("llama", "gqa", "opt", "phi3", "gpt_neox")


class Result(NamedTuple):
    """logits [batch, 1 + steps, vocab]: of the prompt's last row, and of each step's."""

    logits: Tensor
    kv_frac: float
    device_frac: float
    resident_frac: float


@cache
def tiny(family: str) -> PreTrainedModel:
    """A tiny random model, one for all tests."""
    shapes = {
        "llama": ("llama", {"num_key_value_heads": 4}),
        "gqa": ("llama", {"num_key_value_heads": 2}),
        "opt": ("opt", {"word_embed_proj_dim": 64}),
        "phi3": ("phi3", {"num_key_value_heads": 2, "rope_parameters": HALF_ROTARY}),
        "gpt_neox": ("gpt_neox", {}),
    }
    model_type, shape = shapes[family]
    return tiny_model(model_type, **shape)


@cache
def calibration(num_kv_heads: int, head_dim: int) -> dict[str, Tensor]:
    """A random rotation per layer and KV head: no symmetry that could hide a transposed one."""
    generator = torch.Generator().manual_seed(5)
    rotation = torch.linalg.qr(torch.randn(4, num_kv_heads, head_dim, head_dim, generator=generator)).Q
    return {"rotation": rotation}


def calibration_of(attached: Attached) -> dict[str, Tensor]:
    """The calibration of a tiny model."""
    return calibration(attached.geometry.num_kv_heads, attached.geometry.head_dim)


def token_batch(prompts: tuple[int, ...], steps: int = STEPS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [batch, longest prompt + steps] with the prompts' padding on the left, and which of them are real."""
    longest = max(prompts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 256, (len(prompts), longest + steps), generator=generator)
    real = torch.arange(longest + steps) >= longest - torch.tensor(prompts)[:, None]
    return ids, real


def replay(attached: Attached, case: Case, prompts: tuple[int, ...], prefill_len: int | None = None) -> Result:
    """Teacher-forced over all rows at once; `prefill_len` columns are prompt, by default the longest prompt."""
    ids, real = token_batch(prompts)
    columns = prefill_len or max(prompts)
    session = ReplaySession(
        attached,
        case.method,
        final_lengths=real.sum(-1),
        num_columns=ids.shape[1],
        codec=case.codec,
        calibration=calibration_of(attached),
    )
    last = session.prefill(ids[:, :columns], real[:, :columns])[:, -1:]
    rows = session.decode(ids[:, columns:], real[:, columns:])
    reads = session.reads
    logits = attached.logits(torch.cat([last, rows], 1))
    return Result(logits, reads.kv_frac, reads.device_frac, reads.resident_frac)


def open_live(attached: Attached, case: Case, steps: int = STEPS, **options) -> LiveSession:
    """A live session of a case on a tiny model."""
    return LiveSession(
        attached,
        case.method,
        max_new_tokens=steps,
        codec=case.codec,
        calibration=calibration_of(attached),
        **options,
    )


def force(session: LiveSession, prompts: tuple[int, ...], steps: int = STEPS) -> Tensor:
    """Prefill and teacher-forced steps: logits [batch, 1 + steps, vocab]."""
    ids, real = token_batch(prompts, steps)
    columns = max(prompts)
    logits = [session.prefill(ids[:, :columns], real[:, :columns])]
    logits += [session.decode_step(ids[:, columns + step]) for step in range(steps)]
    return torch.stack(logits, 1)


def live(attached: Attached, case: Case, prompts: tuple[int, ...], **options) -> Result:
    """The same rows one step at a time."""
    session = open_live(attached, case, **options)
    logits = force(session, prompts)
    reads = session.reads
    result = Result(logits, reads.kv_frac, reads.device_frac, live_resident_frac(session))
    session.close()
    return result


def live_resident_frac(session: LiveSession) -> float:
    """What the state of a live session keeps, counted as replay counts it."""
    state = session.caches[-1].state
    return 0.0 if state is None else float(resident_share(state).mean())


@contextmanager
def attached_with_link(family: str = "gqa", bytes_per_s: float = 1e12) -> Iterator[tuple[Attached, Link]]:
    """A tiny model under our attention, and a link that costs nothing."""
    with attach(tiny(family)) as attached, EmulatedLink(bytes_per_s) as link:
        yield attached, link


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """Of two tensors of one shape; NaN where one of them holds one."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max())
