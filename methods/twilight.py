"""Twilight (Lin et al., NeurIPS 2025): of a retriever's candidates, the fewest tokens that hold a
share p of attention. So a head whose attention is flat reads many tokens, and one that is focused
reads few.

Official code: github.com/tsinghua-ideal/Twilight, `twilight/pyimpl/{attention,top_p,quantize}.py`;
its `benchmark/configs/config_quest_twi.json` has the defaults.

The rule, and where it differs (made into docs/methods.md):

**twilight** prunes the candidates of `quest` (`candidate_frac`, 0.5). Keys in 4 bits give the
softmax over the candidates. A KV head reads tokens in its order until their sum is `p` (0.85), at
most `budget` of the cached tokens. `group=sum_probs` adds up the group's mean probabilities;
`union`, the official rule, prunes for each query head, among pages of its own, and reads the union.
In the [official code](https://github.com/tsinghua-ideal/Twilight) the
row's current token competes too, and Quest's budget is 8,192 tokens. `budget=` sets the cap
and `p=1`, as the data decides how many tokens `p` is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from methods.base import PromptRows, QueryRows, Selection, TokenCounts, floor_frac
from methods.projection import BITS_MEANING, INDEX_BITS, PartialKeysState
from methods.quest import Quest, QuestState
from methods.selection import SelectingBy, ascending, largest_of_each
from methods.settings import least, one_of, setting, share


class TwilightState(QuestState, PartialKeysState):
    """Quest's bounds of pages, and every key in few bits."""

    replayable = True

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        PartialKeysState.prompt(self, layer, query, key, value, rows)  # it calls `append`

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        PartialKeysState.append(self, layer, key, value, positions, slots)
        QuestState.append(self, layer, key, value, positions, slots)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """Quest's candidates, pruned by the estimated attention on them. With `group=union` each
        query head has candidates of its own."""
        method, positions = self.method, rows.positions
        pages = self.best(rows, QuestState.scores(self, layer, rows))
        candidates = self.tokens_of(pages, rows)
        joint_candidates, _ = method.joined(candidates, positions, self.geometry)
        num_candidates = joint_candidates.sum(-1).double().mean(1)
        softmax = self.geometry.softmax(layer)
        scores = softmax.capped(PartialKeysState.scores(self, layer, rows))
        if method.group == "union":
            scores = scores.flatten(1, 2).unsqueeze(2)
        scores = scores.masked_fill(~candidates.unsqueeze(2), -math.inf)
        weights = scores.softmax(-1).nan_to_num_()  # 0 / 0 of none
        mask = method.prune(weights.mean(2), candidates, rows)
        joint, _ = method.joined(mask, positions, self.geometry)
        side = PartialKeysState.index_read(self, layer, num_candidates)
        side = side + QuestState.index_read(self, layer, positions)
        return Selection(joint, joint.sum(-1).double().mean(1), side)


@dataclass(frozen=True)
class Twilight(SelectingBy):
    """Reads the fewest candidates whose estimated attention adds up to `p`, at most
    `budget` of the cache.

    group=sum_probs is one set for the group, by the mean of its heads' probabilities. group=union
    joins a set for each query head, of pages of its own, which is the official rule.

    Source: Twilight (NeurIPS 2025)
    Keeps: every token; its key in 4 bits, bounds of each page
    Reads: of the best pages, the tokens that hold a share of the attention
    """

    p: float = setting(0.85, "share of the candidates' attention; 1: always the cap", share())
    budget: float = setting(1.0, "cap: the largest share that a row reads", share())
    candidate_frac: float = setting(0.5, "Quest's budget, as a share of the cached tokens", share())
    page_size: int = setting(16, "tokens of Quest's pages", least(1))
    index_bits: int | None = setting(4, BITS_MEANING, INDEX_BITS)

    group: str = setting("sum_probs", allowed=one_of("sum_probs", "union"))
    dense_layers: int = 2  # `skip_first_two_layers`, the default of pyimpl/attention.py

    page_score: ClassVar[str] = "bounds"

    title = "Twilight"
    state = TwilightState

    @cached_property
    def _retriever(self) -> Quest:
        return Quest(budget=self.candidate_frac, page_size=self.page_size)

    def pages_read(self, cached: int) -> int:
        """Full pages among the candidates."""
        return self._retriever.pages_read(cached)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return super().tokens_read(counts, layer) if self.p == 1 else None

    def set_size(self, counts: TokenCounts) -> int:
        pages, unfinished = self.pages_read(counts.cached), counts.cached % self.page_size
        candidates = pages * self.page_size + unfinished
        return min(candidates, max(1, int(self.budget * counts.cached)))

    def with_budget(self, frac: float) -> Self:
        """Set by the cap alone: p becomes 1, and there are at least as many candidates as are
        read."""
        candidates = max(frac, self.candidate_frac)
        return replace(self, p=1.0, budget=frac, candidate_frac=candidates)

    def artifact_budget(self) -> float:
        return self.budget

    def prune(self, weights: Tensor, candidates: Tensor, rows: QueryRows) -> Tensor:
        """The tokens that are read of each set, bool [batch, sets, rows, slots].

        weights: fp32 [batch, sets, rows, slots], attention on the candidates, adding up to 1;
        candidates: bool [batch, sets or heads that share them, rows, slots].
        """
        sets = weights.shape[1]
        candidates = candidates.repeat_interleave(sets // candidates.shape[1], 1)
        cap = floor_frac(self.budget, rows.positions).clamp(min=1)
        count = torch.minimum(candidates.sum(-1), cap[:, None])
        tokens = rows.slot_positions
        forced = self.forced(tokens, tokens, rows.positions, cap)
        forced = torch.zeros_like(candidates) if forced is None else forced & candidates
        if self.p < 1:
            others = ascending(weights.masked_fill(forced, 0.0)).flip(-1).double()
            before = others.cumsum(-1) - others + (weights.double() * forced).sum(-1, keepdim=True)
            count = torch.minimum(count, forced.sum(-1) + (before < self.p).sum(-1))
        score = weights.masked_fill(forced, math.inf).masked_fill_(~candidates, -math.inf)
        return largest_of_each(score, count)
