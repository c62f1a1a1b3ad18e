"""Requests of a task in tokens, the tree of prompts and rows that requests share, and their batches in replay.

prompt   ids[:prefill_len]         dense, once per distinct prompt
  branch   equal rows that follow    decoded once per document, counted as often as requests share them
    own rows                           decoded per request

Prompts are padded left into a batch and run once; sessions of branches are forked from it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.replay import ReplaySession

CACHE_TOKENS = 8192
"""Sequences times columns decoded at once: 0.4 GB of cache in fp32 on the default model, 4 GB in fp16 on
Llama-2-7B."""
OpenSession = Callable[[Tensor, int], ReplaySession]
"""Makes a fresh session from final lengths, int [batch], and a number of columns."""

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
        """Tokens of the decode rows. The last token of the continuation is not run: its prediction is not scored."""
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
Item = TypeVar("Item")


class Branch(NamedTuple):
    """Requests of one document after one prompt, by index, and the decode rows that are equal in all of them."""

    requests: list[int]
    shared: tuple[int, ...]


class SharedContext(NamedTuple):
    """A prompt and the branches that follow it, all of one final length."""

    ids: tuple[int, ...]
    final_length: int
    branches: list[Branch]


def share(requests: Sequence[R], branch: Callable[[R], Hashable]) -> list[SharedContext]:
    """The tree of prompts, branches and requests; longest prompts first, so that batches are even.

    Prompts count as equal only if T is equal too: a method may evict by T at the end of the prompt. branch: the key
    that requests of one branch have in common.
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


class PromptBatch:
    """A batch of prompts after their prefill, whose branches are decoded slice by slice.

    root: the session of the prompts; its `reads` are those of the prefill.
    """

    def __init__(
        self,
        prompts: Sequence[SharedContext],
        requests: Sequence[AnyRequest],
        attached: Attached,
        open_session: OpenSession,
    ) -> None:
        self.requests = requests
        self.device = attached.device
        self.branches = [(parent, branch) for parent, prompt in enumerate(prompts) for branch in prompt.branches]
        self.final_lengths = self._tensor([prompt.final_length for prompt in prompts])
        ids, valid = pad([prompt.ids for prompt in prompts], self.device, left=True)
        self.num_columns = ids.shape[1]
        self.root = open_session(self.final_lengths, self.num_columns)
        counts = self._tensor([sum(len(branch.requests) for branch in prompt.branches) for prompt in prompts])
        self.last_hidden = self.root.prefill(ids, valid, counts)[:, -1:]  # [prompts, 1, hidden_size]

    def slices(self) -> Iterator[list[tuple[int, Branch]]]:
        """The branches, each with the index of its prompt in the batch, in slices of bounded memory."""

        def size(item: tuple[int, Branch]) -> tuple[int, int]:
            members = [self.requests[index] for index in item[1].requests]
            own = sum(len(request.rows) > len(item[1].shared) for request in members)
            return max(1, own), self.num_columns + max(request.num_rows for request in members)

        yield from batches(self.branches, size, CACHE_TOKENS)

    def decode_shared(
        self, branches: Sequence[tuple[int, Branch]], more_columns: int = 0
    ) -> tuple[ReplaySession, Tensor]:
        """Fork the prompts to `branches` and decode the rows that each one's requests share.

        more_columns: room for rows that follow. Returns the session, which has read these rows only, and hidden states
        [branches, 1 + longest, hidden_size], the prompt's last row before the shared ones.
        """
        parents = self._tensor([parent for parent, _ in branches])
        shared, valid = pad([branch.shared for _, branch in branches], self.device)
        session = self.root.fork(parents, self.num_columns + shared.shape[1] + more_columns)
        hidden = [self.last_hidden[parents]]
        if shared.shape[1]:
            counts = self._tensor([len(branch.requests) for _, branch in branches])
            hidden.append(session.decode(shared, valid, counts))
        return session, torch.cat(hidden, 1)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)


def batches(items: Iterable[Item], size: Callable[[Item], tuple[int, int]], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sequences times columns stay within `most`, at least one; size: (sequences, columns)."""
    batch: list[Item] = []
    count = width = 0
    for item in items:
        sequences, columns = size(item)
        if batch and (count + sequences) * max(width, columns) > most:
            yield batch
            batch, count, width = [], 0, 0
        batch.append(item)
        count, width = count + sequences, max(width, columns)
    if batch:
        yield batch


def pad(sequences: Sequence[Sequence[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids int [batch, longest], 0 where padded, and bool of the same shape, True where real."""
    width = max(map(len, sequences))
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    column = torch.arange(width)
    valid = column >= width - lengths[:, None] if left else column < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long)
    ids[valid] = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long)
    return ids.to(device), valid.to(device)
