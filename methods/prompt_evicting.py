"""Methods that evict once, after the prompt, and keep all that is generated: the easy base of SnapKV and its kin.

A state says what a prompt's tokens are worth (`prompt_worth`). How many stay, how layers and KV heads share them, and
which stay whatever their worth is written once, here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from methods.base import EMPTY, Calibration, Geometry, Lengths, PromptRows, Row, Rows, Selection, share_above
from methods.checks import require, require_fraction, require_one_of
from methods.evicting import INF, Evicting, EvictingState

STEEPNESS = 20
"""PyramidKV's beta: the last layer of a pyramid has about a 20th of the mean, where the prompt is long enough."""
FLOOR = 5
"""A KV head has a fifth of the uniform budget for certain: Ada-KV's floor alpha of 0.2."""


class PromptEvictingState(EvictingState):
    """The prompt tokens of the largest worth stay in each KV head, the later one of two that are equal.

    shares: int [selecting layers, batch], how many that compete stay; asked for once, as the prompts' lengths are on
        the device.
    """

    def __init__(self, method: PromptEvicting, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        selecting = geometry.num_layers - method.num_exempt_layers
        shares = [method.shares(prompt, selecting) for prompt in lengths.prompt.tolist()]
        self.shares = torch.tensor(shares, dtype=lengths.prompt.dtype, device=lengths.prompt.device).T

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """Worth of each prompt token, fp32 [batch, num_kv_heads, prompt]; what stands in the padding plays no part."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Evict what loses."""
        self.enter_prompt(layer, rows)
        tokens = self.tokens[layer][:, :, : key.shape[2]]
        last = rows.lengths - self.method.window
        competes = (tokens >= self.method.num_sinks) & (tokens < last[:, None, None])
        worth = self.prompt_worth(layer, query, key, value, rows)
        losers = competes.sum(-1) - self._won(layer, worth.masked_fill(~competes, -INF))
        ascending = worth.masked_fill(~competes, INF).argsort(dim=-1, stable=True)
        evicted = torch.arange(key.shape[2], device=key.device) < losers.unsqueeze(-1)
        tokens.masked_fill_(torch.zeros_like(competes).scatter_(-1, ascending, evicted), EMPTY)

    def select(self, layer: int, rows: Rows) -> Selection:
        """What is kept of the prompt, and all that was generated."""
        self.enter(layer, rows)
        tokens = self.tokens[layer][:, :, None, : rows.slot_positions.shape[-1]]
        mask = tokens < rows.positions[:, None, :, None]
        return Selection(mask, mask.sum(-1).double().mean(1))

    def _won(self, layer: int, worth: Tensor) -> Tensor:
        """How many of the tokens that compete stay in each KV head, int [batch, num_kv_heads or 1]."""
        share = self.shares[layer - self.method.num_exempt_layers, :, None]
        return adaptive(worth, share) if self.method.heads == "adaptive" else share


@dataclass(frozen=True)
class PromptEvicting(Evicting):
    """Keeps `kept_frac` of the prompt, or `kept_tokens` of it, as the mean over the layers' KV heads.

    num_sinks, window: first and last tokens of the prompt that always stay, and count.
    layers: how the layers share what is left: `uniform`, or `pyramid`, ever less from layer to layer (PyramidKV).
    heads: how a layer's KV heads share it: `uniform`, or `adaptive`, by where the worth is (Ada-KV).
    """

    kept_frac: float = 0.2
    kept_tokens: int | None = None
    num_sinks: int = 0
    window: int = 0
    layers: str = "uniform"
    heads: str = "uniform"

    needs_prompt = True
    state: ClassVar[type[PromptEvictingState]]
    """What `new_state` makes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kept_frac", self.kept_frac)
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")
        require(self.window >= 0, "window", self.window, "an integer >= 0")
        enough = self.kept_tokens is None or self.kept_tokens > self.safe
        require(enough, "kept_tokens", self.kept_tokens, f"above {self._safe_words}, or null")
        require_one_of("layers", self.layers, ("uniform", "pyramid"))
        require_one_of("heads", self.heads, ("uniform", "adaptive"))

    @property
    def safe(self) -> int:
        """Tokens of a prompt that stay whatever their worth."""
        return self.num_sinks + self.window

    @property
    def _safe_words(self) -> str:
        return f"num_sinks + window={self.safe}" if self.num_sinks else f"window={self.window}"

    def budget(self, prompt: int) -> int:
        """Tokens of a prompt that are kept, mean over layers and KV heads."""
        return min(prompt, int(self.kept_frac * prompt) if self.kept_tokens is None else self.kept_tokens)

    def shares(self, prompt: int, num_layers: int) -> list[int]:
        """Of each of the `num_layers` layers that select, the tokens that compete and stay; their mean is exact."""
        mean = max(0, self.budget(prompt) - self.safe)
        return [mean] * num_layers if self.layers == "uniform" else pyramid(mean, self._most(prompt), num_layers)

    def _most(self, prompt: int) -> int:
        """The most that any layer's share is."""
        mean, competing = (max(0, count - self.safe) for count in (self.budget(prompt), prompt))
        return mean if self.layers == "uniform" else min(2 * mean - mean // STEEPNESS, competing)

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> EvictingState:
        """ValueError where a prompt's share would not exceed what always stays."""
        shortest = int(lengths.prompt.min())
        kept, least = self.budget(shortest), f"{(self.safe + 1) / shortest:.3g}"
        require(
            kept > self.safe or kept == shortest,
            "kept_frac",
            self.kept_frac,
            f"at least {least} for a prompt of {shortest} tokens, to keep more than {self._safe_words}",
        )
        return self.state(self, geometry, lengths)

    def tokens_read(self, row: Row, layer: int) -> float:
        """What the prompt left, and all that was generated."""
        return self.budget(row.prompt) + row.cached - row.prompt

    def tokens_kept(self, row: Row, layer: int) -> int:
        """The same, in the KV head and the layer that keep most."""
        share, generated = self._most(row.prompt), row.cached - row.prompt
        if self.heads == "adaptive":
            share = -(-(share + (FLOOR - 1) * max(0, row.prompt - self.safe)) // FLOOR)
        return min(row.prompt, self.safe + share) + generated

    def with_size(self, frac: float) -> Self:
        """Sized by `kept_frac`."""
        return replace(self, kept_frac=frac, kept_tokens=None)

    def min_size(self, row: Row) -> float:
        """What keeps one token more than always stays."""
        words = "num_sinks + method.window" if self.num_sinks else "window"
        require(self.safe < row.prompt, words, self.safe, f"below {row.prompt}, the shortest prompt")
        return share_above(self.safe, row.prompt)


def pyramid(mean: int, high: int, num_layers: int) -> list[int]:
    """Whole numbers on a line that falls from `high` to 2 * mean - high, and sum to num_layers * mean.

    PyramidKV's code rounds the step down and so keeps more than the budget; here the line's running sum is rounded.
    """
    gaps = max(1, num_layers - 1)
    fall = high - mean if num_layers > 1 else 0
    until = [(count * (mean + fall) * gaps - fall * count * (count - 1)) // gaps for count in range(num_layers + 1)]
    return [after - before for before, after in zip(until, until[1:], strict=False)]


def adaptive(worth: Tensor, share: Tensor) -> Tensor:
    """How many tokens each KV head keeps so that a layer keeps its best ones: int [batch, num_kv_heads].

    worth: [batch, num_kv_heads, prompt], -inf for tokens that do not compete; share: int [batch, 1], the mean over the
    KV heads, of which a `FLOOR`th is certain. Rounded along the heads, so that their sum is exact.
    """
    num_heads, prompt = worth.shape[1:]
    best = worth.flatten(1).argsort(dim=-1, descending=True, stable=True)
    wins = torch.arange(best.shape[-1], device=worth.device) < num_heads * share
    won = torch.zeros_like(wins).scatter_(-1, best, wins).view(-1, num_heads, prompt).sum(-1)
    until = ((FLOOR - 1) * won + share).cumsum(-1) // FLOOR
    return until.diff(dim=-1, prepend=torch.zeros_like(share))
