"""SnapKV (Li et al., NeurIPS 2024): after the prompt, keep what its last rows attended to, and these rows.

The attention of the last `window` rows over all keys, summed over them and the group, is smoothed along the tokens;
the tokens of the largest values stay, and everything generated. The original chooses a set per query head and so holds
a group's tokens several times; here a set is shared by a KV head's group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from methods.base import Calibration, Geometry, Lengths, PromptRows, Row
from methods.checks import require, require_fraction, require_one_of
from methods.evicting import Evicting, WorthState, received_attention


@dataclass(frozen=True)
class SnapKV(Evicting):
    """Keeps `kept_tokens` of the prompt, or `kept_frac` of it, the `window` last ones included.

    kernel, pooling: width (odd) and kind (max, avg) of the smoothing. Defaults are those of the paper's LongBench runs.
    """

    kept_frac: float = 0.2
    kept_tokens: int | None = None
    window: int = 32
    kernel: int = 7
    pooling: str = "max"

    title = "SnapKV"
    needs_prompt = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kept_frac", self.kept_frac)
        require(self.window >= 1, "window", self.window, "an integer >= 1")
        above = f"above window={self.window}, or null"
        require(self.kept_tokens is None or self.kept_tokens > self.window, "kept_tokens", self.kept_tokens, above)
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "an odd integer >= 1")
        require_one_of("pooling", self.pooling, ("max", "avg"))

    def budget(self, prompt: int) -> int:
        """Tokens of a prompt that are kept."""
        return min(prompt, int(self.kept_frac * prompt) if self.kept_tokens is None else self.kept_tokens)

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> SnapKVState:
        """ValueError where a prompt's share would not exceed the window."""
        shortest = int(lengths.prompt.min())
        kept, least = self.budget(shortest), f"{(self.window + 1) / shortest:.3g}"
        require(
            kept > self.window or kept == shortest,
            "kept_frac",
            self.kept_frac,
            f"at least {least} for a prompt of {shortest} tokens, to keep more than window={self.window}",
        )
        return SnapKVState(self, geometry, lengths)

    def tokens_kept(self, row: Row, layer: int) -> int:
        """What the prompt left, and all that was generated."""
        return self.budget(row.prompt) + row.cached - row.prompt

    def with_size(self, frac: float) -> Self:
        """Sized by `kept_frac`."""
        return replace(self, kept_frac=frac, kept_tokens=None)

    def min_size(self, row: Row) -> float:
        """What keeps one token more than the window, rounded up so that the floor does."""
        require(self.window < row.prompt, "window", self.window, f"below {row.prompt}, the shortest prompt")
        return min(1.0, math.nextafter((self.window + 1) / row.prompt, 1))


class SnapKVState(WorthState):
    """A prompt token's worth is the smoothed attention that it received from the window."""

    evicts_later = False

    def budget(self, layer: int) -> Tensor:
        """Tokens of each prompt that are kept, int [batch]."""
        return self.lengths.prompt.new_tensor([self.method.budget(n) for n in self.lengths.prompt.tolist()])

    @property
    def recent(self) -> Tensor:
        """The window, int [batch]."""
        return torch.full_like(self.lengths.prompt, self.method.window)

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The window's own tokens neither give nor take in the smoothing."""
        before = max(0, key.shape[2] - self.method.window)
        worth = received_attention(query, key, rows.real, self.geometry.scale, first=before)
        pool = max_pool1d if self.method.pooling == "max" else avg_pool1d
        if before:
            width = self.method.kernel
            worth[..., :before] = pool(worth[..., :before], width, stride=1, padding=width // 2)
        return worth
