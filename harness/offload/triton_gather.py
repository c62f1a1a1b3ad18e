"""The row gather and its mirror, the scatter, as one Triton kernel over pinned host memory.

The kernel dereferences host memory across the link, so only the chosen rows travel, at a few hundred bytes a
piece, without a host-side copy and without the host knowing the index. Few programs, each with a tile of rows
in flight, keep the link busy and leave the other multiprocessors to compute. The words of a row are
contiguous and its length is known at compile time, so Triton emits 16-byte accesses wherever slot_bytes is a
multiple of 16.

Shapes as in `gather`. Importable without CUDA; with TRITON_INTERPRET=1 set before the import it runs on CPU
tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_TILE = 8
NUM_PROGRAMS_OVER_LINK = 32  # a few per cent of a data-centre GPU's multiprocessors saturate PCIe


@triton.jit
def _move_rows(  # type: ignore[no-untyped-def]
    slots,
    rows,
    index,
    num_rows,  # of all batch elements and heads
    rows_per_head,
    places_per_head,  # in `rows`
    capacity,
    WORDS: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals
    BLOCK_WORDS: tl.constexpr,  # noqa: N803 - WORDS rounded up to a power of two
    TILE: tl.constexpr,  # noqa: N803
    TO_SLOTS: tl.constexpr,  # noqa: N803
):
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    for start in range(tl.program_id(0) * TILE, num_rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE)
        slot = tl.load(index + row, mask=row < num_rows, other=-1)
        head = (row // rows_per_head).to(tl.int64)
        in_slots = slots + (head * capacity + slot)[:, None] * WORDS + word
        in_rows = rows + (head * places_per_head + row % rows_per_head)[:, None] * WORDS + word
        mask = (slot >= 0)[:, None] & (word < WORDS)
        if TO_SLOTS:
            tl.store(in_slots, tl.load(in_rows, mask=mask), mask=mask)
        else:
            tl.store(in_rows, tl.load(in_slots, mask=mask), mask=mask)


def gather_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`rows[b, h, i] = slots[b, h, index[b, h, i]]` where index >= 0, on the current stream."""
    _launch(slots, index, rows, to_slots=False)


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]` where index >= 0, on the current stream."""
    _launch(slots, index, rows, to_slots=True)


def _launch(slots: Tensor, index: Tensor, rows: Tensor, *, to_slots: bool) -> None:
    assert slots.is_contiguous() and rows[0, 0].is_contiguous()
    if index.numel() == 0:
        return
    words = slots.shape[-1] // 4
    num_tiles = triton.cdiv(index.numel(), ROWS_PER_TILE)
    num_programs = num_tiles if slots.is_cuda else min(num_tiles, NUM_PROGRAMS_OVER_LINK)
    _move_rows[(num_programs,)](
        slots.view(torch.int32),
        rows.view(torch.int32),
        index.contiguous(),
        index.numel(),
        index.shape[-1],
        rows.stride(1) // slots.shape[-1],
        slots.shape[-2],
        WORDS=words,
        BLOCK_WORDS=triton.next_power_of_2(words),
        TILE=ROWS_PER_TILE,
        TO_SLOTS=to_slots,
    )
