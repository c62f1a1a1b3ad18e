"""Packing: codes of a few bits as bytes.

Codes of 1, 2, 4 or 8 bits are packed in planes. With n = 8 / bits codes per byte, byte i holds
elements i, i + width, ..., i + (n - 1) * width, the first in the lowest bits. Unpacking then joins
n contiguous blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def plane_width(head_dim: int, bits: int) -> int:
    """Bytes of a row's codes, which is also the number of elements in a bit plane; even."""
    return -(-head_dim * bits // 16) * 2


def _planes(bits: int) -> tuple[int, ...]:
    """The bits of a code that are packed together, the low ones first."""
    return (2, 1) if bits == 3 else (bits,)


def code_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of 1, 2, 3, 4 or 8 bits, as `pack_codes` packs them."""
    return sum(plane_width(count, plane_bits) for plane_bits in _planes(bits))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Integer codes [..., count] as uint8 [..., `code_bytes`]; codes of 3 bits as their two low
    bits and then their high bit."""
    parts = []
    for plane_bits in _planes(bits):
        parts.append(pack_planes(codes & (2**plane_bits - 1), plane_bits))
        codes = codes >> plane_bits
    return torch.cat(parts, dim=-1)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes in bytes of `pack_codes`: int32 [..., count]."""
    codes = packed.new_zeros((*packed.shape[:-1], count), dtype=torch.int32)
    begin, shift = 0, 0
    for plane_bits in _planes(bits):
        end = begin + plane_width(count, plane_bits)
        codes += unpack_planes(packed[..., begin:end], plane_bits, count, torch.int32) << shift
        begin, shift = end, shift + plane_bits
    return codes


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """fp32 codes [..., head_dim] as bytes [..., plane width]."""
    head_dim, per_byte = codes.shape[-1], 8 // bits
    width = plane_width(head_dim, bits)
    padded = pad(codes, (0, width * per_byte - head_dim)).to(torch.uint8)
    planes = padded.unflatten(-1, (per_byte, width))
    packed = planes[..., 0, :]
    for plane in range(1, per_byte):
        packed = packed | (planes[..., plane, :] << (plane * bits))
    return packed


def unpack_planes(packed: Tensor, bits: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Bytes [..., plane width] as codes [..., head_dim] in `dtype`, contiguous."""
    if bits < 8:
        if packed.is_cpu:
            packed = packed.contiguous()  # it shifts and masks the bytes of slots one by one
        planes = []
        for shift in range(0, 8, bits):
            plane = packed >> shift if shift else packed
            if shift + bits < 8:  # else nothing lies above these bits
                plane = plane & (2**bits - 1)
            planes.append(plane)
        packed = torch.cat(planes, -1)
    codes = packed[..., :head_dim]
    return codes.to(dtype, memory_format=torch.contiguous_format)
