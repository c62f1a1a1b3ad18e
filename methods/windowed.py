"""A window over the first tokens ("sinks") and the most recent ones: what StreamingLLM and DuoAttention share.

What a row reads follows from the positions alone; tokens that fall behind the window leave their slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.base import EMPTY, PromptRows, Rows, Selection
from methods.evicting import EvictingState


class WindowState(EvictingState):
    """The KV heads that stream keep the method's `num_sinks` first tokens and `recent` last ones, the others all."""

    @property
    def recent(self) -> Tensor:
        """Recent tokens of the window, int [batch]."""
        raise NotImplementedError

    def streams(self, layer: int) -> Tensor:
        """Which KV heads of a layer stream, bool [num_kv_heads, 1, 1], or [1, 1, 1] where all are alike."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Let what is behind the window leave."""
        self.enter_prompt(layer, rows)
        self._leave(layer, rows.lengths)

    def select(self, layer: int, rows: Rows) -> Selection:
        """The window, or all."""
        mask = rows.visible() & self._stays(layer, rows.slot_positions.unsqueeze(2), rows.positions)
        self.enter(layer, rows)
        self._leave(layer, torch.where(rows.real, rows.positions + 1, 0).amax(-1))
        window = torch.minimum(rows.positions, (self.method.num_sinks + self.recent)[:, None])
        read = torch.where(self.streams(layer), window, rows.positions)  # [num_kv_heads or 1, batch, rows]
        return Selection(mask, read.double().mean(0))

    def _stays(self, layer: int, token: Tensor, cached: Tensor) -> Tensor:
        """bool [batch, num_kv_heads or 1, rows, slots].

        token: [batch, 1 or num_kv_heads, 1, slots]; cached: [batch, rows].
        """
        oldest = (cached - self.recent[:, None])[:, None, :, None]
        return (token < self.method.num_sinks) | (token >= oldest) | ~self.streams(layer)

    def _leave(self, layer: int, cached: Tensor) -> None:
        stays = self._stays(layer, self.tokens[layer].unsqueeze(2), cached[:, None]).squeeze(2)
        self.tokens[layer].masked_fill_(~stays, EMPTY)
