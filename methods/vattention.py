"""vAttention (Desai et al., ICLR 2026): read the best tokens, and a weighted sample of the others,
as large as the central limit theorem asks for.

Official code: github.com/xAlg-ai/sparse-attention-hub (now skylight-org),
`maskers/sampling/implementations/ adaptive_sampling.py` under
`sparse_attention_hub/sparse_attention/research_attention`.

The rule, and where it differs (made into docs/methods.md):

**vattention** reads a fixed set of `fixed_frac` (0.1) of the cached tokens: sinks, recent ones
(`recent_frac` of the set) and the best by keys in 4 bits. Of the other n tokens it draws b, each of
which counts n / b times in the softmax. b = (z σ n / (ε D))² with z = Φ⁻¹(1 - `delta`): the
softmax's denominator D is then off by more than `epsilon` · D in a share `delta` of all cases to
either side. A base sample of `base_frac` (0.05) of the n gives σ and D, and its size is the least
b; the heads of a group share the largest b. The b tokens are drawn anew: a base sample that misses
heavy tokens asks for few, and as a part of the sample it would make D too small. Both samples are
hashes of `seed`, layer, KV head, row and token, so that replay and live decoding draw the same. A
small base sample still misjudges σ, so that more cases are off than `delta` says
([parity](../benchmarks/PARITY.md)). `budget=` sets the cap with `epsilon=0`, half of it
for the fixed set. The [official code](https://github.com/xAlg-ai/sparse-attention-hub) draws with
replacement from all but first and recent tokens, a sample for each query head, takes σ and D from
exact scores, and the best by an oracle (`when=true_scores`) or an index of its own. Its 128 first
and 128 recent of 32,768 tokens are shares here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import torch
from torch import Tensor

from methods.base import (
    Geometry,
    Lengths,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    When,
    floor_frac,
    require,
    share_above,
)
from methods.projection import BITS_MEANING, INDEX_BITS, PartialKeysState
from methods.sampling import random_numbers
from methods.selection import Selecting, largest, largest_of_each
from methods.settings import Allowed, least, one_of, setting, share

MIN_SAMPLE = 2
"""Tokens in a base sample: fewer have no standard deviation."""
FINAL_SAMPLE, BASE_SAMPLE = 0, 1
"""The two samples of a row, which are drawn by random numbers of their own."""


class VAttentionState(PartialKeysState):
    """Every key in few bits; nothing where the true scores choose."""

    replayable = True

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        if self.method.has_index:
            super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        if self.method.has_index:
            super().append(layer, key, value, positions, slots)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        method, visible = self.method, rows.visible()
        if method.has_index:
            scores = self.geometry.softmax(layer).capped(self.scores(layer, rows))
            own = rows.own_slots.unsqueeze(-1).long()  # whose key is in the index by now
            seen = visible.scatter(-1, own, True)
            scores.masked_fill_(~seen.unsqueeze(2), -math.inf)
        else:
            scores = rows.true_scores().clone()
        powers = (scores - scores.amax(-1, keepdim=True)).exp_()

        # The fixed set
        cap = method.share(method.budget, rows.positions)
        count = torch.minimum(cap, method.share(method.fixed_frac, rows.positions))
        scores.masked_fill_(~visible.unsqueeze(2), -math.inf)
        forced = method.forced(rows.slot_positions, rows.slot_positions, rows.positions, count)
        best = largest(method.reduced(scores, forced), count)
        fixed, _ = method.joined(best, count, self.geometry)

        # The sample: those with the smallest random numbers
        others = visible & ~fixed
        size = number = others.sum(-1)
        if method.epsilon:
            base_size = floor_frac(method.base_frac, number).clamp(min=MIN_SAMPLE)
            base_size = torch.minimum(base_size, number)
            base = self.drawn(BASE_SAMPLE, layer, rows, others, base_size)
            size = method.sample_size(powers, ~others, base, number, base_size)
        size = torch.minimum(size, (cap[:, None] - fixed.sum(-1)).clamp(min=0))
        sample = self.drawn(FINAL_SAMPLE, layer, rows, others, size)
        weight = (number / size.clamp(min=1)).float().log().unsqueeze(-1)
        bias = torch.where(sample, weight, 0.0).unsqueeze(2)
        mask = fixed | sample
        side = self.index_read(layer, rows.positions)
        return Selection(mask, mask.sum(-1).double().mean(1), side, bias)

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The keys in few bits; every key whole where the true scores choose."""
        if self.method.has_index:
            return super().index_read(layer, positions)
        return self.geometry.every_key(positions)

    def drawn(
        self, sample: int, layer: int, rows: QueryRows, others: Tensor, size: Tensor
    ) -> Tensor:
        """The tokens of a sample, bool like `others`.

        sample: `BASE_SAMPLE` or `FINAL_SAMPLE`; others: bool [batch, sets, rows, slots], tokens to
        draw from; size: int [batch, sets, rows], number to draw, at most as many as there are.
        """
        numbers = random_numbers(self.method.seed, layer, rows, others.shape[1], sample)
        return largest_of_each(-numbers.masked_fill_(~others, math.inf), size)


@dataclass(frozen=True)
class VAttention(Selecting):
    """Reads a fixed set of `fixed_frac` of the cached tokens, and a sample, at most
    `budget` in all.

    The fixed set holds the sinks, `recent_frac` of it are the most recent tokens, and the rest the
    best by the index.

    Source: vAttention (ICLR 2026)
    Keeps: every token; its key in 4 bits
    Reads: first, recent and best tokens, and a weighted sample of the others
    """

    fixed_frac: float = setting(0.1, "share of the cached tokens in the fixed set", share())
    base_frac: float = setting(
        0.05, "share of the other tokens in the base sample; no sample is smaller", share()
    )
    epsilon: float = setting(
        0.05,
        "relative error of the softmax's denominator; 0: always the cap",
        Allowed("in [0, 1)", lambda value: 0 <= value < 1),
    )
    delta: float = setting(
        0.05,
        "how often the error may be larger, to either side",
        Allowed("in (0, 0.5]", lambda value: 0 < value <= 0.5),
    )
    budget: float = setting(1.0, "cap: the largest share that a row reads", share())
    index_bits: int | None = setting(4, BITS_MEANING, INDEX_BITS)
    seed: int = setting(0, "of the samples", least(0))

    group: str = "sum_probs"
    num_sinks: int = 4
    recent_frac: float = 0.04
    when: When = setting(
        "own_query",
        "own_query: by the index; true_scores: the official code's oracle",
        one_of("own_query", "true_scores"),
    )

    title = "vAttention"
    state = VAttentionState

    @property
    def has_index(self) -> bool:
        """False where the true scores choose."""
        return self.when != "true_scores"

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where the sinks leave nothing to select in the fixed set of the shortest
        prompt, unless all of it is in the set."""
        prompt = int(lengths.prompt.min())
        fixed = min(prompt, max(1, int(min(self.fixed_frac, self.budget) * prompt)))
        enough = not self.num_sinks or fixed > self.num_sinks or fixed == prompt
        below = f"below {fixed}, the fixed set of a prompt of {prompt} tokens"
        require(enough, "num_sinks", self.num_sinks, below)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return super().tokens_read(counts, layer) if self.epsilon == 0 else None

    def set_size(self, counts: TokenCounts) -> int:
        return min(counts.cached, max(1, int(self.budget * counts.cached)))

    def with_budget(self, frac: float) -> Self:
        """Set by the cap alone: epsilon becomes 0. Half is the fixed set, as in the official code
        at 10 %."""
        return replace(self, epsilon=0.0, budget=frac, fixed_frac=frac / 2)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least number whose half, the fixed set, has a token beside the sinks."""
        if not self.num_sinks:
            return super().min_budget(counts)
        half = counts.prompt // 2
        allowed = f"below {half}, half of the shortest prompt"
        require(self.num_sinks < half, "num_sinks", self.num_sinks, allowed)
        return min(1.0, 2 * share_above(self.num_sinks, counts.prompt))

    def artifact_budget(self) -> float:
        return self.budget

    def share(self, frac: float, cached: Tensor) -> Tensor:
        """floor(frac * cached), at least one token where there is any."""
        return torch.minimum(floor_frac(frac, cached).clamp(min=1), cached)

    def sample_size(
        self, powers: Tensor, known: Tensor, base: Tensor, number: Tensor, count: Tensor
    ) -> Tensor:
        """b, the tokens to be drawn of each set, int [batch, sets, rows]: the largest that a head
        of the set asks for.

        powers: exp(score - the head's best score), fp32 [batch, sets, group, rows, slots]; known:
        bool [batch, sets, rows, slots], slots that are not drawn from; base: the base sample,
        alike; number, count: int [batch, sets, rows], tokens to draw from, and those in the base
        sample.
        """
        base, number, count = base.unsqueeze(2), number.unsqueeze(2), count.unsqueeze(2)
        mean = (powers * base).sum(-1) / count.clamp(min=1)
        squares = (powers - mean.unsqueeze(-1)).square_() * base
        variance = squares.sum(-1) / (count - 1).clamp(min=1)
        total = (powers * known.unsqueeze(2)).sum(-1).double() + number * mean
        z = NormalDist().inv_cdf(1 - self.delta)
        wanted = variance * (z * number / (self.epsilon * total)).square()
        wanted_tokens = torch.maximum(wanted.amax(2).long(), count.squeeze(2))
        return torch.minimum(wanted_tokens, number.squeeze(2))
