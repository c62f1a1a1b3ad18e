"""The loop of every generated text, live and in replay: the next token, and the end of a text.

A text draws its tokens from its own random numbers, made from its own key. So it is the same alone
and in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from harness.settings.config import GREEDY, Sampling


class Draft:
    """A text under way: its tokens, and whether it has ended.

    max_new_tokens: its longest length. key: what the random numbers are made from, such as
    `seed/question/repeat`.
    """

    def __init__(self, max_new_tokens: int, sampling: Sampling = GREEDY, key: str = "") -> None:
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.tokens: list[int] = []
        self.ended = False
        self._random = random.Random(key)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.max_new_tokens - len(self.tokens)

    def ends_itself(self) -> bool:
        """Whether the last token ends the text before `max_new_tokens` does."""
        return False

    def take(self, token: int) -> None:
        """Append the next token."""
        self.tokens.append(token)
        self.ended = self.ends_itself() or not self.left

    def draw(self, logits: Tensor) -> Tensor:
        """The next token, int64 [], by this text's next random number; logits: [vocab]."""
        return sample(logits, self.sampling, self._random.random())


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
    drawing, drawn = [], []
    for at, draft in enumerate(drafts):
        if draft.sampling.temperature and not draft.ended:
            drawing.append(at)
            drawn.append(draft.draw(logits[at]))
    if drawing:
        tokens[drawing] = torch.stack(drawn)
    return tokens.tolist()


def sample(logits: Tensor, sampling: Sampling, number: float) -> Tensor:
    """The token, int64 [], at `number`, in [0, 1), of the distribution; logits: [vocab].

    The tokens lie in the order of the vocabulary on the line from 0 to 1, each as wide as its
    probability. A small change of the logits moves no token far on it, as it would if they were
    sorted.
    """
    if not sampling.temperature:
        return logits.argmax(-1)
    scores = (logits.double() - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        lowest = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        probabilities = torch.zeros_like(ordered).scatter(0, index, ordered)
    reached = probabilities.cumsum(-1)
    return (reached / reached[-1] <= number).sum(-1)
