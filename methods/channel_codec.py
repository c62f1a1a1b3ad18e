"""Keys coded per channel: an element shares lo and step with its channel in the tokens beside it (KIVI; Liu et al.,
ICML 2024). A key's outliers lie in few channels, which thus get steps of their own.

A packed row is [its share of lo and step | codes]. The 4 * head_dim bytes of lo and step of a group of `group_size`
tokens are dealt out to the group's rows, so that a row is as long as any other; they are put together again where the
whole group is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.codec import GROUP_META_BYTES, Codec


@dataclass(frozen=True)
class ChannelCodec(Codec):
    """An integer codec whose groups are `group_size` consecutive tokens of a channel.

    Rows are [..., tokens, head_dim], the groups counted from the first one. `encode` and `decode` take whole groups;
    in `roundtrip` the last one may be shorter. Raises ValueError as Codec, and for floats, which have no groups.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_float:
            raise ValueError(f"key_groups=channel: needs an integer codec, not {self.name}")

    @property
    def span(self) -> int:
        """Consecutive tokens that are coded together."""
        return self.group_size

    def bits_per_element(self, head_dim: int) -> float:
        """`bits`, and 32 a group (lo and step)."""
        return self.bits + 32 / self.group_size

    def _meta_bytes(self, head_dim: int) -> int:
        return -(-GROUP_META_BYTES * head_dim // (2 * self.group_size)) * 2

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., tokens, head_dim] as [..., head_dim, groups, tokens of a group]."""
        return super()._grouped(rows.mT)

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        return groups.flatten(-2)[..., : shape[-2]].mT

    def _pack_meta(self, lo: Tensor, step: Tensor) -> Tensor:
        """[..., head_dim, groups, 1] each, as bytes [..., tokens, meta bytes]."""
        width = self._meta_bytes(lo.shape[-3])
        of_group = torch.cat([lo, step], -1).transpose(-3, -2).flatten(-2).half().view(torch.uint8)
        dealt = pad(of_group, (0, self.group_size * width - of_group.shape[-1]))
        return dealt.unflatten(-1, (self.group_size, width)).flatten(-3, -2)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        groups = packed.shape[-2] // self.group_size
        of_group = packed.unflatten(-2, (groups, self.group_size)).flatten(-2)[..., : GROUP_META_BYTES * head_dim]
        meta = of_group.contiguous().view(torch.float16).unflatten(-1, (head_dim, 2)).transpose(-3, -2)
        return meta[..., :1], meta[..., 1:]
