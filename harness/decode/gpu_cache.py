"""The GPU cache: the rows of each layer that were read last stay on the device (LRU).

Successive steps select mostly the same tokens. So a layer keeps room for `gpu_cache` times the rows
that it reads at most, and only missing rows cross the link. The least recently used row leaves
first, of equally old ones the lowest token. On a CPU the device is memory, too. Live decoding
fetches by these rules, and replay counts by them. What is read does not depend on them, so neither
does accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from harness.decode.cache import Fetch, Fetcher
from harness.decode.share import DeviceShare
from harness.decode.store import Chosen, KVStore
from harness.model.policies import Policy
from methods.base import Method, TokenCounts

NO_ROOM = torch.iinfo(torch.int64).max
"""The age of a buffer row beyond a sequence's own room: it never gives way."""
TOKEN_BITS = 32
"""Of an age; the column is above them."""


def rooms(
    method: Method,
    policies: Iterable[Policy],
    gpu_cache: float,
    lengths: Iterable[tuple[int, int]],
) -> list[int] | None:
    """Of each sequence the rows that a KV head keeps on the device: `gpu_cache` times what it
    reads at most; None where `gpu_cache` is 0.

    policies: of all layers. Only those that name their rows keep some. lengths: of each sequence,
    tokens of its prompt, and T.
    """
    if not gpu_cache:
        return None
    layers = [policy.number for policy in policies if policy.names_rows]
    most_of = cache(partial(most_read, method, layers))
    found = []
    for prompt, final in lengths:
        most = most_of(prompt, final) if layers else 1
        found.append(min(math.ceil(gpu_cache * most), final))
    return found


def most_read(method: Method, layers: Sequence[int], prompt: int, final: int) -> int:
    """The most tokens that a KV head of a sequence reads in any of these layers, in any step."""
    most = 0
    for cached in range(prompt, final + 1):
        row = TokenCounts(cached, prompt, final)
        for layer in layers:
            most = max(most, method.max_tokens_read(row, layer))
    return most


class GpuCache:
    """Which rows of one layer are in its cache.

    rooms: of each sequence, the rows that a KV head may keep. slots: int64 [batch, num_kv_heads,
    room], the slot in each row of the layer's buffer, -1 for none. age: int64 alike, by which rows
    leave, the lowest first: the column whose request used it last, and of one request its token.
    Both change in place.
    """

    def __init__(self, rooms: Sequence[int], num_kv_heads: int, device: torch.device) -> None:
        shape = len(rooms), num_kv_heads, max(rooms)
        self.slots = torch.full(shape, -1, device=device)
        self.age = self.slots.clone()
        for sequence, room in enumerate(rooms):
            self.age[sequence, :, room:] = NO_ROOM

    @property
    def nbytes(self) -> int:
        """Bytes of these lists on the device."""
        return self.slots.nbytes + self.age.nbytes

    @staticmethod
    def bytes_of(rooms: Sequence[int], num_kv_heads: int) -> int:
        """`nbytes` of the lists for these rooms."""
        return 2 * len(rooms) * num_kv_heads * max(rooms) * torch.int64.itemsize

    def request(
        self, mask: Tensor, tokens: Tensor, column: Tensor, most: int
    ) -> tuple[Chosen, Tensor]:
        """The slots to fetch so that all of `mask` are there, and their rows in the buffer. From
        now on they count as there.

        mask: bool [batch, num_kv_heads, slots], the slots to read, at most `most` in a head and not
        more than its room. tokens: int32 [batch, 1 or num_kv_heads, slots], the token in each slot.
        column: int64 [1], of the row that asks, above 0 and above that of the request before.
        Returns also which rows of the buffer are to be read, bool [batch, num_kv_heads, room].
        """
        lists = missing_rows(mask, tokens, self.slots, self.age, column, most)
        missing, targets, present, num_missing = lists
        return Chosen(missing, num_missing, targets), present

    def forget(self, written: Tensor) -> None:
        """Drop the copies of slots that are written anew. written: int64 [batch, num_kv_heads, 1],
        -1 for none."""
        self.slots.masked_fill_(self.slots == written, -1)

    def fork(self, index: Tensor) -> GpuCache:
        """A copy for sequences `index` [new_batch]."""
        child = copy(self)
        child.slots = self.slots.index_select(0, index)
        child.age = self.age.index_select(0, index)
        return child


class GpuCacheFetcher(Fetcher):
    """Brings the rows of a layer that its GPU cache lacks. The cache is the fetcher's buffer.

    gpu_cache: which rows are there.
    """

    keeps_rows = True

    def __init__(self, share: DeviceShare, store: KVStore) -> None:
        super().__init__(share, store)
        assert share.rooms is not None, "rows have room there"
        self.gpu_cache = GpuCache(share.rooms, store.num_kv_heads, share.device)
        self.buffer = share.new_buffer(store, max(share.rooms))

    @property
    def device_bytes(self) -> int:
        return self.gpu_cache.nbytes

    def request_selected(self, mask: Tensor, most: int, tokens: Tensor) -> tuple[Fetch, Tensor]:
        room = self.gpu_cache.slots.shape[-1]
        fetch = Fetch(room, self.store.rows_in(self.buffer, room))
        column = self.share.batch.column
        request, fetch.present = self.gpu_cache.request(mask, tokens, column, most)
        self.fetch = fetch
        self.load(request, fetch.cached)
        _, num_missed = fetch.moving[-1]
        self.share.traffic.missed.add(num_missed, self.store.slot_bytes)
        return fetch, self.gpu_cache.slots

    def forget(self, slots: Tensor) -> None:
        self.gpu_cache.forget(slots)


def missing_rows(
    mask: Tensor, tokens: Tensor, kept: Tensor, age: Tensor, column: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
    """The slots of `mask` that a buffer lacks, and the rows that they go to: those of the lowest
    age, but for rows that hold slots of the mask.

    mask, tokens, column, most: as in `GpuCache.request`; kept, age: its `slots` and `age`, which
    change. Returns int64 [batch, heads, most], a head's missing slots first and -1 behind them;
    their rows in the buffer, alike; which rows hold slots of the mask from now on; and the number
    of missing slots, as in `Chosen`.
    """
    if mask.is_cuda:
        from harness.decode.kernels import rows as kernels

        return kernels.missing_rows(mask, tokens, kept, age, column, most)
    # In numpy, whose small operations and sorts are faster than torch's on a CPU. A head is a line
    # of each array.
    batch, heads, num_slots = mask.shape
    room = kept.shape[-1]
    lines = batch * heads
    line = np.arange(lines)[:, None]
    held = kept.numpy().reshape(lines, room)
    old_age = age.numpy().reshape(lines, room)
    # Rows that hold slots of the mask stay, and these slots are not missing. Slots and rows are
    # numbered through all lines; a row that holds none finds a slot of some other line.
    wanted = np.array(mask.numpy()).reshape(-1)
    at = held + line * num_slots
    stays = wanted.take(at) & (held >= 0)
    wanted[at[stays]] = False
    missing_at = np.flatnonzero(wanted)
    of_line = missing_at // num_slots
    slot = missing_at - of_line * num_slots
    # A missing slot's number within its line, and the row that gives way to it.
    num_missing = np.bincount(of_line, minlength=lines)
    first = np.cumsum(num_missing) - num_missing
    number = np.arange(len(slot)) - first.take(of_line)
    leaving = np.argsort(np.where(stays, NO_ROOM, old_age), -1)
    row = leaving.take(number + of_line * room)
    listed = number + of_line * most
    missing = np.full((lines, most), -1)
    targets = np.zeros_like(missing)
    missing.reshape(-1)[listed] = slot
    targets.reshape(-1)[listed] = row
    # The rows as they are then.
    row_at = row + of_line * room
    held.reshape(-1)[row_at] = slot
    present = stays
    present.reshape(-1)[row_at] = True
    at.reshape(-1)[row_at] = missing_at
    token = tokens.expand(-1, heads, -1).numpy().reshape(-1)
    new_age = token.take(at).astype(np.int64) + (column.numpy() << TOKEN_BITS)
    np.copyto(old_age, new_age, where=present)

    def shaped(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).view(batch, heads, -1)

    return shaped(missing), shaped(targets), shaped(present), len(slot)
