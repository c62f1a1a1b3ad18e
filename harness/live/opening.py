"""Opens the caches of a live session on one device: plans their memory, asks whether it fits, and
allocates it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from harness.live import memory
from harness.live.ahead import AheadFetcher, AheadPart
from harness.live.cache import Fetcher, LayerCache
from harness.live.disk import Disk
from harness.live.disk_store import DiskStore
from harness.live.hot_rows import HotFetcher, HotRows
from harness.live.links import DiskLink
from harness.live.memory import DEFAULT_TUNING, PinnedSlab, SessionBytes
from harness.live.resident import LocalCache, ResidualCache, ValuesCache
from harness.live.share import LAYERS_UNDER_WAY, BatchLengths, DeviceShare
from harness.live.store import KVStore, RowFormat, indices
from harness.model.attached import Attached
from harness.model.policies import Policy
from harness.settings.config import Placement
from methods.base import Method
from methods.codecs.floats import FloatCodec
from methods.codecs.split import AnyCodec, CacheCodec, SplitCodec, codec_at, mean_bits
from methods.evicting import EvictingState
from methods.extras import KeysOnDevice, KeysOnDeviceState


@dataclass(frozen=True)
class BufferPlan:
    """The fetch buffers of a device's layers under a link.

    largest: the store of the two buffers that layers use in turns; num_rows: rows of each of the
    two. num_bytes: of all fetch buffers, those of single layers included.
    """

    largest: KVStore
    num_rows: int
    num_bytes: int


class Opening:
    """Opens the caches of a session, one device after another.

    Given: the settings of `LiveSession`; codec: of the layers under the method; exact: of the
    exempt ones. slabs: empty ones by device; those that are made are put there.
    Filled by `open_share`: caches: by layer. parts: the layers that request a part of the exempt
    layers' rows. bytes_needed: memory that was asked for.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        policies: Sequence[Policy],
        codec: CacheCodec,
        exact: FloatCodec,
        placement: Placement,
        pinned: bool,
        slabs: MutableMapping[torch.device, PinnedSlab],
    ) -> None:
        self.attached = attached
        self.method = method
        self.policies = policies
        self.codec = codec
        self.exact = exact
        self.placement = placement
        self.pinned = pinned
        self.slabs = slabs
        self.caches: dict[int, LayerCache | LocalCache] = {}
        self.parts: dict[LayerCache, AheadPart] = {}
        self.bytes_needed = SessionBytes(0, 0)

    def open_share(self, share: DeviceShare, pass_tokens: int, activations: int) -> None:
        """Open the caches of the layers on one device. pass_tokens: tokens of the prompts that pass
        a layer together; activations: bytes that the pass takes. Raises UserError where they do not
        fit into memory."""
        stores: dict[int, KVStore] = {}
        numbers: list[int] = []  # of the layers under the method
        window_bytes = 0
        for layer, shape in enumerate(self.attached.layers):
            policy = self.policies[layer]
            if shape.device != share.device:
                continue
            if policy.window is not None:
                local = LocalCache(policy, share.batch)
                self.caches[layer] = local
                rows = local.ring_rows * len(share.batch.prompts)
                elements = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
                window_bytes += rows * elements * self.attached.dtype.itemsize
                continue
            stores[layer] = self._new_store(share, layer)
            if policy.kind == "method":
                numbers.append(policy.number)
        if not stores:
            return
        num_ahead = 0
        plan = None
        if share.link is not None:
            num_ahead = num_fetched_ahead(self.method, self.codec, len(stores), numbers)
            selected = most_selected(self.method, share.batch.counts, numbers)
            hot = [store for at, store in stores.items() if self.policies[at].names_rows]
            plan = plan_buffers([*stores.values()], hot, share.rooms, selected, num_ahead)
        on_device = activations + window_bytes
        if plan is not None:
            on_device += plan.num_bytes + under_way_bytes([*stores.values()], pass_tokens)
        for layer, store in stores.items():
            on_device += resident_bytes(
                store, self.policies[layer], self.method, share.batch.counts, share.rooms
            )
        self._allocate(share, [*stores.values()], on_device)
        if plan is not None:
            for _ in range(2):
                share.free.append(share.new_buffer(plan.largest, plan.num_rows))
        self._open_caches(share, stores, num_ahead)

    def _new_store(self, share: DeviceShare, layer: int) -> KVStore:
        """A layer's store, not allocated yet. Exempt layers store rows as they are, in replay and
        here."""
        shape, policy = self.attached.layers[layer], self.policies[layer]
        is_coded = policy.kind == "method"
        codec = codec_at(self.codec, policy.number) if is_coded else self.exact
        replaces = isinstance(share.state, EvictingState)
        capacity = num_slots(self.method, policy, codec, share.batch.counts, evicts=replaces)
        is_latent = shape.latent is not None
        row_format = RowFormat(
            codec, shape.head_dim, self.attached.dtype, shape.value_dim, is_latent
        )
        if isinstance(share.link, DiskLink):
            return DiskStore(
                row_format,
                batch=len(share.batch.prompts),
                num_kv_heads=shape.num_kv_heads,
                capacity=capacity,
                device=share.device,
                layout=share.link.layout,
                gap_blocks=share.link.gap_blocks,
            )
        return KVStore(
            row_format,
            batch=len(share.batch.prompts),
            num_kv_heads=shape.num_kv_heads,
            capacity=capacity,
            placement=self.placement,
            device=share.device,
            tuning=DEFAULT_TUNING if share.link is None else share.link.tuning,
        )

    def _allocate(self, share: DeviceShare, stores: Sequence[KVStore], on_device: int) -> None:
        """Ask for the memory of a device's layers, allocate the stores, and compile the kernels of
        a step. on_device: bytes beside the slots."""
        slots = sum(memory.aligned(store.nbytes) for store in stores)
        if self.placement == "host":
            needed = SessionBytes(slots, on_device)
        elif self.placement == "disk":
            needed = SessionBytes(_disk_buffer(stores), on_device)
        elif self.placement == "device":
            needed = SessionBytes(0, slots + on_device)
        else:
            needed = SessionBytes(0, on_device, slots)
        self.bytes_needed = self.bytes_needed.plus(needed)
        memory.require_emulated(self.bytes_needed.device, share.device)
        slab = self._slab_of(share.device, slots)
        still_needed = needed if slab is None else needed._replace(host=0)
        memory.require_session(still_needed, share.device)
        if self.pinned and slots:
            share.slab = self.slabs[share.device] = slab or PinnedSlab(slots)
        if isinstance(share.link, DiskLink):
            _allocate_on_disk(share, share.link.disk, stores)
        else:
            for store in stores:
                store.allocate(share.slab)
        if share.device.type == "cuda":
            _compile_kernels(share, stores)

    def _slab_of(self, device: torch.device, num_bytes: int) -> PinnedSlab | None:
        """The slab of an earlier session, if it has this size. One of another size is closed."""
        slab = self.slabs.get(device)
        if slab is not None and slab.nbytes != num_bytes:
            slab.close()
            del self.slabs[device]
            return None
        return slab

    def _open_caches(
        self, share: DeviceShare, stores: Mapping[int, KVStore], num_ahead: int
    ) -> None:
        ahead: list[AheadFetcher] = []
        others: list[LayerCache] = []
        for layer, store in stores.items():
            policy = self.policies[layer]
            fetcher: Fetcher
            if share.link is not None and len(ahead) < num_ahead:
                fetcher = AheadFetcher(share, store, share.link)
                ahead.append(fetcher)
                self.caches[layer] = self._new_cache(share, policy, store, fetcher)
                continue
            if share.rooms is not None and policy.names_rows:
                fetcher = HotFetcher(share, store, share.rooms)
            else:
                fetcher = Fetcher(share, store)
            cache = self._new_cache(share, policy, store, fetcher)
            others.append(cache)
            self.caches[layer] = cache
        if ahead:
            for number, cache in enumerate(others):
                self.parts[cache] = AheadPart(number, len(others), ahead)

    def _new_cache(
        self, share: DeviceShare, policy: Policy, store: KVStore, fetcher: Fetcher
    ) -> LayerCache:
        state = share.state if policy.kind == "method" else None
        method, codec = self.method, store.codec
        if isinstance(codec, SplitCodec) and codec.residual:
            return ResidualCache(policy, share, store, codec, method, fetcher)
        if isinstance(state, KeysOnDeviceState) and isinstance(method, KeysOnDevice):
            return ValuesCache(policy, share, store, state, method, fetcher)
        return LayerCache(policy, share, store, state, method, fetcher)


# The arithmetic of a device's memory. `harness.live.needs` asks it before there is a session.


def num_slots(
    method: Method, policy: Policy, codec: AnyCodec, lengths: BatchLengths, *, evicts: bool
) -> int:
    """Slots of a layer's store, of each sequence and KV head. evicts: tokens leave the cache for
    good, and their slots are used again."""
    rows = lengths.rows(lengths.max_new_tokens)
    if policy.kind == "method" and evicts:
        return max(method.tokens_kept(row, policy.number) for row in rows)
    if codec.residual:
        return max(codec.stored(row.cached) for row in rows)
    return lengths.columns


def num_fetched_ahead(
    method: Method, codec: CacheCodec, num_layers: int, numbers: Sequence[int]
) -> int:
    """The first layers whose rows cross a link during the whole step before: the exempt ones, where
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


def plan_buffers(
    stores: Sequence[KVStore],
    hot: Sequence[KVStore],
    rooms: Sequence[int] | None,
    selected: int,
    num_ahead: int,
) -> BufferPlan:
    """Each of the first `num_ahead` layers has its own buffer; two serve all others in turns, with
    room for the `selected` rows; where rows stay, each of the layers that name their rows (`hot`)
    keeps one for them."""
    ahead, others = stores[:num_ahead], stores[num_ahead:]

    def rows_of(store: KVStore) -> int:
        return min(selected, store.capacity)

    largest = max(others, key=lambda store: store.buffer_bytes(rows_of(store)))
    num_rows = rows_of(largest)
    num_bytes = 2 * largest.buffer_bytes(num_rows)
    for store in ahead:
        num_bytes += store.buffer_bytes(store.capacity)
    if rooms is not None:
        for store in hot:
            num_bytes += store.buffer_bytes(max(rooms))
    return BufferPlan(largest, num_rows, num_bytes)


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
    lists of the rows that stay (`LayerCache.device_bytes`)."""
    codec = store.codec
    if isinstance(codec, SplitCodec) and codec.residual:
        return ResidualCache.bytes_of(store, codec)
    num_bytes = 0
    if rooms is not None and policy.names_rows:
        num_bytes += HotRows.bytes_of(rooms, store.num_kv_heads)
    if policy.kind == "method" and isinstance(method, KeysOnDevice):
        rows = lengths.rows(0)
        most = max(method.tokens_resident(row, policy.number) for row in rows)
        num_bytes += ValuesCache.bytes_of(store, most, lengths.max_new_tokens)
    return num_bytes


def _disk_buffer(stores: Sequence[KVStore]) -> int:
    """Host memory for the blocks of a layer that cross together, and those that stay open."""
    return 2 * max(store.nbytes for store in stores)


def _allocate_on_disk(share: DeviceShare, disk: Disk, stores: Sequence[KVStore]) -> None:
    """Give each store its blocks of one file. Raises UserError where the disk has no space."""
    on_disk = [store for store in stores if isinstance(store, DiskStore)]
    share.file = disk.new_file(sum(store.lines.num_blocks for store in on_disk))
    first_block = 0
    for store in on_disk:
        store.place_in(share.file, first_block)
        first_block += store.lines.num_blocks


def _compile_kernels(share: DeviceShare, stores: Sequence[KVStore]) -> None:
    from harness.live.kernels import rows as kernels

    warm: set[int] = set()
    for store in stores:
        if store.is_reachable and store.slot_bytes not in warm:
            warm.add(store.slot_bytes)
            kernels.warm(store.slots, share.device, store.tuning)
    nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=share.device)
    if share.rooms is not None:
        HotRows([1], 1, share.device).request(nothing, nothing.int(), 1)
    else:
        indices(nothing, 1)
