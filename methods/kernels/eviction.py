"""Eviction: one launch each instead of about ten. One program serves a head. The kernels choose the
token that leaves by its score, and the slot of the current token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.kernels import coded

EMPTY = tl.constexpr(torch.iinfo(torch.int32).max)
"""As `methods.base.EMPTY`."""


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


def place_own(data: Mapping[str, Tensor], empties: Mapping[str, float], own: int) -> Tensor:
    """As `EvictingState.place_own`. data: a layer's slot tensors, `tokens` among them; empties: see
    `slot_tensors`."""
    tokens = data["tokens"]
    assert all(tensor.is_contiguous() for tensor in data.values())
    free = torch.empty((*tokens.shape[:2], 1), dtype=torch.int64, device=tokens.device)
    widths = tuple(tensor[0, 0, 0].numel() for tensor in data.values())
    values = tuple(empties[name] for name in data)
    given = (tokens, tuple(data.values()), free, own, tokens.shape[2])
    _place_own[(free.numel(),)](*given, WIDTHS=widths, EMPTIES=values, TILE=coded.ELEMENTS)
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
        score, tokens, positions, limits, *sizes, TILE=coded.ELEMENTS
    )
