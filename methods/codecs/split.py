"""Codecs made of others: keys and values in different formats (`SplitCodec`), and layers with
codecs of their own (`LayerCodecs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from methods.codecs.base import Count, RowCodec
from methods.codecs.floats import FloatCodec
from methods.codecs.integers import PairCodec, has_pairs


@dataclass(frozen=True)
class NoCodec(RowCodec):
    """Codec of keys that are not stored, because the state holds them (`Method.keeps_keys`): rows
    of no bytes."""

    name: str = "none"
    bits: ClassVar[int] = 0

    def bits_per_element(self, head_dim: int) -> float:
        return 0.0

    def row_bytes(self, head_dim: int) -> int:
        return 0

    def roundtrip(self, x: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        return packed.to(dtype)


@dataclass(frozen=True)
class SplitCodec:
    """Keys and values stored in different formats, the last tokens exact; shares are means of the
    two.

    residual: number of last tokens that are exact, KIVI's R; 0 codes all. Keys, or values, that are
    coded in groups of tokens stay exact until R of them are there, and are coded after the step
    that completes them. Raises ValueError if R is no multiple of a group.
    """

    keys: RowCodec
    values: RowCodec
    residual: int = 0

    def __post_init__(self) -> None:
        for half in (self.keys, self.values):
            if self.residual % half.span or (half.span > 1 and not self.residual):
                allowed = f"a multiple of the {half.span} tokens of a group"
                raise ValueError(f"residual={self.residual}: must be {allowed}")

    @property
    def name(self) -> str:
        return f"{self.keys.name}/{self.values.name}"

    @property
    def bits(self) -> float:
        return (self.keys.bits + self.values.bits) / 2

    def bits_per_element(self, head_dim: int) -> float:
        return (self.keys.bits_per_element(head_dim) + self.values.bits_per_element(head_dim)) / 2

    @property
    def span(self) -> int:
        """Consecutive tokens of which some are coded together."""
        return max(self.keys.span, self.values.span)

    @property
    def stored_together(self) -> int:
        """Tokens that begin to be read as stored after the same step, at most."""
        has_groups = self.keys.span > 1 and self.values.span > 1
        return self.residual if has_groups else self.span

    def coded_values(self, cached: Count) -> Count:
        """Number of the first `cached` tokens whose values a row reads coded."""
        return self._coded(self.values, cached)

    def coded_keys(self, cached: Count) -> Count:
        """Number of the first `cached` tokens whose keys a row reads coded."""
        return self._coded(self.keys, cached)

    def _coded(self, half: RowCodec, cached: Count) -> Count:
        if half.span > 1:
            return cached - cached % self.residual
        return (cached - self.residual) * (cached > self.residual)

    def stored(self, cached: Count) -> Count:
        """Number of tokens that are read as stored: key and value of their whole group are
        coded."""
        # The half that is coded by token follows R tokens behind, the other at most R - 1.
        later = self.values if self.values.span == 1 else self.keys
        coded = self._coded(later, cached)
        return coded - coded % self.span


AnyCodec = RowCodec | SplitCodec
"""A layer's codec."""


class NamedLayers(NamedTuple):
    """Layers `first` to `last`, as methods count, and their codec. last: None for all that follow.
    words: how the user named them."""

    first: int
    last: int | None
    codec: AnyCodec
    words: str = ""

    def holds(self, layer: int) -> bool:
        """True if `layer` is one of them."""
        return self.first <= layer and (self.last is None or layer <= self.last)


@dataclass(frozen=True)
class LayerCodecs:
    """A codec for each layer: that of `named` layers, which do not overlap, else `others`."""

    others: AnyCodec
    named: tuple[NamedLayers, ...]

    @property
    def residual(self) -> int:
        """The most last tokens that a layer keeps exact."""
        return max(codec.residual for codec in every_codec(self))

    def of_layer(self, layer: int) -> AnyCodec:
        """The codec of a layer, as methods count."""
        for layers in self.named:
            if layers.holds(layer):
                return layers.codec
        return self.others


CacheCodec = AnyCodec | LayerCodecs
"""The codec of all layers under a method."""


def codec_at(codec: CacheCodec, layer: int) -> AnyCodec:
    """The codec of a layer, as methods count."""
    return codec.of_layer(layer) if isinstance(codec, LayerCodecs) else codec


def every_codec(codec: CacheCodec) -> list[AnyCodec]:
    """The codec, or those of all layers."""
    if not isinstance(codec, LayerCodecs):
        return [codec]
    return [codec.others, *(layers.codec for layers in codec.named)]


def mean_bits(codec: CacheCodec, layers: Sequence[int]) -> float:
    """Mean over the layers of the bits that an element counts without scales."""
    if not isinstance(codec, LayerCodecs):
        return codec.bits
    return fmean(codec.of_layer(layer).bits for layer in layers)


def without_keys(codec: CacheCodec | None) -> CacheCodec:
    """The codec of a cache that holds values only; None stores them as fp32, which is exact."""

    def values_alone(codec: AnyCodec) -> SplitCodec:
        return SplitCodec(NoCodec(), codec.values)

    return _in_each_layer(codec or FloatCodec("fp32"), values_alone)


def of_keys_alone(codec: CacheCodec) -> CacheCodec:
    """The codec of a cache whose keys hold the values as well: one copy, coded when keys are."""

    def keys_alone(codec: AnyCodec) -> AnyCodec:
        if not codec.residual:
            return codec.keys
        return SplitCodec(codec.keys, codec.keys, codec.residual)

    return _in_each_layer(codec, keys_alone)


def in_pairs(codec: AnyCodec, head_dim: int, value_dim: int) -> AnyCodec:
    """The codec with `PairCodec` in place of each half that has pairs; of one codec for both, only
    if both have."""
    keys, values = codec.keys, codec.values
    if has_pairs(keys, head_dim):
        keys = PairCodec(keys.name, keys.group_size)
    if has_pairs(values, value_dim):
        values = PairCodec(values.name, values.group_size)
    if isinstance(codec, SplitCodec):
        return replace(codec, keys=keys, values=values)
    return keys if keys == values else codec


def _in_each_layer(codec: CacheCodec, change: Callable[[AnyCodec], AnyCodec]) -> CacheCodec:
    if not isinstance(codec, LayerCodecs):
        return change(codec)
    named = tuple(layers._replace(codec=change(layers.codec)) for layers in codec.named)
    return LayerCodecs(change(codec.others), named)
