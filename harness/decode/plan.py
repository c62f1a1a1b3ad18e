"""The memory of the layers on one device, by arithmetic alone.

`harness.decode.opening` opens a session by it, and `harness.decode.needs` asks it before there is
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from harness.decode.gpu_cache import GpuCache
from harness.decode.resident import ResidualCache, ValuesCache
from harness.decode.share import LAYERS_UNDER_WAY, BatchLengths
from harness.decode.store import KVStore
from harness.model.policies import Policy, loses_tokens
from methods.base import Method
from methods.codecs.split import AnyCodec, CacheCodec, SplitCodec, mean_bits


class MemoryPlan(NamedTuple):
    """What the layers of a device take there beside their slots.

    num_ahead: the first layers whose rows cross the link during the whole step before; each has a
    buffer of its own. shared: the largest store of the other layers and the rows of each of the two
    buffers that they use in turns; None without a link.
    Bytes: buffers: of fetched rows. under_way: packed rows of a prompt on their way to the host.
    resident: exact rows, and lists of the GPU cache.
    """

    num_ahead: int
    shared: tuple[KVStore, int] | None
    buffers: int
    under_way: int
    resident: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.buffers + self.under_way + self.resident


def plan_memory(
    stores: Mapping[int, KVStore],
    policies: Sequence[Policy],
    method: Method,
    codec: CacheCodec,
    lengths: BatchLengths,
    rooms: Sequence[int] | None,
    pass_tokens: int | None,
) -> MemoryPlan:
    """The plan of the layers on one device.

    stores: of its layers that see every token. policies: of all layers of the model. codec: of the
    layers under the method. rooms: rows of each sequence that stay, with `gpu_cache`.
    pass_tokens: tokens of the prompts that pass a layer together; None without a link.
    """
    numbers: list[int] = []  # of the layers under the method
    resident = 0
    for layer, store in stores.items():
        policy = policies[layer]
        resident += resident_bytes(store, policy, method, lengths, rooms)
        if policy.kind == "method":
            numbers.append(policy.number)
    if pass_tokens is None:
        return MemoryPlan(0, None, 0, 0, resident)

    num_ahead = num_fetched_ahead(method, codec, len(stores), numbers)
    selected = most_selected(method, lengths, numbers)
    in_order = [*stores.values()]
    ahead, others = in_order[:num_ahead], in_order[num_ahead:]

    def rows_of(store: KVStore) -> int:
        return min(selected, store.capacity)

    largest = max(others, key=lambda store: store.buffer_bytes(rows_of(store)))
    buffers = 2 * largest.buffer_bytes(rows_of(largest))
    for store in ahead:
        buffers += store.buffer_bytes(store.capacity)
    if rooms is not None:
        for layer, store in stores.items():
            if policies[layer].names_rows:  # its buffer keeps the rows
                buffers += store.buffer_bytes(max(rooms))
    under_way = under_way_bytes(in_order, pass_tokens)
    return MemoryPlan(num_ahead, (largest, rows_of(largest)), buffers, under_way, resident)


def num_slots(method: Method, policy: Policy, codec: AnyCodec, lengths: BatchLengths) -> int:
    """Slots of a layer's store, of each sequence and KV head. Those of tokens that leave the cache
    for good are used again."""
    rows = lengths.rows(lengths.max_new_tokens)
    if policy.kind == "method" and loses_tokens(method):
        return max(method.tokens_kept(row, policy.number) for row in rows)
    if codec.residual:
        return max(codec.stored(row.cached) for row in rows)
    return lengths.columns


def num_fetched_ahead(
    method: Method, codec: CacheCodec, num_layers: int, numbers: Sequence[int]
) -> int:
    """The first layers whose rows cross a link during the whole step before: the dense ones, where
    the others read less. numbers: of the layers under the method."""
    if not numbers:
        return 0
    reads_less = not method.reads_all or mean_bits(codec, numbers) < 16
    return num_layers - len(numbers) if reads_less else 0


def most_selected(method: Method, lengths: BatchLengths, numbers: Sequence[int]) -> int:
    """The most tokens that a KV head reads in any layer under the method, in any step; all of them
    where the method has no layer."""
    if not numbers:
        return lengths.columns
    most = 0
    for steps in range(lengths.max_new_tokens + 1):
        for row, number in product(lengths.rows(steps), numbers):
            most = max(most, method.max_tokens_read(row, number))
    return most


def under_way_bytes(stores: Sequence[KVStore], pass_tokens: int) -> int:
    """The most bytes of a prompt's packed rows that are on their way to the host at one time.
    pass_tokens: tokens of the prompts that pass a layer together."""
    most = 0
    for store in stores:
        rows = store.num_kv_heads * min(pass_tokens, store.batch * store.capacity)
        most = max(most, rows * store.slot_bytes)
    return LAYERS_UNDER_WAY * most


def resident_bytes(
    store: KVStore,
    policy: Policy,
    method: Method,
    lengths: BatchLengths,
    rooms: Sequence[int] | None,
) -> int:
    """Bytes of a layer that stay on the device beside slots, buffers and state: exact rows, and the
    lists of the GPU cache (`LayerCache.device_bytes`)."""
    codec = store.codec
    if isinstance(codec, SplitCodec) and codec.residual:
        return ResidualCache.bytes_of(store, codec)
    num_bytes = 0
    if rooms is not None and policy.names_rows:
        num_bytes += GpuCache.bytes_of(rooms, store.num_kv_heads)
    if policy.kind == "method" and method.keeps_keys:
        rows = lengths.rows(0)
        most = max(method.tokens_resident(row, policy.number) for row in rows)
        num_bytes += ValuesCache.bytes_of(store, most, lengths.max_new_tokens)
    return num_bytes
