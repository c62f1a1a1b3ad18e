"""Floats: `fp32`, `fp16`, `bf16`, and `fp8`, which is e4m3 without a scale, saturating at +-448, as
vLLM's `kv_cache_dtype=fp8` without calibrated scales; and `nvfp4`, NVIDIA's format of 4-bit floats
with scales on two levels.

The rule, and where it differs (made into docs/methods.md):

**nvfp4**: an element is an E2M1 number (0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 or ±6), 16 elements along
head_dim share a scale in E4M3, and a tensor has a scale in fp32. With s = the tensor's largest
magnitude / (6 · 448), a block's scale is its largest magnitude / 6 / s in E4M3; an element is the
E2M1 number nearest to x / (scale · s), of two the even one. The tensor is a row here, one token's
key or value in one KV head; vLLM reads a cache's scale from the checkpoint, or takes 1. Bytes at
head_dim 64: 4 + 4 + 32, which are 5 bits an element, 4.75 at 128; with one scale for a whole layer
they would be 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.codecs.base import FLOAT_DTYPES, RowCodec
from methods.packing import pack_planes, plane_width, unpack_planes

STORED_DTYPES = FLOAT_DTYPES | {"fp8": torch.float8_e4m3fn}
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
NVFP4 = "nvfp4"
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a float of 1 bit of sign, 2 of exponent and 1 of mantissa, by code."""
NVFP4_BLOCK = 16
"""Elements that share an E4M3 scale."""


@dataclass(frozen=True)
class FloatCodec(RowCodec):
    """Elements as they are, in a float format.

    name: one of STORED_DTYPES.
    """

    name: str

    @property
    def bits(self) -> int:
        """Bits that an element counts: 16 for any float but fp8, which has 8."""
        return 16 if self.name in FLOAT_DTYPES else 8

    def bits_per_element(self, head_dim: int) -> float:
        return float(self.bits)

    def row_bytes(self, head_dim: int) -> int:
        return -(-head_dim * STORED_DTYPES[self.name].itemsize // 2) * 2

    def encode(self, x: Tensor) -> Tensor:
        # A cast turns numbers beyond the range into infinity or NaN; deployed kernels saturate.
        stored = STORED_DTYPES[self.name]
        most = torch.finfo(stored).max
        if most < torch.finfo(x.dtype).max:
            x = x.float().clamp(-most, most)
        packed = x.to(stored).contiguous().view(torch.uint8)
        missing = self.row_bytes(x.shape[-1]) - packed.shape[-1]
        return pad(packed, (0, missing)) if missing else packed

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """As `RowCodec.decode`; a view of `packed`, no copy, where rows are stored in `dtype`."""
        stored = STORED_DTYPES[self.name]
        return packed[..., : head_dim * stored.itemsize].view(stored).to(dtype)


@dataclass(frozen=True)
class Nvfp4Codec(RowCodec):
    """NVIDIA's NVFP4, a row being a tensor: E2M1 numbers, an E4M3 scale for each block of
    `NVFP4_BLOCK` elements, and an fp32 scale.

    A packed row is `[fp32 scale | E4M3 scales | padding to an even number | codes]`. A code's high
    bit is its sign.
    """

    name: str = NVFP4
    bits: ClassVar[int] = 4

    def bits_per_element(self, head_dim: int) -> float:
        """4, and 8 for each block and 32 for the row."""
        return self.bits + (8 * self._num_blocks(head_dim) + 32) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        return self._first_code(head_dim) + plane_width(head_dim, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        codes, scales, row_scale = self._quantize(x)
        row_scale = row_scale.clone(memory_format=torch.contiguous_format)  # of no rows, too
        meta = torch.cat([row_scale.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
        missing = self._first_code(head_dim) - meta.shape[-1]
        return torch.cat([pad(meta, (0, missing)), pack_planes(codes, self.bits)], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        # A copy, since a slot may begin anywhere.
        row_scale = packed[..., :4].clone(memory_format=torch.contiguous_format)
        scales = packed[..., 4 : 4 + self._num_blocks(head_dim)].contiguous()
        packed_codes = packed[..., self._first_code(head_dim) :]
        codes = unpack_planes(packed_codes, self.bits, head_dim, torch.int32)
        levels, _ = _e2m1(packed.device)
        block_scales = scales.view(torch.float8_e4m3fn).float()
        step = (block_scales * row_scale.view(torch.float32)).unsqueeze(-1)
        element_steps = step.expand(*step.shape[:-1], NVFP4_BLOCK).flatten(-2)
        return levels[codes].mul_(element_steps[..., :head_dim]).to(dtype)

    def _num_blocks(self, head_dim: int) -> int:
        return -(-head_dim // NVFP4_BLOCK)

    def _first_code(self, head_dim: int) -> int:
        """Bytes before the codes; even."""
        return 4 + -(-self._num_blocks(head_dim) // 2) * 2

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """codes, int32 [..., head_dim]; scales of the blocks, e4m3 [..., blocks]; scale of the row,
        fp32 [..., 1]."""
        rows = x.float()
        head_dim = rows.shape[-1]
        filled = pad(rows, (0, -head_dim % NVFP4_BLOCK))
        blocks = filled.unflatten(-1, (-1, NVFP4_BLOCK))
        largest = blocks.abs().amax(-1)  # [..., blocks]
        # By a tensor: by a plain number CUDA multiplies by the inverse.
        most_code = largest.new_full((), E2M1_LEVELS[-1])
        row_scale = largest.amax(-1, keepdim=True).div(most_code * FP8_MAX)
        divisor = row_scale.masked_fill(row_scale == 0, 1.0)
        scales = largest.div(most_code).div_(divisor).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn)
        step = (scales.float() * row_scale).unsqueeze(-1)
        is_empty = step == 0
        normal = blocks.div(step.masked_fill(is_empty, 1.0)).masked_fill_(is_empty, 0.0)
        _, boundaries = _e2m1(x.device)
        codes = torch.bucketize(normal.abs().contiguous(), boundaries, out_int32=True)
        codes += 8 * (normal < 0).int()
        return codes.flatten(-2)[..., :head_dim], scales, row_scale


@cache
def _e2m1(device: torch.device) -> tuple[Tensor, Tensor]:
    """The value of each of the 16 codes, and the largest magnitude that goes to each code but the
    last, fp32 on a device.

    A magnitude midway between two codes goes to the even one: down at the first boundary, up at the
    second, and so on.
    """
    levels = torch.tensor(E2M1_LEVELS)
    boundaries = (levels[1:] + levels[:-1]) / 2
    boundaries[1::2] = boundaries[1::2].nextafter(torch.tensor(0.0))
    return torch.cat([levels, -levels]).to(device), boundaries.to(device)
