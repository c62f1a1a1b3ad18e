"""CriticalKV (Feng et al., 2025): half of the tokens that stay are chosen by attention, the others
by attention times the length of what the output projection makes of the value.

What eviction changes of a layer's output is bounded by the evicted tokens' attention times
|W_O v|_1, where the kept tokens have most of the attention.

The rule, and where it differs (made into docs/methods.md):

**criticalkv**: of the tokens that compete, SnapKV's attention a, smoothed by a mean (`pooling=avg`)
`kernel` (5) wide, chooses `first_share` (0.5) of the places, at least one, and (a + `epsilon`) ·
|W_O v|_1 the others. a is the mean over the window's rows and the group, |W_O v|_1 the mean over
the group of what each query head adds to the layer's output. W_O is found by running the layer's
own code on unit vectors, in each prompt and layer anew; a layer with an output gate has none, and
is refused. With `heads=adaptive` (Ada-CriticalKV) the heads' numbers are those of `adakv`, by
attention alone. The authors' code (FFY0/DefensiveKV `kvpress/presses/criticalkv_press.py`, and the
same in kvpress) counts the window among the first half, so that at a small budget no other token is
chosen by attention, and sinks, whose values are short, are lost; here the window stays beside both
halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.attention import PROMPT_CHUNK
from methods.base import Geometry, floor_frac
from methods.evicting import INF, lowest_scores
from methods.prompt_evicting import SnapKV, SnapKVState
from methods.settings import setting, share, zero_or_more


def output_norms(geometry: Geometry, layer: int, value: Tensor) -> Tensor:
    """|W_O v|_1 of each token's value, mean over the query heads of a KV head: fp32 [batch,
    num_kv_heads, prompt].

    value: [batch, num_kv_heads, prompt, value_dim]. Raises ValueError as `Geometry.output_matrix`.
    """
    norms = torch.zeros(value.shape[:3], device=value.device)
    if value.is_meta:  # shapes alone are asked for, maybe without weights
        return norms
    for head, matrix in enumerate(geometry.output_matrix(layer)):
        kv_head = head // geometry.group
        for start in range(0, value.shape[2], PROMPT_CHUNK):
            tokens = slice(start, start + PROMPT_CHUNK)
            added = value[:, kv_head, tokens].float() @ matrix
            norms[:, kv_head, tokens] += added.abs().sum(-1)
    return norms.div_(geometry.group)


class CriticalKVState(SnapKVState):
    """Score: SnapKV's for the first places; for the others it is weighted by the value."""

    replayable = True

    def second_score(
        self,
        layer: int,
        score: Tensor,
        tie_score: Tensor | None,
        competes: Tensor,
        stay: Tensor,
        value: Tensor,
    ) -> Tensor:
        method = self.method
        places = floor_frac(method.first_share, stay)
        if method.first_share:
            places = torch.minimum(places.clamp(min=1), stay)
        chosen = competes & ~lowest_scores(score, competes, competes.sum(-1) - places, tie_score)
        attention = score / (method.window * self.geometry.group)
        weighted = (attention + method.epsilon) * output_norms(self.geometry, layer, value)
        return weighted.masked_fill(chosen, INF)


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV with a second choice, and with its settings. The smoothing is that of the authors'
    `SnapKVPress`.

    Source: CriticalKV (2025)
    Keeps: as `snapkv`, but half of the places by attention times the length of the projected value
    """

    first_share: float = setting(
        0.5, "share of the places of competing tokens that attention alone gives", share(zero=True)
    )
    epsilon: float = setting(
        1e-4,
        "added to the attention, so that a long value counts without any",
        zero_or_more(),
    )

    kernel: int = 5
    pooling: str = "avg"

    state = CriticalKVState

    @property
    def title(self) -> str:
        """Shared budgets have names of their own."""
        title = "CriticalKV"
        if self.layers == "pyramid":
            title = f"Pyramid-{title}"
        return f"Ada-{title}" if self.heads == "adaptive" else title
