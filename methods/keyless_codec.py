"""The codec of a cache that holds values only, because its method holds the keys (`Method.holds_keys`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.codec import AnyCodec, Codec, SplitCodec


@dataclass(frozen=True)
class NoCodec(Codec):
    """Of keys that are not stored: they are read as the method gives them back."""

    name: str = "none"

    def __post_init__(self) -> None:
        pass  # not one of the names that a user may give

    @property
    def bits(self) -> int:
        """None."""
        return 0

    def bits_per_element(self, head_dim: int) -> float:
        """None."""
        return 0.0

    def row_bytes(self, head_dim: int) -> int:
        """None."""
        return 0

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def encode(self, x: Tensor) -> Tensor:
        """No bytes, uint8 [..., 0]."""
        return x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """No elements, [..., 0]."""
        return packed.to(dtype)


def without_keys(codec: AnyCodec | None) -> SplitCodec:
    """The codec of a cache that holds values only; None stores them as fp32, which is exact."""
    return SplitCodec(NoCodec(), (codec or Codec("fp32")).values)
