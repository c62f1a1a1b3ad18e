"""KVarN's tiles (Muller et al., arXiv 2606.03458): rotated rows, whose channels and tokens are
brought to equal variance before they are rounded.

The rule, and where it differs (made into docs/methods.md):

**kvarn** and **kvarn4** are `kvarn_k4v2_g128` and `kvarn_k4v4_g128` of vllm-project/vllm#46812. A
tile is `group_size` (128) tokens of a KV head, rotated by the Hadamard matrix and divided by the
deviations of its tokens and of its channels in turn, 16 times. Keys then have a minimum and a step
for each channel, values for each token, and the other side a scale. Bytes at head_dim 64: a key 32
+ 4, a value 16 + 6 (`kvarn4` 32 + 6). The unfinished tile stays exact. So do a request's first 128
tokens in vLLM, which are coded here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods.codecs.base import (
    TileCodec,
    collected,
    deal_out,
    dealt_bytes,
    hadamard,
    in_range,
    to_half,
    total,
)
from methods.packing import pack_planes, plane_width, unpack_planes

KVARN_BITS = {"kvarn4": 4, "kvarn2": 2}
ROUNDS = 16
"""How often tokens and channels are normalized in turn."""
DEVIATIONS = (1e-3, 1e3)
"""Least and largest deviation that a round divides by."""
SCALES = (math.exp(-0.3), math.exp(10))
"""Least and largest product of the deviations of all rounds."""


@dataclass(frozen=True)
class KvarnCodec(TileCodec):
    """Integer codes of a tile with scales for its tokens and its channels.

    A packed row is `[a part of its tile's scales (fp16) | codes]`. of_values: the minimum and step
    are a token's, else a channel's.
    """

    of_values: bool = False
    names = KVARN_BITS

    @property
    def values(self) -> KvarnCodec:
        return replace(self, of_values=True)

    def row_bytes(self, head_dim: int) -> int:
        meta_bytes = dealt_bytes(self._tile_meta_bytes(head_dim), self.group_size)
        return meta_bytes + plane_width(head_dim, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        codes, *meta = self._quantize(x)
        meta_bytes = torch.cat([part.flatten(-2) for part in meta], -1).view(torch.uint8)
        by_token = codes if self.of_values else codes.mT
        packed = pack_planes(by_token.flatten(-3, -2), self.bits)
        return torch.cat([deal_out(meta_bytes, self.group_size), packed], -1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        first_code = packed.shape[-1] - plane_width(head_dim, self.bits)
        meta_bytes = self._tile_meta_bytes(head_dim)
        meta = collected(packed[..., :first_code], self.group_size, meta_bytes).view(torch.float16)
        by_token = unpack_planes(packed[..., first_code:], self.bits, head_dim, torch.float32)
        tiles = by_token.unflatten(-2, (-1, self.group_size))
        codes = tiles if self.of_values else tiles.mT
        rows, columns = codes.shape[-2:]
        step, minimum, scale = meta.split([rows, rows, columns], -1)
        values = codes * step.unsqueeze(-1).float() + minimum.unsqueeze(-1).float()
        values = values * scale.unsqueeze(-2).float()
        by_token = values if self.of_values else values.mT
        return hadamard(by_token.flatten(-3, -2)).to(dtype)

    def _tile_meta_bytes(self, head_dim: int) -> int:
        """Bytes of a tile's steps, minima and scales."""
        rounded, other = head_dim, self.group_size
        if self.of_values:
            rounded, other = other, rounded
        return 2 * (2 * rounded + other)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, fp32 [..., tiles, rows, columns]; step and minimum of each row, a channel of keys
        or a token of values, fp16 [..., rows, 1]; scale of each column, fp16 [..., 1, columns]."""
        by_token = hadamard(in_range(x)).unflatten(-2, (-1, self.group_size))
        tiles = (by_token if self.of_values else by_token.mT).contiguous()
        column_scales, row_scales = balancing_scales(tiles)
        balanced = tiles / column_scales / row_scales
        levels = balanced.new_full((), 2**self.bits - 1)  # as in `IntegerCodec`
        minimum = balanced.amin(-1, keepdim=True)
        step = ((balanced.amax(-1, keepdim=True) - minimum) / levels).clamp_(min=1e-10)
        codes = ((balanced - minimum) / step).round_().clamp_(0, 2**self.bits - 1)
        step, minimum = to_half(row_scales * step), to_half(row_scales * minimum)
        return codes, step, minimum, to_half(column_scales)


def balancing_scales(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., 1, columns] and [..., rows, 1] by which fp32 tiles [..., rows, columns] are
    divided to have columns and rows of equal deviation.

    Columns and rows are divided by their deviations in turn, `ROUNDS` times; the scales of the best
    round count, of equal ones the last (`variance_normalize` of vllm-project/vllm#46812, which adds
    logarithms where scales are multiplied here).
    """
    column_scales = torch.ones_like(tiles[..., :1, :])
    row_scales = torch.ones_like(tiles[..., :1])
    best_columns, best_rows = column_scales, row_scales
    least = _imbalance(tiles)
    current = tiles
    for _ in range(ROUNDS):
        deviation = _deviation(current.mT).mT.clamp(*DEVIATIONS)
        column_scales = (column_scales * deviation).clamp_(*SCALES)
        current = tiles / column_scales / row_scales
        row_scales = (row_scales * _deviation(current).clamp(*DEVIATIONS)).clamp_(*SCALES)
        current = tiles / column_scales / row_scales
        imbalance = _imbalance(current)
        is_better = imbalance <= least
        least = torch.where(is_better, imbalance, least)
        best_columns = torch.where(is_better, column_scales, best_columns)
        best_rows = torch.where(is_better, row_scales, best_rows)
    return best_columns, best_rows


def _imbalance(tiles: Tensor) -> Tensor:
    """Sum of max / min of the deviations of columns and of rows, [..., 1, 1]; 2 is the least."""
    spreads = []
    for deviations in (_deviation(tiles.mT), _deviation(tiles)):
        least = deviations.amin(-2, keepdim=True).clamp_(min=1e-8)
        spreads.append(deviations.amax(-2, keepdim=True) / least)
    return spreads[0] + spreads[1]


def _deviation(rows: Tensor) -> Tensor:
    """Sample standard deviation of each row, [..., 1]."""
    count = rows.new_full((), rows.shape[-1])
    centred = rows - total(rows) / count
    return (total(centred.square()) / (count - 1)).sqrt_()
