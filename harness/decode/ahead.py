"""Rows of the dense layers, which cross the link in parts during the whole step before.

Dense layers read more than the others. Requested one layer ahead, their rows could not be hidden,
and the link would idle later. So each dense layer has a buffer of its own (`AheadFetcher`), and
each other layer requests one part of their rows for the next step (`AheadPart`).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.decode.cache import Fetch, Fetcher
from harness.decode.links import Link
from harness.decode.share import DeviceShare
from harness.decode.store import KVStore


class AheadFetcher(Fetcher):
    """Brings columns of a dense layer's rows into the layer's own buffer."""

    is_ahead = True

    def __init__(self, share: DeviceShare, store: KVStore, link: Link) -> None:
        super().__init__(share, store)
        self.link = link
        self.buffer = share.new_buffer(store, store.capacity)

    def request_first(self, count: int) -> None:
        self.request_columns(count, 0, count)

    def request_columns(self, count: int, begin: int, end: int) -> None:
        """Request the columns from `begin` to `end` of the first `count` slots."""
        if self.fetch is None:
            self.fetch = Fetch(count, self.store.rows_in(self.buffer, count))
        columns = slice(begin, end)
        ticket = self.link.prefetch(self.store, columns, self.fetch.rows[:, :, columns])
        self.fetch.moving.append((ticket, (end - begin) * self.store.heads))


class AheadPart:
    """One of `num_parts` equal parts of the dense layers' rows; one other layer requests it.

    number: of the part. fetchers: of the dense layers, in their order.
    """

    def __init__(self, number: int, num_parts: int, fetchers: Sequence[AheadFetcher]) -> None:
        self.number = number
        self.num_parts = num_parts
        self.fetchers = fetchers

    def request(self, count: int) -> None:
        """Request the part of the first `count` slots of all dense layers."""
        columns = len(self.fetchers) * count  # of all layers, one after another
        first = columns * self.number // self.num_parts
        last = columns * (self.number + 1) // self.num_parts
        for place, fetcher in enumerate(self.fetchers):
            before = place * count
            begin = min(max(first - before, 0), count)
            end = min(max(last - before, 0), count)
            if begin < end:
                fetcher.request_columns(count, begin, end)
