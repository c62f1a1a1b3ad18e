"""InfiniGen with a pool of limited size (the paper's KV cache pool management).

The rule, and where it differs (made into docs/methods.md):

The **pool** of **infinigen-pool** holds `pool_frac` of T for each layer, sequence and KV head. A
token that enters a full pool replaces one: the oldest (`pool_policy=fifo`), the one fetched longest
ago (`lru`) or least often (`counter`), among the floor((1 - `protect_recent`) · capacity) oldest.
`eviction=artifact` follows the artifact's simulation: a
victim stays a candidate and stays the worst, so `lru` and `counter` evict the same token again and
again. It frees no slot, so it can only be scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods.base import (
    EMPTY,
    Calibration,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    floor_frac,
    require,
)
from methods.evicting import EvictingState
from methods.infinigen import InfiniGen, InfiniGenState
from methods.settings import one_of, setting, share

SATURATED = 255
"""A fetch counter of a pool that reaches this halves all counters of its head."""
NEVER = torch.iinfo(torch.int64).max


class InfiniGenPoolState(InfiniGenState, EvictingState):
    """InfiniGen's state over a pool that has a limit.

    `fifo` evicts the lowest position, `lru` the oldest last fetch, `counter` the smallest number of
    fetches; ties go to the lowest position. Victims come from the floor((1 - protect_recent) *
    capacity) lowest positions present.

    `eviction: artifact` follows the artifact's simulation (accuracy/src/modeling_*_ours_prune.py):
    candidates are all tokens of the sequence's first half, evicted ones included, and the dense
    rows of the prompt count as fetches. An evicted token is never fetched again, so it stays the
    worst one: LRU and counter evict the same token again and again, so almost nothing is evicted.
    Its FIFO takes token t - capacity and really evicts.

    capacities: tokens that each sequence's pool holds, int [batch]; unprotected: number of the
    oldest of them, which may leave. fetches[layer], last_fetch[layer]: int32, shaped like
    tokens[layer]: how often, and in which row last, a token was selected; a token that enters has 0
    and its own position.
    """

    sequence_tensors = (*InfiniGenState.sequence_tensors, "capacities", "unprotected")
    slot_tensors = {
        **InfiniGenState.slot_tensors,
        **EvictingState.slot_tensors,
        "fetches": 0,
        "last_fetch": 0,
    }
    selects_without_own = False
    replayable = True
    fetches: dict[int, Tensor]
    last_fetch: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        method, final = self.method, self.lengths.final
        self.simulates = method.eviction == "artifact"
        self.capacities = floor_frac(method.pool_frac, final)
        self.unprotected = floor_frac(1 - method.protect_recent, self.capacities).clamp(min=1)
        least = f"larger, to hold at least 1 of {int(final.min())} tokens"
        require(bool((self.capacities >= 1).all()), "pool_frac", method.pool_frac, least)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        """The prompt enters in order. No token was fetched yet, so every policy evicts the lowest
        position."""
        with_dump = rows._replace(num_slots=rows.num_slots + 1)
        super().prompt(layer, query, key, value, with_dump)
        self.enter_prompt(layer, rows)
        tokens, lengths = self.tokens[layer], rows.lengths[:, None, None].int()
        self.fetches[layer], self.last_fetch[layer] = torch.zeros_like(tokens), tokens.clone()
        if self.simulates:  # each dense row is a fetch of all tokens up to its own
            self.fetches[layer] = (lengths - tokens).clamp(min=0)
        if not self.simulates or self.method.pool_policy == "fifo":
            tokens.masked_fill_(tokens < lengths - self.capacities[:, None, None], EMPTY)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Steps 3 and 4, one row after the other: each selects, then its current token enters."""
        scores = self.scores(layer, rows)
        num_candidates = rows.positions
        if not self.simulates:
            num_candidates = torch.minimum(num_candidates, self.capacities[:, None])
        own = self.enter(layer, rows)
        held = self.tokens[layer][..., : scores.shape[-1]]
        masks, counts = [], []
        for row in range(scores.shape[3]):
            by_age = held.sort(-1)
            this = slice(row, row + 1)
            positions, real = rows.positions[:, this], rows.real[:, this]
            one = replace(rows, positions=positions, real=real, own_slots=own[..., this])
            # Live slots are reused; ties go to the lowest token.
            chosen = self.method.choose(
                scores[:, :, :, this],
                replace(one, slot_positions=held),
                self.lengths.final,
                self.geometry,
                cached=num_candidates[:, this],
                order=by_age.indices,
            )
            self.use(layer, one, chosen.mask[:, :, 0], by_age.values)
            masks.append(chosen.mask)
            # The artifact's cap is a share of all tokens, of which its FIFO may hold fewer.
            counts.append(
                chosen.mask.sum(-1).double().mean(1) if self.simulates else chosen.num_read
            )
        if len(masks) > 1:  # `torch.cat` would copy a single mask
            masks, counts = [torch.cat(masks, 2)], [torch.cat(counts, 1)]
        return Selection(masks[0], counts[0], self.index_read(layer, num_candidates))

    def use(self, layer: int, row: QueryRows, mask: Tensor, ascending: Tensor) -> None:
        """Count the slots that a row fetched (`mask`, bool [batch, num_kv_heads, slots]), and evict
        from full pools.

        ascending: the tokens in the slots, sorted.
        """
        slots, positions, tokens = mask.shape[-1], row.positions[:, 0], self.tokens[layer]
        if row.padded:
            mask = mask & row.real[:, :, None]
            positions = positions.masked_fill(~row.real[:, 0], -1)
        position = positions[:, None, None]
        fetches, last_fetch = (data[layer][..., :slots] for data in (self.fetches, self.last_fetch))
        fetches.scatter_(-1, row.own_slots, 0)
        last_fetch.scatter_(-1, row.own_slots, position.int().expand_as(row.own_slots))
        fetches += mask
        torch.where(mask, position.int(), last_fetch, out=last_fetch)
        if not self.simulates:
            fetches >>= (fetches >= SATURATED).any(-1, keepdim=True).int()
        policy = self.method.pool_policy
        scores = {"fifo": torch.zeros_like(fetches), "lru": last_fetch, "counter": fetches}
        score = scores[policy]
        if self.simulates:
            seen = row.slot_positions.expand(score.shape)
            leaving = artifact_victim(seen, policy, score, self.capacities, position)
        else:
            held = tokens[..., :slots]
            rank = (self.unprotected.clamp(max=slots) - 1)[:, None, None].expand(*held.shape[:2], 1)
            protected = held > ascending.gather(-1, rank)
            leaving = _order(score, held).masked_fill(protected, NEVER).argmin(-1, keepdim=True)
        stays = position < self.capacities[:, None, None]
        tokens.scatter_(-1, leaving.masked_fill_(stays, tokens.shape[-1] - 1), EMPTY)  # the dump


def artifact_victim(
    positions: Tensor, policy: str, score: Tensor, capacities: Tensor, position: Tensor
) -> Tensor:
    """The slot that the artifact frees after the row at `position` [batch, 1, 1]: int64 [batch,
    num_kv_heads, 1].

    positions: int [batch, num_kv_heads, slots], of every token that ever entered; score: same
    shape, the smallest leaves, of equal ones the lowest position; capacities: int [batch].
    """
    if policy == "fifo":
        return (positions == position - capacities[:, None, None]).int().argmax(-1, keepdim=True)
    order = _order(score, positions).masked_fill(positions >= position // 2, NEVER)
    return order.argmin(-1, keepdim=True)


def _order(score: Tensor, positions: Tensor) -> Tensor:
    """One number to order by: score, then position."""
    return (score.long() << 31) + positions


@dataclass(frozen=True)
class InfiniGenPool(InfiniGen):
    """InfiniGen whose pool of each layer, sequence and KV head holds `pool_frac` of T.
    `InfiniGenPoolState` says which token leaves a full pool.

    Source: InfiniGen (OSDI 2024)
    Keeps: a pool of tokens; their partial keys
    Reads: the same of the pool
    """

    pool_frac: float = setting(0.8, "limit of the pool as a share of T", share())
    pool_policy: str = setting(
        "counter", "the token that leaves a full pool", one_of("fifo", "lru", "counter")
    )
    protect_recent: float = setting(
        0.5, "share of the pool, its most recent tokens, that cannot leave", share(zero=True)
    )
    eviction: str = setting(
        "corrected",
        "artifact: evicted tokens stay candidates, as in the artifact's code",
        one_of("corrected", "artifact"),
    )

    # Each KV head has a pool, from which its query heads take one set of tokens.
    group: str = setting("best", allowed=one_of("best"))

    state = InfiniGenPoolState

    @property
    def replay_only(self) -> str | None:
        """The artifact's victims stay candidates, so their slots are never free."""
        if self.eviction == "corrected":
            return None
        why = "frees no slot, so it can only be scored (replay), not decoded live"
        return f"method.eviction={self.eviction}: {why}"

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        held = counts._replace(cached=self.tokens_kept(counts, layer))
        return super().max_tokens_read(held, layer)

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        if self.eviction == "artifact":
            return counts.cached
        return min(counts.cached, int(self.pool_frac * counts.final))
