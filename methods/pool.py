"""Who leaves a full KV pool (InfiniGen, section 4.4).

`fifo` takes the lowest position, `lru` the oldest last fetch, `counter` the smallest number of fetches, ties to the
lowest position; victims come from the floor((1 - protect_recent) * capacity) lowest positions present.

`eviction: artifact` is what the artifact's simulation does (accuracy/src/modeling_*_ours_prune.py): candidates are all
tokens of the sequence's first half, those evicted before among them, and the dense rows of the prompt count as
fetches. An evicted token is never fetched again, so it stays the worst: LRU and counter evict the same token again and
again, which is no eviction to speak of. Its FIFO takes token t - capacity and so really evicts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from methods.base import EMPTY, Geometry, Lengths, PromptRows, Rows, Selection, floor_frac
from methods.checks import require, require_fraction, require_one_of
from methods.evicting import EvictingState

POLICIES = ("fifo", "lru", "counter")
EVICTIONS = ("corrected", "artifact")
SATURATED = 255
"""A counter that reaches this halves all counters of its head."""
NEVER = torch.iinfo(torch.int64).max


def check(method: Any) -> None:
    """ValueError where a method's settings of its pool, named as in InfiniGen, are not what they must be."""
    require(method.pool_tokens is None or method.pool_tokens >= 1, "pool_tokens", method.pool_tokens, ">= 1 or null")
    one_limit = method.pool_tokens is None or method.pool_frac is None
    require(one_limit, "pool_frac", method.pool_frac, "null with pool_tokens")
    if method.pool_frac is not None:
        require_fraction("pool_frac", method.pool_frac)
    require_fraction("protect_recent", method.protect_recent, zero=True)
    require_one_of("pool_policy", method.pool_policy, POLICIES)
    require_one_of("eviction", method.eviction, EVICTIONS)
    one_set = not method.limited or (method.covers, method.group) == ("kv_head", "best")
    require(one_set, "covers, method.group", f"{method.covers}, {method.group}", "kv_head, best in a limited pool")


class PoolState(EvictingState):
    """A pool of limited size, of which `method.select` chooses.

    fetches[layer], last_fetch[layer]: int32, shaped like tokens[layer]: how often, and in which row last, a token was
    selected; a token that enters has 0 and its own position.
    """

    slot_tensors = {**EvictingState.slot_tensors, "fetches": 0, "last_fetch": 0}
    fetches: dict[int, Tensor]
    last_fetch: dict[int, Tensor]

    def __init__(self, method: Any, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        self.simulates = method.eviction == "artifact"
        if bool((self.capacities < 1).any()):
            shortest = int(lengths.final.min())
            raise ValueError(f"method.pool_frac={method.pool_frac}: must leave at least 1 of {shortest} tokens")

    @property
    def capacities(self) -> Tensor:
        """Tokens each sequence's pool holds, int [batch]."""
        if self.method.pool_tokens is not None:
            return self.lengths.final.clamp(max=self.method.pool_tokens)
        return floor_frac(self.method.pool_frac, self.lengths.final)

    def enter_prompt(self, layer: int, rows: PromptRows) -> None:
        """The prompt enters in order. No token has been fetched, so every policy evicts the lowest position."""
        super().enter_prompt(layer, rows)
        tokens, lengths = self.tokens[layer], rows.lengths[:, None, None].int()
        self.fetches[layer], self.last_fetch[layer] = torch.zeros_like(tokens), tokens.clone()
        if self.simulates:  # its dense rows are fetches of all tokens up to their own
            self.fetches[layer] = (lengths - tokens).clamp(min=0)
        if not self.simulates or self.method.pool_policy == "fifo":
            tokens.masked_fill_(tokens < lengths - self.capacities[:, None, None], EMPTY)

    def candidates(self, positions: Tensor) -> Tensor:
        """Tokens among which a row at `positions` [batch, rows] chooses, int alike."""
        return positions if self.simulates else torch.minimum(positions, self.capacities[:, None])

    def choose(self, layer: int, rows: Rows, scores: Tensor) -> Selection:
        """Scan the rows: each selects by its scores [batch, num_kv_heads, group, rows, slots] among the pool, then its
        own token enters."""
        slots = scores.shape[-1]
        own = self.enter(layer, rows)
        self.fetches[layer].scatter_(-1, own, 0)
        self.last_fetch[layer].scatter_(-1, own, rows.positions.int()[:, None].expand_as(own))
        held = self.tokens[layer][..., :slots]
        order = held.argsort(-1)  # live slots are reused; ties go to the lowest token
        present = self.candidates(rows.positions)
        masks, counts = [], []
        for row in range(scores.shape[3]):
            position = rows.positions[:, row, None, None]
            candidates = scores[:, :, :, row : row + 1].masked_fill((held >= position)[:, :, None, None], -math.inf)
            ordered = candidates.gather(-1, order[:, :, None, None].expand_as(candidates))
            one = replace(rows, positions=rows.positions[:, row : row + 1], slot_positions=held.gather(-1, order))
            cached = present[:, row : row + 1]
            chosen = self.method.select(ordered, one, self.lengths.final, self.geometry, cached)
            mask = torch.zeros_like(chosen.mask).scatter_(-1, order.unsqueeze(2), chosen.mask)
            self._use(layer, rows, row, mask[:, :, 0])
            masks.append(mask)
            # The artifact's cap is a share of all tokens, of which its FIFO may hold fewer.
            counts.append(mask.sum(-1).double().mean(1) if self.simulates else chosen.num_read)
        return Selection(torch.cat(masks, 2), torch.cat(counts, 1))

    def _use(self, layer: int, rows: Rows, row: int, mask: Tensor) -> None:
        """Count what the row fetched, bool [batch, num_kv_heads, slots], and evict where the pool is full."""
        slots, position, real = mask.shape[-1], rows.positions[:, row, None, None], rows.real[:, row, None, None]
        fetches, last_fetch = (data[layer][..., :slots] for data in (self.fetches, self.last_fetch))
        count_fetch(fetches, last_fetch, mask & real, position, saturates=not self.simulates)
        tokens, policy = self.tokens[layer], self.method.pool_policy
        worth = {"fifo": torch.zeros_like(fetches), "lru": last_fetch, "counter": fetches}[policy]
        if self.simulates:
            positions = rows.slot_positions.expand(worth.shape)
            leaving = artifact_victim(positions, policy, worth, self.capacities, position)
        else:
            held = tokens[..., :slots]
            present = torch.where(held < position, held, EMPTY)
            leaving = victim(present, worth, self.capacities, self.method.protect_recent)
        evicts = real & (position >= self.capacities[:, None, None])
        tokens.scatter_(-1, torch.where(evicts, leaving, tokens.shape[-1] - 1), EMPTY)


def count_fetch(fetches: Tensor, last_fetch: Tensor, chosen: Tensor, position: Tensor, *, saturates: bool) -> None:
    """Count a fetch of the chosen slots, bool [batch, num_kv_heads, slots], by the row at `position` [batch, 1, 1]."""
    fetches += chosen
    if saturates:
        fetches >>= (fetches >= SATURATED).any(-1, keepdim=True).int()
    last_fetch.copy_(torch.where(chosen, position.int(), last_fetch))


def victim(present: Tensor, worth: Tensor, capacities: Tensor, protect_recent: float) -> Tensor:
    """The slot to free in each head, int64 [batch, num_kv_heads, 1].

    present: int [batch, num_kv_heads, slots], positions of the tokens that may leave, `EMPTY` elsewhere; worth: int
    alike, the smallest leaves, ties to the lowest position; capacities: int [batch].
    """
    unprotected = floor_frac(1 - protect_recent, capacities).clamp(min=1, max=present.shape[-1])
    rank = (unprotected - 1)[:, None, None].expand(*present.shape[:2], 1)
    newest = present.sort(-1).values.gather(-1, rank)
    return _smallest(worth, present).masked_fill(present > newest, NEVER).argmin(-1, keepdim=True)


def artifact_victim(positions: Tensor, policy: str, worth: Tensor, capacities: Tensor, position: Tensor) -> Tensor:
    """The artifact's choice after the row at `position` [batch, 1, 1].

    positions: int [batch, num_kv_heads, slots], of every token that ever entered; worth, capacities: as `victim`.
    """
    if policy == "fifo":
        return (positions == position - capacities[:, None, None]).int().argmax(-1, keepdim=True)
    return _smallest(worth, positions).masked_fill(positions >= position // 2, NEVER).argmin(-1, keepdim=True)


def _smallest(worth: Tensor, present: Tensor) -> Tensor:
    """One number to order by: worth, then position."""
    return ((worth.long() << 31) + present).masked_fill(present == EMPTY, NEVER)
