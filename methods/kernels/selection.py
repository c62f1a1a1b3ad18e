"""Triton kernels of the choice in `methods.selection`: two launches instead of about thirty.

One program serves a query row of one set. The first kernel reduces the scores of a set's query heads to one. The second
finds the least score that is taken, eight bits at a time, since fp32 numbers order as integers do, and takes all above
it. Rows are read in tiles, so no kernel is compiled for a number of slots, which grows with every step.

Equal to the torch code bit for bit. With TRITON_INTERPRET=1 set before Triton is imported they run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.base import Rows

ELEMENTS = 1024
"""Scores that a program holds in registers at a time."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Smaller values are hidden."""


@triton.jit(do_not_specialize=["slots", "alpha"])
def _relative(  # type: ignore[no-untyped-def]
    scores,
    tokens,  # the position of each slot's token
    positions, relative, within, alpha, slots, sets, rows, group,
    batch_stride, set_stride,  # of `tokens`
    HEADS: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals; `group` rounded up
    TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    row, of_all = program % rows, program // rows
    batch = of_all // sets
    tokens += batch.to(tl.int64) * batch_stride + of_all % sets * set_stride
    position = tl.load(positions + batch * rows + row)
    head = tl.arange(0, HEADS)[:, None]
    of_head = scores + ((of_all.to(tl.int64) * group + head) * rows + row) * slots
    relative += program.to(tl.int64) * slots
    best = tl.full((HEADS, TILE), float("-inf"), tl.float32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        best = tl.maximum(best, seen)
    best = tl.max(best, 1)
    best = tl.where(best == float("-inf"), 0.0, best)[:, None]
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        visible = (slot < slots) & (tl.load(tokens + slot, mask=slot < slots, other=0) < position)
        seen = tl.load(of_head + slot, mask=visible & (head < group), other=float("-inf"))
        nearest = tl.max(seen - best, 0)
        tl.store(relative + slot, nearest, mask=slot < slots)
        count += (nearest >= -alpha).to(tl.int32)
    tl.store(within + program, tl.sum(count, 0))


@triton.jit
def _ordered(values):
    """fp32 as unsigned integers of the same order, 0 for hidden values."""
    bits = tl.where(values == 0, 0.0, values).to(tl.uint32, bitcast=True)  # zeros of either sign are equal
    ordered = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)
    return tl.where(values >= LOWEST, ordered, 0)


@triton.jit(do_not_specialize=["slots"])
def _take_largest(  # type: ignore[no-untyped-def]
    values, within, whole, cached,
    order,  # None: slots are taken as they lie
    mask, taken, slots, sets, rows,
    FRAC: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
    MEAN_OF: tl.constexpr,  # noqa: N803 - sets whose mean number `within` bounds the count, rounded up; 0: none does
):  # fmt: skip
    program = tl.program_id(0)
    row, batch = program % rows, program // rows // sets
    count = (tl.load(whole + batch * rows + row).to(tl.float64) * tl.full((), FRAC, tl.float64)).to(tl.int64)
    count = tl.minimum(tl.maximum(count, LEAST), tl.load(cached + batch * rows + row).to(tl.int64))
    if MEAN_OF > 0:
        one = tl.arange(0, MEAN_OF)
        counts = tl.load(within + (batch * sets + one) * rows + row, mask=one < sets, other=0)
        count = tl.minimum(count, tl.maximum(tl.sum(counts.to(tl.int64), 0) // sets, 1))
    if program // rows % sets == 0:
        tl.store(taken + batch * rows + row, count.to(tl.float64))

    values += program.to(tl.int64) * slots
    mask += program.to(tl.int64) * slots
    wanted = count.to(tl.int32)  # of those that begin as `least` does, the largest so many
    least = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 256)
    for place in range(24, -1, -8):
        number = tl.zeros((256,), tl.int32)
        for start in range(0, slots, TILE):
            slot = start + tl.arange(0, TILE)
            ordered = _ordered(tl.load(values + slot, mask=slot < slots, other=float("-inf")))
            alike = (ordered > 0) & ((ordered ^ least) >> place < 256)
            number += tl.histogram((ordered >> place & 255).to(tl.int32), 256, mask=alike)
        alike_in_all = tl.sum(number, 0)
        wanted = tl.minimum(wanted, alike_in_all)
        above = alike_in_all - tl.cumsum(number, 0)  # with a larger digit
        found = (above < wanted) & (above + number >= wanted)
        least |= tl.sum(tl.where(found, digit, 0), 0).to(tl.uint32) << place
        wanted -= tl.sum(tl.where(found, above, 0), 0)

    equal_before = 0
    if order is not None:
        order += (program // rows).to(tl.int64) * slots
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        within_row = slot < slots
        if order is not None:
            slot = tl.load(order + slot, mask=within_row, other=0)
        ordered = _ordered(tl.load(values + slot, mask=within_row, other=float("-inf")))
        equal = ((ordered == least) & (ordered > 0)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        chosen = (ordered > least) | ((equal > 0) & (rank <= wanted))
        tl.store(mask + slot, chosen & (count > 0), mask=within_row)
        equal_before += tl.sum(equal, 0)


def relative(scores: Tensor, rows: Rows, alpha: float) -> tuple[Tensor, Tensor]:
    """Each set's r (see `Selecting.reduced`), -inf where a row sees no token, fp32 [batch, sets, rows,
    slots], and how many tokens have r >= -alpha, int32 [batch, sets, rows].

    scores: [batch, sets, heads of a set, rows, slots]; those of slots that are not visible may be anything.
    """
    batch, sets, group, num_rows, slots = scores.shape
    tokens = rows.slot_positions
    found = scores.new_empty((batch, sets, num_rows, slots), dtype=torch.float32)
    within = scores.new_empty((batch, sets, num_rows), dtype=torch.int32)
    heads = triton.next_power_of_2(group)
    shape = (slots, sets, num_rows, group)
    strides = (tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0)
    data = (scores.contiguous(), tokens, rows.positions.contiguous(), found, within, alpha)
    tile = max(1, ELEMENTS // heads)
    _relative[(batch * sets * num_rows,)](*data, *shape, *strides, HEADS=heads, TILE=tile)
    return found, within


def largest(
    values: Tensor, within: Tensor | None = None, order: Tensor | None = None,
    *, frac: float, least: int, whole: Tensor, cached: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mask of each row's largest values, and their number, fp64 [batch, rows]. Equal values: the lowest slots first.

    values: fp32 [batch, sets, rows, slots], -inf where hidden. within: [batch, sets, rows]; its mean over the sets, at
    least 1, bounds the number. The cap also does: floor(frac * whole), at least `least`, at most `cached`.
    whole, cached: int [batch, rows]. order: int64 [batch, sets, slots], the order of equal values; None: by slot.
    """
    batch, sets, num_rows, slots = values.shape
    values = values.contiguous()
    mask = torch.empty_like(values, dtype=torch.bool)
    taken = values.new_empty((batch, num_rows), dtype=torch.float64)
    order = None if order is None else order.contiguous()
    mean_of = 0 if within is None else triton.next_power_of_2(sets)
    given = (values, values if within is None else within, whole.contiguous(), cached.contiguous(), order)
    cap = {"FRAC": frac, "LEAST": least, "MEAN_OF": mean_of}
    grid = (batch * sets * num_rows,)
    _take_largest[grid](*given, mask, taken, slots, sets, num_rows, **cap, TILE=ELEMENTS, num_warps=8)
    return mask, taken
