"""My method (authors, venue): what it keeps and reads, and where that differs from the official
code.

This example keeps the mean key of each page of tokens on the device. It reads the pages whose mean
key has the largest product with the query, over the channels in which the query is largest.
methods/base.py says what a method is, methods/selection.py what this base does; a method that
evicts derives from methods/evicting.py.

    python run.py method=./my_method.py experiment=contract
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from methods.base import QueryRows
from methods.selection import RetrievingPages, RetrievingState
from methods.settings import least, setting


class MyMethodState(RetrievingState):
    """What changes while a batch of sequences runs.

    sums[layer]: the sum of each page's keys [batch, num_kv_heads, pages + 1, head_dim]; the last
    page is for padding.
    """

    paged = True  # `scores` are of pages; without this, of tokens
    sequence_tensors = ("sums",)  # what a copy of a sequence copies
    sums: dict[int, Tensor]

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice
    ) -> None:
        """Take in tokens, the prompt's and then each that is decoded: key [batch, num_kv_heads, n,
        head_dim]."""
        if layer not in self.sums:
            self.sums[layer] = key.new_zeros(*key.shape[:2], self.num_pages + 1, key.shape[-1])
        page = (positions // self.method.page_size).clamp(max=self.num_pages).long()
        self.sums[layer].scatter_add_(2, page[:, None, :, None].expand_as(key), key)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Score of each page for each row's query: fp32 [batch, num_kv_heads, group, rows,
        pages]."""
        mean = self.sums[layer][:, :, :-1] / self.method.page_size
        query = rows.query.unflatten(1, (-1, self.geometry.group)) * self.geometry.scale
        least = query.abs().topk(self.num_channels).values[..., -1:]
        query = query.masked_fill(query.abs() < least, 0)
        return (query @ mean.mT.unsqueeze(2)).float()

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """What `scores` reads, in tokens of 2 * head_dim elements: some channels of one vector per
        full page."""
        pages = (positions // self.method.page_size).double()
        return pages * self.num_channels / (2 * self.geometry.head_dim)

    @property
    def num_channels(self) -> int:
        return min(self.method.num_channels, self.geometry.head_dim)


@dataclass(frozen=True)
class MyMethod(RetrievingPages):
    """Reads `budget` of the cached tokens in pages of `page_size`, both settings of the base."""

    page_size: int = 16
    # On the command line method.num_channels=8
    num_channels: int = setting(16, "the query's largest channels, which are scored", least(1))

    title = "My method"
    state = MyMethodState
