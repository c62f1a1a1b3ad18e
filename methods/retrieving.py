"""Methods that keep every token and read the best of them: the easy base of retrieval.

A state says what it keeps of the keys (`append`) and how a query scores each token, or each page of `page_size` tokens
(`scores`); how many are read, and which, stands here. The page that is not full yet is always read, so what is kept of
a page matters only once all its tokens are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.base import Geometry, Lengths, Method, PromptRows, Row, Rows, Selection, State
from methods.checks import require, require_fraction
from methods.selection import ascending, best_of_group, largest


@dataclass(frozen=True)
class Retrieving(Method):
    """Reads `read_frac` of the cached tokens, in pages of `page_size` tokens."""

    read_frac: float = 0.2
    page_size: int = 1

    selects = "query"
    size_setting = "read_frac"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("read_frac", self.read_frac)
        require(self.page_size >= 1, "page_size", self.page_size, "an integer >= 1")

    def pages_read(self, cached: int) -> int:
        """Full pages that a row with `cached` tokens reads beside the last, unfinished one."""
        wanted = (int(self.read_frac * cached) - cached % self.page_size) // self.page_size
        return min(cached // self.page_size, max(1, wanted))

    def tokens_read(self, row: Row, layer: int) -> float:
        """The pages and the unfinished one."""
        return self.max_tokens_read(row, layer)

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """As many."""
        return self.pages_read(row.cached) * self.page_size + row.cached % self.page_size


class RetrievingState(State):
    """Reads what scores best; a group's query heads read what is best for any of them.

    paged: `scores` are of pages, counted from position 0; else of slots.
    """

    paged: ClassVar[bool] = False

    def __init__(self, method: Retrieving, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        self.num_tokens = int(lengths.final.max())
        counts = [method.pages_read(cached) for cached in range(self.num_tokens + 1)]
        self.pages_read = torch.tensor(counts, device=lengths.final.device)

    @property
    def num_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.num_tokens // self.method.page_size)

    def scores(self, layer: int, rows: Rows) -> Tensor:
        """Scaled scores of `rows.query`, fp32 [batch, num_kv_heads, group, rows, slots or pages].

        What is returned for a slot that is not visible, or a page that is not full, plays no part.
        """
        raise NotImplementedError

    def index_read(self, layer: int, positions: Tensor) -> Tensor | None:
        """What the scores read, in tokens of 2 * head_dim elements, [batch, rows]; None where they read no index."""
        return None

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Keep what `append` keeps."""
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def select(self, layer: int, rows: Rows) -> Selection:
        """The best pages and the unfinished one."""
        size, positions = self.method.page_size, rows.positions
        candidates = self._full(positions) if self.paged else rows.visible()
        scores = self.scores(layer, rows).masked_fill(~candidates.unsqueeze(2), float("-inf"))
        relative = best_of_group(scores)
        pages = self.pages_read[positions]
        mask = largest(relative, ascending(relative), pages)
        num_read = (pages * size + positions % size).double()
        side = self.index_read(layer, positions)
        return Selection(self._tokens(mask, rows) if self.paged else mask, num_read, side)

    def _full(self, positions: Tensor) -> Tensor:
        """Pages all of whose tokens are cached, bool [batch, 1, rows, pages]."""
        ends = (torch.arange(self.num_pages, device=positions.device) + 1) * self.method.page_size
        return ends <= positions[:, None, :, None]

    def _tokens(self, pages: Tensor, rows: Rows) -> Tensor:
        """The slots of chosen `pages` [batch, num_kv_heads, rows, pages], and those of the unfinished one."""
        size = self.method.page_size
        page = (rows.slot_positions // size).clamp(max=self.num_pages - 1).long().unsqueeze(2)
        chosen = pages.gather(-1, page.expand(*pages.shape[:3], -1))
        unfinished = rows.slot_positions.unsqueeze(2) >= (rows.positions - rows.positions % size)[:, None, :, None]
        return (chosen | unfinished) & rows.visible()
