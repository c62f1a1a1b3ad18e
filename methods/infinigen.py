"""InfiniGen (Lee et al., OSDI 2024): rehearse the next layer's attention on few columns, fetch only what matters.

Steps as in section 4 of the paper. Offline, per KV head, A = V of the SVD of the queries concentrates the scores in
few columns ("skewing"). After the prompt, the columns of largest magnitude are kept of every key ("partial keys").
While layer l - 1 computes, its attention input stands in for layer l's: the rehearsed scores of those columns decide
what layer l fetches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from methods.base import Geometry, PromptRows, Rows, Selection, State, require, require_fraction
from methods.selection import ScoreSelecting

COLUMN_RULES = ("sum", "query", "union")
POLICIES = ("fifo", "lru", "counter")
EVICTIONS = ("corrected", "artifact")


class Rotations(Protocol):
    """What calibration gives."""

    @property
    def rotation(self) -> Tensor:
        """A of each KV head, [num_layers, num_kv_heads, head_dim, head_dim]."""
        ...


@dataclass(frozen=True)
class InfiniGen(ScoreSelecting):
    """InfiniGen's settings; defaults are the paper's (section 5.1).

    partial_weight_ratio: share of the columns that rehearse.
    columns: importance of a column: `sum` of |q A| and |k A| (the paper), `query` alone (the artifact's speed code),
        or the `union` of the best by either (its accuracy code).
    skew: rotate by A first; False uses the identity.
    pool_tokens, pool_frac: limit of the pool in tokens, or as a share of T; at most one of them; None is no limit.
    pool_policy, protect_recent, eviction: which token leaves a full pool, see `methods.pool`.
    """

    partial_weight_ratio: float = 0.3
    columns: str = "sum"
    skew: bool = True
    pool_tokens: int | None = None
    pool_frac: float | None = None
    pool_policy: str = "counter"
    protect_recent: float = 0.5
    eviction: str = "corrected"

    rehearses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_exempt_layers >= 1,
            "num_exempt_layers",
            self.num_exempt_layers,
            "an integer >= 1: layer 0 has no layer before it to rehearse in",
        )
        require_fraction("partial_weight_ratio", self.partial_weight_ratio)
        require(self.columns in COLUMN_RULES, "columns", self.columns, f"one of {', '.join(COLUMN_RULES)}")
        require(self.pool_tokens is None or self.pool_tokens >= 1, "pool_tokens", self.pool_tokens, ">= 1 or null")
        one_limit = self.pool_tokens is None or self.pool_frac is None
        require(one_limit, "pool_frac", self.pool_frac, "null with pool_tokens")
        if self.pool_frac is not None:
            require_fraction("pool_frac", self.pool_frac)
        require_fraction("protect_recent", self.protect_recent, zero=True)
        require(self.pool_policy in POLICIES, "pool_policy", self.pool_policy, f"one of {', '.join(POLICIES)}")
        require(self.eviction in EVICTIONS, "eviction", self.eviction, f"one of {', '.join(EVICTIONS)}")

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """The rotation is measured; the identity is not."""
        return self.skew

    def new_state(self, geometry: Geometry, final_lengths: Tensor, calibration: Rotations | None = None) -> State:
        """`calibration` is required when `skew` is on."""
        if self.skew and calibration is None:
            raise ValueError("method.skew=true: needs a calibration; run calibrate() first or set skew=false")
        rotation = calibration.rotation if calibration and self.skew else None
        if self.limited:
            from methods.pool import PooledState

            return PooledState(geometry, final_lengths, self, rotation)
        return InfiniGenState(geometry, final_lengths, self, rotation)

    @property
    def limited(self) -> bool:
        """Whether the pool has a limit."""
        return self.pool_tokens is not None or self.pool_frac is not None

    def tokens_read(self, cached: int, final_length: int) -> float | None:
        """As many as the pool has, at most."""
        pool = final_length if self.pool_tokens is None else self.pool_tokens
        if self.pool_frac is not None:
            pool = int(self.pool_frac * final_length)
        if self.limited and self.eviction == "corrected":
            cached = min(cached, pool)
        return super().tokens_read(cached, final_length)


class InfiniGenState(State):
    """Partial keys and the projection onto their columns.

    projection[layer]: [batch, num_kv_heads, head_dim, columns], A restricted to the sequence's columns.
    partial_keys[layer]: [batch, num_kv_heads, slots, columns].
    """

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: InfiniGen, rotation: Tensor | None) -> None:
        super().__init__(geometry, final_lengths)
        self.method = method
        self.rotation = Shared(rotation)
        self.projection: dict[int, Tensor] = {}
        self.partial_keys: dict[int, Tensor] = {}

    def prompt(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> None:
        """Steps 2: choose the columns from the sequence's own prompt, and store its partial keys."""
        basis = self._basis(layer, key)
        self.projection[layer] = choose_columns(query, key, rows.real, basis, self.method)
        batch, num_kv_heads, _, columns = self.projection[layer].shape
        self.partial_keys[layer] = key.new_empty(batch, num_kv_heads, rows.num_slots + self.spare_slots, columns)
        self.append(layer, key, slice(0, key.shape[2]))

    def append(self, layer: int, key: Tensor, slots: slice) -> None:
        """Keep the chosen columns of the keys that enter `slots`."""
        torch.matmul(key, self.projection[layer], out=self.partial_keys[layer][:, :, slots])

    def slot_data(self) -> list[tuple[dict[int, Tensor], float]]:
        """Partial keys."""
        return [*super().slot_data(), (self.partial_keys, 0)]

    def select(self, layer: int, rows: Rows) -> Selection:
        """Step 4 over the rehearsed scores."""
        scores = self.rehearsed_scores(layer, rows)
        scores.masked_fill_(~rows.visible().unsqueeze(2), float("-inf"))
        return self.method.select(scores, rows.positions, self.geometry)

    def rehearsed_scores(self, layer: int, rows: Rows) -> Tensor:
        """Step 3: scaled scores of the rehearsed `rows.query`, fp32 [batch, num_kv_heads, group, rows, slots]."""
        batch, num_kv_heads, head_dim, columns = self.projection[layer].shape
        slots = rows.slot_positions.shape[-1]
        stacked = rows.query.reshape(batch, num_kv_heads, -1, head_dim) @ (self.projection[layer] * self.geometry.scale)
        scores = stacked @ self.partial_keys[layer][:, :, :slots].transpose(-1, -2)
        return scores.view(batch, num_kv_heads, self.geometry.group, -1, slots).float()

    def _basis(self, layer: int, key: Tensor) -> Tensor:
        if self.rotation.value is None:
            eye = torch.eye(self.geometry.head_dim, dtype=key.dtype, device=key.device)
            return eye.expand(self.geometry.num_kv_heads, -1, -1)
        return self.rotation.value[layer].to(key)


@dataclass(frozen=True)
class Shared:
    """A tensor without a batch axis: a fork shares it."""

    value: Tensor | None


def choose_columns(query: Tensor, key: Tensor, real: Tensor, basis: Tensor, method: InfiniGen) -> Tensor:
    """Step 2: the columns of A with the largest importance over the prompt.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real: [batch, prompt];
    basis: [num_kv_heads, head_dim, head_dim]. Returns [batch, num_kv_heads, head_dim, columns].
    """
    batch, num_kv_heads, prompt, head_dim = key.shape
    weight = real[:, None, :, None].to(key.dtype)
    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    group = grouped.shape[2] // prompt
    by_query = ((grouped @ basis).abs().view(batch, num_kv_heads, group, prompt, head_dim) * weight.unsqueeze(2)).sum(3)
    by_query = by_query.float().mean(2)  # [batch, kv, head_dim]
    by_key = ((key @ basis).abs() * weight).float().sum(2)
    wanted = math.ceil(method.partial_weight_ratio * head_dim)
    if method.columns == "union":
        chosen = torch.zeros_like(by_key).scatter_(-1, by_query.topk(wanted).indices, 1.0)
        chosen.scatter_(-1, by_key.topk(wanted).indices, 1.0)
        kept = chosen.topk(min(2 * wanted, head_dim))  # equal width; the surplus columns are zeroed
    else:
        kept = (by_query if method.columns == "query" else by_query + by_key).topk(wanted)
    index = kept.indices[:, :, None].expand(-1, -1, head_dim, -1)
    projection = basis.expand(batch, -1, -1, -1).gather(-1, index)
    return projection * kept.values[:, :, None].ne(0) if method.columns == "union" else projection
