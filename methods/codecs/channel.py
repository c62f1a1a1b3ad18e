"""KIVI's keys (Liu et al., ICML 2024): integer codes whose groups are tokens of one channel.

The outliers of keys lie in few channels, so that the elements of one channel over neighbouring
tokens share a minimum and a step.

The rule, and where it differs (made into docs/methods.md):

**kivi**: keys share minimum and step per channel over `group_size` (32) consecutive tokens, values
per token over 32 channels: 3 and 5 bits an element. The values of the last `residual` (128) tokens
are exact. Keys stay exact until 128 are there, and are coded after the step that completes them.
Its parts can be set apart, with methods that read all: `codec=int4 value_codec=int2
key_groups=channel residual=128`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.codecs.base import collected, deal_out, dealt_bytes
from methods.codecs.integers import GROUP_META_BYTES, IntegerCodec


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
        of_group = torch.cat([lo, step], -1).transpose(-3, -2).flatten(-2).half().view(torch.uint8)
        return deal_out(of_group, self.group_size)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        of_group = collected(packed, self.group_size, GROUP_META_BYTES * head_dim)
        meta = of_group.view(torch.float16).unflatten(-1, (head_dim, 2)).transpose(-3, -2)
        return meta[..., :1], meta[..., 1:]
