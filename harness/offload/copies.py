"""Long rows between a store and a dense buffer: rectangles of bytes, one asynchronous copy each.

The rows of a head lie side by side, in a store and in a buffer, and its heads at equal distances. So the first n slots
of every head, or a column of each, are a rectangle: a head a line, n * slot_bytes wide. A copy engine takes one whole
by `cudaMemcpy2DAsync`, of `cuda.bindings`, which PyTorch's CUDA build brings along; where it is missing the lines are
queued one by one. Within one memory a rectangle is copied as any tensor.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from harness.offload.request import Part
from harness.offload.runtime import cuda_runtime


def copy_heads(source: Tensor, target: Tensor) -> None:
    """`target.copy_(source)`, [batch, num_kv_heads, n, slot_bytes], the rows of a head side by side on either side.

    Asynchronous on the current stream between the device and page-locked memory; raises as `copy_rectangle`.
    """
    copy_rectangle(_lines(source), _lines(target))


def copy_part(slots: Tensor, rows: Tensor, part: Part) -> None:
    """Copies the slots [batch, num_kv_heads, capacity, slot_bytes] of a part to its rows [n, slot_bytes], in at most
    three rectangles; otherwise as `copy_heads`."""
    for source, target in rectangles(slots, rows, part):
        copy_rectangle(source, target)


def rectangles(slots: Tensor, rows: Tensor, part: Part) -> list[tuple[Tensor, Tensor]]:
    """The slots of a part and the rows that they fill, as pairs of views [heads, bytes of a head]: the rest of a first
    head, whole heads, and the begin of a last one, as far as the part has them.

    rows: [places from the part's first row to its last, slot_bytes], contiguous.
    """
    if part.begin == part.end:
        return []
    count, heads = part.num_slots, slots.flatten(0, 1)
    to_next_head = part.place(count) * rows.shape[-1]
    whole = min(-(-part.begin // count) * count, part.end)
    last = max(part.end // count * count, whole)
    found = []
    for begin, end in pairwise((part.begin, whole, last, part.end)):
        if begin < end:
            (head, slot), width = divmod(begin, count), min(end - begin, count)
            height = (end - begin) // width
            lines = heads[head : head + height, slot : slot + width].flatten(1)
            first = rows[part.place(begin) - part.place(part.begin) :]
            found.append((lines, first.as_strided((height, lines.shape[1]), (to_next_head, 1))))
    return found


def copy_rectangle(source: Tensor, target: Tensor) -> None:
    """`target.copy_(source)`, uint8 [lines, bytes of a line]. RuntimeError with CUDA's name of what went wrong."""
    if source.device == target.device:
        target.copy_(source)
    elif (runtime := cuda_runtime()) is None:
        for from_line, to_line in zip(source, target, strict=True):
            to_line.copy_(from_line, non_blocking=True)
    elif source.numel():
        _memcpy_2d(runtime, source, target)


def _memcpy_2d(runtime: ModuleType, source: Tensor, target: Tensor) -> None:
    kinds = runtime.cudaMemcpyKind
    kind = kinds.cudaMemcpyHostToDevice if target.is_cuda else kinds.cudaMemcpyDeviceToHost
    stream = torch.cuda.current_stream(target.device if target.is_cuda else source.device).cuda_stream
    height, width = source.shape
    (error,) = runtime.cudaMemcpy2DAsync(
        target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0), width, height, kind, stream
    )
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpy2DAsync of {height} x {width} bytes: {error.name}")


def _lines(rows: Tensor) -> Tensor:
    """[batch, num_kv_heads, n, slot_bytes] as [heads, bytes of a head], a view."""
    return rows.flatten(2).flatten(0, 1)
