"""H2O (Zhang et al., NeurIPS 2023): keep the tokens with the largest accumulated attention, and the
most recent. A token competes with its whole history as soon as it is no longer recent.

The rule, and where it differs (made into docs/methods.md):

**h2o**: a token's score is the attention it received, summed over all rows and the group. After the
prompt and after each step, tokens of the least score leave until floor(`heavy_frac` · T) +
floor(`recent_frac` · T) are left, or `kept_tokens`, half of them recent; the recent ones are safe.
InfiniGen's artifact drops new tokens from the heavy set at once ([how to compare](paper.md)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from methods.attention import received_attention
from methods.base import PromptRows, TokenCounts, floor_frac, require
from methods.evicting import Evicting, ScoreState
from methods.settings import least, setting, share


class H2OState(ScoreState):
    """A token's score is the attention it received, summed over rows and the group."""

    replayable = True

    def budget(self, layer: int) -> Tensor:
        method, final = self.method, self.lengths.final
        if method.kept_tokens is not None:
            return torch.full_like(final, method.kept_tokens)
        return (floor_frac(method.heavy_frac, final) + self.recent).clamp(min=1)

    @property
    def recent(self) -> Tensor:
        method, final = self.method, self.lengths.final
        if method.kept_tokens is not None:
            return torch.full_like(final, method.kept_tokens // 2)
        return floor_frac(method.recent_frac, final)

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        return received_attention(query, key, rows.real, self.geometry.softmax(layer))

    def observe(self, score: Tensor, probs: Tensor) -> None:
        score += probs[:, :, 0] if probs.shape[2] == 1 else probs.sum(2)


@dataclass(frozen=True)
class H2O(Evicting):
    """Budget = floor(heavy_frac * T) + floor(recent_frac * T) tokens, at least 1, or `kept_tokens`;
    evicted tokens are gone for good.

    Source: H2O (NeurIPS 2023)
    Keeps: the tokens with the most attention so far, and the most recent
    """

    heavy_frac: float = setting(
        0.1, "share of T kept as the most attended tokens", share(zero=True)
    )
    recent_frac: float = setting(0.1, "share of T kept as the most recent tokens", share(zero=True))
    kept_tokens: int | None = setting(
        None, "this many tokens instead of the shares, half of them recent", least(1, null=True)
    )

    title = "H2O"
    state = H2OState

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.heavy_frac + self.recent_frac
        require(0 < total <= 1, "heavy_frac + method.recent_frac", total, "in (0, 1]")

    def tokens_kept(self, counts: TokenCounts, layer: int) -> int:
        if self.kept_tokens is not None:
            return min(counts.cached, self.kept_tokens)
        budget = int(self.heavy_frac * counts.final) + int(self.recent_frac * counts.final)
        return min(counts.cached, max(1, budget))

    def with_budget(self, frac: float) -> Self:
        """Half heavy, half recent, as in the paper."""
        return replace(self, heavy_frac=frac / 2, recent_frac=frac / 2, kept_tokens=None)

    def artifact_budget(self) -> float:
        return self.heavy_frac + self.recent_frac if self.kept_tokens is None else 1.0
