"""Rows that stay on the device: in each layer those that were read last, a bounded number for each
KV head.

A method that names its rows asks again for most of those that it read in the last steps. With
`device_rows` a layer keeps room for that many times the rows that it reads at most, and only rows
that are not there cross the link. Rows leave by least recent use, of equally old ones the lowest
token first. Live decoding fetches by these rules, and replay counts by them. What is read does not
depend on them, so neither does accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache

import torch
from torch import Tensor

from harness.live.store import Chosen, chosen, indices
from harness.model.policies import Policy
from methods.base import NAMES_ROWS, Method, TokenCounts

NO_ROOM = torch.iinfo(torch.int64).max
"""The age of a buffer row beyond a sequence's own room: it never gives way."""


def rooms(
    method: Method,
    policies: Iterable[Policy],
    device_rows: float,
    lengths: Iterable[tuple[int, int]],
) -> list[int] | None:
    """Of each sequence the rows that a KV head keeps on the device: `device_rows` times what it
    reads at most; None where `device_rows` is 0.

    policies: of all layers. Only those that name their rows keep some. lengths: of each sequence,
    tokens of its prompt, and T.
    """
    if not device_rows:
        return None
    layers = [
        policy.number
        for policy in policies
        if policy.kind == "method" and policy.when in NAMES_ROWS
    ]

    @cache
    def room(prompt: int, final: int) -> int:
        rows = [TokenCounts(cached, prompt, final) for cached in range(prompt, final + 1)]
        most = max(
            (method.max_tokens_read(row, layer) for row in rows for layer in layers), default=1
        )
        return min(math.ceil(device_rows * most), final)

    return [room(prompt, final) for prompt, final in lengths]


class HotRows:
    """Which rows of one layer are on the device.

    rooms: of each sequence, the rows that a KV head may keep. slots: int64 [batch, num_kv_heads,
    room], the slot in each row of the layer's buffer, -1 for none. age: int64 alike, by which rows
    leave, the lowest first: the number of the request that used it last, and of one request its
    token.
    """

    def __init__(self, rooms: Sequence[int], num_kv_heads: int, device: torch.device) -> None:
        shape = len(rooms), num_kv_heads, max(rooms)
        self.slots = torch.full(shape, -1, device=device)
        self.age = self.slots.clone()
        for sequence, room in enumerate(rooms):
            self.age[sequence, :, room:] = NO_ROOM
        self._requests = 1

    @property
    def nbytes(self) -> int:
        """Bytes of these lists on the device."""
        return self.slots.nbytes + self.age.nbytes

    def request(self, mask: Tensor, tokens: Tensor, most: int) -> tuple[Chosen, Tensor]:
        """The slots to fetch so that all of `mask` are there, and their rows in the buffer. From
        now on they count as there.

        mask: bool [batch, num_kv_heads, slots], the slots to read, at most `most` in a head and not
        more than its room. tokens: int32 [batch, 1 or num_kv_heads, slots], the token in each slot.
        Returns also which rows of the buffer are to be read, bool [batch, num_kv_heads, room].
        """
        lists = missing_rows(mask, tokens, self.slots, self.age, self._requests << 32, most)
        missing, targets, self.slots, self.age, present = lists
        self._requests += 1
        return chosen(missing, targets), present

    def forget(self, written: Tensor) -> None:
        """Drop the copies of slots that are written anew. written: int64 [batch, num_kv_heads, 1],
        -1 for none."""
        self.slots = self.slots.masked_fill(self.slots == written, -1)

    def fork(self, index: Tensor) -> HotRows:
        """A copy for sequences `index` [new_batch]."""
        child = copy(self)
        child.slots, child.age = self.slots.index_select(0, index), self.age.index_select(0, index)
        return child


def missing_rows(
    mask: Tensor, tokens: Tensor, kept: Tensor, age: Tensor, now: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The slots of `mask` that a buffer lacks, and the rows that they go to: those of the lowest
    age, but for rows that hold slots of the mask.

    mask, tokens, most: as in `HotRows.request`; kept, age: its `slots` and `age`; now: added to the
    token of each slot of the mask, its age from now on. Returns int64 [batch, heads, most], a
    head's missing slots first and -1 behind them; their rows in the buffer, alike; the new `kept`
    and `age`; and which rows hold slots of the mask.
    """
    if mask.is_cuda:
        from harness.live.kernels import rows as kernels

        return kernels.missing_rows(mask, tokens, kept, age, now, most)
    num_slots, room = mask.shape[-1], kept.shape[-1]
    there = (kept >= 0) & mask.gather(-1, kept.clamp(min=0))
    found = mask.new_zeros((*mask.shape[:-1], num_slots + 1))
    found.scatter_(-1, torch.where(there, kept, num_slots), True)
    missing = indices(mask & ~found[..., :num_slots], most)
    leaving = age.argsort(-1)
    giving_way = indices(~there.gather(-1, leaving), most)  # places in `leaving`
    targets = leaving.gather(-1, giving_way.clamp(min=0))
    after = torch.cat([kept, kept[..., :1]], -1)  # a row more, for what is not missing
    after = after.scatter_(-1, torch.where(missing >= 0, targets, room), missing)[
        ..., :room
    ].contiguous()
    present = (after >= 0) & mask.gather(-1, after.clamp(min=0))
    token = tokens.expand(-1, mask.shape[1], -1).gather(-1, after.clamp(min=0)).long()
    return missing, targets, after, torch.where(present, token + now, age), present
