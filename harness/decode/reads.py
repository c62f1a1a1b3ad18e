"""What decode rows read of their caches: one count for steps of live decoding and passes of replay,
without a sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.attached import Attached
from harness.model.budgets import code_widths, share_of_cache
from harness.model.policies import evicts
from methods.base import Geometry, Method
from methods.codecs.split import CacheCodec


class LayerRead(NamedTuple):
    """What some rows read in a layer under the method.

    number: the layer's, as methods count. tokens: mean over KV heads, [batch, rows]. side: tokens
    of an index, or of exact rows beside codes, alike; None: there is none. keeps_rows: the layer
    has a GPU cache.
    """

    number: int
    tokens: Tensor
    side: Tensor | None = None
    keeps_rows: bool = False


class RowReads:
    """What rows read, summed over the layers under the method.

    cached: tokens before each row, int [batch, rows]. slot_bytes: of a stored row, by the layer's
    number. Sums, fp64 [batch, rows]: read: tokens; stored: each times the width of its layer's
    codec (`code_width`); stored_bytes: bytes of a KV head, 0 without `slot_bytes`; index_read:
    tokens of an index, or of exact rows beside codes.
    """

    def __init__(
        self,
        cached: Tensor,
        geometry: Geometry,
        method: Method,
        widths: Sequence[float],
        slot_bytes: Mapping[int, int] | None = None,
    ) -> None:
        self.cached = cached
        self.geometry = geometry
        self.method = method
        self.widths = widths
        self.slot_bytes = slot_bytes
        self.read = torch.zeros_like(cached, dtype=torch.float64)
        self.stored = torch.zeros_like(self.read)
        self.stored_bytes = torch.zeros_like(self.read)
        self.index_read = torch.zeros_like(self.read)

    def add(self, reads: Sequence[LayerRead], rows: slice = slice(None)) -> None:
        """Count what `rows` read in some layers."""
        by_format: dict[tuple[float, int], list[Tensor]] = {}
        for read in reads:
            slot_bytes = 0 if self.slot_bytes is None else self.slot_bytes[read.number]
            row_format = self.widths[read.number], slot_bytes
            by_format.setdefault(row_format, []).append(read.tokens)
        for (width, slot_bytes), tokens in by_format.items():
            of_format = self.sum(tokens)
            self.read[:, rows] += of_format
            self.stored[:, rows] += width * of_format
            if slot_bytes:
                self.stored_bytes[:, rows] += slot_bytes * of_format
        sides = [read.side for read in reads if read.side is not None]
        if sides:
            self.index_read[:, rows] += self.sum(sides)

    def sum(self, layers: Sequence[Tensor]) -> Tensor:
        """Sum over layers, fp64, in one launch."""
        return torch.stack(list(layers)).sum(0, dtype=torch.float64)

    @property
    def whole(self) -> Tensor:
        """Tokens of the full cache before each row, fp64 [batch, rows]."""
        return self.cached.double().clamp(min=1)  # 0: padding only

    @property
    def share(self) -> Tensor:
        """Rows read / the full cache."""
        num_layers = self.geometry.num_layers
        return share_of_cache(self.whole, self.stored, self.method.dense_layers, num_layers)

    @property
    def index_share(self) -> Tensor:
        """Tokens of an index / the full cache."""
        return share_of_cache(self.whole, self.index_read, 0, self.geometry.num_layers)

    @property
    def evicted(self) -> Tensor:
        """Cached tokens that a KV head no longer holds, mean over the layers under the method."""
        return self.cached - self.read / (self.geometry.num_layers - self.method.dense_layers)


class StepReads:
    """What live decoding reads on the device, summed over steps and sequences, in place.

    codec: of the layers under the method. slot_bytes: of the layers' rows, set once the stores are
    there.
    num_bytes: fp64, 0-d: rows as they are stored, index and windows in the compute dtype, and the
    current token of every layer. tokens_read: fp64, 0-d: cached tokens read, mean over KV heads, in
    all layers that see every token; gpu_cache_tokens_read: of them those in layers with a GPU
    cache. Padding is not counted.
    """

    def __init__(self, attached: Attached, method: Method, codec: CacheCodec) -> None:
        self.geometry = attached.geometry
        self.method = method
        self.widths = code_widths(codec, self.geometry)
        self.token_bytes = self.geometry.elements * attached.dtype.itemsize  # exact, of a KV head
        self.slot_bytes: dict[int, int] = {}
        self.rows = 0
        sums = torch.zeros(6, dtype=torch.float64, device=attached.device)
        self.frac_sum, self.index_sum, self.num_bytes, *of_tokens = sums
        self.tokens_read, self.gpu_cache_tokens_read, self.evicted_sum = of_tokens

    def count(self, cached: Tensor, reads: Sequence[LayerRead]) -> None:
        """Add a step. cached: tokens before it, int [batch, 1]; reads: of each layer under the
        method."""
        geometry, dense_layers = self.geometry, self.method.dense_layers
        step = RowReads(cached, geometry, self.method, self.widths, self.slot_bytes)
        step.add(reads)
        self.rows += len(cached)
        exact = dense_layers * cached + step.index_read + geometry.num_layers
        for window in geometry.windows:
            exact = exact + window.weight * (window.num_cached(cached) + 1)
        num_bytes = geometry.num_kv_heads * (exact * self.token_bytes + step.stored_bytes)
        self.frac_sum += step.share.sum()
        self.index_sum += step.index_share.sum()
        self.num_bytes += num_bytes.sum()
        self.tokens_read += (dense_layers * cached + step.read).sum()
        if evicts(self.method):
            self.evicted_sum += step.evicted.sum()
        kept = [read.tokens for read in reads if read.keeps_rows]
        if kept:
            self.gpu_cache_tokens_read += step.sum(kept).sum()

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
        return float(self.evicted_sum) / self.rows if evicts(self.method) and self.rows else None
