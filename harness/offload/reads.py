"""What live decoding reads on the device, summed over its steps without asking the device for a number."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.sizes import share_of_cache
from methods.codec import AnyCodec


class StepReads:
    """Sums over the steps and sequences so far; the shares are those of `harness.sizes`.

    codec: of the rows in the non-exempt layers, which take `slot_bytes` a token and KV head.
    num_bytes: fp64, 0-d: the rows that attention read as they are stored, what was read of an index in the dtype that
    is computed in, and the own token of every layer; of real tokens only, padding is not counted.
    """

    def __init__(self, attached: Attached, num_exempt: int, codec: AnyCodec, slot_bytes: int) -> None:
        geometry = attached.geometry
        self.num_layers, self.num_kv_heads = geometry.num_layers, geometry.num_kv_heads
        self.num_exempt = num_exempt
        self.width = codec.bits_per_element(geometry.head_dim) / 16
        self.token_bytes = 2 * geometry.head_dim * attached.dtype.itemsize  # exact, of a KV head
        self.slot_bytes = slot_bytes
        self.rows = 0
        self.frac_sum, self.index_sum, self.num_bytes = torch.zeros(3, dtype=torch.float64, device=attached.device)

    def count(self, cached: Tensor, reads: list[Tensor], index_reads: list[Tensor]) -> None:
        """Add a step: int [batch] tokens cached before it; of each non-exempt layer [batch] tokens read, and read of an
        index, mean over KV heads."""
        read, index_read = (_sum(cached, each) for each in (reads, index_reads))
        self.rows += len(cached)
        share = share_of_cache(cached, read, self.width, self.num_exempt, self.num_layers)
        index_share = share_of_cache(cached, index_read, 1.0, 0, self.num_layers)
        exact = self.num_exempt * cached + index_read + self.num_layers
        num_bytes = self.num_kv_heads * (exact * self.token_bytes + read * self.slot_bytes)
        self.frac_sum = self.frac_sum + share.sum()
        self.index_sum = self.index_sum + index_share.sum()
        self.num_bytes = self.num_bytes + num_bytes.sum()

    @property
    def kv_frac(self) -> float:
        """What was read of the cache / the full cache, mean over the steps and sequences so far."""
        return float(self.frac_sum) / self.rows

    @property
    def device_frac(self) -> float:
        """What was read in device memory / the full cache, alike."""
        return float(self.frac_sum + self.index_sum) / self.rows


def _sum(cached: Tensor, layers: list[Tensor]) -> Tensor:
    """Over the layers, one launch for all: fp64, shaped like `cached`, zeros of none."""
    return torch.stack(layers).sum(0, dtype=torch.float64) if layers else torch.zeros_like(cached, dtype=torch.float64)
