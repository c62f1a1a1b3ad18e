"""The row gather and its mirror, the scatter, as one Triton kernel over pinned host memory.

The kernel dereferences host memory across the link, so only the chosen rows travel, at a few hundred bytes a piece,
without a host-side copy and without the host knowing the index. What the link's latency asks for is bytes under way,
whatever the width of a row: a program moves as many whole rows at a time as `Tuning.tile_bytes` hold. Over the link a
few programs do, and leave the other multiprocessors to compute; within the device there is one for every tile.

A thread moves 16 bytes at once where slot_bytes is a multiple of 16, else 8 or 4. Of the numbers in a launch only that
width is known at compile time: counts grow from step to step, and none may compile anew in one.

Shapes as in `harness.offload.store`. Importable without CUDA; with TRITON_INTERPRET=1 set before the import it runs
on CPU tensors.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.offload.memory import Tuning

WORD_BYTES = 4
WORDS_AT_ONCE = 4  # a thread's widest access
ACCESSES_OF_A_THREAD = 4  # under way at once; more cost registers


@triton.jit(
    do_not_specialize=["num_rows", "rows_per_head", "head_stride", "capacity"],
    do_not_specialize_on_alignment=["index", "places"],
)
def _move_rows(  # type: ignore[no-untyped-def]
    slots,
    rows,
    index,
    places,  # None: rows are in the order of the index
    num_rows,  # of all batch elements and heads
    rows_per_head,
    head_stride,  # of `rows`, in rows
    capacity,
    WORDS: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals
    AT_ONCE: tl.constexpr,  # noqa: N803 - words of an access, a divisor of WORDS
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803 - accesses to a tile, rounded up to a power of two
    TO_SLOTS: tl.constexpr,  # noqa: N803
):
    access = tl.arange(0, TILE)
    tile_row = access // (WORDS // AT_ONCE)
    word = (access % (WORDS // AT_ONCE) * AT_ONCE)[:, None] + tl.arange(0, AT_ONCE)[None, :]
    for first in range(tl.program_id(0) * TILE_ROWS, num_rows, tl.num_programs(0) * TILE_ROWS):
        number = (first + tile_row).to(tl.int64)
        slot = tl.load(index + number, mask=(tile_row < TILE_ROWS) & (number < num_rows), other=-1)
        head = ((first + tile_row) // rows_per_head).to(tl.int64)
        place = number - head * rows_per_head
        if places is not None:
            place = tl.load(places + number, mask=slot >= 0, other=0)
        in_slots = slots + (((head * capacity + slot) * WORDS)[:, None] + word)
        in_rows = rows + (((head * head_stride + place) * WORDS)[:, None] + word)
        mask = (slot >= 0)[:, None]
        if TO_SLOTS:
            tl.store(in_slots, tl.load(in_rows, mask=mask), mask=mask)
        else:
            tl.store(in_rows, tl.load(in_slots, mask=mask), mask=mask)


def gather_rows(slots: Tensor, index: Tensor, rows: Tensor, places: Tensor | None, tuning: Tuning) -> None:
    """`rows[b, h, places[b, h, i]] = slots[b, h, index[b, h, i]]` where index >= 0, on the current stream."""
    _launch(slots, index, rows, places, tuning, to_slots=False)


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor, tuning: Tuning) -> None:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]` where index >= 0, on the current stream."""
    _launch(slots, index, rows, None, tuning, to_slots=True)


def warm(slots: Tensor, device: torch.device, tuning: Tuning) -> None:
    """Compile and load what moves rows as wide as those of `slots`, by launches on `device` that move none."""
    nothing = torch.full((*slots.shape[:2], 1), -1, device=device)
    rows = torch.empty((*slots.shape[:2], 1, slots.shape[3]), dtype=torch.uint8, device=device)
    for places in (None, nothing):
        gather_rows(slots, nothing, rows, places, tuning)
    scatter_rows(slots, nothing, rows, tuning)


def _launch(
    slots: Tensor, index: Tensor, rows: Tensor, places: Tensor | None, tuning: Tuning, *, to_slots: bool
) -> None:
    assert slots.is_contiguous() and rows[0, 0].is_contiguous() and (places is None or places.is_contiguous())
    if index.numel() == 0:
        return
    words = slots.shape[-1] // WORD_BYTES
    at_once = gcd(words, WORDS_AT_ONCE)
    tile_rows = max(1, tuning.tile_bytes // slots.shape[-1])
    tile = triton.next_power_of_2(tile_rows * words // at_once)
    num_tiles = triton.cdiv(index.numel(), tile_rows)
    _move_rows[(num_tiles if slots.is_cuda else min(num_tiles, tuning.num_programs),)](
        slots.view(torch.int32),
        rows.view(torch.int32),
        index.contiguous(),
        places,
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
