"""Methods that keep every token and read the best of them: the easy base of retrieval.

A state says what it keeps of the keys (`append`) and how a query scores each token, or each page of `page_size` tokens
(`scores`); how many are read, and which, stands here. The page that is not full yet is always read, so what is kept of
a page matters only once all its tokens are there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from methods.base import Geometry, Lengths, PromptRows, Rest, Row, Rows, Selection, State
from methods.checks import require, require_fraction
from methods.selection import Selecting, largest


@dataclass(frozen=True)
class Retrieving(Selecting):
    """Reads `read_frac` of the cached tokens, or `read_tokens` of them, in pages of `page_size` tokens."""

    read_frac: float = 0.2
    read_tokens: int | None = None
    page_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("read_frac", self.read_frac)
        require(self.read_tokens is None or self.read_tokens >= 1, "read_tokens", self.read_tokens, ">= 1 or null")
        require(self.page_size >= 1, "page_size", self.page_size, "an integer >= 1")

    def budget(self, cached: int) -> int:
        """Tokens that a row with `cached` tokens is to read."""
        return int(self.read_frac * cached) if self.read_tokens is None else min(self.read_tokens, cached)

    def pages_read(self, cached: int) -> int:
        """Full pages that a row with `cached` tokens reads beside the last, unfinished one."""
        wanted = (self.budget(cached) - cached % self.page_size) // self.page_size
        return min(cached // self.page_size, max(1, wanted))

    def tokens_read(self, row: Row, layer: int) -> float | None:
        """The pages and the unfinished one."""
        return None if self.group == "union" else self._read(row.cached)

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """As many; of a union anything."""
        return row.cached if self.group == "union" else self._read(row.cached)

    def _read(self, cached: int) -> int:
        return self.pages_read(cached) * self.page_size + cached % self.page_size

    def with_size(self, frac: float) -> Self:
        """Sized by `read_frac`."""
        return replace(self, read_frac=frac, read_tokens=None)

    def artifact_budget(self) -> float:
        """The share."""
        return self.read_frac


class RetrievingState(State):
    """Reads what scores best.

    paged: `scores` are of pages, counted from position 0; else of slots.
    """

    paged: ClassVar[bool] = False

    def __init__(self, method: Retrieving, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        method.check_lengths(lengths)
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
        """What the scores read, in tokens (`Geometry.elements`), [batch, rows]; None where they read no index."""
        return None

    def rest(self, layer: int, rows: Rows, scores: Tensor, mask: Tensor) -> Rest | None:
        """What stands for the tokens not read, by what `scores` made and the mask of those read; None for nothing."""
        return None

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Keep what `append` keeps."""
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def select(self, layer: int, rows: Rows) -> Selection:
        """The best pages and the unfinished one."""
        size, positions = self.method.page_size, rows.positions
        candidates = self._full(positions) if self.paged else rows.visible()
        scores = self.scores(layer, rows)
        pages, unfinished = self.pages_read[positions], positions % size
        first = torch.arange(self.num_pages, device=positions.device)[None, None] * size
        first, last = (first, first + size - 1) if self.paged else (rows.slot_positions, rows.slot_positions)
        visible = scores.masked_fill(~candidates.unsqueeze(2), float("-inf"))
        relative = self.method.reduced(visible, self.method.forced(first, last, positions, pages * size + unfinished))
        chosen = largest(relative, pages)
        mask, num_pages = self.method.joined(chosen, pages, self.geometry)
        tokens = self._tokens(mask, rows) if self.paged else mask
        side, rest = self.index_read(layer, positions), self.rest(layer, rows, scores, tokens)
        return Selection(tokens, num_pages * size + unfinished, side, rest=rest)

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
