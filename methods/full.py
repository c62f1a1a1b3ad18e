"""Full cache: every decode row reads every cached token."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Geometry, Method, TokenCounts
from methods.dsa import Dsa
from methods.extras import FitsModel


@dataclass(frozen=True)
class Full(FitsModel):
    """Dense attention over the whole cache; with a codec, over the rows as the codec gives them
    back."""

    title = "Full cache"
    state = None

    def fitted(self, geometry: Geometry) -> Method:
        """A model with indexers of its own reads what they choose, also under the full cache."""
        return self if geometry.index is None else Dsa().fitted(geometry)

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        return counts.cached
