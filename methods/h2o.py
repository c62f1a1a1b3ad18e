"""H2O (Zhang et al., NeurIPS 2023): keep the tokens with the largest accumulated attention, and the most recent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from methods.base import (
    EMPTY,
    EvictingState,
    Geometry,
    Method,
    PromptRows,
    Rows,
    Selection,
    attention_scores,
    floor_frac,
    require,
    require_fraction,
)

PROMPT_CHUNK = 256
"""Prompt rows whose probabilities are held at once."""


@dataclass(frozen=True)
class H2O(Method):
    """Budget = floor(heavy_frac * T) + floor(recent_frac * T) tokens, at least 1; evicted tokens are gone for good."""

    heavy_frac: float = 0.1
    recent_frac: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("heavy_frac", self.heavy_frac, zero=True)
        require_fraction("recent_frac", self.recent_frac, zero=True)
        total = self.heavy_frac + self.recent_frac
        require(0 < total <= 1, "heavy_frac + method.recent_frac", total, "in (0, 1]")

    def new_state(self, geometry: Geometry, final_lengths: Tensor, calibration: Any = None) -> H2OState:
        """No calibration."""
        return H2OState(geometry, final_lengths, self)

    def tokens_read(self, cached: int, final_length: int) -> float:
        """The budget, or all that is cached."""
        budget = int(self.heavy_frac * final_length) + int(self.recent_frac * final_length)
        return min(cached, max(1, budget))

    def with_size(self, frac: float) -> H2O:
        """Half heavy, half recent, as in the paper."""
        return replace(self, heavy_frac=frac / 2, recent_frac=frac / 2)

    def artifact_budget(self) -> float:
        """The whole budget."""
        return self.heavy_frac + self.recent_frac


class H2OState(EvictingState):
    """Accumulated attention of the kept tokens.

    mass[layer]: fp32, shaped like tokens[layer], inf in slots that hold no token.
    """

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: H2O) -> None:
        super().__init__(geometry, final_lengths)
        self.method = method
        self.mass: dict[int, Tensor] = {}

    @property
    def recent(self) -> Tensor:
        """floor(recent_frac * T), int [batch]."""
        return floor_frac(self.method.recent_frac, self.final_lengths)

    @property
    def budget(self) -> Tensor:
        """Tokens kept, int [batch]."""
        return (floor_frac(self.method.heavy_frac, self.final_lengths) + self.recent).clamp(min=1)

    @property
    def capacity(self) -> int:
        """The largest budget."""
        return int(self.budget.max())

    def slot_data(self) -> list[tuple[dict[int, Tensor], float]]:
        """Tokens and their mass."""
        return [*super().slot_data(), (self.mass, float("inf"))]

    def prompt(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> None:
        """Sum the prompt's attention and evict down to the budget."""
        _, num_kv_heads, prompt, _ = key.shape
        self.enter_prompt(layer, rows, num_kv_heads)
        tokens = self.tokens[layer]
        mass = torch.full_like(tokens, float("inf"), dtype=torch.float32)
        mass[:, :, :prompt] = prompt_mass(query, key, rows.real, self.geometry.scale)
        surplus = rows.lengths - self.budget
        old = tokens[:, :, :prompt] < (rows.lengths - self.recent)[:, None, None]
        ascending = mass[:, :, :prompt].masked_fill(~old, float("inf")).argsort(-1)
        evicted = torch.arange(prompt, device=key.device) < surplus[:, None, None]
        gone = torch.zeros_like(old).scatter_(-1, ascending, evicted.expand_as(old))
        gone |= ~rows.real[:, None]
        mass[:, :, :prompt].masked_fill_(gone, float("inf"))
        tokens[:, :, :prompt].masked_fill_(gone, EMPTY)
        self.mass[layer] = mass

    def select(self, layer: int, rows: Rows) -> Selection:
        """Scan the rows: each reads what is kept, adds its attention to the sums, and evicts a token if over budget."""
        mass, tokens = self.mass[layer], self.tokens[layer]
        slots = rows.slot_positions.shape[-1]
        own = rows.own_slots.expand(-1, mass.shape[1], -1)
        self.enter(layer, rows)
        mass.scatter_(-1, own, torch.where(rows.real, 0.0, float("inf"))[:, None].expand_as(own))
        readable = tokens[:, :, :slots].clone()
        evicts = rows.real & (rows.positions >= self.budget[:, None])
        scan = Scan(mass, tokens, slots, readable)
        died = scan.run(rows, evicts, rows.positions - self.recent[:, None])
        cached = readable.unsqueeze(2) < rows.positions[:, None, :, None]
        alive = died.unsqueeze(2) >= torch.arange(own.shape[-1], device=own.device)[:, None]
        return Selection(cached & alive, torch.minimum(rows.positions, self.budget[:, None]).double())


@dataclass
class Scan:
    """One block's sequential pass; `mass` and `tokens` are the state's own and are updated in place."""

    mass: Tensor
    tokens: Tensor
    slots: int
    readable: Tensor

    def run(self, rows: Rows, evicts: Tensor, newest_old: Tensor) -> Tensor:
        """The row after which each slot's token was evicted, int [batch, num_kv_heads, slots]; rows if it was not.

        evicts: bool [batch, rows]; newest_old: int [batch, rows], the newest token that may be evicted after each row.
        """
        scores = rows.true_scores()
        num_rows = scores.shape[3]
        bias = torch.where(self.readable == EMPTY, float("-inf"), 0.0).unsqueeze(2)  # [batch, kv, 1, slots]
        died = torch.full_like(self.mass, num_rows, dtype=torch.int32)
        weight = rows.real[:, None, :, None].float()
        bound = newest_old.int()[:, None, :, None]
        dump = torch.where(evicts, 0, self.mass.shape[-1] - 1)[:, None, :, None]
        mass, tokens = self.mass[..., : self.slots], self.tokens[..., : self.slots]
        bias = torch.nn.functional.pad(bias, (0, self.mass.shape[-1] - self.slots))
        for row in range(num_rows):
            received = (scores[:, :, :, row] + bias[..., : self.slots]).softmax(-1).sum(2)
            mass.addcmul_(received, weight[:, :, row])
            old = mass.masked_fill(tokens > bound[:, :, row], float("inf"))
            victim = torch.maximum(old.argmin(-1, keepdim=True), dump[:, :, row])
            self.mass.scatter_(-1, victim, float("inf"))
            self.tokens.scatter_(-1, victim, EMPTY)
            bias.scatter_(-1, victim.unsqueeze(2), float("-inf"))
            died.scatter_(-1, victim, row)
        return died[..., : self.slots]


def prompt_mass(query: Tensor, key: Tensor, real: Tensor, scale: float) -> Tensor:
    """Attention each prompt token received from the prompt, summed over rows and the group, fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real: [batch, prompt];
    returns [batch, num_kv_heads, prompt].
    """
    batch, num_kv_heads, prompt, _ = key.shape
    mass = torch.zeros(batch, num_kv_heads, prompt, device=key.device)
    column = torch.arange(prompt, device=key.device)
    for start in range(0, prompt, PROMPT_CHUNK):
        stop = min(start + PROMPT_CHUNK, prompt)
        scores = attention_scores(query[:, :, start:stop], key[:, :, :stop], scale)
        hidden = (column[:stop] > column[start:stop, None]) | ~real[:, None, None, None, :stop]
        probs = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        rows = real[:, None, None, start:stop, None].to(probs.dtype)
        mass[:, :, :stop] += probs.nan_to_num_().mul_(rows).sum((2, 3))
    return mass
