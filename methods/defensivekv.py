"""DefensiveKV (Feng et al., ICLR 2026): keeps the tokens that any row of the window, in any query
head of the group, attended to most, instead of those with the most attention on average.

A mean hides the few rows for which a token decides. The largest attention of any row estimates the
worst case. For a token that no row of the window needed it is low by chance, so it is raised to the
mean over the tokens.

The rule, and where it differs (made into docs/methods.md):

**defensivekv** follows the authors' code (FFY0/DefensiveKV
`kvpress/presses/efficient_defensivekv_press.py`). The attention of each of the prompt's last
`window` (32) rows is averaged over `kernel` (5) neighbouring tokens, and scaled so that the row's
sum stays. A token's risk is the largest of these numbers over rows and group, and at least the mean
risk of the tokens before the window. Its score is the risk times |W_O v|_1 (as `criticalkv`), over
the sum of |W_O v|_1 of the token's KV heads. Before that, each head's tokens with the most mean
attention are chosen until they have `first_mass` (0.9) of it, less the share of the attention on
the `window` tokens that stand before the window; at most the head's share of the budget, from which
the code takes the window twice. The best of a layer over all its KV heads stay, without a floor
(`heads=adaptive`); a head may keep the whole prompt, so memory is reserved for it, and what is
evicted does not cross the link. `heads=uniform` gives each head the same number. CriticalKV's first
choice is half of the places instead. The variant whose layers share a budget (LayerDefensiveKV) is
left out: it needs the scores of all layers before the first evicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from methods.base import PromptRows
from methods.criticalkv import output_norms
from methods.evicting import INF
from methods.prompt_evicting import PromptEvicting, PromptEvictingState, won
from methods.settings import least, odd, setting, share

TINY = 1e-30
"""Least divisor of a sum of attention."""


class DefensiveKVState(PromptEvictingState):
    """Score: the largest attention from the window's rows, times the length of the projected value;
    inf for the tokens that have most of the mean attention."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        """The tokens of the window itself have a score of 0; they stay."""
        before = max(0, key.shape[2] - self.method.window)
        score = torch.zeros(key.shape[:3], device=key.device)
        if not before:
            return score
        real = rows.real[:, :before]
        attention = self._window_attention(layer, query, key, rows.real)
        risk = self._risk(attention, real, rows.lengths - self.method.window)
        norms = output_norms(self.geometry, layer, value[:, :, :before])
        weighted = risk * norms / norms.sum(1, keepdim=True).clamp(min=TINY)
        score[..., :before] = weighted.masked_fill(self._first(layer, attention), INF)
        return score

    def _window_attention(self, layer: int, query: Tensor, key: Tensor, real: Tensor) -> Tensor:
        """Attention of the window's rows to the tokens before it, fp32 [batch, num_kv_heads, group,
        window, tokens]."""
        prompt = key.shape[2]
        before = prompt - self.method.window
        column = torch.arange(prompt, device=key.device)
        hidden = (column > column[before:, None]) | ~real[:, None, None, None]
        softmax = self.geometry.softmax(layer)
        scores = softmax.scores(query[:, :, before:], key).masked_fill_(hidden, -INF)
        return softmax.weights(scores)[..., :before].nan_to_num()  # NaN: a row of padding

    def _risk(self, attention: Tensor, real: Tensor, number: Tensor) -> Tensor:
        """The largest smoothed attention of any row and query head, at least the mean over the
        tokens: fp32 [batch, num_kv_heads, tokens].

        real: bool [batch, tokens]. number: of real tokens, int [batch].
        """
        width = self.method.kernel
        by_row = attention.flatten(1, 3)
        smoothed = avg_pool1d(by_row, width, stride=1, padding=width // 2)
        smoothed = smoothed.masked_fill(~real[:, None], 0.0)
        kept_sum = by_row.sum(-1, keepdim=True) / smoothed.sum(-1, keepdim=True).clamp(min=TINY)
        largest = (smoothed * kept_sum).view(attention.shape).amax((2, 3))
        mean = largest.sum(-1) / number.clamp(min=1)[:, None]
        return torch.maximum(largest, mean.unsqueeze(-1))

    def _first(self, layer: int, attention: Tensor) -> Tensor:
        """The tokens that mean attention chooses, bool [batch, num_kv_heads, tokens]."""
        method = self.method
        mean = attention.mean((2, 3))
        near = attention[..., -method.window :].sum(-1).mean((1, 2, 3))
        ranked = mean.sort(dim=-1, descending=True, stable=True)
        mass = ranked.values.cumsum(-1) / mean.sum(-1, keepdim=True).clamp(min=TINY)
        number = (mass < (method.first_mass - near)[:, None, None]).sum(-1, keepdim=True)
        budget = self.shares[layer - method.dense_layers, :, None, None]
        is_first = torch.arange(mean.shape[-1], device=mean.device) < number.minimum(budget)
        return torch.zeros_like(is_first).scatter_(-1, ranked.indices, is_first)

    def stay(self, layer: int, score: Tensor) -> Tensor:
        share = self.shares[layer - self.method.dense_layers, :, None]
        if self.method.heads == "uniform":
            return share
        return won(score, score.shape[1] * share)


@dataclass(frozen=True)
class DefensiveKV(PromptEvicting):
    """Defaults are those of the authors' code.

    Source: DefensiveKV (ICLR 2026)
    Keeps: the prompt's tokens that any of its last rows attended to most; all generated tokens
    """

    window: int = setting(32, "last tokens, whose attention is the score; they stay", least(1))
    heads: str = "adaptive"
    kernel: int = setting(5, "width of the smoothing", odd())
    first_mass: float = setting(
        0.9,
        "share of the mean attention whose tokens are chosen whatever their values",
        share(zero=True),
    )

    title = "DefensiveKV"
    state = DefensiveKVState

    def _most(self, prompt: int) -> int:
        """Every token, where the heads of a layer share one budget: a head may keep them."""
        return max(0, prompt - self.safe) if self.heads == "adaptive" else super()._most(prompt)
