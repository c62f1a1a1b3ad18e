"""What a codec is: the format of cached rows.

`RowCodec` is what every codec is; a codec in a file of one's own derives from it. `roundtrip(x)` is
`decode(encode(x))` bit for bit, for some codecs without the packing. Replay uses the first, live
decoding the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats to compute in."""
FP16_MAX = torch.finfo(torch.float16).max
LARGEST = 1e17
"""Magnitude at which elements saturate, so that sums of their squares stay finite."""
Count = TypeVar("Count", int, Tensor)


class RowCodec:
    """A storage format of cached rows, for keys, for values or for both. A row is one token's in
    one KV head.

    A subclass says `bits`, `row_bytes`, `encode` and `decode`. A row is coded by itself, whatever
    lies beside it.

    name: one of `FLOAT_DTYPES` if rows are stored so; any other word means nothing.
    """

    name: str = "own"
    residual: ClassVar[int] = 0
    """Number of last tokens that are kept exact; see `SplitCodec`."""

    @property
    def bits(self) -> float:
        """Bits that an element counts in `budget_artifact`, without what a row has once; shares
        count all of a row."""
        raise NotImplementedError

    @property
    def keys(self) -> RowCodec:
        return self

    @property
    def values(self) -> RowCodec:
        return self

    @property
    def span(self) -> int:
        """Consecutive tokens that are coded together."""
        return 1

    def stored(self, cached: Count) -> Count:
        """Number of the `cached` tokens that are read as stored: all."""
        return cached

    def bits_per_element(self, head_dim: int) -> float:
        """Bits that an element counts in a budget: by default those that are stored."""
        return 8 * self.row_bytes(head_dim) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a packed row of head_dim elements; even, so that fp16 values stay aligned in any
        slot."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> Tensor:
        """Packs `x` [..., head_dim], of any float dtype, into uint8 [..., row_bytes(head_dim)]."""
        raise NotImplementedError

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Rows [..., head_dim] in `dtype` from `packed`, uint8 [..., row_bytes(head_dim)] with
        stride 1 last."""
        raise NotImplementedError

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` [..., head_dim] as it reads back from storage, in its own dtype."""
        return self.decode(self.encode(x), x.shape[-1], x.dtype)


class Family(RowCodec):
    """Codecs of one format in several numbers of bits.

    names: the bits of each name.
    """

    names: ClassVar[Mapping[str, int]]

    @property
    def bits(self) -> int:
        """Bits that an element counts, without scales."""
        return self.names[self.name]


@dataclass(frozen=True)
class TileCodec(Family):
    """Codecs of tiles of `group_size` tokens, counted from the first one.

    Rows are [..., tokens, head_dim]. `encode` and `decode` take whole tiles; `roundtrip` leaves an
    unfinished one as it is. A tile's scales are dealt out to its rows, so that all rows have the
    same length. Raises ValueError for a group_size below 2.
    """

    name: str
    group_size: int = 128

    def __post_init__(self) -> None:
        require_group_size(self.group_size, least=2)

    @property
    def span(self) -> int:
        return self.group_size

    def roundtrip(self, x: Tensor) -> Tensor:
        whole = x.shape[-2] - x.shape[-2] % self.group_size
        if not whole:
            return x
        return torch.cat([super().roundtrip(x[..., :whole, :]), x[..., whole:, :]], -2)


def require_group_size(group_size: int, *, least: int) -> None:
    """Raise ValueError for a group of fewer than `least` elements."""
    if type(group_size) is not int or group_size < least:
        raise ValueError(f"group_size={group_size!r}: must be an integer >= {least}")


def dealt_bytes(group_bytes: int, size: int) -> int:
    """Bytes of each of the `size` rows of a group, to which the group's bytes are dealt out; even,
    so that all rows have the same length."""
    return -(-group_bytes // (2 * size)) * 2


def deal_out(packed_groups: Tensor, size: int) -> Tensor:
    """The bytes of each group [..., groups, group bytes] as bytes of its rows [..., groups * size,
    `dealt_bytes`]."""
    width = dealt_bytes(packed_groups.shape[-1], size)
    dealt = pad(packed_groups, (0, size * width - packed_groups.shape[-1]))
    return dealt.unflatten(-1, (size, width)).flatten(-3, -2)


def collected(dealt: Tensor, size: int, group_bytes: int) -> Tensor:
    """Inverse of `deal_out`, contiguous."""
    groups = dealt.shape[-2] // size
    packed_groups = dealt.unflatten(-2, (groups, size)).flatten(-2)
    return packed_groups[..., :group_bytes].contiguous()


def in_range(x: Tensor) -> Tensor:
    """`x` in fp32, saturated at `LARGEST`."""
    return x.float().clamp(-LARGEST, LARGEST)


def to_half(numbers: Tensor) -> Tensor:
    """Numbers in fp16; those beyond its range saturate, so that a row never reads back as NaN."""
    return numbers.clamp(-FP16_MAX, FP16_MAX).half()


def total(x: Tensor) -> Tensor:
    """The sum along the last axis, [..., 1], by halves: its order, and so its rounding, follows
    from no layout."""
    while x.shape[-1] > 1:
        x = pad(x, (0, 1)) if x.shape[-1] % 2 else x
        first, second = x.chunk(2, -1)
        x = first + second
    return x


def hadamard(x: Tensor, at_most: int | None = None) -> Tensor:
    """`x` [..., head_dim] times the orthonormal Hadamard matrix in Sylvester's order, which is its
    own inverse.

    In blocks of the largest power of two that divides head_dim, and of `at_most` elements, a power
    of two. Computed by butterflies, so that a row's bits do not depend on the rows beside it, as
    they may in a product of matrices.
    """
    block = x.shape[-1] & -x.shape[-1]
    if at_most is not None:
        block = min(block, at_most)
    rotated, half = x.unflatten(-1, (-1, block)), 1
    while half < block:
        first, second = rotated.unflatten(-1, (-1, 2, half)).unbind(-2)
        rotated = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return rotated.mul(block**-0.5).flatten(-2)
