"""Where cached K and V live: preallocated slots on the device or in host memory.

A slot holds one token's K and V of one KV head side by side, packed by a codec, so fetching a token is one contiguous
read of `slot_bytes`. Slots are filled in order at a column common to all heads, or at slot indices of each head's own
where a method evicts and slots are used again. Rows cross between host and device packed; they are encoded and decoded
on the device. On a CPU-only machine both memories are RAM.

    store = KVStore(batch=8, num_kv_heads=3, capacity=2048, head_dim=64, codec=Codec("int4"), placement="host", ...)
    store.write(store.pack(k, v), at=0)
    store.load(index, rows := store.rows_in(store.new_buffer(index.shape[-1]), index))
    k, v = store.unpack(rows)

What is read, a `SlotRequest` says. `load` and `write` are what a `Link` runs beside the computation; while it does, the
store belongs to the link, which keeps the order of its reads and writes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError
from harness.offload import memory
from harness.offload.memory import OWN, PinnedSlab, cuda_runtime, require_memory
from harness.offload.tuning import DEFAULT_TUNING, Tuning
from harness.settings.speed import Placement
from methods.codec import AnyCodec, Codec


class KeyValue(NamedTuple):
    """Keys and values, each [batch, num_kv_heads, n, head_dim] in the compute dtype."""

    keys: Tensor
    values: Tensor


class KVStore:
    """Slots [batch, num_kv_heads, capacity, slot_bytes] of one layer; counts what crosses the link exactly.

    dtype and device are the computation's. slab: page-locked memory that the slots of host placement are taken from,
    which asynchronous transfers and kernels need under CUDA; without one they lie in pageable memory, from which every
    transfer waits. Under managed placement the driver pages what a kernel touches; all is as on the device. tuning: of
    the link to the device. Raises UserError where the slots do not fit into memory, or for an unknown placement.
    """

    def __init__(
        self,
        *,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        codec: AnyCodec,
        placement: Placement,
        device: torch.device,
        slab: PinnedSlab | None = None,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        if placement not in get_args(Placement):
            raise UserError(f"placement={placement!r} is unknown; allowed: {', '.join(get_args(Placement))}")
        self.head_dim, self.dtype, self.codec = head_dim, dtype, codec
        self.placement: Placement = placement
        self.device, self.pinned, self.tuning = device, slab is not None, tuning
        self.slots = self._allocate((batch, num_kv_heads, capacity, self.slot_bytes), slab)
        self._rows_loaded: int | Tensor = 0
        self._rows_written: int | Tensor = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V of one KV head."""
        return slot_bytes(self.codec, self.head_dim)

    @property
    def key_bytes(self) -> int:
        """Those of the key, which come first."""
        return self.codec.keys.row_bytes(self.head_dim)

    @property
    def capacity(self) -> int:
        """Slots per batch element and KV head."""
        return self.slots.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, 0 after `free`."""
        return self.slots.numel()

    @property
    def h2d_bytes(self) -> int:
        """Payload bytes loaded over the link so far, 0 without one. Drain the link before."""
        return int(self._rows_loaded) * self.slot_bytes

    @property
    def d2h_bytes(self) -> int:
        """Payload bytes written over the link so far, 0 without one. Drain the link before."""
        return int(self._rows_written) * self.slot_bytes

    def num_rows(self, request: int | Chosen) -> int | Tensor:
        """Rows of so many slots of every head, or of the slots that are chosen."""
        return request * self.slots.shape[:2].numel() if isinstance(request, int) else request.num_rows

    def new_buffer(self, num_rows: int) -> Tensor:
        """A flat zeroed buffer on the device for `places_in` up to num_rows."""
        size = self.slots.shape[:2].numel() * (num_rows + OWN) * self.slot_bytes
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def places_in(self, buffer: Tensor, num_rows: int) -> Tensor:
        """Rows [batch, num_kv_heads, num_rows + 1, slot_bytes] at the start of a flat buffer: those that a request of
        num_rows fills, and behind each head's the place for the step's own row."""
        shape = (*self.slots.shape[:2], num_rows + OWN, self.slot_bytes)
        return buffer[: math.prod(shape)].view(shape)

    def rows_in(self, buffer: Tensor, request: SlotRequest) -> Tensor:
        """The rows [batch, num_kv_heads, n, slot_bytes] `request` fills in a flat buffer, contiguous in a head; of a
        part, the places [any, slot_bytes] from its first row to its last."""
        if isinstance(request, Part):
            places = self.places_in(buffer, request.num_slots).view(-1, self.slot_bytes)
            return places[request.place(request.begin) : request.place(request.end - 1) + 1]
        return self.places_in(buffer, num_requested(request))[:, :, :-1]

    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        """K and V [batch, num_kv_heads, n, head_dim] as packed rows [batch, num_kv_heads, n, slot_bytes]."""
        if has_kernels(self.codec, keys.device):
            from harness.offload.kernels import pack as kernels

            return kernels.pack(keys, values, self.codec, self.slot_bytes)
        rows = torch.cat([self.codec.keys.encode(keys), self.codec.values.encode(values)], dim=-1)
        room = self.slot_bytes - rows.shape[-1]
        return pad(rows, (0, room)) if room else rows

    def unpack(self, rows: Tensor) -> KeyValue:
        """K and V from rows on the device; views of `rows` where the codec stores the compute dtype."""
        end = self.key_bytes + self.codec.values.row_bytes(self.head_dim)
        keys, values = rows[..., : self.key_bytes], rows[..., self.key_bytes : end]
        shape = (self.head_dim, self.dtype)
        return KeyValue(self.codec.keys.decode(keys, *shape), self.codec.values.decode(values, *shape))

    def load(self, request: SlotRequest, rows: Tensor) -> int | Tensor:
        """Copies the requested slots into `rows` (from `rows_in`); returns and counts the bytes moved.

        A negative index leaves its row alone. Under CUDA asynchronous on the current stream from device and pinned
        memory, the count of an index being a 0-d device tensor; from pageable memory the call waits. Raises ValueError
        for more slots than there are, IndexError (CPU only) for an index beyond the capacity.
        """
        if isinstance(request, int | Part):
            moved: int | Tensor = self._copy_out(request, rows)
        else:
            request = chosen(request)
            self._load_chosen(request, rows)
            moved = request.num_rows
        if self.placement == "host":
            self._rows_loaded = self._rows_loaded + moved
        return moved * self.slot_bytes

    def _load_chosen(self, request: Chosen, rows: Tensor) -> None:
        if not rows.is_cuda or self.reachable:
            gather_rows(self.slots, request.slots, rows, request.places, self.tuning)
        else:
            gather_staged(self.slots, request.by_place(), rows)

    def write(self, rows: Tensor, at: int | Chosen | Tensor) -> int | Tensor:
        """Puts `rows` (from `pack`) into slots; returns and counts the bytes moved.

        at: the column of the first row, for all heads; or slot indices [batch, num_kv_heads, n], negative
        ones writing nothing. Asynchronous and raising as `load`.
        """
        if isinstance(at, int):
            moved: int | Tensor = self._copy_in(rows, at)
        else:
            index, moved, _ = chosen(at)
            if rows.is_cuda and not self.reachable:
                index, rows = index.cpu(), rows.cpu()
            scatter_rows(self.slots, index, rows, self.tuning)
        if self.placement == "host":
            self._rows_written = self._rows_written + moved
        return moved * self.slot_bytes

    def free(self) -> None:
        """Gives the slots back; the store holds none afterwards. Drain the link before."""
        self.slots = self.slots.new_empty(0, 0, 0, self.slot_bytes)

    def _copy_out(self, request: int | Part, rows: Tensor) -> int:
        """The first slots of every head, or a part of them; returns the number of rows."""
        if isinstance(request, Part):
            self._checked(request.num_slots)
            copy_part(self.slots, rows, request)
            return request.end - request.begin
        copy_heads(self.slots[:, :, : self._checked(request)], rows)
        return rows.shape[:3].numel()

    def _copy_in(self, rows: Tensor, at: int) -> int:
        """Rows of every head from column `at` on; returns their number. Few rows a head, as a step's own, are short
        lines: a kernel writes them where it can, else the host, from one copy of them all."""
        column = self.slots[:, :, at : self._checked(at + rows.shape[2])]
        if rows.device == column.device or rows.shape[2] * self.slot_bytes >= self.tuning.min_copy_bytes:
            copy_heads(rows, column)
        elif self.reachable:
            index = torch.arange(at, at + rows.shape[2], device=self.device)
            scatter_rows(self.slots, index.expand(*rows.shape[:3]), rows, self.tuning)
        else:
            column.copy_(rows.cpu())
        return rows.shape[:3].numel()

    @property
    def reachable(self) -> bool:
        """Whether a kernel on the device can address the slots."""
        return self.placement != "host" or self.pinned

    def _allocate(self, shape: tuple[int, ...], slab: PinnedSlab | None) -> Tensor:
        if slab is not None:
            return slab.take(shape)
        if self.placement == "managed":
            return memory.managed_empty(shape, self.device)
        home = self.device if self.placement == "device" else torch.device("cpu")
        require_memory(math.prod(shape), home)
        return torch.empty(shape, dtype=torch.uint8, device=home)

    def _checked(self, end: int) -> int:
        if not 0 <= end <= self.capacity:
            raise ValueError(f"column {end} is beyond the capacity of {self.capacity} slots")
        return end


def slot_bytes(codec: AnyCodec, head_dim: int) -> int:
    """Bytes of one token's K and V of one KV head, rounded up to a multiple of 4."""
    return -(-(codec.keys.row_bytes(head_dim) + codec.values.row_bytes(head_dim)) // 4) * 4


class Part(NamedTuple):
    """Rows `begin` to `end` of a read of the first `num_slots`, counted through one head after another: a read that
    comes in several parts into one buffer, each of few long copies."""

    begin: int
    end: int
    num_slots: int

    def place(self, row: int) -> int:
        """Where a row so counted lies in the buffer: behind each head's there is one place more."""
        return row + row // self.num_slots


class Chosen(NamedTuple):
    """Slots of each head's own, and how many they are, which is counted once for all who account for them.

    slots: int64 [batch, num_kv_heads, n], negative ones moving nothing. num_rows: those that are not negative, under
    CUDA 0-d on the device. places: which of n rows each slot belongs to, alike; distinct in a head, and of no meaning
    beside a negative slot. None: in order.
    """

    slots: Tensor
    num_rows: int | Tensor
    places: Tensor | None = None

    def by_place(self) -> Tensor:
        """The slot of each row, -1 for none."""
        if self.places is None:
            return self.slots
        n = self.slots.shape[-1]
        found = self.slots.new_full((*self.slots.shape[:-1], n + 1), -1)
        return found.scatter_(-1, self.places.masked_fill(self.slots < 0, n), self.slots)[..., :n]


SlotRequest = int | Part | Chosen | Tensor


def chosen(index: Chosen | Tensor) -> Chosen:
    """Slot indices, counted."""
    return index if isinstance(index, Chosen) else Chosen(index, num_true(index >= 0))


def num_true(mask: Tensor) -> int | Tensor:
    """How many of a mask hold; asked of no device, where it is 0-d."""
    count = mask.sum()
    return int(count) if count.is_cpu else count


def num_requested(request: int | Chosen | Tensor) -> int:
    """Rows per batch element and KV head that a request asks for, negative indices included."""
    if isinstance(request, int):
        return request
    return (request.slots if isinstance(request, Chosen) else request).shape[-1]


def tensors_of(request: SlotRequest) -> list[Tensor]:
    """What a transfer reads to know its rows."""
    parts = request if isinstance(request, Chosen) else (request,)
    return [part for part in parts if isinstance(part, Tensor)]


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


def warm_gather(slots: Tensor, device: torch.device, tuning: Tuning = DEFAULT_TUNING) -> None:
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


COMPILED = {"cuda"}
"""Kinds of devices for which the kernels are compiled."""


def has_kernels(codec: AnyCodec, device: torch.device) -> TypeGuard[Codec]:
    """Whether they know the format: K and V coded alike, in groups along head_dim, without a rotation."""
    plain = type(codec) is Codec and not codec.is_float and codec.rotation is None
    return plain and device.type in COMPILED
