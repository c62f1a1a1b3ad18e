"""`int8` to `int1`: integer codes with a minimum and a step for each group of elements.

FlexGen's group-wise asymmetric scheme, which InfiniGen's INT4 baseline uses (section 5.1). Per
token, KV head and group of `group_size` elements along head_dim: `lo = min`, `step = (max - lo) /
(2^bits - 1)`, both rounded to fp16 before use, where they saturate at 65504; `code = round((x - lo)
/ step)`, clamped; `value = code * step + lo` in the compute dtype. A group whose step rounds to 0
gives `lo`. The last group of a row may be shorter. A packed row is `[lo, step of each group (fp16)
| codes]`.

With `rotation="hadamard"` a row is rotated before it is quantized and back after, as in QuaRot's KV
cache (Ashkboos et al., NeurIPS 2024): the rotation spreads an outlier over the row.

`ChannelCodec` has KIVI's keys (Liu et al., ICML 2024), whose groups are tokens of one channel: the
outliers of keys lie in few channels.

The rule, and where it differs (made into docs/methods.md):

**int8** to **int1**: elements in groups of `group_size` share a minimum and a step in fp16
(asymmetric). Any method can have such a codec (`codec=int4`). **fp8** has no scales and saturates
at ±448. **-hadamard** rotates keys (after their positions) and values before they are coded and
back after. QuaRot turns the query instead of turning keys back, and folds the rotation of values
into the weights. Its 4-bit cache has asymmetric codes as here, with one group a row.

**kivi**: keys share minimum and step per channel over `group_size` (32) consecutive tokens, values
per token over 32 channels: 3 and 5 bits an element. The values of the last `residual` (128) tokens
are exact. Keys stay exact until 128 are there, and are coded after the step that completes them.
Its parts can be set apart, with methods that read all: `codec=int4 value_codec=int2
key_groups=channel residual=128`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from methods.codecs.base import (
    Family,
    RowCodec,
    collected,
    deal_out,
    dealt_bytes,
    hadamard,
    in_range,
    require_group_size,
    to_half,
)
from methods.compiled import kernels_for
from methods.packing import pack_planes, plane_width, unpack_planes

INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
Rotation = Literal["hadamard"]
GROUP_META_BYTES = 4  # lo and step, fp16 each


@dataclass(frozen=True)
class IntegerCodec(Family):
    """Integer codes. group_size: elements that share lo and step. rotation: applied to a row before
    it is quantized. Raises ValueError for a group_size below 1.
    """

    name: str
    group_size: int = 64
    rotation: Rotation | None = None
    names = INTEGER_BITS

    def __post_init__(self) -> None:
        require_group_size(self.group_size, least=1)

    def num_groups(self, head_dim: int) -> int:
        """Groups in a row of head_dim elements."""
        return -(-head_dim // self.group_size)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits that an element counts in a budget: `bits`, and 32 for each group (lo and step)."""
        return self.bits + 32 * self.num_groups(head_dim) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        return self._meta_bytes(head_dim) + plane_width(head_dim, self.bits)

    @property
    def is_plain(self) -> bool:
        """True if kernels know these rows: in groups along head_dim, without a rotation."""
        return type(self) is IntegerCodec and self.rotation is None

    def roundtrip(self, x: Tensor) -> Tensor:
        codes, lo, step = self._quantize(x)
        return self._values(codes.to(self._working(x.dtype)), lo, step, x.shape).to(x.dtype)

    def encode(self, x: Tensor) -> Tensor:
        if self.is_plain and (kernels := kernels_for(x)):
            return kernels.encode(x, self.bits, self.group_size)
        codes, lo, step = self._quantize(x)
        packed = pack_planes(self._ungrouped(codes, x.shape), self.bits)
        return torch.cat([self._pack_meta(lo, step), packed], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        codes, lo, step = self.unpack(packed, head_dim, self._working(dtype))
        return self._values(self._grouped(codes), lo, step, codes.shape).to(dtype)

    def unpack(
        self, packed: Tensor, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of rows in `dtype`, [..., head_dim], and lo and step of their groups,
        fp16 [..., num_groups, 1]. Arguments as in `decode`."""
        meta_bytes = self._meta_bytes(head_dim)
        lo, step = self._unpack_meta(packed[..., :meta_bytes], head_dim)
        return unpack_planes(packed[..., meta_bytes:], self.bits, head_dim, dtype), lo, step

    def _working(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute values in: fp32 if they are rotated back, so that they are rounded
        once."""
        return dtype if self.rotation is None else torch.float32

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., head_dim] cut into groups. A shorter last group repeats its last element: same min
        and max."""
        head_dim = rows.shape[-1]
        group = max(1, min(self.group_size, head_dim))
        missing = -head_dim % group
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
        return rows.unflatten(-1, (rows.shape[-1] // group, group))

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        return groups.flatten(-2)[..., : shape[-1]]

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """codes [..., num_groups, group], lo and step [..., num_groups, 1], rounded to fp16; all
        fp32."""
        rows = in_range(x)
        if self.rotation is not None:
            rows = hadamard(rows)
        grouped = self._grouped(rows)
        levels = 2**self.bits - 1
        minimum = grouped.amin(-1, keepdim=True)
        intervals = minimum.new_full(
            (), levels
        )  # by a plain number CUDA does not divide: it multiplies by 1 / levels
        step = grouped.amax(-1, keepdim=True).sub_(minimum).div_(intervals)
        step, lo = to_half(step).float(), to_half(minimum).float()
        divisor = step.masked_fill(step == 0, 1.0)  # code * 0 + lo is lo, whatever the code
        return (grouped - lo).div_(divisor).round_().clamp_(0, levels), lo, step

    def _values(self, codes: Tensor, lo: Tensor, step: Tensor, shape: torch.Size) -> Tensor:
        """Rows of `shape`; overwrites `codes`. Two separate roundings, so that no kernel may fuse
        them."""
        rows = self._ungrouped(codes.mul_(step.to(codes.dtype)).add_(lo.to(codes.dtype)), shape)
        return rows if self.rotation is None else hadamard(rows)

    def _meta_bytes(self, head_dim: int) -> int:
        return GROUP_META_BYTES * self.num_groups(head_dim)

    def _pack_meta(self, lo: Tensor, step: Tensor) -> Tensor:
        """[..., num_groups, 1] each, as bytes [..., meta bytes]."""
        return torch.cat([lo, step], dim=-1).flatten(-2).half().view(torch.uint8)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """lo and step, fp16 [..., num_groups, 1], from bytes [..., meta bytes]."""
        meta = packed.view(torch.float16).unflatten(-1, (self.num_groups(head_dim), 2))
        return meta[..., :1], meta[..., 1:]


@dataclass(frozen=True)
class PairCodec(IntegerCodec):
    """`int4` in bytes that one call of torch unpacks to fp32, on a CPU in a quarter of the time.

    A packed row is `[codes | step, lo (fp16)]` of each group in turn. Byte i of a group has the
    codes of its elements 2i and 2i + 1, the first in the lower bits. Rows read back as those of
    `IntegerCodec`, bit for bit, though the call may fuse product and sum: a code has 4 bits and a
    step 11, so that fp32 holds their product exactly.
    """

    def encode(self, x: Tensor) -> Tensor:
        codes, lo, step = self._quantize(x)
        first, second = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        scales = torch.cat([step, lo], -1).half().view(torch.uint8)
        return torch.cat([first | (second << 4), scales], -1).flatten(-2)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        groups = packed.reshape(-1, packed.shape[-1] // self.num_groups(head_dim))
        groups = groups.contiguous()  # the call knows no strides
        values = torch.ops.quantized.embedding_bag_4bit_unpack(groups)
        return values.view(*packed.shape[:-1], head_dim).to(dtype)


def has_pairs(codec: RowCodec, size: int) -> TypeGuard[IntegerCodec]:
    """True if `PairCodec` stores rows of `size` elements as `codec` does, in as many bytes."""
    if not isinstance(codec, IntegerCodec) or not codec.is_plain or codec.bits != 4:
        return False
    group = min(codec.group_size, size)
    return size % group == 0 and group % 4 == 0


@dataclass(frozen=True)
class ChannelCodec(IntegerCodec):
    """An integer codec whose groups are `group_size` consecutive tokens of a channel.

    Rows are [..., tokens, head_dim], groups are counted from the first token. `encode` and `decode`
    take whole groups; in `roundtrip` the last one may be shorter. A group's 4 * head_dim bytes of
    lo and step are dealt out to its rows, so that all rows have the same length. Raises ValueError
    as `IntegerCodec`.
    """

    @property
    def span(self) -> int:
        return self.group_size

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / self.group_size

    def _meta_bytes(self, head_dim: int) -> int:
        return dealt_bytes(GROUP_META_BYTES * head_dim, self.group_size)

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., tokens, head_dim] as [..., head_dim, groups, tokens of a group]."""
        return super()._grouped(rows.mT)

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        return groups.flatten(-2)[..., : shape[-2]].mT

    def _pack_meta(self, lo: Tensor, step: Tensor) -> Tensor:
        """[..., head_dim, groups, 1] each, as bytes [..., tokens, meta bytes]."""
        scales = torch.cat([lo, step], -1).transpose(-3, -2).flatten(-2)
        return deal_out(scales.half().view(torch.uint8), self.group_size)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        packed_groups = collected(packed, self.group_size, GROUP_META_BYTES * head_dim)
        meta = packed_groups.view(torch.float16).unflatten(-1, (head_dim, 2)).transpose(-3, -2)
        return meta[..., :1], meta[..., 1:]
