"""The loop of every generated text, live and in replay: the next token, and the end of a text.

`harness.model.generation` says which tokens a text may get and what ends it. A text draws its
tokens from its own random numbers, made from its own key. So it is the same alone and in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from harness.model.generation import GenerationRule


class Draft:
    """A text under way: its tokens, and whether it has ended.

    prompt: the tokens before it. key: what the random numbers are made from, such as
    `seed/question/repeat`.
    """

    def __init__(self, prompt: Sequence[int], rule: GenerationRule, key: str = "") -> None:
        self.rule = rule
        self.tokens: list[int] = []
        self.ended = False
        self.ended_itself = False
        self._random = random.Random(key)
        self._num_prompt = len(prompt)
        self._ids = torch.empty(len(prompt) + rule.max_new_tokens, dtype=torch.long)
        self._ids[: len(prompt)] = torch.tensor(prompt)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.rule.max_new_tokens - len(self.tokens)

    @property
    def _ids_so_far(self) -> Tensor:
        return self._ids[: self._num_prompt + len(self.tokens)]

    def take(self, token: int) -> None:
        """Append the next token."""
        self._ids[self._num_prompt + len(self.tokens)] = token
        self.tokens.append(token)
        self.ended_itself = self.rule.has_ended(self._ids_so_far)
        self.ended = self.ended_itself or not self.left

    def choose(self, logits: Tensor) -> Tensor:
        """The next token, int64 [], drawn by this text's next random number or the most likely;
        logits: [vocab]."""
        scores = self.rule.scores(self._ids_so_far, logits)
        return drawn(scores, self._random.random()) if self.rule.is_drawn else scores.argmax(-1)


AnyDraft = TypeVar("AnyDraft", bound=Draft)


def write(
    drafts: Sequence[AnyDraft],
    logits: Tensor,
    feed: Callable[[Sequence[AnyDraft]], tuple[Sequence[AnyDraft], Tensor]],
) -> Iterator[None]:
    """Decode until every text has ended; yields after each token.

    drafts: one a row of logits [batch, vocab], which predict the first token. feed: runs the last
    token of each draft and returns the drafts that go on, with their next logits. It may leave out
    those that have ended.
    """
    while True:
        for draft, token in zip(drafts, _next_tokens(drafts, logits), strict=True):
            if not draft.ended:
                draft.take(token)
        yield
        if all(draft.ended for draft in drafts):
            return
        drafts, logits = feed(drafts)


def _next_tokens(drafts: Sequence[Draft], logits: Tensor) -> list[int]:
    """The next token of each text; of one that has ended, any."""
    tokens = logits.argmax(-1)
    choosing, chosen = [], []
    for at, draft in enumerate(drafts):
        if not draft.ended and not draft.rule.is_plain:
            choosing.append(at)
            chosen.append(draft.choose(logits[at]))
    if choosing:
        tokens[choosing] = torch.stack(chosen)
    return tokens.tolist()


def drawn(scores: Tensor, number: float) -> Tensor:
    """The token, int64 [], at `number`, in [0, 1), of the distribution softmax(scores); scores:
    [vocab].

    The tokens lie in the order of the vocabulary on the line from 0 to 1, each as wide as its
    probability. A small change of the scores moves no token far on it, as it would if they were
    sorted.
    """
    reached = scores.double().softmax(-1).cumsum(-1)
    return (reached / reached[-1] <= number).sum(-1)
