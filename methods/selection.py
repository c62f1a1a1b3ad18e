"""Choosing the best by their scores: the settings that all methods share which do, and the choice itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from methods.base import Geometry, Lengths, Method, Row, Selects, floor_frac
from methods.checks import require, require_fraction, require_one_of
from methods.kernels import compiled_for

GROUPS = ("best", "max_logits", "sum_logits", "max_probs", "sum_probs", "union")
WHEN: dict[str, Selects] = {"layer": "query", "previous_layer": "rehearsed", "previous_step": "previous"}


def kernels_for(scores: Tensor) -> ModuleType | None:
    """The same functions as kernels, where there are any for the device of `scores`."""
    if not compiled_for(scores):
        return None
    from methods.kernels import selection

    return selection


class Cap(NamedTuple):
    """The most that each row takes: floor(frac * whole), at least `least`, at most `cached`.

    whole, cached: int [batch, rows].
    """

    frac: float
    least: int
    whole: Tensor
    cached: Tensor

    def tokens(self) -> Tensor:
        """int [batch, rows]."""
        return torch.minimum(floor_frac(self.frac, self.whole).clamp(min=self.least), self.cached)


@dataclass(frozen=True)
class Selecting(Method):
    """Scores what is cached and reads the best: the settings that all such methods share.

    group: how the scores of a KV head's query heads become one (see `reduce_group`); `union` reads what is best for any
        of them, so that the number read depends on the data.
    covers: a selection is made for each `kv_head`, or one for all heads of a `layer`.
    when: by which query: the `layer`'s own, one rehearsed in the `previous_layer`, or that of the `previous_step`. The
        last two let rows cross the link while the layer before computes.
    num_sinks: so many first tokens are always read. recent_frac: share of the tokens read that are the most recent.
    """

    group: str = "best"
    covers: str = "kv_head"
    when: str = "layer"
    num_sinks: int = 0
    recent_frac: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("group", self.group, GROUPS)
        require_one_of("covers", self.covers, ("kv_head", "layer"))
        require_one_of("when", self.when, tuple(WHEN))
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")
        require_fraction("recent_frac", self.recent_frac, zero=True)
        because = "an integer >= 1: layer 0 has no layer before it to rehearse in"
        rehearses = self.selects == "rehearsed"
        require(not rehearses or self.num_exempt_layers >= 1, "num_exempt_layers", self.num_exempt_layers, because)

    @property
    def selects(self) -> Selects:
        """As `when` says."""
        return WHEN[self.when]

    def min_size(self, row: Row) -> float:
        """The least that reads a token beside the sinks at the first row."""
        if not self.num_sinks:
            return super().min_size(row)
        first, low, high = row._replace(cached=row.prompt), 0.0, 1.0
        for _ in range(24):
            middle = (low + high) / 2
            enough = self.with_size(middle).max_tokens_read(first, self.num_exempt_layers) > self.num_sinks
            low, high = (low, middle) if enough else (middle, high)
        return high

    def check_lengths(self, lengths: Lengths) -> None:
        """ValueError where the sinks leave nothing to select in the shortest prompt, all of which is not read."""
        prompt = int(lengths.prompt.min())
        shortest = Row(prompt, prompt, int(lengths.final.min()))
        read = self.max_tokens_read(shortest, self.num_exempt_layers)
        enough = not self.num_sinks or read > self.num_sinks or read == shortest.cached
        require(enough, "num_sinks", self.num_sinks, f"below {read}, what is read of a prompt of {prompt} tokens")

    def forced(self, first: Tensor, last: Tensor, positions: Tensor, num_read: Tensor) -> Tensor | None:
        """What is read whatever its score: sinks and recent tokens; None where there are none.

        first, last: int [batch, num_kv_heads or 1, n], tokens from which to which each candidate goes; positions: int
        [batch, rows]; num_read: int [batch, rows], tokens read in all. Returns bool [batch, 1 or kv, rows, n].
        """
        if not self.num_sinks and not self.recent_frac:
            return None
        recent = (positions - floor_frac(self.recent_frac, num_read))[:, None, :, None]
        return (first.unsqueeze(2) < self.num_sinks) | (last.unsqueeze(2) >= recent)

    def reduced(self, scores: Tensor, forced: Tensor | None = None) -> Tensor:
        """Scores [batch, num_kv_heads, group, rows, n], -inf where nothing is to be read, overwritten, as one for each
        set that is chosen: [batch, sets, rows, n], inf where `forced`, which only what could be read may be."""
        scores = self.by_set(scores)
        if forced is not None:
            forced = forced & (scores[:, :, 0] != -math.inf)
        worth = reduce_group(scores, self.group)
        if forced is not None:
            sets = worth.shape[1] // forced.shape[1]  # of a union one for each query head
            worth.masked_fill_(forced.repeat_interleave(sets, 1), math.inf)
        return worth

    def by_set(self, scores: Tensor) -> Tensor:
        """Scores [batch, num_kv_heads, group, rows, n] with the heads that choose together in the third axis."""
        return scores.flatten(1, 2).unsqueeze(1) if self.covers == "layer" else scores

    def joined(self, mask: Tensor, count: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """The sets that were chosen, bool [batch, sets, rows, n], `count` [batch, rows] in each, as one for each KV
        head or the layer: [batch, num_kv_heads or 1, rows, n], and how many that is, mean over the heads, fp64."""
        if self.group != "union":
            return mask, count.double()
        joint = mask.unflatten(1, (-1, geometry.group if self.covers == "kv_head" else geometry.num_heads)).any(2)
        return joint, joint.sum(-1).double().mean(1)


def reduce_group(scores: Tensor, how: str) -> Tensor:
    """One score for the query heads of a group, [batch, num_kv_heads, rows, n]; of `union` one for each, [batch, heads,
    rows, n]. Means rank as sums do. `best`: the largest distance below each head's own best, which is InfiniGen's r.

    scores: [batch, num_kv_heads, group, rows, n], -inf where nothing is to be read; overwritten.
    """
    if how == "best":
        return best_of_group(scores)
    if how == "union":
        return scores.flatten(1, 2)
    if how.endswith("probs"):
        scores = scores.log_softmax(-1)  # log: ranks alike, and stays -inf where hidden
        return scores.amax(2) if how == "max_probs" else scores.logsumexp(2)
    return scores.amax(2) if how == "max_logits" else scores.sum(2)


def best_of_group(scores: Tensor) -> Tensor:
    """r = max over a group's heads of (score - the head's best score): [batch, num_kv_heads, rows, slots].

    scores: [batch, num_kv_heads, group, rows, slots], -inf where not visible; overwritten.
    """
    scores -= scores.amax(-1, keepdim=True)
    return scores[:, :, 0] if scores.shape[2] == 1 else scores.amax(2)


def ascending(values: Tensor) -> Tensor:
    """Sorted along the last axis. On the CPU numpy's vectorised sort takes a third of torch.topk's time."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(-1).values


def largest(values: Tensor, count: Tensor, ordered: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """Mask of the `count` largest values; among equal ones those of the lowest slots. No device sync.

    values: [batch, num_kv_heads, rows, slots]; count: int [batch, rows], which may exceed the number of finite values,
    of which all are then taken; ordered: the values sorted ascending, where they are at hand; order: int64 [batch,
    num_kv_heads, slots], the slots as equal values take them, where that is not as they lie.
    """
    if kernels := kernels_for(values):
        return kernels.largest(values, order=order, **Cap(1.0, 0, count, count)._asdict())[0]
    if order is not None:
        of_rows = order.unsqueeze(2).expand_as(values)
        mask = largest(values.gather(-1, of_rows), count, ordered)
        return torch.empty_like(mask).scatter_(-1, of_rows, mask)
    ordered = ascending(values) if ordered is None else ordered
    slots = values.shape[-1]
    rank = (slots - count).clamp(0, slots - 1)[:, None, :, None].expand(*values.shape[:-1], 1)
    least = ordered.gather(-1, rank).clamp(min=torch.finfo(values.dtype).min)
    least = least.masked_fill((count == 0)[:, None, :, None], math.nan)  # nothing compares to it
    mask = values >= least
    # A tie at the last place: a group's heads all have r = 0 at their best token, so this is no rarity.
    tied = ordered.gather(-1, (rank - 1).clamp(min=0)) == least
    if values.device.type == "cpu":
        return _drop_ties(mask, values, least, tied, count) if bool(tied.any()) else mask
    return _keep_lowest(mask, values == least, count[:, None, :, None])


def _drop_ties(mask: Tensor, values: Tensor, least: Tensor, tied: Tensor, count: Tensor) -> Tensor:
    where = tied.squeeze(-1).nonzero(as_tuple=True)
    wanted = count[:, None].expand(mask.shape[:-1])[where].unsqueeze(-1)
    mask[where] = _keep_lowest(mask[where], values[where] == least[where], wanted)
    return mask


def _keep_lowest(mask: Tensor, equal: Tensor, count: Tensor) -> Tensor:
    """Drop from `mask` the equal values of the highest slots until `count` (with a last axis of 1) are left."""
    above = mask & ~equal
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
