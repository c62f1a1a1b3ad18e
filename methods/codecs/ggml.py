"""llama.cpp's cache types `q8_0`, `q5_1` and `q4_0`: blocks of 32 elements with their own scales.

The rule, and where it differs (made into docs/methods.md):

**q8_0**, **q5_1** and **q4_0** are llama.cpp's cache types, byte for byte: 32 elements share a
scale in fp16, in `q5_1` a minimum too; 8.5, 6 and 4.5 bits an element. The methods rotate as
llama.cpp does by default (ggml-org/llama.cpp#21038): keys after their positions by the Hadamard
matrix of the largest power of two that divides head_dim, values in blocks of 64, both only where 64
divides head_dim. `method=full codec=q4_0` is `LLAMA_ATTN_ROT_DISABLE=1`. llama.cpp turns queries
and outputs instead, and on a CPU codes queries too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods.codecs.base import Family, hadamard, in_range, to_half
from methods.codecs.integers import Rotation
from methods.packing import pack_planes, unpack_planes

GGML_BITS = {"q8_0": 8, "q5_1": 5, "q4_0": 4}
GGML_BLOCK = 32
"""Elements of a block."""
ROTATED = 64
"""llama.cpp rotates heads whose size is a multiple of this, and values in blocks of it."""


@dataclass(frozen=True)
class GgmlCodec(Family):
    """A cache type of llama.cpp. A packed row is its blocks, each `[d | m | high bits | codes]`
    as in ggml; a shorter last block repeats its last element.

    With d the scale and m the minimum: `q8_0` has d = largest magnitude / 127, its codes are
    rounded half away from zero. `q4_0` has d = the element of the largest magnitude / -8, its codes
    0 to 15 stand for -8 to 7. `q5_1` has d = (max - m) / 31.

    rotation: applied to a row before it is coded. of_values: the rows are values, which are rotated
    in blocks of `ROTATED`.
    """

    name: str
    rotation: Rotation | None = None
    of_values: bool = False
    names = GGML_BITS

    @property
    def values(self) -> GgmlCodec:
        return self if self.rotation is None else replace(self, of_values=True)

    def row_bytes(self, head_dim: int) -> int:
        num_blocks = -(-head_dim // GGML_BLOCK)
        return num_blocks * (self._meta_bytes + GGML_BLOCK * self.bits // 8)

    def encode(self, x: Tensor) -> Tensor:
        codes, scale, minimum = self._quantize(x)
        parts = [scale.view(torch.uint8)]
        if self.name == "q5_1":
            parts += [minimum.view(torch.uint8), _pack_high_bits(codes)]
        if self.name == "q8_0":
            parts.append(codes.to(torch.int8).view(torch.uint8))
        else:
            low = codes + 8 if self.name == "q4_0" else codes.int() & 15
            parts.append(pack_planes(low, 4))
        return torch.cat(parts, -1).flatten(-2)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        num_blocks = -(-head_dim // GGML_BLOCK)
        blocks = packed.unflatten(-1, (num_blocks, packed.shape[-1] // num_blocks))
        meta = blocks[..., : self._meta_bytes].contiguous()
        scale = meta[..., :2].contiguous().view(torch.float16).float()
        minimum = torch.zeros_like(scale)
        packed_codes = blocks[..., self._meta_bytes :]
        if self.name == "q8_0":
            codes = packed_codes.view(torch.int8).float()
        elif self.name == "q4_0":
            codes = unpack_planes(packed_codes, 4, GGML_BLOCK, torch.float32) - 8
        else:
            minimum = meta[..., 2:].contiguous().view(torch.float16).float()
            high = _unpack_high_bits(packed_codes[..., : GGML_BLOCK // 8])
            low = unpack_planes(packed_codes[..., GGML_BLOCK // 8 :], 4, GGML_BLOCK, torch.float32)
            codes = low + 16 * high
        rows = (codes * scale + minimum).flatten(-2)[..., :head_dim]
        return self._rotated(rows).to(dtype)

    @property
    def _meta_bytes(self) -> int:
        """Bytes of a block's scale and minimum."""
        return 4 if self.name == "q5_1" else 2

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """codes, fp32 [..., blocks, GGML_BLOCK], of `q4_0` and `q8_0` around 0; scale and minimum,
        fp16 [..., blocks, 1], the minimum 0 but in `q5_1`."""
        rows = self._rotated(in_range(x))
        missing = -rows.shape[-1] % GGML_BLOCK
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
        blocks = rows.unflatten(-1, (-1, GGML_BLOCK))
        minimum = torch.zeros_like(blocks[..., :1])
        if self.name == "q5_1":
            minimum = blocks.amin(-1, keepdim=True)
            scale = _quotient(blocks.amax(-1, keepdim=True) - minimum, 31)
            codes = ((blocks - minimum) * _inverse(scale) + 0.5).trunc_().clamp_(0, 31)
        elif self.name == "q4_0":
            largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            scale = _quotient(largest, -8)
            codes = (blocks * _inverse(scale) + 8.5).trunc_().clamp_(0, 15) - 8
        else:
            scale = _quotient(blocks.abs().amax(-1, keepdim=True), 127)
            scaled = blocks * _inverse(scale)
            magnitude = scaled.abs()
            whole = magnitude.floor()
            codes = scaled.sign() * (whole + (2 * (magnitude - whole)).floor_())
        return codes, to_half(scale), to_half(minimum)

    def _rotated(self, rows: Tensor) -> Tensor:
        if self.rotation is None or rows.shape[-1] % ROTATED:
            return rows
        return hadamard(rows, at_most=ROTATED) if self.of_values else hadamard(rows)


def _quotient(number: Tensor, divisor: float) -> Tensor:
    """number / divisor. By a tensor: by a plain number CUDA multiplies by the inverse."""
    return number / number.new_full((), divisor)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, 0 of 0."""
    return scale.masked_fill(scale == 0, torch.inf).reciprocal_()


def _pack_high_bits(codes: Tensor) -> Tensor:
    """The fifth bits of a block's codes, eight to a byte, the first in the lowest bit."""
    bits = (codes.int() >> 4).unflatten(-1, (-1, 8))
    places = torch.arange(8, device=codes.device, dtype=torch.int32)
    return (bits << places).sum(-1).to(torch.uint8)


def _unpack_high_bits(packed: Tensor) -> Tensor:
    """Inverse of `_pack_high_bits`, in fp32."""
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(-2).float()
