"""R-KV (Cai et al., NeurIPS 2025): for long generations, drop now and then tokens that are
unattended and redundant, as a reasoning text says much twice. The state keeps the last rows'
queries, and a second copy of the kept keys on the device.

The rule, and where it differs (made into docs/methods.md):

**rkv**: after the prompt and after every `divide_length` (128) generated tokens, each KV head goes
back to floor(`budget` · T) tokens or `kept_tokens`, the last `window` (8) among them. Score is
`mix_lambda` (0.07) · attention - (1 - `mix_lambda`) · similarity: the attention of the last
`window` rows, smoothed by a maximum `kernel` (7) wide, and the softmax of the key's mean cosine
with the other kept keys; of the keys with a cosine above 0.5 the latest does not count. The size
includes the tokens between compressions. Each sequence of a batch has its own schedule. The
official code differs in four points. It compresses where the length of prompt and answer is a
multiple of `divide_length`, and one step later, with the next token. A compression leaves its cache
in the order of score, so that later "the latest" and the smoothing follow that order instead of the
text. Where no cosine exceeds 0.5, its first key does not count. Its serving code waits until the
budget and a whole `buffer` (128) are there. `protect_prompt=true`, which the official code lacks,
keeps the prompt's tokens, as TriAttention does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from methods.attention import PROMPT_CHUNK
from methods.base import EMPTY, PromptRows, require
from methods.evicting import INF
from methods.periodic import Held, KeyedState, Periodic
from methods.settings import least, odd, setting, share

ALIKE = 0.5
"""Keys with a larger cosine say the same. The latest of them does not count as similar."""


class RKVState(KeyedState):
    """queries[layer]: of the last rows, [batch, heads, window, head_dim]."""

    sequence_tensors = (*KeyedState.sequence_tensors, "queries")
    queries: dict[int, Tensor]

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        window = self.method.window
        missing = max(0, window - key.shape[2])
        self.queries[layer] = pad(query, (0, 0, missing, 0))[:, :, -window:]
        super().prompt(layer, query, key, value, rows)

    def take_in(self, layer: int, query: Tensor, real: Tensor) -> None:
        """Keep the queries of the last `window` real rows."""
        window = self.method.window
        queries = torch.cat([self.queries[layer], query], 2)
        real = pad(real, (window, 0), value=True)
        column = torch.arange(real.shape[1], device=real.device)
        last = torch.where(real, column, -1).sort(-1).values[:, -window:]
        index = last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[-1])
        self.queries[layer] = queries.gather(2, index)

    def score(self, layer: int, held: Held) -> Tensor:
        keys, share = self.keys_of(layer, held), self.method.mix_lambda
        attention = self._attention(layer, keys, held.competes)
        return share * attention - (1 - share) * similarity(keys, held.tokens != EMPTY)

    def _attention(self, layer: int, keys: Tensor, competes: Tensor) -> Tensor:
        """Mean attention of the last rows, by a group's largest scores, smoothed: [batch,
        num_kv_heads, n]."""
        scores = self.geometry.softmax(layer).scores(self.queries[layer], keys).amax(2)
        probs = scores.masked_fill_(~competes.unsqueeze(2), -INF).softmax(-1).nan_to_num_().mean(2)
        return max_pool1d(probs, self.method.kernel, stride=1, padding=self.method.kernel // 2)


@dataclass(frozen=True)
class RKV(Periodic):
    """The attention of the window's rows counts; the window is part of the budget.

    Source: R-KV (NeurIPS 2025)
    Keeps: attended tokens whose keys are unlike the others
    """

    window: int = setting(8, allowed=least(1))
    mix_lambda: float = setting(
        0.07, "share of attention in a token's score; the rest is similarity", share(zero=True)
    )
    kernel: int = setting(7, "width of the maximum that smooths the attention", odd())

    title = "R-KV"
    state = RKVState

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = self.kept_tokens is None or self.kept_tokens > self.window
        above = f"above window={self.window}, or null"
        require(enough, "kept_tokens", self.kept_tokens, above)


def similarity(keys: Tensor, present: Tensor) -> Tensor:
    """Similarity of each key to the others: softmax of the mean cosine with them, fp32 [batch,
    num_kv_heads, n].

    keys: [batch, num_kv_heads, n, head_dim], oldest first; present: bool [batch, num_kv_heads, n].
    Of the keys whose cosine with a given key exceeds `ALIKE`, the latest is left out.
    """
    directions = normalize(keys.float(), dim=-1).masked_fill_(~present.unsqueeze(-1), 0)
    column = torch.arange(keys.shape[2], device=keys.device)
    total = torch.zeros(present.shape, device=keys.device)
    for rows in column.split(PROMPT_CHUNK):
        cosine = directions[:, :, rows] @ directions.mT
        cosine.masked_fill_(column == rows[:, None], 0)
        latest = torch.where(cosine > ALIKE, column, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(column == latest, 0).sum(2)
    mean = total / present.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill_(~present, -INF).softmax(-1)
