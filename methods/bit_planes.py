"""Integer codes of 1, 2, 4 or 8 bits packed into bytes, planar.

With n = 8 / bits codes a byte, byte i holds elements i, i + width, ..., i + (n - 1) * width, the first in the lowest
bits, so unpacking writes n contiguous blocks instead of interleaving.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def plane_width(head_dim: int, bits: int) -> int:
    """Bytes that hold the codes of a row, which is also the number of elements in a bit plane; even."""
    return -(-head_dim * bits // 16) * 2


def pack(codes: Tensor, bits: int) -> Tensor:
    """fp32 codes [..., head_dim] as bytes [..., plane width]."""
    head_dim, per_byte = codes.shape[-1], 8 // bits
    width = plane_width(head_dim, bits)
    padded = pad(codes, (0, width * per_byte - head_dim)).to(torch.uint8)
    planes = padded.unflatten(-1, (per_byte, width))
    packed = planes[..., 0, :]
    for plane in range(1, per_byte):
        packed = packed | (planes[..., plane, :] << (plane * bits))
    return packed


def unpack(packed: Tensor, bits: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Bytes [..., plane width] as codes [..., head_dim] in `dtype`."""
    width = packed.shape[-1]
    codes = torch.empty(*packed.shape[:-1], head_dim, dtype=dtype, device=packed.device)
    for plane, start in enumerate(range(0, head_dim, width)):
        block = codes[..., start : start + width]
        shifted = (packed >> (plane * bits)) & (2**bits - 1)
        block.copy_(shifted[..., : block.shape[-1]])
    return codes
