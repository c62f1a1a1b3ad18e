"""Block-GTQ's keys (Liang et al., arXiv 2606.24033): TurboQuant's quantiser with more bits for the
rotary pairs that carry more energy.

The rule, and where it differs (made into docs/methods.md):

**blockgtq3** and **blockgtq2** (JIA-Lab-research/blockgtq): the next bit goes to the rotary pair of
keys with the largest energy · 4^-bits, until the mean is 3 or 2. Pairs of one width are coded
together as `turboquant3` codes a key, with a length in fp16; values as `turbo3` or `turbo2`. A
pair's energy there is the mean of keys' and queries' on a calibration text, here that of the keys
of a tile of `group_size` (128) tokens, which stores its widths; so the unfinished tile stays exact.
Widths go to 3 above the mean (8 there), as a row has room for a length of each. Bytes of a key at
head_dim 64: 2 + 12 + 24 (`blockgtq2` 2 + 10 + 16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from methods.codecs.base import (
    TileCodec,
    collected,
    deal_out,
    dealt_bytes,
    in_range,
    to_half,
    total,
)
from methods.codecs.turbo import normal_levels
from methods.packing import code_bytes, pack_codes, plane_width, unpack_codes

BLOCKGTQ_BITS = {"gtq3": 3, "gtq2": 2}
MORE_BITS = 3
"""The most bits of a channel, above the mean."""
WIDTH_BITS = 3
"""Bits of a pair's stored width, 1 to 8."""


class Layout(NamedTuple):
    """Places of each tile's channels, in the order of their widths. Each is int64 [..., tiles,
    head_dim].

    channel: of each place. width: bits. begin: first place of the same width. size: number of
    places of the same width. power: the largest power of two up to it.
    """

    channel: Tensor
    width: Tensor
    begin: Tensor
    size: Tensor
    power: Tensor


@dataclass(frozen=True)
class BlockGtqCodec(TileCodec):
    """Directions of channels of one width, coded by Lloyd-Max centroids, and their lengths.

    A pair are channels i and i + head_dim / 2, as in Llama. Rotations are Hadamard matrices on the
    first and then on the last 2^n channels of a width; the authors' are random.

    head_dim is even. A packed row is `[a part of its tile's widths | length of each width (fp16) |
    codes]`.
    """

    names = BLOCKGTQ_BITS

    @property
    def most_bits(self) -> int:
        """The most bits of a channel, and the number of widths."""
        return self.bits + MORE_BITS

    def row_bytes(self, head_dim: int) -> int:
        dealt = dealt_bytes(code_bytes(head_dim // 2, WIDTH_BITS), self.group_size)
        return dealt + 2 * self.most_bits + plane_width(head_dim, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        codes, lengths, widths = self._quantize(x.unflatten(-2, (-1, self.group_size)))
        dealt = deal_out(pack_codes(widths - 1, WIDTH_BITS), self.group_size)
        num_bytes = plane_width(x.shape[-1], self.bits)
        packed = pack_widths(codes, layout_of(widths).width, num_bytes)
        row_codes = torch.cat([lengths.view(torch.uint8), packed], -1).flatten(-3, -2)
        return torch.cat([dealt, row_codes], -1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        width_bytes = code_bytes(head_dim // 2, WIDTH_BITS)
        dealt = dealt_bytes(width_bytes, self.group_size)
        packed_widths = collected(packed[..., :dealt], self.group_size, width_bytes)
        layout = layout_of(unpack_codes(packed_widths, WIDTH_BITS, head_dim // 2) + 1)
        packed_rows = packed[..., dealt:].unflatten(-2, (-1, self.group_size))
        length_bytes = 2 * self.most_bits
        lengths = packed_rows[..., :length_bytes].contiguous().view(torch.float16).float()
        codes = unpack_widths(packed_rows[..., length_bytes:], layout.width)
        places = self._centroids(codes, layout) * _by_place(lengths, layout)
        back = _rotated(places, layout, inverse=True)
        at = layout.channel.unsqueeze(-2).expand(back.shape)
        return torch.zeros_like(back).scatter_(-1, at, back).flatten(-3, -2).to(dtype)

    def _quantize(self, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantised tiles [..., tokens, head_dim]: codes in the order of places, int32; fp16
        lengths [..., tokens, most_bits], by which centroids are multiplied; widths, int32 [...,
        pairs]."""
        tiles = in_range(tiles)
        energy = tiles.square().unflatten(-1, (2, -1)).sum(-2)  # [..., tokens, pairs]
        tile_energy = total(energy.mT).squeeze(-1)
        widths = allocated(tile_energy, self.bits, self.most_bits)
        layout = layout_of(widths)
        at = layout.channel.unsqueeze(-2).expand(tiles.shape)
        rotated = _rotated(tiles.gather(-1, at), layout)
        length = self._lengths(rotated, layout)
        is_empty = length == 0
        places = _by_place(length.masked_fill(is_empty, 1.0), layout)
        normal = rotated / places * layout.size.unsqueeze(-2).sqrt()
        codes = torch.zeros_like(normal, dtype=torch.int32)
        for width in range(1, self.most_bits + 1):
            _, boundaries = normal_levels(width, tiles.device)
            width_codes = torch.bucketize(normal.contiguous(), boundaries, out_int32=True)
            codes = torch.where(layout.width.unsqueeze(-2) == width, width_codes, codes)
        coded_length = self._lengths(self._centroids(codes, layout), layout)
        scale = to_half(length / coded_length.masked_fill(coded_length == 0, 1.0))
        return codes, scale, widths

    def _centroids(self, codes: Tensor, layout: Layout) -> Tensor:
        """fp32, of the shape of `codes`."""
        found = torch.zeros_like(codes, dtype=torch.float32)
        for width in range(1, self.most_bits + 1):
            centroids, _ = normal_levels(width, codes.device)
            width_centroids = centroids[codes.clamp(max=len(centroids) - 1)]
            found = torch.where(layout.width.unsqueeze(-2) == width, width_centroids, found)
        return found

    def _lengths(self, places: Tensor, layout: Layout) -> Tensor:
        """Length of each row's places of each width: [..., tokens, most_bits]."""
        squares = places.square()
        found = []
        for width in range(1, self.most_bits + 1):
            others = layout.width.unsqueeze(-2) != width
            found.append(total(squares.masked_fill(others, 0.0)))
        return torch.cat(found, -1).sqrt_()


def allocated(energy: Tensor, mean_bits: int, most_bits: int) -> Tensor:
    """Bits of each pair, int32 [..., pairs], from 1 to `most_bits`, `mean_bits` on average; energy:
    fp32 of the same shape.

    Each bit divides a pair's expected squared error by 4, so that the greedy rule takes the largest
    energy · 4^-bits of all pairs' next bits, of equal ones the first (algorithm 1 of the paper).
    """
    steps = torch.arange(1, most_bits, device=energy.device)
    gains = energy.unsqueeze(-1) * 4.0**-steps  # of a bit beyond `steps`
    order = gains.flatten(-2).argsort(dim=-1, descending=True, stable=True)
    more = energy.shape[-1] * (mean_bits - 1)
    pairs = order[..., :more] // len(steps)
    widths = torch.ones_like(energy, dtype=torch.int32)
    return widths.scatter_add_(-1, pairs, torch.ones_like(pairs, dtype=torch.int32))


def layout_of(widths: Tensor) -> Layout:
    """The layout of tiles whose pairs have these widths, int [..., pairs]: by width, pairs of one
    width in their order, a pair's channels side by side."""
    pairs = widths.shape[-1]
    order = widths.argsort(dim=-1, stable=True)
    channel = torch.stack([order, order + pairs], -1).flatten(-2)
    width = widths.gather(-1, order).long().repeat_interleave(2, -1)
    begin = torch.searchsorted(width, width, right=False)
    size = torch.searchsorted(width, width, right=True) - begin
    power = torch.ones_like(size)
    for _ in range(int(2 * pairs).bit_length()):
        power = torch.where(2 * power <= size, 2 * power, power)
    return Layout(channel, width, begin, size, power)


def _by_place(numbers: Tensor, layout: Layout) -> Tensor:
    """A number of each width [..., tokens, most_bits] at the places of that width."""
    index = (layout.width - 1).unsqueeze(-2).expand(*numbers.shape[:-1], -1)
    return numbers.gather(-1, index)


def _rotated(places: Tensor, layout: Layout, *, inverse: bool = False) -> Tensor:
    """`places` [..., tokens, head_dim] with those of each width rotated: the first `power` of them
    by the Hadamard matrix, then the last `power`, where these are others."""
    place = torch.arange(places.shape[-1], device=places.device)
    rank = place - layout.begin
    from_last = rank - (layout.size - layout.power)
    windows = [(rank, rank < layout.power)]
    windows.append((from_last, (from_last >= 0) & (layout.size != layout.power)))
    for local, is_inside in reversed(windows) if inverse else windows:
        half = 1
        while half < places.shape[-1]:
            turns = (is_inside & (half < layout.power)).unsqueeze(-2)
            partner = torch.where(turns.squeeze(-2), place - local + (local ^ half), place)
            other = places.gather(-1, partner.unsqueeze(-2).expand(places.shape))
            is_second = (local & half).bool().unsqueeze(-2)
            turned = torch.where(is_second, other - places, places + other)
            places = torch.where(turns, turned, places)
            half *= 2
        scale = torch.where(is_inside, layout.power.float().rsqrt(), 1.0)
        places = places * scale.unsqueeze(-2)
    return places


def pack_widths(codes: Tensor, width: Tensor, num_bytes: int) -> Tensor:
    """Codes int32 [..., tokens, n] of `width` bits each, int64 [..., n], one behind the other, as
    uint8 [..., tokens, num_bytes]; a code's lowest bit first, in the lowest bit of a byte."""
    element, bit = _bits_of(width, num_bytes)
    at = element.unsqueeze(-2).expand(*codes.shape[:-1], -1)
    bits = (codes.gather(-1, at) >> bit.unsqueeze(-2)) & 1  # beyond a code's width all are 0
    by_byte = bits.unflatten(-1, (num_bytes, 8))
    return (by_byte << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)


def unpack_widths(packed: Tensor, width: Tensor) -> Tensor:
    """Inverse of `pack_widths`: int32 [..., tokens, n]."""
    element, bit = _bits_of(width, packed.shape[-1])
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2).int()
    codes = bits.new_zeros((*packed.shape[:-1], width.shape[-1]))
    at = element.unsqueeze(-2).expand(*packed.shape[:-1], -1)
    return codes.scatter_add_(-1, at, bits << bit.unsqueeze(-2).int())


def _bits_of(width: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """The element, and the bit of it, that each bit of a packed row is: int64 [..., bits].

    A slot that holds no row reads as widths that leave bits over; these are any element's.
    """
    slots = torch.arange(8 * num_bytes, device=width.device)
    end = width.cumsum(-1)
    element = torch.searchsorted(end, slots.expand(*width.shape[:-1], -1).contiguous(), right=True)
    element = element.clamp_(max=width.shape[-1] - 1)
    bit = slots - (end - width).gather(-1, element)
    return element, bit.clamp_(max=2**WIDTH_BITS)
