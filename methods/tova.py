"""TOVA (Oren et al., EMNLP 2024): keep the tokens that the last row attends to most.

The rule, and where it differs (made into docs/methods.md):

**tova** keeps floor(`budget` · T) tokens or `kept_tokens`. After the prompt and every row, the
tokens that this row attends to least leave, by the mean over all heads of a layer. The row's
current token may leave, and no sink is safe; `protect_last=true` keeps the current token. kvpress's
TOVAPress evicts once, after the prompt, and keeps all that is generated:
`method=kvpress:TOVAPress`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.attention import received_attention
from methods.base import PromptRows
from methods.evicting import EvictingToBudget, ScoreState
from methods.settings import setting


class TOVAState(ScoreState):
    """A token's score is the attention of the last row, mean over all heads of the layer."""

    replayable = True

    def budget(self, layer: int) -> Tensor:
        return self.method.budgets_in_tokens(self.lengths.final)

    @property
    def recent(self) -> Tensor:
        return torch.full_like(self.lengths.final, int(self.method.protect_last))

    def prompt_score(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> Tensor:
        softmax, last = self.geometry.softmax(layer), max(0, key.shape[2] - 1)
        score = received_attention(query, key, rows.real, softmax, first=last)
        return score.mean(1, keepdim=True).expand_as(score)

    def observe(self, score: Tensor, probs: Tensor) -> None:
        score.copy_(probs.mean((1, 2)).unsqueeze(1).expand_as(score))


@dataclass(frozen=True)
class TOVA(EvictingToBudget):
    """Keeps a budget of tokens; the row's current token may leave, as in the authors' code.

    Source: TOVA (EMNLP 2024)
    Keeps: the tokens that the last row attends to most
    """

    protect_last: bool = setting(False, "the row's current token stays, as in kvpress")

    title = "TOVA"
    state = TOVAState
