"""What a task asks of a method in tokens, and the tree of what requests share.

prompt   ids[:prefill_len]       dense, once per distinct prompt
  branch   equal rows that follow  decoded once per document, counted as often as requests share them
    leaf     the rest                decoded per request
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

Document = tuple[str | None, int | None]
"""Task and number of a question."""


class Request(NamedTuple):
    """One continuation to score: `ids[context_len:]`, given `ids[:context_len]`.

    prefill_len: rows that attend densely, at least 1. final_length: T, context and longest choice of the
    document. document: requests of one document are the choices of one question.
    """

    ids: tuple[int, ...]
    context_len: int
    prefill_len: int
    final_length: int
    document: Document

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the dense rows."""
        return self.ids[: self.prefill_len]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of the decode rows; the last token of the continuation has none, as nothing it predicts is
        scored."""
        return self.ids[self.prefill_len : -1]

    @property
    def num_rows(self) -> int:
        """Decode rows."""
        return len(self.ids) - 1 - self.prefill_len


class GenerationRequest(NamedTuple):
    """One context, `ids`, to be continued by at most `max_new_tokens` tokens.

    prefill_len: rows that attend densely, at least 1; the rest of the context is decoded. stops: texts that end the
    answer once it holds one.
    """

    ids: tuple[int, ...]
    prefill_len: int
    max_new_tokens: int
    stops: tuple[str, ...]
    document: Document

    @property
    def context_len(self) -> int:
        """Tokens of the context."""
        return len(self.ids)

    @property
    def final_length(self) -> int:
        """T, as in live decoding: the context and the longest answer that is allowed."""
        return len(self.ids) + self.max_new_tokens

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the dense rows."""
        return self.ids[: self.prefill_len]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of the decode rows that are known beforehand: the rest of the context."""
        return self.ids[self.prefill_len :]

    @property
    def num_rows(self) -> int:
        """Decode rows at most; the last token of an answer has none."""
        return self.final_length - 1 - self.prefill_len


AnyRequest = Request | GenerationRequest
R = TypeVar("R", Request, GenerationRequest)


class Branch(NamedTuple):
    """Requests of one document after one prompt, by index, and the decode rows that are equal in all of them."""

    requests: list[int]
    shared: tuple[int, ...]


class Leaf(NamedTuple):
    """A request's own decode rows, after those of its branch (its place in a slice)."""

    branch: int
    request: int
    rows: tuple[int, ...]


class SharedContext(NamedTuple):
    """A prompt and the branches that follow it, all of one final length."""

    ids: tuple[int, ...]
    final_length: int
    branches: list[Branch]


def share(requests: Sequence[R], branch: Callable[[R], Hashable]) -> list[SharedContext]:
    """The tree of prompts, branches and requests; longest prompts first, so that batches are even.

    Prompts count as equal where T is equal too: a method may evict by T at the end of the prompt. branch: equal of
    requests that are to share one.
    """
    tree: dict[tuple, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, request in enumerate(requests):
        tree[request.prompt, request.final_length][branch(request)].append(index)
    prompts = []
    for (ids, final_length), branches in tree.items():
        shared = [Branch(group, _common([requests[index].rows for index in group])) for group in branches.values()]
        prompts.append(SharedContext(ids, final_length, shared))
    return sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.final_length), reverse=True)


def _common(sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest common beginning."""
    columns = zip(*sequences, strict=False)
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
