"""Rows of slots in Triton: gather and scatter over pinned host memory, and lists of slots from
masks.

The gather dereferences host memory across the link, so only the chosen rows travel, a few hundred
bytes each, without a host-side copy and without the host knowing the index. The link's latency asks
for bytes under way, whatever the width of a row: a program moves as many whole rows at a time as
`TILE_BYTES` hold. Over the link a few programs move rows and leave the other multiprocessors to
compute; within the device there is one program for every tile.

Counts change from step to step and no launch may compile anew, so only the width of an access is
known at compile time: 16 bytes where slot_bytes is a multiple of 16, else 8 or 4. Shapes as in
`harness.decode.store`. With TRITON_INTERPRET=1 set before the import they run on CPU tensors.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.kernels.selection import parts_of, steps_of

NUM_PROGRAMS = 64
"""Programs that move rows over the link."""
TILE_BYTES = 4096
"""Under way in one program. All of them cover the latency of PCIe 5 (1.5 us at 55 GB/s are 80 KiB)
three times."""
WORD_BYTES = 4
WORDS_AT_ONCE = 4  # a thread's widest access
ACCESSES_OF_A_THREAD = 4  # under way at once; more cost registers
BLOCK = 1024  # slots that a program lists at a time, 4 a thread
LIST_WARPS = 8


@triton.jit(
    do_not_specialize=["num_rows", "rows_per_head", "head_stride", "capacity"],
    do_not_specialize_on_alignment=["index", "targets"],
)
def _move_rows(
    slots,
    rows,
    index,
    targets,  # None: rows are in the order of the index
    num_rows,  # of all batch elements and heads
    rows_per_head,
    head_stride,  # of `rows`, in rows
    capacity,
    WORDS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # words of an access, a divisor of WORDS
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,  # accesses to a tile, rounded up to a power of two
    TO_SLOTS: tl.constexpr,
):
    access = tl.arange(0, TILE)
    tile_row = access // (WORDS // AT_ONCE)
    word = (access % (WORDS // AT_ONCE) * AT_ONCE)[:, None] + tl.arange(0, AT_ONCE)[None, :]
    for first in range(tl.program_id(0) * TILE_ROWS, num_rows, tl.num_programs(0) * TILE_ROWS):
        number = (first + tile_row).to(tl.int64)
        slot = tl.load(index + number, mask=(tile_row < TILE_ROWS) & (number < num_rows), other=-1)
        head = ((first + tile_row) // rows_per_head).to(tl.int64)
        target = number - head * rows_per_head
        if targets is not None:
            target = tl.load(targets + number, mask=slot >= 0, other=0)
        in_slots = slots + (((head * capacity + slot) * WORDS)[:, None] + word)
        in_rows = rows + (((head * head_stride + target) * WORDS)[:, None] + word)
        mask = (slot >= 0)[:, None]
        if TO_SLOTS:
            tl.store(in_slots, tl.load(in_rows, mask=mask), mask=mask)
        else:
            tl.store(in_rows, tl.load(in_slots, mask=mask), mask=mask)


def gather_rows(slots: Tensor, index: Tensor, rows: Tensor, targets: Tensor | None) -> None:
    """`rows[b, h, targets[b, h, i]] = slots[b, h, index[b, h, i]]` where index >= 0, on the current
    stream."""
    _launch(slots, index, rows, targets, to_slots=False)


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]` where index >= 0, on the current stream."""
    _launch(slots, index, rows, None, to_slots=True)


def _launch(
    slots: Tensor, index: Tensor, rows: Tensor, targets: Tensor | None, *, to_slots: bool
) -> None:
    assert slots.is_contiguous() and rows[0, 0].is_contiguous()
    assert targets is None or targets.is_contiguous()
    if index.numel() == 0:
        return
    words = slots.shape[-1] // WORD_BYTES
    at_once = gcd(words, WORDS_AT_ONCE)
    tile_rows = max(1, TILE_BYTES // slots.shape[-1])
    tile = triton.next_power_of_2(tile_rows * words // at_once)
    num_tiles = triton.cdiv(index.numel(), tile_rows)
    _move_rows[(num_tiles if slots.is_cuda else min(num_tiles, NUM_PROGRAMS),)](
        slots.view(torch.int32),
        rows.view(torch.int32),
        index.contiguous(),
        targets,
        index.numel(),
        index.shape[-1],
        rows.stride(1) // slots.shape[-1],
        slots.shape[-2],
        WORDS=words,
        AT_ONCE=at_once,
        TILE_ROWS=tile_rows,
        TILE=tile,
        TO_SLOTS=to_slots,
        num_warps=min(32, max(4, tile // (32 * ACCESSES_OF_A_THREAD))),
    )


# Lists of slots. A program goes through one head's slots block by block and carries how many it has
# found, so a list is in the order of the slots. Where heads are few and long, it takes a part of
# them, which a launch before has counted.


@triton.jit(
    do_not_specialize=[
        "heads", "batch_stride", "head_stride", "num_slots", "cap", "parts", "part_slots",
    ]
)  # fmt: skip
def _list_slots(
    mask,
    found,
    number,  # of each head's listed slots
    counts,  # of each part of a head, int32 [head, parts]
    heads,
    batch_stride,
    head_stride,
    num_slots,
    cap,
    parts,
    part_slots,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,  # these three: see `steps_of`
    LAST: tl.constexpr,
    PARTS: tl.constexpr,
):
    head, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    mask += head // heads * batch_stride + head % heads * head_stride
    found += head * cap
    start = part * part_slots
    end = tl.minimum(start + part_slots, num_slots)
    count = 0
    if LAST == 0:
        for first in range(start, end, BLOCK):
            slot = first + tl.arange(0, BLOCK)
            count += tl.sum(tl.load(mask + slot, mask=slot < end, other=0).to(tl.int32))
        tl.store(counts + tl.program_id(0), count)
    else:
        if PARTS > 1:
            each = tl.arange(0, PARTS)
            count = tl.sum(tl.load(counts + head * parts + each, mask=each < part, other=0))
        for first in range(start, end, BLOCK):
            slot = first + tl.arange(0, BLOCK)
            wanted = tl.load(mask + slot, mask=slot < end, other=0).to(tl.int32)
            order = count + tl.cumsum(wanted) - 1
            tl.store(found + order, slot.to(tl.int64), mask=(wanted != 0) & (order < cap))
            count += tl.sum(wanted)
        if part == parts - 1:
            tl.store(number + head, tl.minimum(count, cap))
            for first in range(count, cap, BLOCK):
                order = first + tl.arange(0, BLOCK)
                tl.store(found + order, tl.full((BLOCK,), -1, tl.int64), mask=order < cap)


@triton.jit(
    do_not_specialize=[
        "heads",
        "batch_stride",
        "head_stride",
        "token_batch_stride",
        "token_head_stride",
        "num_slots",
        "room",
        "most",
    ]
)
def _list_missing(
    mask,
    tokens,
    kept,  # these two change in place
    age,
    leaving,
    wanted,  # a head's mask, from which what stays is struck out
    missing,
    targets,
    present,
    number,  # of each head's missing slots
    column,
    heads,
    batch_stride,
    head_stride,
    token_batch_stride,
    token_head_stride,
    num_slots,
    room,
    most,
    TOKEN_BITS: tl.constexpr,  # of an age; the column is above them
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    now = tl.load(column) << TOKEN_BITS
    mask += head // heads * batch_stride + head % heads * head_stride
    tokens += head // heads * token_batch_stride + head % heads * token_head_stride
    wanted += head * num_slots
    kept += head * room
    age += head * room
    present += head * room
    leaving += head * room
    missing += head * most
    targets += head * most
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(
            wanted + slot,
            tl.load(mask + slot, mask=slot < num_slots, other=0),
            mask=slot < num_slots,
        )
    tl.debug_barrier()
    count = 0
    for first in range(0, room, BLOCK):
        place = first + tl.arange(0, BLOCK)
        row = tl.load(leaving + place, mask=place < room, other=0)
        held = tl.load(kept + row, mask=place < room, other=-1)
        stays = (held >= 0) & (tl.load(mask + held, mask=held >= 0, other=0) != 0)
        tl.store(wanted + held, tl.zeros((BLOCK,), tl.int1), mask=stays)
        token = tl.load(tokens + held, mask=stays, other=0).to(tl.int64)
        tl.store(age + row, token + now, mask=stays)
        tl.store(present + row, stays, mask=place < room)
        leaves = ((place < room) & ~stays).to(tl.int32)
        order = count + tl.cumsum(leaves) - 1
        tl.store(targets + order, row, mask=(leaves != 0) & (order < most))
        count += tl.sum(leaves)
    tl.debug_barrier()
    count = 0
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        asked = tl.load(wanted + slot, mask=slot < num_slots, other=0).to(tl.int32)
        order = count + tl.cumsum(asked) - 1
        asked = (asked != 0) & (order < most)
        tl.store(missing + order, slot.to(tl.int64), mask=asked)
        target = tl.load(targets + order, mask=asked, other=0)
        tl.store(kept + target, slot.to(tl.int64), mask=asked)
        token = tl.load(tokens + slot, mask=asked, other=0).to(tl.int64)
        tl.store(age + target, token + now, mask=asked)
        tl.store(present + target, asked, mask=asked)
        count += tl.sum(asked.to(tl.int32))
    tl.store(number + head, count)
    for first in range(count, most, BLOCK):
        order = first + tl.arange(0, BLOCK)
        tl.store(missing + order, tl.full((BLOCK,), -1, tl.int64), mask=order < most)


def indices(mask: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    """As `harness.decode.store.indices`, with the number of each head's slots, int32 [batch,
    heads]."""
    batch, heads, num_slots = mask.shape
    found = torch.empty((batch, heads, cap), dtype=torch.int64, device=mask.device)
    number = torch.empty((batch, heads), dtype=torch.int32, device=mask.device)
    if number.numel():
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        parts = parts_of(num_slots, batch * heads)
        counts = number if parts == 1 else number.new_empty((batch, heads, parts))
        data = (mask, found, number, counts, heads, *mask.stride()[:2], num_slots, cap)
        for step in steps_of(parts, num_slots, 2):
            _list_slots[(counts.numel(),)](*data, **step, BLOCK=BLOCK, num_warps=LIST_WARPS)
    return found, number


def missing_rows(
    mask: Tensor, tokens: Tensor, kept: Tensor, age: Tensor, column: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gpu_cache.missing_rows`, with the number of each head's missing slots, int32 [batch,
    heads]. A target without a missing slot may be anything."""
    batch, heads, num_slots = mask.shape
    missing = kept.new_empty((batch, heads, most))
    targets = torch.empty_like(missing)
    present = torch.empty_like(kept, dtype=torch.bool)
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    tokens = tokens.expand(-1, heads, -1)
    number = torch.empty((batch, heads), dtype=torch.int32, device=mask.device)
    wanted = torch.empty((batch, heads, num_slots), dtype=torch.bool, device=mask.device)
    lists = (
        mask,
        tokens,
        kept,
        age,
        age.argsort(-1),
        wanted,
        missing,
        targets,
        present,
        number,
        column,
    )
    sizes = (heads, *mask.stride()[:2], *tokens.stride()[:2], num_slots, kept.shape[-1], most)
    blocks = {"TOKEN_BITS": 32, "BLOCK": BLOCK, "num_warps": LIST_WARPS}
    _list_missing[(batch * heads,)](*lists, *sizes, **blocks)
    return missing, targets, present, number
