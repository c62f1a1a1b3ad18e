"""Log-likelihoods of continuations through replay, each piece of work done once.

Requests with the same prompt share its prefill, and those of one document share the decode rows in which they
do not yet differ: the end of the context, and the tokens with which several choices begin (`requests.share`).

Prompts of similar length are padded left into one batch, later rows are padded right. The output head runs
only on the rows that predict a token of a continuation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from harness.accuracy.requests import Branch, Leaf, Request, SharedContext, share
from harness.model.attach import Attached
from harness.replay.session import ReplaySession
from harness.sizes import ReadStats

PROMPT_TOKENS = 1024
"""Prompts times columns of one prefill: enough rows to keep the matrix products busy; more would only pad more."""

CACHE_TOKENS = 8192
"""Sequences times columns decoded at once: 0.4 GB of cache in fp32 on the default model, 4 GB in fp16 on
Llama-2-7B."""

HEAD_ROWS = 256
"""Rows that pass the output head at once: 50 MB of fp32 logits at a vocabulary of 50k, 130 MB at 128k."""

Item = TypeVar("Item")
OpenSession = Callable[[Tensor, int], ReplaySession]
"""Makes a fresh session from final lengths, int [batch], and a number of columns."""


class Score(NamedTuple):
    """Sum of a continuation's token log-probabilities in nats, and whether greedy decoding would produce it."""

    log_likelihood: float
    is_greedy: bool


def score(
    requests: Sequence[Request],
    attached: Attached,
    open_session: OpenSession,
    on_scored: Callable[[int], object],
) -> tuple[list[Score], ReadStats]:
    """Scores in the order of `requests`, and what was read for them, every request counted as a sequence of
    its own.

    Args:
        open_session: makes the session of a batch of prompts.
        on_scored: told how many more requests have been scored.

    Raises:
        UserError: the method did not run on every decode row.
    """
    scores: dict[int, Score] = {}
    reads = ReadStats()
    for prompts in _batches(share(requests), lambda prompt: (1, len(prompt.ids)), PROMPT_TOKENS):
        batch = PromptBatch(prompts, requests, attached, open_session)
        reads += batch.root.reads
        for branches in batch.slices():
            hidden, decoded = batch.decode(branches)
            decoded.check_fired()
            reads += decoded
            scores |= read_off(hidden, requests, attached)
            on_scored(len(hidden.addresses))
    return [scores[index] for index in range(len(requests))], reads


class HiddenRows:
    """Final hidden states of several forwards, end to end.

    addresses: for each request, by index, where the last row of its prompt and then its decode rows lie.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.addresses: dict[int, list[int]] = defaultdict(list)
        self._size = 0

    def add(self, hidden: Tensor, owners: Iterable[tuple[Sequence[int], int]]) -> None:
        """Append hidden [batch, rows, hidden_size]; `owners`: for each sequence its requests and number of
        real rows."""
        batch, width, _ = hidden.shape
        for at, (requests, count) in enumerate(owners):
            start = self._size + at * width
            for index in requests:
                self.addresses[index] += range(start, start + count)
        self.blocks.append(hidden.flatten(0, 1))
        self._size += batch * width


class PromptBatch:
    """A batch of prompts after their prefill, whose branches are decoded slice by slice."""

    def __init__(
        self,
        prompts: Sequence[SharedContext],
        requests: Sequence[Request],
        attached: Attached,
        open_session: OpenSession,
    ) -> None:
        self.requests = requests
        self.device = attached.device
        self.branches = [(parent, branch) for parent, prompt in enumerate(prompts) for branch in prompt.branches]
        self.final_lengths = self._tensor([prompt.final_length for prompt in prompts])
        ids, valid = _pad([prompt.ids for prompt in prompts], self.device, left=True)
        self.num_columns = ids.shape[1]
        self.root = open_session(self.final_lengths, self.num_columns)
        counts = self._tensor([sum(len(branch.requests) for branch in prompt.branches) for prompt in prompts])
        self.last_hidden = self.root.prefill(ids, valid, counts)[:, -1:]  # [prompts, 1, hidden_size]

    def slices(self) -> Iterator[list[tuple[int, Branch]]]:
        """The branches, each with its prompt's place in the batch, in slices of bounded memory."""

        def size(item: tuple[int, Branch]) -> tuple[int, int]:
            longest = max(len(self.requests[index].rows) for index in item[1].requests)
            return len(item[1].requests), self.num_columns + longest

        yield from _batches(self.branches, size, CACHE_TOKENS)

    def decode(self, branches: Sequence[tuple[int, Branch]]) -> tuple[HiddenRows, ReadStats]:
        """Decode the shared rows of `branches`, then each request's own; what was read for both."""
        parents = self._tensor([parent for parent, _ in branches])
        rows = HiddenRows()
        rows.add(self.last_hidden[parents], [(branch.requests, 1) for _, branch in branches])

        shared, valid = _pad([branch.shared for _, branch in branches], self.device)
        trunk = self.root.fork(parents, self.num_columns + shared.shape[1])
        if shared.shape[1]:
            hidden = trunk.decode(shared, valid, self._tensor([len(branch.requests) for _, branch in branches]))
            rows.add(hidden, [(branch.requests, len(branch.shared)) for _, branch in branches])

        reads = trunk.reads
        leaves = [
            Leaf(at, index, self.requests[index].rows[len(branch.shared) :])
            for at, (_, branch) in enumerate(branches)
            for index in branch.requests
        ]
        for group in _alike([leaf for leaf in leaves if leaf.rows]):
            own, valid = _pad([leaf.rows for leaf in group], self.device)
            stems = self._tensor([leaf.branch for leaf in group])
            tips = trunk.fork(stems, self.num_columns + shared.shape[1] + own.shape[1])
            rows.add(tips.decode(own, valid), [([leaf.request], len(leaf.rows)) for leaf in group])
            reads += tips.reads
        return rows, reads

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)


def read_off(rows: HiddenRows, requests: Sequence[Request], attached: Attached) -> dict[int, Score]:
    """Scores of the requests whose rows are given, by index. A row shared by several passes the head once."""
    targets = {index: requests[index].ids[requests[index].context_len :] for index in rows.addresses}
    # The continuation's first token is predicted by the row of the context's last: one row before its own.
    addresses = [rows.addresses[index][-len(tokens) :] for index, tokens in targets.items()]
    device = attached.device
    wanted = torch.tensor([token for tokens in targets.values() for token in tokens], device=device)
    unique, where = torch.unique(
        torch.tensor([at for each in addresses for at in each], device=device), return_inverse=True
    )
    hidden = torch.cat(rows.blocks)[unique]
    log_probs = torch.empty(len(wanted), device=device)
    greedy = torch.empty(len(wanted), dtype=torch.bool, device=device)
    for start in range(0, len(unique), HEAD_ROWS):
        logits = attached.logits(hidden[start : start + HEAD_ROWS])  # [rows, vocab]
        here = ((where >= start) & (where < start + HEAD_ROWS)).nonzero().squeeze(-1)
        row, token = where[here] - start, wanted[here]
        log_probs[here] = logits[row, token] - logits.logsumexp(-1)[row]
        greedy[here] = logits.argmax(-1)[row] == token
    lengths = [len(tokens) for tokens in targets.values()]
    sums, all_greedy = log_probs.double().split(lengths), greedy.split(lengths)
    return {
        index: Score(float(total.sum()), bool(same.all()))
        for index, total, same in zip(targets, sums, all_greedy, strict=True)
    }


def _alike(leaves: Iterable[Leaf]) -> Iterator[list[Leaf]]:
    """Groups in which no leaf has twice the rows of another: less padding than one group, few forwards."""
    groups: dict[int, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        groups[len(leaf.rows).bit_length()].append(leaf)
    yield from groups.values()


def _batches(items: Iterable[Item], size: Callable[[Item], tuple[int, int]], most: int) -> Iterator[list[Item]]:
    """Runs of items whose sequences times columns stay within `most`, of at least one item; size: (sequences,
    columns)."""
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


def _pad(sequences: Sequence[Sequence[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids int [batch, longest], 0 where padded, and where they are real, bool alike."""
    width = max(map(len, sequences))
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    column = torch.arange(width)
    valid = column >= width - lengths[:, None] if left else column < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long)
    ids[valid] = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long)
    return ids.to(device), valid.to(device)
