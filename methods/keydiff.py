"""KeyDiff (Park et al., NeurIPS 2025): after the prompt, keep the tokens whose keys are least like the others.

A key is compared with the mean of all keys' directions, which takes one pass instead of every pair. No query is looked
at.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from methods.base import PromptRows
from methods.prompt_evicting import PromptEvicting, PromptEvictingState


class KeyDiffState(PromptEvictingState):
    """A token's worth is the cosine between its key and the mean of the prompt's normalised keys, negated."""

    def prompt_worth(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> Tensor:
        """The sum points where the mean does."""
        directions = normalize(key.float(), dim=-1).masked_fill_(~rows.real[:, None, :, None], 0)
        return -cosine_similarity(key.float(), directions.sum(2, keepdim=True), dim=-1)


@dataclass(frozen=True)
class KeyDiff(PromptEvicting):
    """Nothing is safe by default, as in kvpress."""

    title = "KeyDiff"
    state = KeyDiffState
