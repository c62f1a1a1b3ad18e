"""Full cache: every decode row reads every cached token."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Method, TokenCounts


@dataclass(frozen=True)
class Full(Method):
    """Dense attention over the whole cache; with a codec, over the rows as the codec gives them
    back."""

    title = "Full cache"
    state = None

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        return counts.cached
