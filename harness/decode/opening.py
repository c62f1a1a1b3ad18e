"""Opens the caches of a live session on one device: asks whether they fit (`harness.decode.needs`),
and allocates them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch

from harness.decode import memory
from harness.decode.ahead import AheadFetcher, AheadPart
from harness.decode.cache import Fetcher, LayerCache
from harness.decode.disk import Disk
from harness.decode.disk_store import DiskStore
from harness.decode.gpu_cache import GpuCache, GpuCacheFetcher
from harness.decode.links import DiskLink
from harness.decode.memory import DEFAULT_TUNING, PinnedSlab, SessionBytes
from harness.decode.needs import Plan
from harness.decode.plan import plan_memory
from harness.decode.resident import LocalCache, ResidualCache, ValuesCache
from harness.decode.share import DeviceShare
from harness.decode.store import KVStore, indices
from harness.model.attached import Attached
from harness.model.policies import Policy
from methods.codecs.split import SplitCodec


class Opening:
    """Opens the caches of a session, one device after another.

    plan: of the session. pinned: host memory is page-locked. slabs: empty ones by device; those
    that are made are put there.
    Filled by `open_share`: caches: by layer. parts: the layers that request a part of the dense
    layers' rows. bytes_needed: memory that was asked for.
    """

    def __init__(
        self,
        attached: Attached,
        plan: Plan,
        pinned: bool,
        slabs: MutableMapping[torch.device, PinnedSlab],
    ) -> None:
        self.attached = attached
        self.plan = plan
        self.pinned = pinned
        self.slabs = slabs
        self.caches: dict[int, LayerCache | LocalCache] = {}
        self.parts: dict[LayerCache, AheadPart] = {}
        self.bytes_needed = SessionBytes(0, 0)

    def open_share(self, share: DeviceShare, pass_tokens: int, activations: int) -> None:
        """Open the caches of the layers on one device. pass_tokens: tokens of the prompts that pass
        a layer together; activations: bytes that the pass takes. Raises UserError where they do not
        fit into memory."""
        plan, lengths = self.plan, share.batch.counts
        tuning = DEFAULT_TUNING if share.link is None else share.link.tuning
        stores: dict[int, KVStore] = {}
        windows = 0
        for layer, shape in enumerate(self.attached.layers):
            if shape.device != share.device:
                continue
            policy = plan.policies[layer]
            if policy.window is None:
                stores[layer] = plan.store(layer, lengths, share.device, tuning)
            else:
                self.caches[layer] = LocalCache(policy, share.batch)
                windows += plan.window_bytes(layer, lengths)
        if not stores:
            return
        needed = plan_memory(
            stores,
            plan.policies,
            plan.method,
            plan.coded,
            lengths,
            share.rooms,
            pass_tokens if share.link is not None else None,
        )
        on_device = activations + windows + needed.num_bytes
        self._allocate(share, [*stores.values()], on_device)
        if needed.shared is not None:
            for _ in range(2):
                share.free.append(share.new_buffer(*needed.shared))
        self._open_caches(share, stores, needed.num_ahead)

    def _allocate(self, share: DeviceShare, stores: Sequence[KVStore], on_device: int) -> None:
        """Ask for the memory of a device's layers, allocate the stores, and compile the kernels of
        a step. on_device: bytes beside the slots."""
        slots = sum(memory.aligned(store.nbytes) for store in stores)
        if self.plan.placement == "host":
            needed = SessionBytes(slots, on_device)
        elif self.plan.placement == "disk":
            needed = SessionBytes(_disk_buffer(stores), on_device)
        elif self.plan.placement == "device":
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
            policy = self.plan.policies[layer]
            fetcher: Fetcher
            if share.link is not None and len(ahead) < num_ahead:
                fetcher = AheadFetcher(share, store, share.link)
                ahead.append(fetcher)
                self.caches[layer] = self._new_cache(share, policy, store, fetcher)
                continue
            if share.rooms is not None and policy.names_rows:
                fetcher = GpuCacheFetcher(share, store, share.rooms)
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
        method, codec = self.plan.method, store.codec
        if isinstance(codec, SplitCodec) and codec.residual:
            return ResidualCache(policy, share, store, codec, method, fetcher)
        if state is not None and method.keeps_keys:
            return ValuesCache(policy, share, store, state, method, fetcher)
        return LayerCache(policy, share, store, state, method, fetcher)


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
    from harness.decode.kernels import rows as kernels

    warm: set[int] = set()
    for store in stores:
        if store.is_reachable and store.slot_bytes not in warm:
            warm.add(store.slot_bytes)
            kernels.warm(store.slots, share.device, store.tuning)
    nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=share.device)
    if share.rooms is not None:
        GpuCache([1], 1, share.device).request(nothing, nothing.int(), 1)
    else:
        indices(nothing, 1)
