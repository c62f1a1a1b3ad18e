"""What the decode steps of a live session read on the device, counted without a sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.budgets import code_widths, share_of_cache
from methods.base import Geometry
from methods.codecs.split import CacheCodec


class LayerRead(NamedTuple):
    """What a layer under the method read in a step. number: the layer's, as methods count. tokens:
    mean over KV heads, [batch]."""

    number: int
    tokens: Tensor


class StepReads:
    """What live decoding reads on the device, summed over steps and sequences without a sync.

    codec: of the layers under the method. slot_bytes: of their rows by the layer's number, set once
    the stores are there.
    element_bytes: of the compute dtype. num_bytes: fp64, 0-d: rows as they are stored, index and
    windows in the compute dtype, and the current token of every layer. tokens_read: fp64, 0-d:
    cached tokens read, mean over KV heads, in all layers that see every token;
    gpu_cache_tokens_read: of them those in layers with a GPU cache. Padding is not counted.
    """

    def __init__(
        self,
        geometry: Geometry,
        dense_layers: int,
        codec: CacheCodec,
        *,
        element_bytes: int,
        device: torch.device,
        evicts: bool = False,
    ) -> None:
        self.geometry = geometry
        self.dense_layers = dense_layers
        self.evicts = evicts
        self.widths = code_widths(codec, geometry)
        self.token_bytes = geometry.elements * element_bytes  # exact, of a KV head
        self.slot_bytes: dict[int, int] = {}
        self.rows = 0
        sums = torch.zeros(6, dtype=torch.float64, device=device)
        self.frac_sum, self.index_sum, self.num_bytes, *of_tokens = sums
        self.tokens_read, self.gpu_cache_tokens_read, self.evicted_sum = of_tokens

    def count(
        self,
        cached: Tensor,
        reads: Sequence[LayerRead],
        index_reads: Sequence[Tensor],
        gpu_cache_reads: Sequence[Tensor] = (),
    ) -> None:
        """Add a step. cached: tokens before it, int [batch]; reads: of each layer under the method;
        index_reads: tokens read of an index, mean over KV heads, [batch]; gpu_cache_reads: the
        tokens of `reads` in layers with a GPU cache."""
        geometry, num_layers = self.geometry, self.geometry.num_layers
        index_read = _sum(cached, index_reads)
        read = torch.zeros_like(index_read)
        stored = torch.zeros_like(index_read)
        stored_bytes = torch.zeros_like(index_read)
        for (width, slot_bytes), tokens in self._by_format(reads).items():
            of_format = _sum(cached, tokens)
            read = read + of_format
            stored = stored + width * of_format
            stored_bytes = stored_bytes + slot_bytes * of_format
        self.rows += len(cached)
        share = share_of_cache(cached, stored, self.dense_layers, num_layers)
        index_share = share_of_cache(cached, index_read, 0, num_layers)
        exact = self.dense_layers * cached + index_read + num_layers
        for window in geometry.windows:
            exact = exact + window.weight * (window.num_cached(cached) + 1)
        num_bytes = geometry.num_kv_heads * (exact * self.token_bytes + stored_bytes)
        self.frac_sum = self.frac_sum + share.sum()
        self.index_sum = self.index_sum + index_share.sum()
        self.num_bytes = self.num_bytes + num_bytes.sum()
        tokens_read = self.dense_layers * cached + read
        self.tokens_read = self.tokens_read + tokens_read.sum()
        if self.evicts:
            evicted = cached - read / (num_layers - self.dense_layers)
            self.evicted_sum = self.evicted_sum + evicted.sum()
        if gpu_cache_reads:
            self.gpu_cache_tokens_read = (
                self.gpu_cache_tokens_read + _sum(cached, gpu_cache_reads).sum()
            )

    def _by_format(self, reads: Sequence[LayerRead]) -> dict[tuple[float, int], list[Tensor]]:
        """The tokens read in layers whose rows have one width and one number of bytes."""
        groups: dict[tuple[float, int], list[Tensor]] = {}
        for read in reads:
            row_format = self.widths[read.number], self.slot_bytes[read.number]
            groups.setdefault(row_format, []).append(read.tokens)
        return groups

    @property
    def budget(self) -> float:
        """Rows read / the full cache, mean over the steps and sequences so far."""
        return float(self.frac_sum) / self.rows

    @property
    def device_frac(self) -> float:
        """Rows and index read in device memory / the full cache, mean as `budget`."""
        return float(self.frac_sum + self.index_sum) / self.rows

    @property
    def tokens_evicted(self) -> float | None:
        """Cached tokens that a KV head no longer holds at a step, mean as `budget`; None of a
        method that does not evict, and before the first step."""
        return float(self.evicted_sum) / self.rows if self.evicts and self.rows else None


def _sum(cached: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Over the layers, one launch for all of a device: fp64, shaped like `cached`, zeros of
    none."""
    if not layers:
        return torch.zeros_like(cached, dtype=torch.float64)
    by_device: dict[torch.device, list[Tensor]] = {}
    for layer in layers:
        by_device.setdefault(layer.device, []).append(layer)
    sums = []
    for on_device in by_device.values():
        total = torch.stack(on_device).sum(0, dtype=torch.float64)
        sums.append(total.to(cached.device))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
