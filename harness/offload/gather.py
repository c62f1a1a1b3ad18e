"""Moving rows by slot index between a store and a dense buffer.

Shapes: `slots` [batch, num_kv_heads, capacity, slot_bytes], `index` int64 [batch, num_kv_heads, num_rows],
`rows` [batch, num_kv_heads, num_rows, slot_bytes]; slots and rows are contiguous uint8, slot_bytes a multiple
of 4; rows to be filled may be the first of more places a head. A negative index moves nothing: ragged counts,
and rows that are already where they should be.

Under CUDA a Triton kernel (`kernels.gather`) reads and writes pinned host memory in place, without a sync. On
the CPU `index_select` is one memcpy a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from harness.offload.tuning import DEFAULT_TUNING, Tuning


def gather_rows(
    slots: Tensor, index: Tensor, rows: Tensor, places: Tensor | None = None, tuning: Tuning = DEFAULT_TUNING
) -> None:
    """`rows[b, h, places[b, h, i]] = slots[b, h, index[b, h, i]]`; nothing where the index is negative.

    places: int64 like `index`, distinct in a head, of no meaning beside a negative index; None is i itself. A row that
    is given nothing keeps its content. Raises IndexError for an index beyond the capacity, on the CPU only.
    """
    if rows.is_cuda:
        from harness.offload.kernels import gather as kernels

        kernels.gather_rows(slots, index, rows, places, tuning)
        return
    _check(slots, index)
    words = slots.view(torch.int32), rows.view(torch.int32)
    for head in np.ndindex(*index.shape[:2]):
        _gather_head(words[0][head], index[head], words[1][head], None if places is None else places[head])


def gather_staged(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`gather_rows` to a device that cannot address `slots`: by the host, which waits for the index."""
    staged = torch.zeros(rows.shape, dtype=torch.uint8)
    gather_rows(slots, index.cpu(), staged)
    rows[index >= 0] = staged.to(rows.device)[index >= 0]


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor, tuning: Tuning = DEFAULT_TUNING) -> None:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]`, nothing where the index is negative.

    A slot may occur once in a head's index. Raises as `gather_rows`.
    """
    if rows.is_cuda:
        from harness.offload.kernels import gather as kernels

        kernels.scatter_rows(slots, index, rows, tuning)
        return
    position, moving = _positions(slots, index)
    _flat_words(slots).index_copy_(0, position[moving], _flat_words(rows)[moving])


def warm(slots: Tensor, device: torch.device, tuning: Tuning = DEFAULT_TUNING) -> None:
    """Under CUDA compile and load the kernels for rows as wide as those of `slots`, moving none."""
    if device.type == "cuda":
        from harness.offload.kernels import gather as kernels

        kernels.warm(slots, device, tuning)


def _gather_head(slots: Tensor, index: Tensor, rows: Tensor, places: Tensor | None) -> None:
    """The same of one head, in words; where nothing is left out or moved without an intermediate copy."""
    moving = (index >= 0).nonzero().view(-1)
    if places is None and len(moving) == len(index):
        torch.index_select(slots, 0, index, out=rows)
    elif len(moving):
        rows.index_copy_(0, moving if places is None else places[moving], slots.index_select(0, index[moving]))


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
