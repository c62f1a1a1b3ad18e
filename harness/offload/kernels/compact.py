"""Lists of slots from masks, as in `harness.offload.fetch`, each by one Triton kernel with a program a head.

A program goes through its head's slots block by block and carries how many it has found, so a list is in the order of
the slots and nothing is asked of the host. No length is known at compile time: all of them change from step to step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # slots at a time, 4 a thread
NUM_WARPS = 8


@triton.jit(do_not_specialize=["heads", "batch_stride", "head_stride", "num_slots", "cap"])
def _list_slots(  # type: ignore[no-untyped-def]
    mask,
    found,
    heads,
    batch_stride,
    head_stride,
    num_slots,
    cap,
    BLOCK: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals
):
    head = tl.program_id(0).to(tl.int64)
    mask += head // heads * batch_stride + head % heads * head_stride
    found += head * cap
    count = 0
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        wanted = tl.load(mask + slot, mask=slot < num_slots, other=0).to(tl.int32)
        order = count + tl.cumsum(wanted) - 1
        tl.store(found + order, slot.to(tl.int64), mask=(wanted != 0) & (order < cap))
        count += tl.sum(wanted)
    for first in range(count, cap, BLOCK):
        order = first + tl.arange(0, BLOCK)
        tl.store(found + order, tl.full((BLOCK,), -1, tl.int64), mask=order < cap)


@triton.jit(do_not_specialize=["heads", "batch_stride", "head_stride", "num_slots", "room"])
def _list_missing(  # type: ignore[no-untyped-def]
    mask,
    resident,
    wanted,  # a head's mask, from which what stays is struck out
    missing,
    free,
    after,
    heads,
    batch_stride,
    head_stride,
    num_slots,
    room,
    BLOCK: tl.constexpr,  # noqa: N803
):
    head = tl.program_id(0).to(tl.int64)
    mask += head // heads * batch_stride + head % heads * head_stride
    wanted += head * num_slots
    resident += head * room
    missing += head * room
    free += head * room
    after += head * room
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(wanted + slot, tl.load(mask + slot, mask=slot < num_slots, other=0), mask=slot < num_slots)
    tl.debug_barrier()
    count = 0
    for first in range(0, room, BLOCK):
        place = first + tl.arange(0, BLOCK)
        held = tl.load(resident + place, mask=place < room, other=-1)
        stays = (held >= 0) & (tl.load(mask + held, mask=held >= 0, other=0) != 0)
        tl.store(wanted + held, tl.zeros((BLOCK,), tl.int1), mask=stays)
        tl.store(after + place, tl.where(stays, held, -1), mask=place < room)
        leaves = ((place < room) & ~stays).to(tl.int32)
        tl.store(free + count + tl.cumsum(leaves) - 1, place.to(tl.int64), mask=leaves != 0)
        count += tl.sum(leaves)
    tl.debug_barrier()
    count = 0
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        asked = tl.load(wanted + slot, mask=slot < num_slots, other=0).to(tl.int32)
        order = count + tl.cumsum(asked) - 1
        asked = (asked != 0) & (order < room)
        tl.store(missing + order, slot.to(tl.int64), mask=asked)
        place = tl.load(free + order, mask=asked, other=0)
        tl.store(after + place, slot.to(tl.int64), mask=asked)
        count += tl.sum(asked.to(tl.int32))
    for first in range(count, room, BLOCK):
        order = first + tl.arange(0, BLOCK)
        tl.store(missing + order, tl.full((BLOCK,), -1, tl.int64), mask=order < room)


def indices(mask: Tensor, cap: int) -> Tensor:
    """As `harness.offload.fetch.indices`."""
    batch, heads, num_slots = mask.shape
    found = torch.empty((batch, heads, cap), dtype=torch.int64, device=mask.device)
    if found.numel():
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        _list_slots[(batch * heads,)](
            mask, found, heads, *mask.stride()[:2], num_slots, cap, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return found


def missing_rows(mask: Tensor, resident: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The missing slots, the places that are free for them, and the new `resident`, all int64 [batch, heads, room]; see
    `harness.offload.fetch.missing_rows`."""
    batch, heads, num_slots = mask.shape
    missing, free, after = (torch.empty_like(resident, memory_format=torch.contiguous_format) for _ in range(3))
    if resident.numel():
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        wanted = torch.empty((batch, heads, num_slots), dtype=torch.bool, device=mask.device)
        lists = (mask, resident.contiguous(), wanted, missing, free, after)
        sizes = (heads, *mask.stride()[:2], num_slots, resident.shape[-1])
        _list_missing[(batch * heads,)](*lists, *sizes, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return missing, free, after
