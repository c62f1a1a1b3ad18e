"""Key norm (Devoto et al., EMNLP 2024): after the prompt, keep the tokens whose keys are shortest.

Shorter keys tend to receive more attention. No query is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from methods.base import PromptRows
from methods.prompt_evicting import PromptEvicting, PromptEvictingState


class KnormState(PromptEvictingState):
    """A token's worth is its key's length, negated."""

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The same with and without positions."""
        return -key.float().norm(dim=-1)


@dataclass(frozen=True)
class Knorm(PromptEvicting):
    """Nothing is safe by default, as in the paper."""

    title = "Key norm"
    state = KnormState
