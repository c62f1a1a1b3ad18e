"""Continuations to score, and the tree of what they share.

prompt   ids[:prefill_len]       dense, once per distinct prompt
  branch   equal rows that follow  decoded once per document, counted as often as requests share them
    leaf     the rest                decoded per request
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

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


def share(requests: Sequence[Request]) -> list[SharedContext]:
    """The tree of prompts, branches and requests; longest prompts first, so that batches are even.

    Prompts count as equal where T is equal too: a method may evict by T at the end of the prompt.
    """
    tree: dict[tuple, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, request in enumerate(requests):
        tree[request.prompt, request.final_length][request.document].append(index)
    prompts = []
    for (ids, final_length), documents in tree.items():
        branches = [Branch(group, _common([requests[index].rows for index in group])) for group in documents.values()]
        prompts.append(SharedContext(ids, final_length, branches))
    return sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.final_length), reverse=True)


def _common(sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest common beginning."""
    columns = zip(*sequences, strict=False)
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
