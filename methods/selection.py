"""How many tokens a row reads by their scores, and which: step 4 of InfiniGen, and the choice of the best for all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from methods.base import Geometry, Method, Row, Selection, floor_frac
from methods.checks import require, require_fraction, require_one_of

ALPHA_OPT = 4.0
ALPHA_OTHER = 5.0


@dataclass(frozen=True)
class ScoreSelecting(Method):
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

    def tokens_read(self, row: Row, layer: int) -> float | None:
        """Closed form where alpha plays no part."""
        plays_no_part = self.fixed_fetch is not None or self.alpha == math.inf
        return self.max_tokens_read(row, layer) if plays_no_part else None

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """The cap; with `fixed_fetch` that number."""
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

    def select(self, scores: Tensor, cached: Tensor, final: Tensor, geometry: Geometry) -> Selection:
        """Each KV head's best tokens.

        scores: [batch, num_kv_heads, group, rows, slots], scaled, -inf where not visible; overwritten.
        cached: int [batch, rows], number of visible tokens; final: int [batch], T.
        """
        relative = best_of_group(scores)
        ordered = ascending(relative)
        count = self._count(ordered, cached, final, geometry)
        return Selection(largest(relative, ordered, count), count.double())

    def _count(self, ordered: Tensor, cached: Tensor, final: Tensor, geometry: Geometry) -> Tensor:
        if self.fixed_fetch is not None:
            return cached.clamp(max=self.fixed_fetch)
        whole = cached if self.cap_of == "cached" else final[:, None]
        cap = torch.minimum(floor_frac(self.max_fetch_frac, whole).clamp(min=1), cached)
        alpha = self.threshold(geometry)
        if alpha == math.inf:
            return cap
        below = torch.searchsorted(ordered, ordered.new_full((*ordered.shape[:-1], 1), -alpha)).squeeze(-1)
        above = ordered.shape[-1] - below  # [batch, kv, rows] tokens with r >= -alpha
        mean = above.sum(1) // above.shape[1]
        return torch.minimum(mean.clamp(min=1), cap)


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


def largest(values: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """Mask of the `count` largest values; among equal ones those of the lowest slots. No device sync.

    values: [batch, num_kv_heads, rows, slots]; ordered: the same, sorted ascending; count: int [batch, rows], which may
    exceed the number of finite values, of which all are then taken.
    """
    slots = values.shape[-1]
    rank = (slots - count).clamp(0, slots - 1)[:, None, :, None].expand(*values.shape[:-1], 1)
    least = ordered.gather(-1, rank).clamp(min=torch.finfo(values.dtype).min)
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
