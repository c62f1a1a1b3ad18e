"""Texts to token requests: their tokens, the rows that attend densely, what happens beyond the model's limit.

Tokens are those of lm-eval's `HFLM` with default settings, so that the full cache gives its numbers and its texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lm_eval.models.utils import has_bos_prefix

from harness.accuracy.requests import Document, GenerationRequest, Request
from harness.errors import UserError
from harness.model.load import LoadedModel

FEWSHOT_SEPARATOR = "\n\n"  # lm-eval's default between examples

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""(context, continuation) as texts, then the tokens of each: what lm-eval hands over."""


class Prefill(NamedTuple):
    """Which rows of a request attend densely; the rest are decode rows, on which a method acts.

    mode: `dense`: the context but for its last row where a continuation is scored, and all of it where text is
        generated, as when serving.
        `question`: the prompt ends before the token that holds the first character of `marker`, so that the cache is
        reduced before the question is known.
        `artifact`: the prompt is decoded too, but for its first floor(T * budget) tokens, as in the paper's Fig 11.
    marker: text with which the question starts; its last occurrence in the context counts.
    budget: share of T that the method keeps.
    """

    mode: str
    marker: str = FEWSHOT_SEPARATOR
    budget: float = 1.0


class Encoder:
    """Makes the token requests of a model.

    too_long: what happens to a context beyond the model's limit; `truncate` leaves out its beginning, as `HFLM` does.
    truncated: the questions of which that was done.
    """

    def __init__(self, loaded: LoadedModel, prefill: Prefill, too_long: Literal["refuse", "truncate"]) -> None:
        if loaded.tokenizer is None:
            raise UserError(f"model {loaded.name} has no tokenizer: tasks are text, choose a model that has one")
        self.tokenizer = loaded.tokenizer
        self.max_length = loaded.max_length
        self.truncated: set[Document] = set()
        self._prefill = prefill
        self._too_long = too_long

    @property
    def prefix_token_id(self) -> int:
        """What an empty context consists of."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Special tokens as the tokenizer adds them, unless the text already begins with the prefix token."""
        return self.tokenizer(text, **self._special(text, add_special_tokens), verbose=False)["input_ids"]

    def choices(self, documents: Sequence[Document], encoded: Sequence[Encoded]) -> list[Request]:
        """Continuations to score; those of one document have one T, that of the longest."""
        contexts = [
            self._fit(document, context, self.max_length + 1 - len(continuation))
            for document, (_, context, continuation) in zip(documents, encoded, strict=True)
        ]
        longest: dict[Document, int] = defaultdict(int)
        for document, context, (_, _, continuation) in zip(documents, contexts, encoded, strict=True):
            longest[document] = max(longest[document], len(context) + len(continuation))
        return [
            self._request(document, each, context, longest[document])
            for document, each, context in zip(documents, encoded, contexts, strict=True)
        ]

    def windows(self, document: Document, windows: Sequence[tuple[list[int], list[int]]]) -> list[Request]:
        """A text to score as (context, continuation) windows within the model's limit, each a sequence of its own."""
        if self._prefill.mode == "question":
            raise UserError(
                f"task {document[0]}: scores whole texts, in which prefill=question finds no question; "
                "use prefill=dense or artifact"
            )
        return [
            self._request(document, (("", ""), context, continuation), context, len(context) + len(continuation))
            for context, continuation in windows
        ]

    def generation(self, document: Document, text: str, max_new_tokens: int, stops: Sequence[str]) -> GenerationRequest:
        """A context to continue."""
        whole = self.encode(text) or [self.prefix_token_id]
        context = self._fit(document, whole, self.max_length - max_new_tokens)
        final_length, cut = len(context) + max_new_tokens, len(whole) - len(context)
        prefill_len = self._prefill_len(document, text, cut, len(context), final_length)
        if prefill_len + 1 >= final_length:
            raise UserError(
                f"{_where(document)}: max_gen_toks={max_new_tokens} leaves no decode row, so no method could act on it"
            )
        return GenerationRequest(tuple(context), prefill_len, max_new_tokens, tuple(stops), document)

    def _request(self, document: Document, encoded: Encoded, context: list[int], final_length: int) -> Request:
        (text, _), whole, continuation = encoded
        cut = len(whole) - len(context)
        text = text.rstrip()  # as lm-eval encodes a context
        prefill_len = self._prefill_len(document, text, cut, len(context) - 1, final_length)
        num_tokens = len(context) + len(continuation)
        if num_tokens <= prefill_len + 1:  # the last token is predicted, not run
            raise UserError(
                f"{_where(document)}: {num_tokens} tokens leave no decode row, so no method could act on it"
            )
        return Request((*context, *continuation), len(context), prefill_len, final_length, document)

    def _fit(self, document: Document, context: list[int], most: int) -> list[int]:
        """The last `most` tokens of a context, where that is allowed."""
        if len(context) <= most:
            return context
        if self._too_long == "refuse" or most < 1:
            ways = "lower num_fewshot, choose a model with a longer context"
            ways += "" if most < 1 else ", or too_long=truncate"
            raise UserError(
                f"{_where(document)}: context and answer have {len(context) - most + self.max_length} tokens, "
                f"the model takes {self.max_length}; {ways}"
            )
        self.truncated.add(document)
        return context[-most:]

    def _prefill_len(self, document: Document, text: str, cut: int, most: int, final_length: int) -> int:
        """Dense rows of a context whose first `cut` tokens have been left out: at most `most`, and at least 1."""
        end = most
        if self._prefill.mode == "artifact":
            end = int(final_length * self._prefill.budget)
        elif self._prefill.mode == "question":
            end = self._question(document, text, cut)
        return max(1, min(end, most))

    def _question(self, document: Document, text: str, cut: int) -> int:
        """Tokens before the question."""
        at = self._token_of(self._prefill.marker, text)
        if at is None or at <= cut:
            raise UserError(
                f"{_where(document)}: prefill=question needs {self._prefill.marker!r} inside the context, where the "
                "question starts; use prefill=dense or artifact, or num_fewshot above 0"
            )
        return at - cut

    def _token_of(self, marker: str, text: str) -> int | None:
        """Index of the token that holds the first character of the last `marker`; None where there is none."""
        at = text.rfind(marker)
        if at < 0:
            return None
        if not self.tokenizer.is_fast:
            raise UserError("prefill=question needs a fast tokenizer, which knows where in the text its tokens lie")
        encoded = self.tokenizer(text, **self._special(text), return_offsets_mapping=True, verbose=False)
        return next(index for index, (_, stop) in enumerate(encoded["offset_mapping"]) if stop > at)

    def _special(self, text: str, add_special_tokens: bool | None = None) -> dict[str, bool]:
        if add_special_tokens is not None:
            return {"add_special_tokens": add_special_tokens}
        starts = has_bos_prefix(text, self.tokenizer.decode(self.prefix_token_id))
        return {"add_special_tokens": False} if starts else {}


def _where(document: Document) -> str:
    return f"task {document[0]}, question {document[1]}"
