"""Expected Attention (Devoto et al., 2025): after the prompt, keep what the queries to come should attend to.

Their distribution is taken to be the prompt's, a normal one for each query head, rotated to the positions that follow;
a token's worth is its expected attention times the length of its value. The prompt's question plays no special part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import PromptRows
from methods.checks import require
from methods.prompt_evicting import PromptEvicting, PromptEvictingState

HORIZON = 512
"""Positions after the prompt whose mean rotation the queries to come get, as in kvpress."""


class ExpectedState(PromptEvictingState):
    """Nothing is kept of it once the prompt is done."""

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The expectation of exp(query . key), over all tokens but the sinks, times |value|; the group's mean."""
        batch, num_kv_heads, prompt, head_dim = key.shape
        past_sinks = rows.real & (rows.positions >= self.method.num_sinks)
        mean, cov = self._statistics(layer, query, rows, past_sinks)
        mean, cov = (each.view(batch, num_kv_heads, -1, *each.shape[2:]) for each in (mean, cov))
        keys = key.float().unsqueeze(2) * self.geometry.scale  # [batch, kv, 1, prompt, head_dim]
        scores = (keys @ mean.unsqueeze(-1)).squeeze(-1) + ((keys @ cov) * keys).sum(-1) / 2
        probs = scores.masked_fill_(~past_sinks[:, None, None], float("-inf")).softmax(-1).mean(2)
        return (probs + self.method.epsilon) * value.float().norm(dim=-1)

    def _statistics(self, layer: int, query: Tensor, rows: PromptRows, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [batch, heads, head_dim] and covariance of the counted rows' queries, rotated to what follows."""
        positions = rows.positions.masked_fill(~rows.real, 0)
        plain = self.geometry.rotate(query, positions, inverse=True, layer=layer).float()
        counted = counted[:, None, :, None].float()
        number = counted.sum(2, keepdim=True).clamp(min=1)
        mean = (plain * counted).sum(2, keepdim=True) / number
        apart = (plain - mean) * counted
        rotation = self._mean_rotation(layer, query.device)
        cov = rotation.mT @ (apart.mT @ apart / number) @ rotation
        return (mean @ rotation).squeeze(2), cov

    def _mean_rotation(self, layer: int, device: torch.device) -> Tensor:
        """Of the positions that follow: fp32 [batch, 1, head_dim, head_dim], a row is a unit vector's image."""
        units = torch.eye(self.geometry.head_dim, device=device)[None, :, None].expand(-1, -1, HORIZON, -1)
        ahead = self.lengths.prompt[:, None] + torch.arange(HORIZON, device=device)
        turned = [self.geometry.rotate(units, each[None], layer=layer).mean(2) for each in ahead]
        return torch.stack(turned)


@dataclass(frozen=True)
class ExpectedAttention(PromptEvicting):
    """The sinks stay, and their queries, which are unlike all others, do not count.

    epsilon: added to the expected attention, so that a long value counts without any.
    """

    num_sinks: int = 4
    epsilon: float = 0.0

    title = "Expected Attention"
    state = ExpectedState

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epsilon >= 0, "epsilon", self.epsilon, "a number >= 0")
