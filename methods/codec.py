"""How a cached row is stored: as floats, or as integer codes with a minimum and a step per group.

Integer codecs follow FlexGen's group-wise asymmetric scheme, which InfiniGen's INT4 baseline uses
(section 5.1): per token, KV head and group of `group_size` elements along head_dim, `lo = min` and
`step = (max - lo) / (2^bits - 1)`, both rounded to fp16 before use; `code = round((x - lo) / step)`,
clamped; `value = code * step + lo` in the compute dtype. A group whose step rounds to 0 gives `lo`. Where
head_dim is no multiple of group_size (Phi-3's 96 with 64), the last group is shorter.

A packed row of an integer codec is `[lo, step of each group (fp16) | codes]`. The codes are planar: with
n = 8 / bits codes a byte, byte i holds elements i, i + width, ..., i + (n - 1) * width, the first in the
lowest bits, so unpacking writes n contiguous blocks instead of interleaving.

`roundtrip(x)` is `decode(encode(x))` bit for bit without the packing: replay uses the one, live decoding the
other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
CODEC_NAMES = (*FLOAT_DTYPES, *INTEGER_BITS)
_GROUP_META_BYTES = 4  # lo and step, fp16 each


class _Quantized(NamedTuple):
    """Integer codes, held as fp32, of rows cut into groups; lo and step are fp16 values held as fp32."""

    codes: Tensor  # [..., num_groups, group]
    lo: Tensor  # [..., num_groups, 1]
    step: Tensor  # [..., num_groups, 1]


@dataclass(frozen=True)
class Codec:
    """Storage format of cached K and V rows; holds no state.

    name: one of CODEC_NAMES. group_size: elements that share lo and step (integer codecs only).
    Raises ValueError for an unknown name or a group_size below 1.
    """

    name: str
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.name not in CODEC_NAMES:
            raise ValueError(f"codec={self.name!r}: must be one of {', '.join(CODEC_NAMES)}")
        if type(self.group_size) is not int or self.group_size < 1:
            raise ValueError(f"group_size={self.group_size!r}: must be an integer >= 1")

    @classmethod
    def parse(cls, name: str, group_size: int = 64) -> Codec:
        """The codec called `name`; raises ValueError naming the allowed ones."""
        return cls(name, group_size)

    @property
    def keys(self) -> Codec:
        """K's codec: this one, for K and V alike."""
        return self

    @property
    def values(self) -> Codec:
        """V's codec, alike."""
        return self

    @property
    def is_float(self) -> bool:
        """Whether elements are stored as floating-point numbers, without groups."""
        return self.name in FLOAT_DTYPES

    @property
    def bits(self) -> int:
        """Stored bits of one element, lo and step not counted."""
        return FLOAT_DTYPES[self.name].itemsize * 8 if self.is_float else INTEGER_BITS[self.name]

    def num_groups(self, head_dim: int) -> int:
        """Groups in a row of head_dim elements; 0 for float codecs."""
        return 0 if self.is_float else -(-head_dim // self.group_size)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits an element counts in kv_frac: 16 for float codecs, else bits + 32 / group (lo and step)."""
        return 16.0 if self.is_float else self.bits + 32 * self.num_groups(head_dim) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a packed row of head_dim elements; even, so that fp16 values stay aligned in any slot."""
        if self.is_float:
            return head_dim * self.bits // 8
        return _GROUP_META_BYTES * self.num_groups(head_dim) + self._plane_width(head_dim)

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` [..., head_dim] as it reads back from storage, in its own dtype; maybe `x` itself."""
        if self.is_float:
            return x.to(FLOAT_DTYPES[self.name]).to(x.dtype)
        codes, lo, step = self._quantize(x)
        return self._dequantize(codes.to(x.dtype), lo, step).flatten(-2)[..., : x.shape[-1]]

    def encode(self, x: Tensor) -> Tensor:
        """Packs `x` [..., head_dim] into uint8 [..., row_bytes(head_dim)]."""
        if self.is_float:
            return x.to(FLOAT_DTYPES[self.name]).contiguous().view(torch.uint8)
        codes, lo, step = self._quantize(x)
        meta = torch.cat([lo, step], dim=-1).flatten(-2).half().view(torch.uint8)
        return torch.cat([meta, self._pack(codes.flatten(-2)[..., : x.shape[-1]])], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Rows [..., head_dim] in `dtype` from `packed`, uint8 [..., row_bytes(head_dim)] with stride 1 last.

        A float codec whose dtype is `dtype` gives a view of `packed`, not a copy.
        """
        if self.is_float:
            return packed.view(FLOAT_DTYPES[self.name]).to(dtype)
        num_groups = self.num_groups(head_dim)
        meta_bytes = _GROUP_META_BYTES * num_groups
        meta = packed[..., :meta_bytes].view(torch.float16).unflatten(-1, (num_groups, 2))
        codes = self._unpack(packed[..., meta_bytes:], head_dim, dtype)
        values = self._dequantize(self._grouped(codes), meta[..., :1], meta[..., 1:])
        return values.flatten(-2)[..., :head_dim]

    def _grouped(self, rows: Tensor) -> Tensor:
        """Cuts [..., head_dim] into groups; a shorter last one repeats its last element: same min and max."""
        head_dim = rows.shape[-1]
        group = min(self.group_size, head_dim)
        missing = -head_dim % group
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
        return rows.unflatten(-1, (-1, group))

    def _quantize(self, x: Tensor) -> _Quantized:
        grouped = self._grouped(x.float())
        levels = 2**self.bits - 1
        minimum = grouped.amin(-1, keepdim=True)
        step = grouped.amax(-1, keepdim=True).sub_(minimum).div_(levels).half().float()
        lo = minimum.half().float()
        divisor = step.masked_fill(step == 0, 1.0)  # code * 0 + lo is lo, whatever the code
        return _Quantized((grouped - lo).div_(divisor).round_().clamp_(0, levels), lo, step)

    @staticmethod
    def _dequantize(codes: Tensor, lo: Tensor, step: Tensor) -> Tensor:
        """Overwrites `codes` with the values; two separate roundings, so that no kernel may fuse them."""
        return codes.mul_(step.to(codes.dtype)).add_(lo.to(codes.dtype))

    def _plane_width(self, head_dim: int) -> int:
        """Bytes that hold the codes of a row, which is also the number of elements in a bit plane; even."""
        return -(-head_dim * self.bits // 16) * 2

    def _pack(self, codes: Tensor) -> Tensor:
        """fp32 codes [..., head_dim] as bytes [..., plane width]."""
        head_dim, per_byte = codes.shape[-1], 8 // self.bits
        width = self._plane_width(head_dim)
        padded = pad(codes, (0, width * per_byte - head_dim)).to(torch.uint8)
        planes = padded.unflatten(-1, (per_byte, width))
        packed = planes[..., 0, :]
        for plane in range(1, per_byte):
            packed = packed | (planes[..., plane, :] << (plane * self.bits))
        return packed

    def _unpack(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Bytes [..., plane width] as codes [..., head_dim] in `dtype`."""
        width = packed.shape[-1]
        codes = torch.empty(*packed.shape[:-1], head_dim, dtype=dtype, device=packed.device)
        for plane, start in enumerate(range(0, head_dim, width)):
            block = codes[..., start : start + width]
            shifted = (packed >> (plane * self.bits)) & (2**self.bits - 1)
            block.copy_(shifted[..., : block.shape[-1]])
        return codes


@dataclass(frozen=True)
class NoCodec:
    """Of what is not stored, as a method holds it otherwise."""

    name = "none"
    is_float = False
    bits = 0

    def bits_per_element(self, head_dim: int) -> float:
        """None."""
        return 0.0

    def row_bytes(self, head_dim: int) -> int:
        """None."""
        return 0

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` itself: what is held otherwise is not this codec's to change."""
        return x

    def encode(self, x: Tensor) -> Tensor:
        """No bytes, uint8 [..., 0]."""
        return x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """No elements, [..., 0]."""
        return packed.to(dtype)


@dataclass(frozen=True)
class SplitCodec:
    """Keys and values stored in formats of their own; sizes are means of the two."""

    keys: Codec | NoCodec
    values: Codec

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.keys.name}/{self.values.name}"

    @property
    def is_float(self) -> bool:
        """Whether both are stored as floating-point numbers."""
        return self.keys.is_float and self.values.is_float

    @property
    def bits(self) -> float:
        """Stored bits of an element, groups' scales not counted; floats count 16, as in every size."""
        return sum(16 if codec.is_float else codec.bits for codec in (self.keys, self.values)) / 2

    def bits_per_element(self, head_dim: int) -> float:
        """Bits an element counts in kv_frac."""
        return (self.keys.bits_per_element(head_dim) + self.values.bits_per_element(head_dim)) / 2


AnyCodec = Codec | SplitCodec


def exact_codec(dtype: torch.dtype) -> Codec:
    """The codec that stores rows of `dtype` as they are."""
    return Codec(next(name for name, stored in FLOAT_DTYPES.items() if stored == dtype))


def without_keys(codec: AnyCodec | None, dtype: torch.dtype) -> SplitCodec:
    """The codec of a cache that holds values only; None stores them as they are."""
    return SplitCodec(NoCodec(), (codec or exact_codec(dtype)).values)
