"""What the tests of live decoding share: every method as a case, padded batches, and both ways to run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.checks.two_ways import STEPS, TOLERANCE, Result, Trial, largest_difference, token_batch
from harness.decode.links import EmulatedLink, Link, Ticket
from harness.decode.session import LiveSession
from harness.decode.store import Chosen, KVStore, RowFormat, SlotRequest
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.generation import ENDLESS, Draft, GenerationRule
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup
from harness.settings.codecs import codec_named
from harness.settings.config import GREEDY
from methods.codecs.split import AnyCodec, every_codec
from tests.cases import Case
from tests.conftest import tiny

PROMPT = 24
PROMPTS = {"even": (PROMPT,), "padded": (PROMPT, 15)}
"""Real prompt tokens of the sequences of a batch."""

FLIPS = {"int8": 2e-3, "fp8": 2e-2, "int4": 3e-2, "turbo4": 3e-2, "turbo3": 0.1, "int2": 0.3, "turbo2": 0.3, "int1": 1,
         "nvfp4": 0.1, "q8_0": 2e-3, "q5_1": 2e-2, "q4_0": 0.1, "kvarn4": 3e-2, "kvarn2": 0.3, "gtq3": 0.1,
         "gtq2": 0.3}  # fmt: skip
"""A value at the border of two codes may fall to either side, since live and replay round differently; one code off
moves it by (max - min) / (2^bits - 1), which on these models moves a logit by a fifth of this at most. Without steps
(`smooth`), the codec's path is held to the contract's tolerance."""

__all__ = ["STEPS", "TOLERANCE", "Result", "largest_difference", "tiny", "token_batch"]  # for tests


CPU = torch.device("cpu")


def endless(prompt: Sequence[int], count: int, family: str = "gqa", sampling=GREEDY, key: str = "") -> Draft:
    """A text of `count` tokens that no token ends."""
    rule = GenerationRule(tiny(family), prompt, max_new_tokens=count, **sampling, **ENDLESS)
    return Draft(prompt, rule, key)


def make_store(head_dim: int, codec: str | AnyCodec = "fp32", *, dtype=torch.float32, **options) -> KVStore:
    """A store of `options`, in host memory unless they say otherwise."""
    stored = codec_named(codec) if isinstance(codec, str) else codec
    slab = options.pop("slab", None)
    store = KVStore(RowFormat(stored, head_dim, dtype), **({"placement": "host", "device": CPU} | options))
    return store.allocate(slab)


class Crossed:
    """Bytes of rows that crossed the link inside the `with` block, by the store they are of."""

    def __init__(self) -> None:
        self.loaded: Counter[KVStore] = Counter()
        self.written: Counter[KVStore] = Counter()
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Crossed:
        for name, crossed in (("load", self.loaded), ("write", self.written)):
            self._patches.setattr(KVStore, name, self._counting(getattr(KVStore, name), crossed))
        return self

    @staticmethod
    def _counting(move: Callable[..., int | Tensor], crossed: Counter[KVStore]) -> Callable[..., int | Tensor]:
        def count(store: KVStore, *arguments: object, **named: object) -> int | Tensor:
            moved = move(store, *arguments, **named)
            crossed[store] += int(moved) if store.placement == "host" else 0
            return moved

        return count

    def __exit__(self, *_: object) -> None:
        self._patches.undo()


NUM_HEADS = 4
"""Query heads of every tiny model."""
FAMILIES = ("llama", "gqa", "opt", "phi3", "gpt_neox")


@cache
def calibration(num_kv_heads: int, head_dim: int) -> dict[str, Tensor]:
    """A random rotation per layer and KV head: no symmetry that could hide a transposed one; random gates of heads,
    scores of channels, moments of queries and keys, similarities of heads, and centres of queries with the planes in
    which their positions turn, by another angle in each layer."""
    generator = torch.Generator().manual_seed(5)
    rotation = torch.linalg.qr(torch.randn(4, num_kv_heads, head_dim, head_dim, generator=generator)).Q
    gates = torch.rand(4, num_kv_heads, generator=generator)
    magnitude = torch.rand(4, num_kv_heads, head_dim, generator=generator)
    factors = {name: torch.randn(rotation.shape, generator=generator) / head_dim**0.5 for name in ("query", "key")}
    moments = {name: factor @ factor.mT for name, factor in factors.items()}
    similarity = torch.rand(4, 4, num_kv_heads, num_kv_heads, generator=generator)
    half = head_dim // 2
    angle = torch.rand(4, half, generator=generator, dtype=torch.float64)
    in_planes = {
        "centre": torch.randn(4, NUM_HEADS, head_dim, generator=generator, dtype=torch.float64),
        "spread": torch.rand(4, NUM_HEADS, head_dim, generator=generator) * (torch.arange(head_dim) < half),
        "partner": torch.arange(head_dim).roll(half).expand(4, -1),
        "turn": torch.cat([-angle, angle], -1),
    }
    return {
        "rotation": rotation,
        "gates": gates,
        "magnitude": magnitude,
        **moments,
        "similarity": similarity,
        **in_planes,
    }


def calibration_of(attached: Attached) -> dict[str, Tensor]:
    """The calibration of a tiny model."""
    return calibration(attached.geometry.num_kv_heads, attached.geometry.head_dim)


def setup_of(attached: Attached, case: Case) -> Setup:
    """A case as a run has it."""
    return Setup(case.method, case.codec, calibration_of(attached))


def replay(
    attached: Attached,
    case: Case,
    prompts: tuple[int, ...],
    prefill_len: int | None = None,
    steps: int = STEPS,
    **options,
) -> Result:
    """Teacher-forced over all rows at once."""
    return Trial(attached, None, setup_of(attached, case), prompts, steps=steps).replay(prefill_len, **options)


def replay_ids(attached: Attached, case: Case, ids: Tensor, real: Tensor) -> tuple[Tensor, ReadStats]:
    """Logits [batch, new, vocab] by which each of the new tokens of `ids` [batch, prompt + new] was chosen."""
    columns, new = real.shape[1], ids.shape[1] - real.shape[1]
    lengths = {"final_lengths": real.sum(-1) + new, "num_columns": ids.shape[1]}
    session = ReplaySession(attached, case.method, codec=case.codec, calibration=calibration_of(attached), **lengths)
    last = session.prefill(ids[:, :columns], real)[:, -1:]
    rows = session.decode(ids[:, columns:-1], torch.ones_like(ids[:, columns:-1], dtype=torch.bool))
    return attached.logits(torch.cat([last, rows], 1)), session.reads


def open_live(attached: Attached, case: Case, steps: int = STEPS, **options) -> LiveSession:
    """A live session of a case on a tiny model."""
    return setup_of(attached, case).live(attached, steps, **options)


def force(session: LiveSession, prompts: tuple[int, ...], steps: int = STEPS) -> Tensor:
    """Prefill and teacher-forced steps: logits [batch, 1 + steps, vocab]."""
    return Trial(session.attached, None, None, prompts, steps=steps).force(session)


def live(attached: Attached, case: Case, prompts: tuple[int, ...], steps: int = STEPS, **options) -> Result:
    """The same rows one step at a time."""
    return Trial(attached, None, setup_of(attached, case), prompts, steps=steps).live(**options)


@contextmanager
def attached_with_link(family: str = "gqa", bytes_per_s: float = 1e12) -> Iterator[tuple[Attached, Link]]:
    """A tiny model under our attention, and a link that costs nothing."""
    with attach(tiny(family)) as attached, EmulatedLink(bytes_per_s) as link:
        yield attached, link


def of_codec(codec) -> float:
    """What flips allow: those of the coarser of keys and values."""
    allowed = [TOLERANCE]
    for of_layer in every_codec(codec) if codec else ():
        allowed += [FLIPS.get(half.name, TOLERANCE) for half in (of_layer.keys, of_layer.values)]
    return max(allowed)


class LatestLink(Link):
    """Moves nothing before it is waited for, and spoils a buffer as soon as it is promised to a transfer.

    A row that is read too early is not a number, and so is one whose buffer was given away too early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], object]] = []

    def prefetch(self, store: KVStore, request: SlotRequest, rows: Tensor) -> Ticket:
        rows[request.by_target(rows.shape[2]) >= 0 if isinstance(request, Chosen) else slice(None)] = 0xFF
        return super().prefetch(store, request, rows)

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        return super().copy(source, target.fill_(0xFF))

    def start(self, move: Callable[[], object], used: Sequence[Tensor]) -> Callable[[], object]:
        self.queue.append(move)
        return move

    def finish(self, started: Callable[[], object]) -> None:
        while started in self.queue:  # what was submitted before comes first
            self.queue.pop(0)()

    wait_moved = finish

    @torch.inference_mode()
    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    close = drain
