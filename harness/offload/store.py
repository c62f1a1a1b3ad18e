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
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError
from harness.offload import managed
from harness.offload.coded import has_kernels
from harness.offload.copies import copy_heads, copy_part
from harness.offload.gather import gather_rows, gather_staged, scatter_rows
from harness.offload.memory import OWN, require_memory
from harness.offload.pinned import PinnedSlab
from harness.offload.request import Chosen, Part, SlotRequest, chosen, num_requested
from harness.offload.tuning import DEFAULT_TUNING, Tuning
from harness.settings.speed import Placement
from methods.codec import AnyCodec


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
            return managed.empty(shape, self.device)
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
