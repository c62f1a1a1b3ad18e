"""Full cache: every decode row reads every cached token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """Dense attention over the whole cache; with a codec, over what the codec gives back."""

    reads_all: ClassVar[bool] = True

    def tokens_read(self, cached: int, final_length: int) -> float:
        """All `cached` tokens."""
        return cached

    def artifact_budget(self) -> float:
        """The prompt is dense as far as it goes: nothing is ever dropped."""
        return 1.0
