"""Quest (Tang et al., ICML 2024): pages of tokens, scored by an upper bound of the score of any key
in the page, after their positions.

The rule, and where it differs (made into docs/methods.md):

**quest**: a page's score is sum_j max(q_j · min_j, q_j · max_j), with the elementwise minimum and
maximum of the keys of its `page_size` (16) tokens: an upper bound. It reads max(3,
floor(`budget` · cached / `page_size`)) pages. The least of 3 is the rule of Quest's accuracy
code; that the last, unfinished page is one of them is the rule of its speed code.
`page_score=deviation` is UNIQUE's score (2605.27740) of as many bytes: sum_j q_j · mean_j + |q_j| ·
deviation_j, with the mean and the standard deviation of the page's keys in each element. It needs
the first page among those always read (`num_sinks`): a mean hides the first token's key. How UNIQUE
selects beyond this score is not here.

**freekv** is `quest` with `when=previous_step`, in pages of 32, by the sum of probabilities over
the pages that compete, with a first page and a quarter of the pages, the most recent ones, always
read. FreeKV's code takes the probabilities of unscaled bounds. Its correction (to select again when
a query has turned) is left out; its budgets of 2,048 and 512 tokens are shares here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import QueryRows
from methods.selection import RetrievingPages, RetrievingState
from methods.settings import one_of, setting

MIN_PAGES = 3


class QuestState(RetrievingState):
    """lowest[layer], highest[layer]: elementwise extremes of each page's keys, [batch,
    num_kv_heads, pages + 1, head_dim]; the last page is for padding. With `page_score=deviation`
    instead sums[layer], squares[layer]: sums of the keys and of their squares, alike, fp32."""

    paged = True
    sequence_tensors = ("lowest", "highest", "sums", "squares")
    replayable = True
    lowest: dict[int, Tensor]
    highest: dict[int, Tensor]
    sums: dict[int, Tensor]
    squares: dict[int, Tensor]

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        """Widen the extremes of the keys' pages, or add to their sums."""
        page = (positions // self.method.page_size).clamp(max=self.num_pages).long()
        index = page[:, None, :, None].expand_as(key)
        if self.method.page_score == "deviation":
            if layer not in self.sums:
                shape = (*key.shape[:2], self.num_pages + 1, key.shape[-1])
                self.sums[layer] = key.new_zeros(shape, dtype=torch.float32)
                self.squares[layer] = torch.zeros_like(self.sums[layer])
            self.sums[layer].scatter_add_(2, index, key.float())
            self.squares[layer].scatter_add_(2, index, key.float().square())
            return
        if layer not in self.lowest:
            shape = (*key.shape[:2], self.num_pages + 1, key.shape[-1])
            limit = torch.finfo(key.dtype).max
            self.lowest[layer] = key.new_full(shape, limit)
            self.highest[layer] = key.new_full(shape, -limit)
        self.lowest[layer].scatter_reduce_(2, index, key, "amin")
        self.highest[layer].scatter_reduce_(2, index, key, "amax")

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Each page's highest possible score: the sum over j of q_j times the highest key where
        q_j > 0, else times the lowest. Or the mean key's score, and what the deviations add."""
        query = rows.query.float() * self.geometry.scale
        query = query.unflatten(1, (self.geometry.num_kv_heads, -1)).flatten(2, 3)
        if self.method.page_score == "deviation":
            mean = self.sums[layer][:, :, :-1] / self.method.page_size  # of full pages
            mean_square = self.squares[layer][:, :, :-1] / self.method.page_size
            deviation = (mean_square - mean.square()).clamp(min=0).sqrt()
            scores = query @ mean.mT + query.abs() @ deviation.mT
        else:
            lowest = self.lowest[layer][:, :, :-1].mT.float()
            highest = self.highest[layer][:, :, :-1].mT.float()
            scores = query.clamp(min=0) @ highest + query.clamp(max=0) @ lowest
        return scores.unflatten(2, (self.geometry.group, -1))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """Two vectors for each full page."""
        full_pages = (positions // self.method.page_size).double()
        return full_pages * (2 * self.geometry.head_dim / self.geometry.elements)


@dataclass(frozen=True)
class Quest(RetrievingPages):
    """Reads max(3, floor(budget * cached / page_size)) pages, the unfinished one among them; at
    1 all.

    Source: Quest (ICML 2024), FreeKV (2025), UNIQUE's score (2026)
    Keeps: every token; bounds of each page
    Reads: the pages with the best bounds, by the layer's own query or (FreeKV) that of the step
        before
    """

    page_size: int = 16
    page_score: str = setting(
        "bounds",
        "a page's score: an upper bound of any key's, or UNIQUE's by mean and deviation",
        one_of("bounds", "deviation"),
    )
    dense_layers: int = 2  # `self.layer_id < 2` in evaluation/quest_attention.py

    title = "Quest"
    state = QuestState

    def pages_read(self, cached: int) -> int:
        """The unfinished page is one of the budget's."""
        if self.budget_in_tokens(cached) == cached:
            return cached // self.page_size
        budget = self.budget_in_tokens(cached) // self.page_size
        return min(cached // self.page_size, max(MIN_PAGES, budget) - 1)
