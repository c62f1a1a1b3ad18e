"""TOVA (Oren et al., EMNLP 2024): keep the tokens that the last row attends to most.

After the prompt, once, and after every row, the tokens of the least attention in the last row leave, its own not
excepted. A layer's heads share one set: the attention is the mean over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from methods.base import Calibration, Geometry, Lengths, PromptRows, Row, floor_frac
from methods.checks import require, require_fraction
from methods.evicting import Evicting, WorthState, received_attention


@dataclass(frozen=True)
class TOVA(Evicting):
    """Keeps floor(kept_frac * T) tokens, at least 1, or `kept_tokens`.

    protect_last: the row's own token stays, as in kvpress; in the authors' code it competes.
    """

    kept_frac: float = 0.2
    kept_tokens: int | None = None
    protect_last: bool = False

    title = "TOVA"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kept_frac", self.kept_frac)
        require(self.kept_tokens is None or self.kept_tokens >= 1, "kept_tokens", self.kept_tokens, ">= 1 or null")

    def budget(self, final: int) -> int:
        """Tokens kept of a sequence of T = `final`."""
        return max(1, int(self.kept_frac * final)) if self.kept_tokens is None else self.kept_tokens

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> TOVAState:
        """No calibration."""
        return TOVAState(self, geometry, lengths)

    def tokens_kept(self, row: Row, layer: int) -> int:
        """The budget, or all that is cached."""
        return min(row.cached, self.budget(row.final))

    def with_size(self, frac: float) -> Self:
        """Sized by `kept_frac`."""
        return replace(self, kept_frac=frac, kept_tokens=None)

    def artifact_budget(self) -> float:
        """The budget, where it is a share."""
        return self.kept_frac if self.kept_tokens is None else 1.0


class TOVAState(WorthState):
    """A token's worth is the attention of the last row, mean over all heads of the layer."""

    def budget(self, layer: int) -> Tensor:
        """Tokens kept, int [batch]."""
        if self.method.kept_tokens is not None:
            return torch.full_like(self.lengths.final, self.method.kept_tokens)
        return floor_frac(self.method.kept_frac, self.lengths.final).clamp(min=1)

    @property
    def recent(self) -> Tensor:
        """The last token or none, int [batch]."""
        return torch.full_like(self.lengths.final, int(self.method.protect_last))

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The attention of the prompt's last row."""
        worth = received_attention(query, key, rows.real, self.geometry.scale, first=key.shape[2] - 1)
        return worth.mean(1, keepdim=True).expand_as(worth)

    def observe(self, worth: Tensor, probs: Tensor) -> None:
        """Only the last row counts."""
        worth.copy_(probs.mean((1, 2)).unsqueeze(1).expand_as(worth))
