"""What a live session holds, and what its decode steps have moved and read, in bytes and rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.decode import memory
from harness.decode.cache import LayerCache
from harness.decode.resident import LocalCache
from harness.decode.share import DeviceShare
from harness.decode.step_reads import StepReads
from harness.decode.store import KVStore
from harness.model.attached import Attached
from harness.model.model_cache import ModelCache
from harness.settings.config import Placement
from methods.base import State


class SessionSizes:
    """The numbers of a `LiveSession`, which says what these fields hold."""

    attached: Attached
    placement: Placement
    shares: dict[torch.device, DeviceShare]
    caches: list[LayerCache | LocalCache]
    stores: list[KVStore]
    reads: StepReads
    model_cache: ModelCache

    @property
    def states(self) -> list[State]:
        """The method's states, one on each device; none where it reads everything."""
        return [share.state for share in self.shares.values() if share.state is not None]

    @property
    def loaded_bytes(self) -> int | Tensor:
        """Payload bytes of the rows that the decode steps so far took from the link: every row that
        a layer asked for and waited for, unused prefetches included. Rows that are under way for a
        step that has not come are not among them. Under CUDA a 0-d tensor (no sync)."""
        return self._total([share.loaded.num_bytes for share in self.shares.values()])

    @property
    def late_bytes(self) -> int | Tensor:
        """The part of `loaded_bytes` that layers asked for by their own query, and waited for."""
        return self._total([share.late.num_bytes for share in self.shares.values()])

    @property
    def written_bytes(self) -> int | Tensor:
        """Payload bytes that the decode steps so far wrote back, without the prompt's. Counted as
        `loaded_bytes`."""
        return self._total([share.written.num_bytes for share in self.shares.values()])

    @property
    def rows_loaded(self) -> int:
        """Rows of `loaded_bytes`, of one token and KV head each."""
        return int(self._total([share.loaded.num_rows for share in self.shares.values()]))

    @property
    def disk_read_bytes(self) -> int:
        """Bytes that a disk read in whole blocks for the rows of `loaded_bytes`."""
        return sum(share.block_bytes for share in self.shares.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that hold the cache."""
        files = [share.file for share in self.shares.values()]
        return sum(file.nbytes for file in files if file is not None)

    @property
    def rows_read(self) -> float | Tensor:
        """Rows that the steps so far read, of one token and KV head each, in layers that see every
        token. Padding is not counted. Under CUDA a 0-d tensor (no sync)."""
        return self.reads.tokens_read * self.attached.geometry.num_kv_heads

    @property
    def rows_found(self) -> float | Tensor:
        """The part of `rows_read` that was on the device when its layer selected it: fetched before
        and kept in the GPU cache."""
        selected = self.reads.gpu_cache_tokens_read * self.attached.geometry.num_kv_heads
        return selected - self._total([share.missed.num_rows for share in self.shares.values()])

    @property
    def h2d_bytes(self) -> int:
        """`loaded_bytes` as a number, which a GPU has to tell; 0 under managed placement, where the
        driver moves pages."""
        return int(self.loaded_bytes)

    @property
    def d2h_bytes(self) -> int:
        """`written_bytes` as a number, like `h2d_bytes`."""
        return int(self.written_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that cache and method keep on the device: stores (none under managed placement,
        whose pages come and go), the GPU cache, windows, recurrent states, fetch buffers,
        and the method's states with their calibration."""
        total = self.model_cache.nbytes
        if self.placement == "device":
            total += sum(store.nbytes for store in self.stores)
        for cache in self.caches:
            total += cache.device_bytes
        for share in self.shares.values():
            total += sum(buffer.nbytes for buffer in share.buffers)
        for state in self.states:
            total += memory.tensor_bytes(vars(state))
        return total

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the cache in host memory; None under managed placement, whose pages come and
        go."""
        if self.placement == "managed":
            return None
        return sum(store.nbytes for store in self.stores) if self.placement == "host" else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this session."""
        slabs = [share.slab for share in self.shares.values()]
        return sum(slab.nbytes for slab in slabs if slab is not None)

    def _total(self, counts: Sequence[int | Tensor]) -> int | Tensor:
        """Of all devices, on the first layer's."""
        total: int | Tensor = 0
        for count in counts:
            here = count.to(self.attached.device) if isinstance(count, Tensor) else count
            total = total + here
        return total
