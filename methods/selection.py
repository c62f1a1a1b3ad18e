"""Choosing the best by their scores: the settings that all methods share which do, and the choice itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from methods.base import Geometry, Lengths, Method, Row, Rows, Selection, When, floor_frac
from methods.checks import require, require_fraction, require_one_of
from methods.kernels import compiled_for

GROUPS = ("best", "max_logits", "sum_logits", "max_probs", "sum_probs", "union")


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
    when: by which query: the layer's `own_query`, one rehearsed in the `previous_layer`, or that of the
        `previous_step`. The last two let rows cross the link while the previous layer computes.
    own_query_layers: so many layers, the first that are not exempt, select by their own query whatever `when` says.
    num_sinks: so many first tokens are always read. recent_frac: share of the tokens read that are the most recent.
    """

    group: str = "best"
    covers: str = "kv_head"
    when: When = "own_query"  # type: ignore[misc]  # a setting here, a constant in other methods
    own_query_layers: int = 0
    num_sinks: int = 0
    recent_frac: float = 0.0

    choices_of_when: ClassVar[tuple[When, ...]] = ("previous_step", "previous_layer", "own_query")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("group", self.group, GROUPS)
        require_one_of("covers", self.covers, ("kv_head", "layer"))
        require_one_of("when", self.when, self.choices_of_when)
        require(self.own_query_layers >= 0, "own_query_layers", self.own_query_layers, "an integer >= 0")
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")
        require_fraction("recent_frac", self.recent_frac, zero=True)

    def when_of(self, layer: int) -> When:
        """As `when` says, but for the first layers."""
        return "own_query" if layer - self.num_exempt_layers < self.own_query_layers else self.when

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


ALPHA_OPT = 4.0
ALPHA_OTHER = 5.0


@dataclass(frozen=True)
class ScoreSelecting(Selecting):
    """The count rule: tokens within `alpha` of the best score, at most `max_fetch_frac` of the cache.

    alpha: in units of scaled logits; inf always takes the cap; None means 4 for OPT and 5 otherwise (section 5.1).
    max_fetch_frac: cap, as a share of what `cap_of` says: of the tokens `cached` at a row, or of T, the `final` number
        of tokens, as in the artifact's accuracy code. The text ("up to 20 % of the KV cache") leaves it open.
    fixed_fetch: this many tokens, instead of alpha and the cap; as the artifact's speed code has its cap.
    """

    alpha: float | None = None
    max_fetch_frac: float = 0.2
    cap_of: str = "cached"
    fixed_fetch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha is None or self.alpha >= 0, "alpha", self.alpha, "a number >= 0, inf or null")
        require_fraction("max_fetch_frac", self.max_fetch_frac)
        require_one_of("cap_of", self.cap_of, ("cached", "final"))
        require(self.fixed_fetch is None or self.fixed_fetch >= 1, "fixed_fetch", self.fixed_fetch, ">= 1 or null")
        one_scale = self.group == "best" or self._counts_by_cap
        require(one_scale, "group", self.group, "best, the distance that alpha bounds; or set alpha=inf")

    @property
    def _counts_by_cap(self) -> bool:
        """Whether alpha plays no part."""
        return self.fixed_fetch is not None or self.alpha == math.inf

    def tokens_read(self, row: Row, layer: int) -> float | None:
        """Closed form where alpha plays no part."""
        return self.max_tokens_read(row, layer) if self._counts_by_cap and self.group != "union" else None

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """The cap; with `fixed_fetch` that number; of a union anything."""
        return row.cached if self.group == "union" else self._cap(row)

    def _cap(self, row: Row) -> int:
        if self.fixed_fetch is not None:
            return min(self.fixed_fetch, row.cached)
        whole = row.cached if self.cap_of == "cached" else row.final
        return min(row.cached, max(1, int(self.max_fetch_frac * whole)))

    def with_size(self, frac: float) -> Self:
        """Sized by the cap alone: alpha becomes inf."""
        return replace(self, alpha=math.inf, max_fetch_frac=frac, fixed_fetch=None)

    def artifact_budget(self) -> float:
        """The cap."""
        return self.max_fetch_frac

    def threshold(self, geometry: Geometry) -> float:
        """`alpha`, or the paper's value for this family."""
        if self.alpha is None:
            return ALPHA_OPT if geometry.family == "opt" else ALPHA_OTHER
        return self.alpha

    def select(
        self,
        scores: Tensor,
        rows: Rows,
        final: Tensor,
        geometry: Geometry,
        cached: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Selection:
        """Each KV head's best tokens.

        scores: [batch, num_kv_heads, group, rows, slots], scaled; overwritten. Those of slots that are not visible play
        no part. final: int [batch], T; cached: int [batch, rows], number of visible tokens, where it is not that of the
        rows. order: int64 [batch, num_kv_heads, slots], the slots as equal scores take them; None: the lowest first.
        """
        cap = self._cap_of_rows(rows.positions if cached is None else cached, final)
        if self._by_scores_alone and (kernels := kernels_for(scores)):
            relative, within = kernels.relative(self.by_set(scores), rows, self.threshold(geometry))
            within = None if self._counts_by_cap else within
            return Selection(*kernels.largest(relative, within, order, **cap._asdict()))
        rows.hide(scores)
        tokens, most = rows.slot_positions, cap.tokens()
        relative = self.reduced(scores, self.forced(tokens, tokens, rows.positions, most))
        ordered = ascending(relative)
        count = self._count(ordered, most, geometry)
        return Selection(*self.joined(largest(relative, count, ordered, order), count, geometry))

    @property
    def _by_scores_alone(self) -> bool:
        """Whether nothing but the distance from the best decides who is read."""
        return self.group == "best" and not self.num_sinks and not self.recent_frac

    def _cap_of_rows(self, cached: Tensor, final: Tensor) -> Cap:
        """As `_cap`; cached: int [batch, rows]; final: int [batch]."""
        if self.fixed_fetch is not None:
            return Cap(0.0, self.fixed_fetch, cached, cached)
        whole = cached if self.cap_of == "cached" else final[:, None].expand_as(cached)
        return Cap(self.max_fetch_frac, 1, whole, cached)

    def _count(self, ordered: Tensor, cap: Tensor, geometry: Geometry) -> Tensor:
        if self._counts_by_cap:
            return cap
        alpha = self.threshold(geometry)
        below = torch.searchsorted(ordered, ordered.new_full((*ordered.shape[:-1], 1), -alpha)).squeeze(-1)
        above = ordered.shape[-1] - below  # [batch, kv, rows] tokens with r >= -alpha
        mean = above.sum(1) // above.shape[1]
        return torch.minimum(mean.clamp(min=1), cap)
