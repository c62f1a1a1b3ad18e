"""InfiniGen with a limited KV pool (paper, section 4.4): when the pool is full, a victim makes room for the own row.

Policies: `fifo` takes the lowest position, `lru` the oldest last fetch, `counter` the smallest number of fetches, ties
to the lowest position; victims come from the floor((1 - protect_recent) * capacity) lowest positions present.
`eviction: artifact` reproduces the artifact's simulation, where a victim stays selectable: an eviction without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from methods.base import EMPTY, EvictingState, Geometry, PromptRows, Rows, Selection, floor_frac
from methods.infinigen import InfiniGenState

if TYPE_CHECKING:
    from methods.infinigen import InfiniGen

SATURATED = 255
"""A counter that reaches this halves all counters of its head."""


class PooledState(InfiniGenState, EvictingState):
    """InfiniGen's state over a pool.

    fetches[layer], last_fetch[layer]: int32, shaped like tokens[layer]: how often, and in which row last, a token was
    selected; a token that enters has 0 and its own position.
    """

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: InfiniGen, rotation: Tensor | None) -> None:
        super().__init__(geometry, final_lengths, method, rotation)
        self.fetches: dict[int, Tensor] = {}
        self.last_fetch: dict[int, Tensor] = {}
        if bool((self.capacities < 1).any()):
            shortest = int(final_lengths.min())
            raise ValueError(f"method.pool_frac={method.pool_frac}: must leave at least 1 of {shortest} tokens")

    @property
    def capacities(self) -> Tensor:
        """Tokens each sequence's pool holds, int [batch]."""
        if self.method.pool_tokens is not None:
            return self.final_lengths.clamp(max=self.method.pool_tokens)
        return floor_frac(self.method.pool_frac or 1.0, self.final_lengths)

    @property
    def capacity(self) -> int:
        """The largest pool."""
        return int(self.capacities.max())

    def slot_data(self) -> list[tuple[dict[int, Tensor], float]]:
        """Fetches too."""
        return [*super().slot_data(), (self.fetches, 0), (self.last_fetch, 0)]

    def prompt(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> None:
        """The prompt enters in order. No token has been fetched, so every policy evicts the lowest position."""
        super().prompt(layer, query, key, rows)
        self.enter_prompt(layer, rows, key.shape[1])
        tokens = self.tokens[layer]
        if self.method.eviction == "corrected":
            tokens.masked_fill_(tokens < (rows.lengths - self.capacities)[:, None, None], EMPTY)
        self.fetches[layer] = torch.zeros_like(tokens)
        self.last_fetch[layer] = tokens.clone()

    def select(self, layer: int, rows: Rows) -> Selection:
        """Scan the rows: each selects among the pool, then its own token enters."""
        scores = self.rehearsed_scores(layer, rows)
        slots = scores.shape[-1]
        self.enter(layer, rows)
        own = rows.own_slots.expand(-1, self.geometry.num_kv_heads, -1)
        self.fetches[layer].scatter_(-1, own, 0)
        self.last_fetch[layer].scatter_(-1, own, rows.positions.int()[:, None].expand_as(own))
        corrected = self.method.eviction == "corrected"
        by_token = self.tokens[layer][..., :slots].argsort(-1)  # live slots are reused; ties go to the lowest token
        masks, counts = [], []
        for row in range(scores.shape[3]):
            position, real = rows.positions[:, row : row + 1], rows.real[:, row, None, None]
            present = torch.minimum(position, self.capacities[:, None]) if corrected else position
            visible = self.tokens[layer][..., :slots] < position[:, None]
            candidates = scores[:, :, :, row : row + 1].masked_fill(~visible[:, :, None, None], float("-inf"))
            ordered = candidates.gather(-1, by_token[:, :, None, None].expand_as(candidates))
            chosen = self.method.select(ordered, present, self.geometry)
            assert chosen.mask is not None
            mask = torch.zeros_like(chosen.mask).scatter_(-1, by_token.unsqueeze(2), chosen.mask)
            self._count(layer, mask[:, :, 0] & real, position[:, None])
            if corrected:
                self._evict(layer, slots, position[:, None], real & (position >= self.capacities[:, None])[:, None])
            masks.append(mask)
            counts.append(chosen.num_read)
        return Selection(torch.cat(masks, 2), torch.cat(counts, 1))

    def _count(self, layer: int, chosen: Tensor, position: Tensor) -> None:
        """Count a fetch of the chosen slots, bool [batch, num_kv_heads, slots]."""
        slots = chosen.shape[-1]
        fetches = self.fetches[layer][..., :slots]
        fetches += chosen
        saturated = (fetches >= SATURATED).any(-1, keepdim=True)
        fetches >>= saturated.int()
        last = self.last_fetch[layer][..., :slots]
        last.copy_(torch.where(chosen, position.int(), last))

    def _evict(self, layer: int, slots: int, position: Tensor, evicts: Tensor) -> None:
        """Drop one token older than `position` per head where `evicts` [batch, 1, 1]."""
        tokens = self.tokens[layer]
        present = torch.where(tokens[..., :slots] < position, tokens[..., :slots], EMPTY)
        unprotected = floor_frac(1 - self.method.protect_recent, self.capacities).clamp(min=1)
        rank = (unprotected.clamp(max=slots) - 1)[:, None, None].expand(-1, tokens.shape[1], 1)
        newest = present.sort(-1).values.gather(-1, rank)
        use = {"fifo": None, "lru": self.last_fetch, "counter": self.fetches}[self.method.pool_policy]
        worth = present.long() if use is None else (use[layer][..., :slots].long() << 31) + present
        victim = worth.masked_fill(present > newest, torch.iinfo(torch.int64).max).argmin(-1, keepdim=True)
        dump = tokens.shape[-1] - 1
        tokens.scatter_(-1, torch.where(evicts, victim, dump), EMPTY)
