"""Who leaves a full KV pool (InfiniGen, section 4.4).

`fifo` takes the lowest position, `lru` the oldest last fetch, `counter` the smallest number of fetches, ties to the
lowest position; victims come from the floor((1 - protect_recent) * capacity) lowest positions present.

`eviction: artifact` is what the artifact's simulation does (accuracy/src/modeling_*_ours_prune.py): candidates are all
tokens of the sequence's first half, those evicted before among them, and the dense rows of the prompt count as
fetches. An evicted token is never fetched again, so it stays the worst: LRU and counter evict the same token again and
again, which is no eviction to speak of. Its FIFO takes token t - capacity and so really evicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.base import EMPTY, floor_frac

POLICIES = ("fifo", "lru", "counter")
EVICTIONS = ("corrected", "artifact")
SATURATED = 255
"""A counter that reaches this halves all counters of its head."""
NEVER = torch.iinfo(torch.int64).max


def count_fetch(fetches: Tensor, last_fetch: Tensor, chosen: Tensor, position: Tensor, *, saturates: bool) -> None:
    """Count a fetch of the chosen slots, bool [batch, num_kv_heads, slots], by the row at `position` [batch, 1, 1]."""
    fetches += chosen
    if saturates:
        fetches >>= (fetches >= SATURATED).any(-1, keepdim=True).int()
    last_fetch.copy_(torch.where(chosen, position.int(), last_fetch))


def victim(present: Tensor, worth: Tensor, capacities: Tensor, protect_recent: float) -> Tensor:
    """The slot to free in each head, int64 [batch, num_kv_heads, 1].

    present: int [batch, num_kv_heads, slots], positions of the tokens that may leave, `EMPTY` elsewhere; worth: int
    alike, the smallest leaves, ties to the lowest position; capacities: int [batch].
    """
    unprotected = floor_frac(1 - protect_recent, capacities).clamp(min=1, max=present.shape[-1])
    rank = (unprotected - 1)[:, None, None].expand(*present.shape[:2], 1)
    newest = present.sort(-1).values.gather(-1, rank)
    return _smallest(worth, present).masked_fill(present > newest, NEVER).argmin(-1, keepdim=True)


def artifact_victim(positions: Tensor, policy: str, worth: Tensor, capacities: Tensor, position: Tensor) -> Tensor:
    """The artifact's choice after the row at `position` [batch, 1, 1].

    positions: int [batch, num_kv_heads, slots], of every token that ever entered; worth, capacities: as `victim`.
    """
    if policy == "fifo":
        return (positions == position - capacities[:, None, None]).int().argmax(-1, keepdim=True)
    return _smallest(worth, positions).masked_fill(positions >= position // 2, NEVER).argmin(-1, keepdim=True)


def _smallest(worth: Tensor, present: Tensor) -> Tensor:
    """One number to order by: worth, then position."""
    return ((worth.long() << 31) + present).masked_fill(present == EMPTY, NEVER)
