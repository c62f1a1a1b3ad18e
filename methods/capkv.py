"""CapKV (2026, https://arxiv.org/abs/2604.25975): keeps the tokens whose values add most to what
the kept values span.

With a linear and Gaussian model of attention, the information that a kept set S has of the output
is log det(I + sum over S of w v v'), where w is a token's weight. A token's share of it is near its
leverage, w v' (I + sum over all of w v v')^-1 v. The weight is exp(tau cos(k, m)) with the mean m
of the prompt's queries.

The rule, and where it differs (made into docs/methods.md):

**capkv** follows kvpress' CapPress. A token's score is the mean over the group of w v' A^-1 v, with
A = I + the sum of w v v' over all tokens but the `num_sinks` (4) first, which stay. w = exp(`tau`
(5) · cosine of the key and the anchor), divided by its largest. The anchor is the mean of the
prompt's queries without those of the sinks, rotated to the next 512 positions as in `expected`. The
paper has the plain product of key and anchor; kvpress takes the cosine, which does not overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from methods.base import PromptRows
from methods.evicting import INF
from methods.prompt_evicting import ComingQueriesState, PromptEvicting
from methods.settings import setting, zero_or_more

EPSILON = 1e-6
"""Added to a weight inside the sum, as in kvpress."""


class CapKVState(ComingQueriesState):
    """Score: the weighted leverage of a token's value."""

    replayable = True

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        past_sinks = self.past_sinks(rows)[:, None, None]  # [batch, 1, 1, prompt]
        weights = self._weights(layer, query, key, rows, past_sinks)
        values = value.float().unsqueeze(2)  # [batch, num_kv_heads, 1, prompt, value_dim]
        counted = (weights + EPSILON).sqrt_().masked_fill_(~past_sinks, 0.0)
        scaled = values * counted.unsqueeze(-1)
        capacity = scaled.mT @ scaled
        capacity.diagonal(0, -2, -1).add_(1)
        factor = torch.linalg.cholesky(capacity)  # A = L L', so v' A^-1 v = |L^-1 v|^2
        solved = torch.linalg.solve_triangular(factor, values.mT, upper=False)
        return (weights * solved.square().sum(-2)).mean(2)

    def _weights(
        self, layer: int, query: Tensor, key: Tensor, rows: PromptRows, past_sinks: Tensor
    ) -> Tensor:
        """w of each token in each query head, fp32 [batch, num_kv_heads, group, prompt]; 0 for
        sinks and padding."""
        _, _, mean = self.plain_queries(layer, query, rows)
        anchors = normalize(mean @ self.rotation_ahead(layer), dim=-1)
        anchors = anchors.squeeze(2).unflatten(1, (key.shape[1], -1))
        cosines = anchors @ normalize(key.float(), dim=-1).mT
        logits = (self.method.tau * cosines.clamp(-1, 1)).masked_fill(~past_sinks, -INF)
        return (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num()  # NaN: sinks alone


@dataclass(frozen=True)
class CapKV(PromptEvicting):
    """The sinks stay, and their queries, which are unlike all others, do not count.

    Source: CapKV (2026)
    Keeps: the prompt's tokens whose values add most to what the kept ones span; all generated
        tokens
    """

    num_sinks: int = 4
    tau: float = setting(
        5.0,
        "how steeply a token's weight grows with the cosine of its key and the mean query",
        zero_or_more(),
    )

    title = "CapKV"
    state = CapKVState
