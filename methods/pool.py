"""InfiniGen's KV pool with a limit, and the token that leaves when it is full (section 4.4).

`fifo` evicts the lowest position, `lru` the oldest last fetch, `counter` the smallest number of fetches; ties go to the
lowest position. Victims come from the floor((1 - protect_recent) * capacity) lowest positions present.

`eviction: artifact` follows the artifact's simulation (accuracy/src/modeling_*_ours_prune.py): candidates are all
tokens of the sequence's first half, evicted ones included, and the dense rows of the prompt count as fetches. An
evicted token is never fetched again, so it stays the worst one: LRU and counter evict the same token again and again,
so almost nothing is evicted. Its FIFO takes token t - capacity and really evicts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import EMPTY, Calibration, PromptRows, Rows, Selection, floor_frac
from methods.evicting import EvictingState
from methods.kernels import kernels_for

POLICIES = ("fifo", "lru", "counter")
EVICTIONS = ("corrected", "artifact")
SATURATED = 255
"""A counter that reaches this halves all counters of its head."""
NEVER = torch.iinfo(torch.int64).max


class PoolState(EvictingState):
    """The tokens in a pool that has a limit. The method's `select` chooses among them.

    capacities: tokens that each sequence's pool holds, int [batch]; unprotected: number of the oldest of them, which
    may leave. fetches[layer], last_fetch[layer]: int32, shaped like tokens[layer]: how often, and in which row last, a
    token was selected; a token that enters has 0 and its own position.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ("capacities", "unprotected")
    slot_tensors = {**EvictingState.slot_tensors, "fetches": 0, "last_fetch": 0}
    fetches: dict[int, Tensor]
    last_fetch: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        method, lengths = self.method, self.lengths
        self.simulates = method.eviction == "artifact"
        if method.pool_tokens is not None:
            self.capacities = lengths.final.clamp(max=method.pool_tokens)
        else:
            self.capacities = floor_frac(method.pool_frac, lengths.final)
        self.unprotected = floor_frac(1 - method.protect_recent, self.capacities).clamp(min=1)
        if bool((self.capacities < 1).any()):
            shortest = int(lengths.final.min())
            raise ValueError(f"method.pool_frac={method.pool_frac}: must leave at least 1 of {shortest} tokens")

    def enter_prompt(self, layer: int, rows: PromptRows) -> None:
        """The prompt enters in order. No token was fetched yet, so every policy evicts the lowest position."""
        super().enter_prompt(layer, rows)
        tokens, lengths = self.tokens[layer], rows.lengths[:, None, None].int()
        self.fetches[layer], self.last_fetch[layer] = torch.zeros_like(tokens), tokens.clone()
        if self.simulates:  # each dense row is a fetch of all tokens up to its own
            self.fetches[layer] = (lengths - tokens).clamp(min=0)
        if not self.simulates or self.method.pool_policy == "fifo":
            tokens.masked_fill_(tokens < lengths - self.capacities[:, None, None], EMPTY)

    def candidates(self, positions: Tensor) -> Tensor:
        """Number of tokens among which a row at `positions` [batch, rows] chooses, int [batch, rows]."""
        return positions if self.simulates else torch.minimum(positions, self.capacities[:, None])

    def choose(self, layer: int, rows: Rows, scores: Tensor, candidates: Tensor) -> Selection:
        """Scan the rows: each selects by its scores [batch, num_kv_heads, group, rows, slots] among its `candidates`,
        then its own token enters."""
        own = self.enter(layer, rows)
        held = self.tokens[layer][..., : scores.shape[-1]]
        masks, counts = [], []
        for row in range(scores.shape[3]):
            by_age = held.sort(-1)
            this = slice(row, row + 1)
            one = replace(rows, positions=rows.positions[:, this], real=rows.real[:, this], own_slots=own[..., this])
            chosen = self.method.select(
                scores[:, :, :, this],
                replace(one, slot_positions=held),
                self.lengths.final,
                self.geometry,
                cached=candidates[:, this],
                order=by_age.indices,  # live slots are reused; ties go to the lowest token
            )
            self.use(layer, one, chosen.mask[:, :, 0], by_age.values)
            masks.append(chosen.mask)
            # The artifact's cap is a share of all tokens, of which its FIFO may hold fewer.
            counts.append(chosen.mask.sum(-1).double().mean(1) if self.simulates else chosen.num_read)
        return Selection(joined(masks, 2), joined(counts, 1))

    def use(self, layer: int, row: Rows, mask: Tensor, ascending: Tensor) -> None:
        """Count the slots that a row fetched (`mask`, bool [batch, num_kv_heads, slots]), and evict from full pools.

        ascending: the tokens in the slots, sorted.
        """
        slots, positions, tokens = mask.shape[-1], row.positions[:, 0], self.tokens[layer]
        if row.padded:
            mask, positions = mask & row.real[:, :, None], positions.masked_fill(~row.real[:, 0], -1)
        kernels = kernels_for(tokens, "evicting")
        if kernels is not None and not self.simulates:
            data = tokens, self.fetches[layer], self.last_fetch[layer]
            limits = self.capacities, self.unprotected
            kernels.use(mask, ascending, data, positions, limits, self.method.pool_policy)
            return
        position = positions[:, None, None]
        fetches, last_fetch = (data[layer][..., :slots] for data in (self.fetches, self.last_fetch))
        fetches.scatter_(-1, row.own_slots, 0)
        last_fetch.scatter_(-1, row.own_slots, position.int().expand_as(row.own_slots))
        fetches += mask
        torch.where(mask, position.int(), last_fetch, out=last_fetch)
        if not self.simulates:
            fetches >>= (fetches >= SATURATED).any(-1, keepdim=True).int()
        worth = {"fifo": torch.zeros_like(fetches), "lru": last_fetch, "counter": fetches}[self.method.pool_policy]
        if self.simulates:
            seen = row.slot_positions.expand(worth.shape)
            leaving = artifact_victim(seen, self.method.pool_policy, worth, self.capacities, position)
        else:
            held = tokens[..., :slots]
            rank = (self.unprotected.clamp(max=slots) - 1)[:, None, None].expand(*held.shape[:2], 1)
            protected = held > ascending.gather(-1, rank)
            leaving = _order(worth, held).masked_fill(protected, NEVER).argmin(-1, keepdim=True)
        stays = position < self.capacities[:, None, None]
        tokens.scatter_(-1, leaving.masked_fill_(stays, tokens.shape[-1] - 1), EMPTY)  # the dump


def artifact_victim(positions: Tensor, policy: str, worth: Tensor, capacities: Tensor, position: Tensor) -> Tensor:
    """The slot that the artifact frees after the row at `position` [batch, 1, 1]: int64 [batch, num_kv_heads, 1].

    positions: int [batch, num_kv_heads, slots], of every token that ever entered; worth: same shape, the smallest
    leaves, of equal ones the lowest position; capacities: int [batch].
    """
    if policy == "fifo":
        return (positions == position - capacities[:, None, None]).int().argmax(-1, keepdim=True)
    return _order(worth, positions).masked_fill(positions >= position // 2, NEVER).argmin(-1, keepdim=True)


def _order(worth: Tensor, positions: Tensor) -> Tensor:
    """One number to order by: worth, then position."""
    return (worth.long() << 31) + positions


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, which would copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
