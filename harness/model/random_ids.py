"""Token ids for a model with random weights, to which every text is as good as another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from harness.files import text_sha256


class RandomIds:
    """Stands in for a tokenizer: a text has one random id for each of its words.

    The ids are uniform over the vocabulary and follow from the text alone, so they are the same in
    every run and on every machine. A text in which special tokens are asked for begins with
    `start`, if that is not None.
    """

    eos_token_id = None
    """No text ends before its limit."""

    def __init__(self, vocab_size: int, start: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.start = start

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        """Ids of the whole text, as of a transformers tokenizer; verbose plays no part."""
        generator = random.Random(text_sha256(text))
        ids = generator.choices(range(self.vocab_size), k=len(text.split()))
        has_start = add_special_tokens and self.start is not None
        return {"input_ids": [self.start, *ids] if has_start else ids}  # type: ignore[list-item]

    def decode(self, ids: Iterable[int] | Sequence[int]) -> str:
        """The ids as decimal numbers: they stand for no words."""
        return " ".join(str(int(number)) for number in ids)
