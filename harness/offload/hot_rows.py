"""Rows that stay on the device: in each layer those that were read last, a bounded number for each KV head.

A method that names its rows asks again for most of those that it read in the last steps. With `device_rows` a layer
keeps room for that many times the rows that it reads at most, and only rows that are not there cross the link. Rows
leave by least recent use, of equally old ones the lowest token first. Live decoding fetches by these rules, and replay
counts by them. What is read does not depend on them, so neither does accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache

import torch
from torch import Tensor

from harness.offload.store import Chosen, missing_rows
from methods.base import Lengths, Method, Row

NO_ROOM = torch.iinfo(torch.int64).max
"""The age of a buffer row beyond a sequence's own room: it never gives way."""


def rooms(method: Method, layers: Iterable[int], device_rows: float, lengths: Lengths) -> list[int]:
    """Of each sequence the rows that a KV head keeps on the device: `device_rows` times what it reads at most.

    layers: those under the method.
    """
    layers = list(layers)

    @cache
    def room(prompt: int, final: int) -> int:
        rows = [Row(cached, prompt, final) for cached in range(prompt, final + 1)]
        most = max(method.max_tokens_read(row, layer) for row in rows for layer in layers)
        return min(math.ceil(device_rows * most), final)

    prompts, finals = (part.tolist() for part in lengths)
    return [room(*sequence) for sequence in zip(prompts, finals, strict=True)]


class HotRows:
    """Which rows of one layer are on the device.

    rooms: of each sequence, the rows that a KV head may keep. slots: int64 [batch, num_kv_heads, room], the slot in
    each row of the layer's buffer, -1 for none. age: int64 alike, by which rows leave, the lowest first: the number of
    the request that used it last, and of one request its token.
    """

    def __init__(self, rooms: Sequence[int], num_kv_heads: int, device: torch.device) -> None:
        shape = len(rooms), num_kv_heads, max(rooms)
        self.slots = torch.full(shape, -1, device=device)
        self.age = self.slots.clone()
        beyond = torch.arange(max(rooms), device=device) >= torch.tensor(rooms, device=device)[:, None, None]
        self.age.masked_fill_(beyond, NO_ROOM)
        self._requests = 0

    @property
    def nbytes(self) -> int:
        """Bytes of these lists on the device."""
        return self.slots.nbytes + self.age.nbytes

    def request(self, mask: Tensor, tokens: Tensor, most: int) -> Chosen:
        """The slots to fetch so that all of `mask` are there, and their rows in the buffer. From now on they count as
        there.

        mask: bool [batch, num_kv_heads, slots], the slots to read, at most `most` in a head and not more than its room.
        tokens: int32 [batch, 1 or num_kv_heads, slots], the token in each slot.
        """
        fetch, self.slots = missing_rows(mask, self.slots, self.age.argsort(-1), most)
        there = tokens.expand(-1, mask.shape[1], -1).gather(-1, self.slots.clamp(min=0))
        self.age = torch.where(self.present(mask), there.long() + (self._requests << 32), self.age)
        self._requests += 1
        return fetch

    def present(self, mask: Tensor) -> Tensor:
        """Rows of the buffer whose slot is in `mask`: bool [batch, num_kv_heads, room]."""
        return (self.slots >= 0) & mask.gather(-1, self.slots.clamp(min=0))

    def forget(self, written: Tensor) -> None:
        """Drop the copies of slots that are written anew. written: int64 [batch, num_kv_heads, 1], -1 for none."""
        self.slots = self.slots.masked_fill(self.slots == written, -1)

    def fork(self, index: Tensor) -> HotRows:
        """A copy for sequences `index` [new_batch]."""
        child = copy(self)
        child.slots, child.age = self.slots.index_select(0, index), self.age.index_select(0, index)
        return child
