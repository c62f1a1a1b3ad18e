"""Moving rows by slot index between a store and a dense buffer.

Shapes: `slots` [batch, num_kv_heads, capacity, slot_bytes], `index` int64 [batch, num_kv_heads, num_rows],
`rows` [batch, num_kv_heads, num_rows, slot_bytes]; slots and rows are contiguous uint8, slot_bytes a multiple
of 4; rows to be filled may be the first of more places a head. A negative index moves nothing: ragged counts,
and rows that are already where they should be.

Under CUDA a Triton kernel (`triton_gather`) reads and writes pinned host memory in place, without a sync. On
the CPU `index_select` is one memcpy a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(slots: Tensor, index: Tensor, rows: Tensor) -> int | Tensor:
    """`rows[b, h, i] = slots[b, h, index[b, h, i]]`; a row whose index is negative keeps its content.

    Returns the number of rows moved, under CUDA as a 0-d tensor on the device (reading it would wait).
    Raises IndexError for an index beyond the capacity, on the CPU only.
    """
    if rows.is_cuda:
        from harness.offload import triton_gather

        triton_gather.gather_rows(slots, index, rows)
        return (index >= 0).sum()
    _check(slots, index)
    heads = (each.flatten(0, 1) for each in (slots.view(torch.int32), index, rows.view(torch.int32)))
    return sum(_gather_head(*head) for head in zip(*heads, strict=True))


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> int | Tensor:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]`, nothing where the index is negative.

    A slot may occur once in a head's index. Returns and raises as `gather_rows`.
    """
    if rows.is_cuda:
        from harness.offload import triton_gather

        triton_gather.scatter_rows(slots, index, rows)
        return (index >= 0).sum()
    position, kept = _positions(slots, index)
    _flat_words(slots).index_copy_(0, position[kept], _flat_words(rows)[kept])
    return len(kept)


def _gather_head(slots: Tensor, index: Tensor, rows: Tensor) -> int:
    """The same of one head, in words; where nothing is left out without an intermediate copy."""
    kept = (index >= 0).nonzero().view(-1)
    if len(kept) == len(index):
        torch.index_select(slots, 0, index, out=rows)
    elif len(kept):
        rows.index_copy_(0, kept, slots.index_select(0, index[kept]))
    return len(kept)


def _flat_words(rows: Tensor) -> Tensor:
    """[..., num_rows, bytes] as 32-bit words [all rows, words], a view."""
    return rows.view(torch.int32).view(-1, rows.shape[-1] // 4)


def _positions(slots: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where each indexed row lies among all flattened slots, and which of the indices are not negative."""
    _check(slots, index)
    batch, num_kv_heads, capacity, _ = slots.shape
    first = torch.arange(0, batch * num_kv_heads * capacity, capacity).view(batch, num_kv_heads, 1)
    return (first + index).view(-1), (index >= 0).view(-1).nonzero().view(-1)


def _check(slots: Tensor, index: Tensor) -> None:
    capacity, largest = slots.shape[2], int(index.max()) if index.numel() else -1
    if largest >= capacity:
        raise IndexError(f"slot index {largest} is beyond the capacity of {capacity} slots")
