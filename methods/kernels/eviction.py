"""Eviction: one launch each instead of about ten and twenty. One program serves a head. The kernels
choose the token that leaves and the slot of the current token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.kernels import common

EMPTY = tl.constexpr(torch.iinfo(torch.int32).max)
"""As `methods.base.EMPTY`."""
SATURATED = tl.constexpr(255)
"""As `methods.infinigen_pool.SATURATED`."""
NEVER = tl.constexpr(torch.iinfo(torch.int64).max)


@triton.jit
def _move(slots, source, target, WIDTH: tl.constexpr, EMPTY: tl.constexpr):
    """Move one slot of a head and leave `EMPTY` behind."""
    element = tl.arange(0, triton.next_power_of_2(WIDTH))
    held = element < WIDTH
    moved = tl.load(slots + source * WIDTH + element, mask=held)
    tl.store(slots + target * WIDTH + element, moved, mask=held)
    tl.store(
        slots + source * WIDTH + element,
        tl.full(moved.shape, EMPTY, moved.dtype),
        mask=held & (target != source),
    )


@triton.jit(do_not_specialize=["own", "num_slots"])
def _place_own(
    tokens,
    data,  # of every slot tensor
    free, own, num_slots,
    WIDTHS: tl.constexpr,  # elements of a slot
    EMPTIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    tokens += head * num_slots
    gone = tl.load(tokens + own) == EMPTY
    first = own
    for start in range(0, own, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < own, other=0)
        first = tl.minimum(first, tl.min(tl.where(token == EMPTY, slot, own), 0))
    target = tl.where(gone, num_slots - 1, first)
    tl.store(free + head, tl.where(gone, -1, first).to(tl.int64))
    for part in tl.static_range(len(WIDTHS)):
        head_slots = data[part] + head * num_slots * WIDTHS[part]
        _move(head_slots, own, target, WIDTHS[part], EMPTIES[part])


@triton.jit(do_not_specialize=["slots", "num_slots", "position_stride"])
def _evict_least(
    score, tokens, positions, limits, slots, num_slots, heads, position_stride,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + head // heads * position_stride).to(tl.int64)
    limits += head // heads * 2
    budget, recent = tl.load(limits), tl.load(limits + 1)
    score += head * num_slots
    tokens += head * num_slots
    least, victim = float("inf"), 0
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        old = (slot < slots) & (token <= position - recent)
        slot_scores = tl.where(old, tl.load(score + slot, mask=old, other=0), float("inf"))
        lowest = tl.min(slot_scores, 0)
        first = tl.min(tl.where(slot_scores == lowest, slot, slots), 0)
        victim = tl.where(lowest < least, first, victim)
        least = tl.minimum(least, lowest)
    tl.store(tokens + victim, EMPTY, mask=position >= budget)


@triton.jit(do_not_specialize=["slots", "num_slots", "position_stride"])
def _use(
    chosen,
    ascending,  # the tokens in the slots, sorted
    tokens, fetches, last_fetch, positions, capacities, unprotected,
    slots, num_slots, heads, position_stride,
    POLICY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + head // heads * position_stride)
    chosen += head * slots
    tokens += head * num_slots
    fetches += head * num_slots
    last_fetch += head * num_slots
    most = 0
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        count = tl.load(fetches + slot, mask=slot < slots, other=0)
        count += tl.load(chosen + slot, mask=slot < slots, other=0).to(tl.int32)
        count = tl.where(
            tl.load(tokens + slot, mask=slot < slots, other=EMPTY) == position, 0, count
        )
        most = tl.maximum(most, tl.max(count, 0))
    saturated = (most >= SATURATED).to(tl.int32)
    rank = tl.minimum(tl.load(unprotected + head // heads), slots) - 1
    newest = tl.load(ascending + head * slots + rank)
    least = tl.full((), NEVER, tl.int64)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        own, fetched = token == position, tl.load(chosen + slot, mask=slot < slots, other=0) != 0
        count = tl.load(fetches + slot, mask=slot < slots, other=0) + fetched.to(tl.int32)
        count = tl.where(own, 0, count) >> saturated
        last = tl.where(
            own | fetched, position, tl.load(last_fetch + slot, mask=slot < slots, other=0)
        )
        tl.store(fetches + slot, count, mask=slot < slots)
        tl.store(last_fetch + slot, last, mask=slot < slots)
        score = count if POLICY == "counter" else last if POLICY == "lru" else tl.zeros_like(count)
        order = (score.to(tl.int64) << 31) + token
        least = tl.minimum(least, tl.min(tl.where(token <= newest, order, NEVER), 0))
    victim = (least & EMPTY).to(tl.int32)  # the token
    leaves = position >= tl.load(capacities + head // heads)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        token = tl.load(tokens + slot, mask=slot < slots, other=EMPTY)
        tl.store(
            tokens + slot,
            tl.full((TILE,), EMPTY, tl.int32),
            mask=leaves & (slot < slots) & (token == victim),
        )


def place_own(data: Mapping[str, Tensor], empties: Mapping[str, float], own: int) -> Tensor:
    """As `EvictingState.place_own`. data: a layer's slot tensors, `tokens` among them; empties: see
    `slot_tensors`."""
    tokens = data["tokens"]
    assert all(tensor.is_contiguous() for tensor in data.values())
    free = torch.empty((*tokens.shape[:2], 1), dtype=torch.int64, device=tokens.device)
    widths = tuple(tensor[0, 0, 0].numel() for tensor in data.values())
    values = tuple(empties[name] for name in data)
    given = (tokens, tuple(data.values()), free, own, tokens.shape[2])
    _place_own[(free.numel(),)](*given, WIDTHS=widths, EMPTIES=values, TILE=common.ELEMENTS)
    return free


def evict_least(
    score: Tensor, tokens: Tensor, slots: int, positions: Tensor, limits: Tensor
) -> None:
    """Free each head's token of the lowest score that is not recent, where more tokens than the
    budget are held.

    positions: int [batch], -1 for padding, which evicts nothing; limits: budget and recent tokens,
    int [batch, 2].
    """
    heads = tokens.shape[1]
    sizes = (slots, tokens.shape[2], heads, positions.stride(0))
    _evict_least[(len(tokens) * heads,)](
        score, tokens, positions, limits, *sizes, TILE=common.ELEMENTS
    )


def use(
    chosen: Tensor, ascending: Tensor, data: tuple[Tensor, Tensor, Tensor], positions: Tensor,
    limits: tuple[Tensor, Tensor], policy: str,
) -> None:  # fmt: skip
    """As `InfiniGenPoolState.use`. positions: int [batch], -1 for padding; data: tokens, fetches
    and last fetches; limits: capacities and numbers of unprotected tokens, int64 [batch]."""
    tokens, heads = data[0], chosen.shape[1]
    sizes = (chosen.shape[2], tokens.shape[2], heads, positions.stride(0))
    grid = (len(tokens) * heads,)
    _use[grid](
        chosen.contiguous(),
        ascending,
        *data,
        positions,
        *limits,
        *sizes,
        POLICY=policy,
        TILE=common.ELEMENTS,
    )
