"""How many tokens a row reads, from their scores: step 4 of InfiniGen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from methods.base import Geometry, Row, Rows, Selection
from methods.checks import require, require_fraction, require_one_of
from methods.selection import Cap, Selecting, ascending, kernels_for, largest

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
        scores.masked_fill_(~rows.visible().unsqueeze(2), -math.inf)
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
