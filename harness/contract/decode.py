"""Both ways to decode a batch of random tokens: replay, all rows at once, and live, one step at a time."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.model.tiny import VOCAB_SIZE
from harness.offload.links import Link
from harness.offload.live import LiveSession
from harness.replay.replay import ReplaySession
from harness.setup import Setup
from harness.sizes import resident_share
from methods.base import Rows, Selection
from methods.evicting import EvictingState

STEPS = 10
ROWS_OF_FIRST_CALL = (8, 3)
"""Of even and odd sequences, where sequences take turns: the second call has the others."""


class Result(NamedTuple):
    """logits [batch, 1 + steps, vocab]: of the prompt's last row, and of each step's."""

    logits: Tensor
    size: float
    device_frac: float
    resident_frac: float


class Bytes(NamedTuple):
    """What crossed the link to the device in a batch's steps, and what should have.

    miscounted: tokens by which a selection's `num_read` was off the rows of its mask, at most.
    """

    crossed: int
    expected: int
    miscounted: float


def token_batch(
    prompts: tuple[int, ...], steps: int = STEPS, seed: int = 0, *, only: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids [batch, longest prompt + steps] with the prompts' padding on the left, and which of them are real.
    only: this sequence of them alone, without padding."""
    longest = max(prompts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (len(prompts), longest + steps), generator=generator)
    real = torch.arange(longest + steps) >= longest - torch.tensor(prompts)[:, None]
    if only is not None:
        columns = slice(longest - prompts[only], None)
        return ids[only : only + 1, columns], real[only : only + 1, columns]
    return ids, real


def open_replay(
    attached: Attached, setup: Setup, real: Tensor, *, more_columns: int = 0, **options: Any
) -> ReplaySession:
    """A replay session for a batch of `token_batch`; options: of `ReplaySession`."""
    return ReplaySession(
        attached,
        setup.method,
        final_lengths=real.sum(-1),
        num_columns=real.shape[1] + more_columns,
        codec=setup.codec,
        calibration=setup.calibration,
        **options,
    )


def replay(
    attached: Attached,
    setup: Setup,
    prompts: tuple[int, ...],
    prefill_len: int | None = None,
    *,
    steps: int = STEPS,
    seed: int = 0,
    only: int | None = None,
    **options: Any,
) -> Result:
    """Teacher-forced over all rows at once; `prefill_len` columns are prompt, by default the longest prompt. steps,
    seed, only: as in `token_batch`. options: of `ReplaySession`."""
    ids, real = (each.to(attached.device) for each in token_batch(prompts, steps, seed, only=only))
    columns = prefill_len or ids.shape[1] - steps
    session = open_replay(attached, setup, real, **options)
    last = session.prefill(ids[:, :columns], real[:, :columns])[:, -1:]
    rows = session.decode(ids[:, columns:], real[:, columns:])
    logits, reads = attached.logits(torch.cat([last, rows], 1)), session.reads
    return Result(logits, reads.size, reads.device_frac, reads.resident_frac)


def replay_in_turns(attached: Attached, setup: Setup, prompts: tuple[int, ...], seed: int = 0) -> Result:
    """The same in two calls, in each of which the sequences have unequal numbers of rows: the fewer ones are followed
    by padding."""
    ids, real = (each.to(attached.device) for each in token_batch(prompts, seed=seed))
    columns = ids.shape[1] - STEPS
    num_first = torch.tensor([ROWS_OF_FIRST_CALL[index % 2] for index in range(len(ids))], device=ids.device)
    session = open_replay(attached, setup, real, more_columns=STEPS)
    last = session.prefill(ids[:, :columns], real[:, :columns])[:, -1:]

    def decode(begin: Tensor, count: Tensor) -> list[Tensor]:
        """Hidden states of each sequence's rows from `begin` on."""
        rows = torch.arange(int(count.max()), device=ids.device)
        index = (columns + begin[:, None] + rows).clamp(max=ids.shape[1] - 1)
        valid = rows < count[:, None]
        return [hidden[own] for hidden, own in zip(session.decode(ids.gather(1, index), valid), valid, strict=True)]

    parts = zip(last, decode(torch.zeros_like(num_first), num_first), decode(num_first, STEPS - num_first), strict=True)
    logits, reads = attached.logits(torch.stack([torch.cat(part) for part in parts])), session.reads
    return Result(logits, reads.size, reads.device_frac, reads.resident_frac)


def open_live(attached: Attached, setup: Setup, steps: int = STEPS, **options: Any) -> LiveSession:
    """A live session; options: of `LiveSession`."""
    return LiveSession(
        attached, setup.method, max_new_tokens=steps, codec=setup.codec, calibration=setup.calibration, **options
    )


def force(session: LiveSession, prompts: tuple[int, ...], steps: int = STEPS, **chosen: Any) -> Tensor:
    """Prefill and teacher-forced steps: logits [batch, 1 + steps, vocab]. chosen: of `token_batch`."""
    ids, real = (each.to(session.attached.device) for each in token_batch(prompts, steps, **chosen))
    columns = ids.shape[1] - steps
    logits = [session.prefill(ids[:, :columns], real[:, :columns])]
    logits += [session.decode_step(ids[:, columns + step]) for step in range(steps)]
    return torch.stack(logits, 1)


def live(
    attached: Attached,
    setup: Setup,
    prompts: tuple[int, ...],
    *,
    steps: int = STEPS,
    seed: int = 0,
    only: int | None = None,
    **options: Any,
) -> Result:
    """The same rows one step at a time."""
    with closing(open_live(attached, setup, steps, **options)) as session:
        return result_of(session, force(session, prompts, steps, seed=seed, only=only))


def result_of(session: LiveSession, logits: Tensor) -> Result:
    """What a session decoded, before it is closed."""
    return Result(logits, session.reads.size, session.reads.device_frac, resident_frac(session))


def resident_frac(session: LiveSession) -> float:
    """What a live session keeps on the device, counted as replay counts it, mean over the sequences."""
    final, exempt = session.batch.lengths.final, session.method.num_exempt_layers
    return float(resident_share(session.states, session.codec, final, exempt, session.attached.geometry).mean())


def link_bytes(attached: Attached, setup: Setup, prompts: tuple[int, ...], link: Link) -> Bytes:
    """What crosses under host placement; the selected rows, and the exempt layers whole, are what should."""
    method, geometry = setup.method, attached.geometry
    ids, real = (each.to(attached.device) for each in token_batch(prompts))
    columns = max(prompts)
    with closing(open_live(attached, setup, placement="host", link=link)) as session:
        session.prefill(ids[:, :columns], real[:, :columns])
        selected = SelectedRows(session)
        for step in range(STEPS):
            session.decode_step(ids[:, columns + step])
        every = len(prompts) * geometry.num_kv_heads * sum(range(columns, columns + STEPS))
        whole = geometry.num_layers - method.num_exempt_layers if method.reads_all else 0
        exact, coded = session.stores[0].slot_bytes, session.stores[-1].slot_bytes
        expected = every * (method.num_exempt_layers * exact + whole * coded) + selected.number * coded
        return Bytes(session.h2d_bytes, expected, selected.miscounted)


class SelectedRows:
    """Counts the rows, of one token and KV head each, that a session's selections name from now on."""

    def __init__(self, session: LiveSession) -> None:
        self.number = 0
        self.miscounted = 0.0
        self.num_kv_heads = session.attached.geometry.num_kv_heads
        self.evicts = isinstance(session.states[0], EvictingState) if session.states else False
        for state in session.states:
            self.select = state.select
            state.select = self._listen  # type: ignore[method-assign]

    def _listen(self, layer: int, rows: Rows) -> Selection:
        selection = self.select(layer, rows)
        mask = rows.visible() if selection.mask is None else selection.mask
        read = mask[..., :-1].sum(-1).double()  # the own slot is the last; [batch, num_kv_heads or 1, rows]
        crosses = read
        if selection.mask is None and not self.evicts:  # whole, as in an exempt layer: padding crosses as well
            crosses = torch.full_like(read, mask.shape[-1] - 1)
        self.number += int(crosses.sum()) * (self.num_kv_heads // mask.shape[1])
        self.miscounted = max(self.miscounted, float((read.mean(1) - selection.num_read).abs().max()))
        return selection
