"""Opens the caches of a live session on one device: plans their memory, asks whether it fits, and
allocates it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.live import memory
from harness.live.ahead import AheadFetcher, AheadPart
from harness.live.cache import Fetcher, LayerCache
from harness.live.hot_rows import HotFetcher, HotRows
from harness.live.memory import DEFAULT_TUNING, PinnedSlab, SessionBytes
from harness.live.resident import LocalCache, ResidualCache, ValuesCache
from harness.live.share import DeviceShare, TokenBatch
from harness.live.store import KVStore, RowFormat, indices
from harness.model.attached import Attached
from harness.model.policies import Policy
from harness.settings.config import Placement
from methods.base import Method, State
from methods.codec import AnyCodec, Codec, SplitCodec
from methods.evicting import EvictingState


@dataclass(frozen=True)
class Opening:
    """The settings that decide how caches are made; fields as in `LiveSession`. codec: of the
    layers under the method; exact: of the exempt ones."""

    attached: Attached
    method: Method
    policies: list[Policy]
    codec: AnyCodec
    exact: Codec
    placement: Placement
    pinned: bool


@dataclass(frozen=True)
class Opened:
    """The caches on one device, by layer. parts: the layers that request a part of the exempt
    layers' rows. needed: memory that was asked for."""

    caches: dict[int, LayerCache | LocalCache]
    parts: dict[LayerCache, AheadPart]
    needed: SessionBytes


@dataclass(frozen=True)
class BufferPlan:
    """The fetch buffers of a device's layers under a link.

    largest: the store of the two buffers that layers use in turns; num_rows: rows of each of the
    two. num_bytes: of all fetch buffers, those of single layers included.
    """

    largest: KVStore
    num_rows: int
    num_bytes: int


def open_share(opening: Opening, share: DeviceShare, activations: int) -> Opened:
    """Open the caches of the layers on one device. activations: bytes that the prompt's pass takes.

    Raises UserError where they do not fit into memory.
    """
    method, policies = opening.method, opening.policies
    layers: list[int] = []
    stores: dict[int, KVStore] = {}
    numbers: list[int] = []  # of the layers under the method
    for layer, shape in enumerate(opening.attached.layers):
        if shape.device != share.device:
            continue
        layers.append(layer)
        if policies[layer].kind != "local":
            stores[layer] = _new_store(opening, share, layer)
        if policies[layer].kind == "method":
            numbers.append(policies[layer].number)
    reads_less = bool(numbers) and (not method.reads_all or opening.codec.bits < 16)
    num_ahead = len(stores) - len(numbers) if reads_less and share.link is not None else 0
    needed = SessionBytes(0, 0)
    if stores:
        plan = None
        if share.link is not None:
            selected = _most_selected(method, share.batch, numbers)
            plan = _plan_buffers(share, [*stores.values()], selected, num_ahead)
        buffers = 0 if plan is None else plan.num_bytes
        window_bytes = _window_bytes(opening, share.batch, layers)
        needed = _needed(opening.placement, stores, buffers + activations + window_bytes)
        memory.require_session(needed, share.device)
        _allocate(opening, share, stores)
        if plan is not None:
            for _ in range(2):
                share.free.append(share.new_buffer(plan.largest, plan.num_rows))
    return _new_caches(opening, share, layers, stores, num_ahead, needed)


def _new_store(opening: Opening, share: DeviceShare, layer: int) -> KVStore:
    """A layer's store, not allocated yet. Exempt layers store rows as they are, in replay and
    here."""
    shape, policy = opening.attached.layers[layer], opening.policies[layer]
    codec = opening.codec if policy.kind == "method" else opening.exact
    is_latent = shape.latent is not None
    return KVStore(
        RowFormat(codec, shape.head_dim, opening.attached.dtype, shape.value_dim, is_latent),
        batch=len(share.batch.prompts),
        num_kv_heads=shape.num_kv_heads,
        capacity=_slots_needed(policy, opening.method, share.state, codec, share.batch),
        placement=opening.placement,
        device=share.device,
        tuning=DEFAULT_TUNING if share.link is None else share.link.tuning,
    )


def _slots_needed(
    policy: Policy, method: Method, state: State | None, codec: AnyCodec, batch: TokenBatch
) -> int:
    """Largest number of slots that any sequence uses in a layer."""
    rows = batch.rows(batch.max_new_tokens)
    if policy.kind == "method" and isinstance(state, EvictingState):
        return max(method.tokens_kept(row, policy.number) for row in rows)
    if codec.residual:
        return max(codec.stored(row.cached) for row in rows)
    return batch.tokens.shape[1]


def _most_selected(method: Method, batch: TokenBatch, numbers: list[int]) -> int:
    """The most tokens that a KV head reads in any layer under the method, in any step."""
    most = 0
    for steps in range(batch.max_new_tokens + 1):
        for row in batch.rows(steps):
            for number in numbers:
                most = max(most, method.max_tokens_read(row, number))
    return most


def _plan_buffers(
    share: DeviceShare, stores: list[KVStore], selected: int, num_ahead: int
) -> BufferPlan:
    """Each of the first `num_ahead` layers has its own buffer; two serve all others in turns; where
    rows stay, each of the others keeps one for them."""
    ahead, others = stores[:num_ahead], stores[num_ahead:]
    largest = max(others, key=lambda store: store.nbytes)
    num_rows = min(selected, largest.capacity) if num_ahead else largest.capacity
    num_bytes = 2 * largest.buffer_bytes(num_rows)
    for store in ahead:
        num_bytes += store.buffer_bytes(store.capacity)
    if share.rooms is not None:
        for store in others:
            num_bytes += store.buffer_bytes(max(share.rooms))
    return BufferPlan(largest, num_rows, num_bytes)


def _window_bytes(opening: Opening, batch: TokenBatch, layers: list[int]) -> int:
    """Bytes of the local layers' rings."""
    elements = 0
    for layer in layers:
        shape, window = opening.attached.layers[layer], opening.policies[layer].window
        if window is not None:
            rows = LocalCache.rows_needed(window, batch.tokens.shape[1])
            elements += rows * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    return len(batch.prompts) * elements * opening.attached.dtype.itemsize


def _needed(placement: Placement, stores: dict[int, KVStore], on_device: int) -> SessionBytes:
    """Memory of a device's layers. on_device: bytes beside the slots."""
    slots = sum(memory.aligned(store.nbytes) for store in stores.values())
    if placement == "host":
        return SessionBytes(slots, on_device)
    if placement == "device":
        return SessionBytes(0, slots + on_device)
    return SessionBytes(0, on_device, slots)


def _allocate(opening: Opening, share: DeviceShare, stores: dict[int, KVStore]) -> None:
    """Allocate the stores, and compile the kernels of a step."""
    slots = sum(memory.aligned(store.nbytes) for store in stores.values())
    if opening.pinned and slots:
        share.slab = PinnedSlab(slots)
    for store in stores.values():
        store.allocate(share.slab)
    if share.device.type != "cuda":
        return
    from harness.live.kernels import rows as kernels

    warm: set[int] = set()
    for store in stores.values():
        if store.is_reachable and store.slot_bytes not in warm:
            warm.add(store.slot_bytes)
            kernels.warm(store.slots, share.device, store.tuning)
    nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=share.device)
    if share.rooms is not None:
        HotRows([1], 1, share.device).request(nothing, nothing.int(), 1)
    else:
        indices(nothing, 1)


def _new_caches(
    opening: Opening,
    share: DeviceShare,
    layers: list[int],
    stores: dict[int, KVStore],
    num_ahead: int,
    needed: SessionBytes,
) -> Opened:
    caches: dict[int, LayerCache | LocalCache] = {}
    ahead: list[AheadFetcher] = []
    others: list[LayerCache] = []
    for layer in layers:
        policy = opening.policies[layer]
        if layer not in stores:
            caches[layer] = LocalCache(policy, share.batch)
        elif share.link is not None and len(ahead) < num_ahead:
            fetcher = AheadFetcher(share, stores[layer], share.link)
            ahead.append(fetcher)
            caches[layer] = _new_cache(opening, share, policy, stores[layer], fetcher)
        else:
            cache = _new_cache(opening, share, policy, stores[layer], None)
            others.append(cache)
            caches[layer] = cache
    parts: dict[LayerCache, AheadPart] = {}
    if ahead:
        for number, cache in enumerate(others):
            parts[cache] = AheadPart(number, len(others), ahead)
    return Opened(caches, parts, needed)


def _new_cache(
    opening: Opening, share: DeviceShare, policy: Policy, store: KVStore, fetcher: Fetcher | None
) -> LayerCache:
    state = share.state if policy.kind == "method" else None
    method, codec = opening.method, store.codec
    if fetcher is None and share.rooms is not None and policy.names_rows:
        fetcher = HotFetcher(share, store, share.rooms)
    elif fetcher is None:
        fetcher = Fetcher(share, store)
    if isinstance(codec, SplitCodec) and codec.residual:
        return ResidualCache(policy, share, store, codec, method, fetcher)
    if state is not None and method.holds_keys:
        return ValuesCache(policy, share, store, state, method, fetcher)
    return LayerCache(policy, share, store, state, method, fetcher)
