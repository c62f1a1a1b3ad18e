"""InfiniGen (Lee et al., OSDI 2024): rehearse the next layer's attention on few columns, fetch only what matters.

Steps as in section 4 of the paper. Offline, per KV head, A = V of the SVD of the queries concentrates the scores in
few columns ("skewing"). After the prompt, the columns of largest magnitude are kept of every key ("partial keys").
While layer l - 1 computes, its attention input stands in for layer l's: the rehearsed scores of those columns decide
what layer l fetches. A pool of limited size (section 4.4) chooses its victims as `methods.pool` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods import pool
from methods.base import EMPTY, Calibration, Geometry, Lengths, PromptRows, Row, Rows, Selection, State, floor_frac
from methods.checks import require, require_fraction, require_one_of
from methods.evicting import EvictingState
from methods.projected import ProjectedState
from methods.threshold import ScoreSelecting

COLUMN_RULES = ("sum", "query", "union")


@dataclass(frozen=True)
class InfiniGen(ScoreSelecting):
    """InfiniGen's settings; defaults are the paper's (section 5.1).

    partial_weight_ratio: share of the columns that rehearse. round_columns: `up`, or `down` as the artifact's int().
    columns: importance of a column: `sum` of |q A| and |k A| (the paper), `query` alone (the artifact's speed code),
        or the `union` of the best by either (its accuracy code).
    skew: rotate by A first; False uses the identity.
    pool_tokens, pool_frac: limit of the pool in tokens, or as a share of T; at most one of them; None is no limit.
    pool_policy, protect_recent, eviction: which token leaves a full pool, see `methods.pool`.
    """

    partial_weight_ratio: float = 0.3
    round_columns: str = "up"
    columns: str = "sum"
    skew: bool = True
    pool_tokens: int | None = None
    pool_frac: float | None = None
    pool_policy: str = "counter"
    protect_recent: float = 0.5
    eviction: str = "corrected"

    when: str = "previous_layer"

    title = "InfiniGen"
    needs_prompt = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("partial_weight_ratio", self.partial_weight_ratio)
        require_one_of("round_columns", self.round_columns, ("up", "down"))
        require_one_of("columns", self.columns, COLUMN_RULES)
        require(self.pool_tokens is None or self.pool_tokens >= 1, "pool_tokens", self.pool_tokens, ">= 1 or null")
        one_limit = self.pool_tokens is None or self.pool_frac is None
        require(one_limit, "pool_frac", self.pool_frac, "null with pool_tokens")
        if self.pool_frac is not None:
            require_fraction("pool_frac", self.pool_frac)
        require_fraction("protect_recent", self.protect_recent, zero=True)
        require_one_of("pool_policy", self.pool_policy, pool.POLICIES)
        require_one_of("eviction", self.eviction, pool.EVICTIONS)
        one_set = not self.limited or (self.covers, self.group) == ("kv_head", "best")
        require(one_set, "covers, method.group", f"{self.covers}, {self.group}", "kv_head, best in a limited pool")

    @property
    def label(self) -> str:
        """Skewing is half of the method."""
        return self.title if self.skew else f"{self.title} without skewing"

    @property
    def needs_calibration(self) -> bool:
        """The rotation is measured; the identity is not."""
        return self.skew

    @property
    def limited(self) -> bool:
        """Whether the pool has a limit."""
        return self.pool_tokens is not None or self.pool_frac is not None

    @property
    def replay_only(self) -> str | None:
        """The artifact's victims stay candidates, so their slots are never free."""
        if not self.limited or self.eviction == "corrected":
            return None
        return f"method.eviction={self.eviction}: frees no slot, so it can only be scored (replay), not decoded live"

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """rotation: A of each KV head, fp32 [num_kv_heads, head_dim, head_dim], columns by falling singular value.

        A = V of the SVD of the group's stacked queries, not centred (section 4.1).
        """
        stacked = query.reshape(len(key), -1, query.shape[-1]).float()
        few = stacked.shape[1] < stacked.shape[2]  # then the reduced V would not be square
        return {"rotation": torch.linalg.svd(stacked, full_matrices=few).Vh.mT.contiguous()}

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """`calibration` is required when `skew` is on."""
        if self.skew and calibration is None:
            raise ValueError("method.skew=true: needs a calibration; calibrate first, or set skew=false")
        rotation = calibration["rotation"] if calibration and self.skew else None
        self.check_lengths(lengths)
        state = PooledState if self.limited else InfiniGenState
        return state(self, geometry, lengths, rotation)

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """As many as the pool has, at most."""
        return super().max_tokens_read(row._replace(cached=self.tokens_kept(row, layer)), layer)

    def tokens_kept(self, row: Row, layer: int) -> int:
        """The pool, or all that is cached."""
        if not self.limited or self.eviction == "artifact":
            return row.cached
        return min(row.cached, self.pool_tokens or int((self.pool_frac or 1) * row.final))


class InfiniGenState(ProjectedState):
    """The projection is A restricted to the sequence's own columns; the query is rehearsed."""

    def __init__(self, method: InfiniGen, geometry: Geometry, lengths: Lengths, rotation: Tensor | None) -> None:
        super().__init__(method, geometry, lengths)
        self.rotation = rotation

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """Step 2."""
        if self.rotation is None:
            basis = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device).expand(key.shape[1], -1, -1)
        else:
            basis = self.rotation[layer].to(key)
        return choose_columns(query, key, rows.real, basis, self.method)

    def select(self, layer: int, rows: Rows) -> Selection:
        """Steps 3 and 4."""
        scores = self.partial_scores(layer, rows)
        scores.masked_fill_(~rows.visible().unsqueeze(2), -math.inf)
        selection = self.method.select(scores, rows, self.lengths.final, self.geometry)
        return selection._replace(side=self.index_read(layer, rows.positions))


class PooledState(InfiniGenState, EvictingState):
    """InfiniGen's state over a pool.

    fetches[layer], last_fetch[layer]: int32, shaped like tokens[layer]: how often, and in which row last, a token was
    selected; a token that enters has 0 and its own position.
    """

    slot_tensors = {**InfiniGenState.slot_tensors, **EvictingState.slot_tensors, "fetches": 0, "last_fetch": 0}
    fetches: dict[int, Tensor]
    last_fetch: dict[int, Tensor]

    def __init__(self, method: InfiniGen, geometry: Geometry, lengths: Lengths, rotation: Tensor | None) -> None:
        super().__init__(method, geometry, lengths, rotation)
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

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """The prompt enters in order. No token has been fetched, so every policy evicts the lowest position."""
        super().prompt(layer, query, key, value, rows)
        self.enter_prompt(layer, rows)
        tokens, lengths = self.tokens[layer], rows.lengths[:, None, None].int()
        self.fetches[layer], self.last_fetch[layer] = torch.zeros_like(tokens), tokens.clone()
        if self.simulates:  # its dense rows are fetches of all tokens up to their own
            self.fetches[layer] = (lengths - tokens).clamp(min=0)
        if not self.simulates or self.method.pool_policy == "fifo":
            tokens.masked_fill_(tokens < lengths - self.capacities[:, None, None], EMPTY)

    def select(self, layer: int, rows: Rows) -> Selection:
        """Scan the rows: each selects among the pool, then its own token enters."""
        scores = self.partial_scores(layer, rows)
        slots = scores.shape[-1]
        own = self.enter(layer, rows)
        self.fetches[layer].scatter_(-1, own, 0)
        self.last_fetch[layer].scatter_(-1, own, rows.positions.int()[:, None].expand_as(own))
        held = self.tokens[layer][..., :slots]
        order = held.argsort(-1)  # live slots are reused; ties go to the lowest token
        present = rows.positions if self.simulates else torch.minimum(rows.positions, self.capacities[:, None])
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
        return Selection(torch.cat(masks, 2), torch.cat(counts, 1), self.index_read(layer, present))

    def _use(self, layer: int, rows: Rows, row: int, mask: Tensor) -> None:
        """Count what the row fetched, bool [batch, num_kv_heads, slots], and evict where the pool is full."""
        slots, position, real = mask.shape[-1], rows.positions[:, row, None, None], rows.real[:, row, None, None]
        fetches, last_fetch = (data[layer][..., :slots] for data in (self.fetches, self.last_fetch))
        pool.count_fetch(fetches, last_fetch, mask & real, position, saturates=not self.simulates)
        tokens, policy = self.tokens[layer], self.method.pool_policy
        worth = {"fifo": torch.zeros_like(fetches), "lru": last_fetch, "counter": fetches}[policy]
        if self.simulates:
            positions = rows.slot_positions.expand(worth.shape)
            victim = pool.artifact_victim(positions, policy, worth, self.capacities, position)
        else:
            held = tokens[..., :slots]
            present = torch.where(held < position, held, EMPTY)
            victim = pool.victim(present, worth, self.capacities, self.method.protect_recent)
        evicts = real & (position >= self.capacities[:, None, None])
        tokens.scatter_(-1, torch.where(evicts, victim, tokens.shape[-1] - 1), EMPTY)


def choose_columns(query: Tensor, key: Tensor, real: Tensor, basis: Tensor, method: InfiniGen) -> Tensor:
    """Step 2: the columns of A with the largest importance over the prompt, summed in fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real: [batch, prompt];
    basis: [num_kv_heads, head_dim, head_dim]. Returns [batch, num_kv_heads, head_dim, columns].
    """
    batch, num_kv_heads, prompt, head_dim = key.shape
    weight = real[:, None, :, None].to(key.dtype)
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    in_basis = (grouped @ basis).abs().view(batch, num_kv_heads, -1, prompt, head_dim)
    by_query = (in_basis * weight.unsqueeze(2)).sum(3, dtype=torch.float32).mean(2)  # [batch, kv, head_dim]
    by_key = ((key @ basis).abs() * weight).sum(2, dtype=torch.float32)
    round_to = math.ceil if method.round_columns == "up" else math.floor
    wanted = max(1, round_to(method.partial_weight_ratio * head_dim))
    if method.columns == "union":
        chosen = torch.zeros_like(by_key).scatter_(-1, by_query.topk(wanted).indices, 1.0)
        chosen.scatter_(-1, by_key.topk(wanted).indices, 1.0)
        kept = chosen.topk(min(2 * wanted, head_dim))  # equal width; the surplus columns are zeroed
    else:
        kept = (by_query if method.columns == "query" else by_query + by_key).topk(wanted)
    index = kept.indices[:, :, None].expand(-1, -1, head_dim, -1)
    projection = basis.expand(batch, -1, -1, -1).gather(-1, index)
    return projection * kept.values[:, :, None].ne(0) if method.columns == "union" else projection
