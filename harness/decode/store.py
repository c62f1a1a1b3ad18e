"""Where cached keys and values live: preallocated slots on the device or in host memory.

A slot holds one token's key and value of one KV head side by side, packed by a codec, so that
fetching a token is one contiguous read of `slot_bytes`. Slots are filled in order at a column
common to all heads; where a method evicts, at slot indices of each head's own. Rows cross between
host and device packed; they are encoded and decoded on the device. On a CPU-only machine both
memories are RAM.

    store = KVStore(RowFormat(IntegerCodec("int4"), head_dim=64, dtype=torch.float16), batch=8,
                    num_kv_heads=3, capacity=2048, placement="host", device=device).allocate()
    store.write(store.format.pack(k, v), at=0)
    store.load(chosen(index), rows := store.rows_in(store.new_buffer(n), n)[:, :, :n])
    k, v = store.format.unpack(rows)

A `Link` runs `load` and `write` beside the computation, in the order in which they were asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from harness.decode import memory
from harness.decode.memory import PinnedSlab, call_cuda, cuda_runtime
from harness.settings.config import Placement
from methods import compiled
from methods.codecs.base import FLOAT_DTYPES
from methods.codecs.floats import FloatCodec
from methods.codecs.integers import IntegerCodec
from methods.codecs.split import AnyCodec

MIN_COPY_BYTES = 28 * 1024
"""A contiguous piece of this size crosses the link faster by a copy engine than by a kernel."""


class KeyValue(NamedTuple):
    """Keys and values, each [batch, num_kv_heads, n, head_dim or value_dim] in the compute
    dtype."""

    keys: Tensor
    values: Tensor


class Chosen(NamedTuple):
    """A request for each head's own slots.

    slots: int64 [batch, num_kv_heads, n]; negative ones move nothing. num_rows: number of the
    others, under CUDA numbers on the device that nobody has added up. targets: the buffer row of
    each slot, int64 like `slots`, distinct in a head; None: in order.
    """

    slots: Tensor
    num_rows: int | Tensor
    targets: Tensor | None = None

    def by_target(self, num_rows: int) -> Tensor:
        """The slot of each of the first `num_rows` buffer rows, -1 for none."""
        if self.targets is None:
            return self.slots
        found = self.slots.new_full((*self.slots.shape[:-1], num_rows + 1), -1)
        targets = self.targets.masked_fill(self.slots < 0, num_rows)
        return found.scatter_(-1, targets, self.slots)[..., :num_rows]


SlotRequest = int | slice | Chosen
"""The first n slots of every head, a range of them, or slots one by one."""


def chosen(slots: Tensor, targets: Tensor | None = None) -> Chosen:
    """A request for these slots."""
    return Chosen(slots, num_true(slots >= 0), targets)


def num_true(mask: Tensor) -> int | Tensor:
    """Number of True entries; on a GPU it stays there as a 0-d tensor (no sync)."""
    return int(np.count_nonzero(mask.numpy())) if mask.is_cpu else mask.sum()


@dataclass(frozen=True)
class RowFormat:
    """Layout of a slot: a token's key and value of one KV head.

    dtype: of the computation. value_dim: elements of a value; None: as many as of a key.
    values_in_keys: a value is the first `value_dim` elements of its key and is not stored.
    """

    codec: AnyCodec
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None
    values_in_keys: bool = False

    @property
    def key_bytes(self) -> int:
        """Bytes of the key, which comes first."""
        return self.codec.keys.row_bytes(self.head_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, a multiple of 4."""
        return -(-(self.key_bytes + self._value_bytes) // 4) * 4

    @cached_property
    def is_exact(self) -> bool:
        """True if keys and values are stored as they are computed."""
        exact = FLOAT_DTYPES.get(self.codec.keys.name)
        return isinstance(self.codec, FloatCodec) and exact == self.dtype

    @property
    def elements(self) -> int:
        """Elements of a token's key and value."""
        return self.head_dim + (0 if self.values_in_keys else self._value_size)

    @property
    def _value_size(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def _value_bytes(self) -> int:
        return 0 if self.values_in_keys else self.codec.values.row_bytes(self._value_size)

    def has_kernels(self, device: torch.device) -> TypeGuard[IntegerCodec]:
        """True if kernels take rows of this format: keys and values coded alike."""
        is_plain = isinstance(self.codec, IntegerCodec) and self.codec.is_plain
        return is_plain and self._has_one_size and device.type in compiled.COMPILED

    def has_kernels_for_exact(self, device: torch.device) -> bool:
        """True if kernels attend to rows of this format: stored as they are computed."""
        return self.is_exact and self._has_one_size and device.type in compiled.COMPILED

    @property
    def _has_one_size(self) -> bool:
        return not self.values_in_keys and self._value_size == self.head_dim

    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [batch, num_kv_heads, n, size] as packed rows [batch, num_kv_heads, n,
        slot_bytes]."""
        if self.has_kernels(keys.device):
            from harness.decode.kernels import codes as kernels

            assert isinstance(self.codec, IntegerCodec)
            return kernels.pack(keys, values, self.codec, self.slot_bytes)
        if self.is_exact:
            elements = keys if self.values_in_keys else torch.cat([keys, values], -1)
            rows = elements.contiguous().view(torch.uint8)
        else:
            rows = self.codec.keys.encode(keys)
            if not self.values_in_keys:
                rows = torch.cat([rows, self.codec.values.encode(values)], -1)
        room = self.slot_bytes - rows.shape[-1]
        return pad(rows, (0, room)) if room else rows

    def unpack(self, rows: Tensor) -> KeyValue:
        """Keys and values from rows on the device; views of `rows` where the codec stores the
        compute dtype."""
        keys = self.unpack_keys(rows)
        if self.values_in_keys:
            return KeyValue(keys, keys[..., : self._value_size])
        return KeyValue(keys, self.unpack_values(rows))

    def unpack_keys(self, rows: Tensor) -> Tensor:
        """The keys of `unpack`."""
        if self.is_exact:
            return rows.view(self.dtype)[..., : self.head_dim]
        return self.codec.keys.decode(rows[..., : self.key_bytes], self.head_dim, self.dtype)

    def unpack_values(self, rows: Tensor) -> Tensor:
        """The values of `unpack`, where they are stored."""
        if self.is_exact:
            return rows.view(self.dtype)[..., self.head_dim : self.elements]
        coded = rows[..., self.key_bytes : self.key_bytes + self._value_bytes]
        return self.codec.values.decode(coded, self._value_size, self.dtype)


@dataclass(frozen=True)
class PackedRows:
    """Rows on the device in place of a `KeyValue`. Keys and values are decoded when they are asked
    for, so that a step need not hold both.

    rows: uint8 [batch, num_kv_heads, n, slot_bytes].
    """

    rows: Tensor
    format: RowFormat

    @property
    def keys(self) -> Tensor:
        return self.format.unpack_keys(self.rows)

    @property
    def values(self) -> Tensor:
        return self.format.unpack_values(self.rows)


class KVStore:
    """Slots [batch, num_kv_heads, capacity, slot_bytes] of one layer.

    `nbytes` is known before `allocate` makes the slots. Under managed placement the driver pages
    what a kernel touches; all else is as on the device.
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        placement: Placement,
        device: torch.device,
    ) -> None:
        self.format = row_format
        self.codec = row_format.codec
        self.slot_bytes = row_format.slot_bytes
        self.batch = batch
        self.num_kv_heads = num_kv_heads
        self.heads = batch * num_kv_heads
        self.capacity = capacity
        self.nbytes = self.heads * capacity * self.slot_bytes
        self.placement = placement
        self.device = device
        self.is_reachable = placement != "host"
        """True if a kernel on the device can address the slots."""
        self.slots = torch.empty(0, dtype=torch.uint8)

    def allocate(self, home: object = None) -> KVStore:
        """Make the slots and return the store.

        home: page-locked memory for host placement, which asynchronous transfers and kernels need
        under CUDA. Without it the slots lie in pageable memory, from which every transfer waits.
        """
        shape = self.batch, self.num_kv_heads, self.capacity, self.slot_bytes
        if isinstance(home, PinnedSlab):
            self.slots, self.is_reachable = home.take(shape), True
        elif self.placement == "managed":
            self.slots = memory.managed_empty(shape, self.device)
        else:
            where = self.device if self.placement == "device" else torch.device("cpu")
            self.slots = torch.empty(shape, dtype=torch.uint8, device=where)
        return self

    def free(self) -> None:
        """Give the slots back. Drain the link before."""
        self.slots = self.slots.new_empty(0)

    def clear(self) -> None:
        """Fill the slots with zeros, as those on a disk are."""
        self.slots.zero_()

    def num_rows(self, request: SlotRequest) -> int | Tensor:
        """Rows of that many slots of every head, of a range of them, or of the chosen slots."""
        if isinstance(request, Chosen):
            return request.num_rows
        count = request if isinstance(request, int) else request.stop - request.start
        return count * self.heads

    def buffer_bytes(self, num_rows: int) -> int:
        """Bytes of a buffer for `num_rows` rows of each head and the step's own row behind them."""
        return self.heads * (num_rows + 1) * self.slot_bytes

    def new_buffer(self, num_rows: int) -> Tensor:
        """A flat zeroed buffer on the device, for `rows_in` up to num_rows."""
        return torch.zeros(self.buffer_bytes(num_rows), dtype=torch.uint8, device=self.device)

    def rows_in(self, buffer: Tensor, num_rows: int) -> Tensor:
        """Rows [batch, num_kv_heads, num_rows + 1, slot_bytes] at the start of a flat buffer: a
        request's, and behind each head's rows room for the step's own row."""
        shape = (self.batch, self.num_kv_heads, num_rows + 1, self.slot_bytes)
        return buffer[: math.prod(shape)].view(shape)

    def load(self, request: SlotRequest, rows: Tensor) -> int:
        """Copy the requested slots into `rows` [batch, num_kv_heads, n, slot_bytes], contiguous in
        a head; return the bytes moved, 0 where the device alone knows how many rows these are.

        A negative index leaves its row alone. Under CUDA asynchronous on the current stream from
        device and pinned memory, the count of chosen slots being on the device; from pageable
        memory the call waits. Raises ValueError for more slots than there are, IndexError (CPU
        only) for an index beyond the capacity.
        """
        if isinstance(request, Chosen):
            moved = request.num_rows
            if not rows.is_cuda or self.is_reachable:
                gather_rows(self.slots, request.slots, rows, request.targets)
            else:  # the host gathers, and waits for the index
                index = request.by_target(rows.shape[2])
                staged = torch.zeros(rows.shape, dtype=torch.uint8)
                gather_rows(self.slots, index.cpu(), staged)
                wanted = index >= 0
                rows[wanted] = staged.to(rows.device)[wanted]
        else:
            part = request if isinstance(request, slice) else slice(0, request)
            moved = rows.shape[:3].numel()
            copy_heads(self.slots[:, :, part.start : self._checked(part.stop)], rows)
        return self._bytes_of(moved)

    def write(self, rows: Tensor, at: int | Chosen) -> int:
        """Put packed `rows` into slots; return the bytes moved, as `load`.

        at: the column of the first row, for all heads; or the slot of each row. Asynchronous and
        raising as `load`.
        """
        if isinstance(at, int):
            moved: int | Tensor = rows.shape[:3].numel()
            self._write_columns(rows, at)
        else:
            index, moved, _ = at
            if rows.is_cuda and not self.is_reachable:
                index, rows = index.cpu(), rows.cpu()
            scatter_rows(self.slots, index, rows)
        return self._bytes_of(moved)

    def _bytes_of(self, num_rows: int | Tensor) -> int:
        return num_rows * self.slot_bytes if isinstance(num_rows, int) else 0

    def _write_columns(self, rows: Tensor, at: int) -> None:
        """Write rows of every head from column `at` on. Short lines, such as a step's own row, are
        written by a kernel if it can reach the slots, else by the host from one copy of all."""
        column = self.slots[:, :, at : self._checked(at + rows.shape[2])]
        is_long = rows.shape[2] * self.slot_bytes >= MIN_COPY_BYTES
        if rows.device == column.device or is_long:
            copy_heads(rows, column)
        elif self.is_reachable and rows.shape[2] == 1:
            index = torch.full(rows.shape[:3], at, device=self.device)
            scatter_rows(self.slots, index, rows)
        elif self.is_reachable:
            index = torch.arange(at, at + rows.shape[2], device=self.device)
            scatter_rows(self.slots, index.expand(*rows.shape[:3]), rows)
        else:
            column.copy_(rows.cpu())

    def _checked(self, end: int) -> int:
        if not 0 <= end <= self.capacity:
            raise ValueError(f"column {end} is beyond the capacity of {self.capacity} slots")
        return end


# Long pieces: the first slots of every head, or some columns of each, are a rectangle of bytes, a
# head a line. A copy engine takes it whole.


def copy_heads(source: Tensor, target: Tensor) -> None:
    """`target.copy_(source)`, uint8 [batch, num_kv_heads, n, slot_bytes], both contiguous in a
    head.

    Asynchronous on the current stream between the device and page-locked memory. Raises
    RuntimeError in CUDA's words.
    """
    source = source.flatten(2).flatten(0, 1)  # a head a line
    target = target.flatten(2).flatten(0, 1)
    if not source.numel() or source.device == target.device:
        target.copy_(source)
    else:
        _memcpy_2d(source, target)


def _memcpy_2d(source: Tensor, target: Tensor) -> None:
    kinds = cuda_runtime().cudaMemcpyKind
    kind = kinds.cudaMemcpyHostToDevice if target.is_cuda else kinds.cudaMemcpyDeviceToHost
    device = target.device if target.is_cuda else source.device
    stream = torch.cuda.current_stream(device).cuda_stream
    height, width = source.shape
    lines = target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0), width, height
    call_cuda("cudaMemcpy2DAsync", *lines, kind, stream)


# Rows one by one. Under CUDA a Triton kernel reads and writes pinned host memory in place, without
# a sync.


def gather_rows(slots: Tensor, index: Tensor, rows: Tensor, targets: Tensor | None = None) -> None:
    """`rows[b, h, targets[b, h, i]] = slots[b, h, index[b, h, i]]`; nothing where the index is
    negative.

    slots: uint8 [batch, num_kv_heads, capacity, slot_bytes], contiguous; rows: [batch,
    num_kv_heads, n, slot_bytes], contiguous in a head; index: int64 [batch, num_kv_heads, n];
    targets: of the same shape, distinct in a head, None is i itself. Rows that nothing is written
    to keep their content. Raises IndexError for an index beyond the capacity, on the CPU only.
    """
    if rows.is_cuda:
        from harness.decode.kernels import rows as kernels

        kernels.gather_rows(slots, index, rows, targets)
        return
    # In numpy, which keeps the interpreter while it copies: a link's thread that asked for it anew
    # after every operation would wait for the computation, and the computation for it.
    _, num_kv_heads, capacity, _ = slots.shape
    batch, head, row, slot = listed(index, capacity)
    target = row if targets is None else targets.numpy()[batch, head, row]
    words = slots.view(torch.int32).flatten(0, 2).numpy()  # `take` is one memcpy a row
    moved = words.take((batch * num_kv_heads + head) * capacity + slot, 0)
    rows.view(torch.int32).numpy()[batch, head, target] = moved


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`slots[b, h, index[b, h, i]] = rows[b, h, i]`, nothing where the index is negative.

    A slot may occur once in a head's index. Shapes and errors as in `gather_rows`.
    """
    if rows.is_cuda:
        from harness.decode.kernels import rows as kernels

        kernels.scatter_rows(slots, index, rows)
        return
    batch, head, row, slot = listed(index, slots.shape[2])
    new_words = rows.view(torch.int32).numpy()[batch, head, row]
    slots.view(torch.int32).numpy()[batch, head, slot] = new_words


def listed(index: Tensor, capacity: int) -> tuple[NDArray[np.int64], ...]:
    """Batch, head, row and slot of each slot of `index` that is not negative, on the CPU. Raises
    IndexError for one beyond the capacity."""
    slot_of = index.numpy()
    batch, head, row = np.nonzero(slot_of >= 0)
    slot = slot_of[batch, head, row]
    if (largest := slot.max(initial=-1)) >= capacity:
        raise IndexError(f"slot index {largest} is beyond the capacity of {capacity} slots")
    return batch, head, row, slot


# Lists of slots from masks, without a sync. Under CUDA each is one kernel, a program a head.


def indices(mask: Tensor, cap: int) -> tuple[Tensor, int | Tensor]:
    """The first `cap` slots where `mask`, bool [batch, heads, slots], is True, in order: int64
    [batch, heads, cap], -1 behind the last. And their number, as in `Chosen`."""
    if mask.is_cuda:
        from harness.decode.kernels import rows as kernels

        return kernels.indices(mask, cap)
    order = torch.where(mask, mask.cumsum(-1) - 1, cap).clamp_(max=cap)
    slots = torch.arange(mask.shape[-1], device=mask.device).expand_as(order)
    found = order.new_full((*mask.shape[:-1], cap + 1), -1)
    found = found.scatter_(-1, order, slots)[..., :cap]
    return found, num_true(found >= 0)
