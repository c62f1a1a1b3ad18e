"""Log-likelihoods of continuations through replay, each piece of work done once.

Requests with the same prompt share its prefill, and those of one document share the decode rows in which they
do not yet differ: the end of the context, and the tokens with which several choices begin (`requests.share`).

Prompts of similar length are padded left into one batch, later rows are padded right. The output head runs
only on the rows that predict a token of a continuation.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.accuracy.requests import Branch, OpenSession, PromptBatch, Request, batches, pad, share
from harness.model.attach import Attached
from harness.sizes import ReadStats

PROMPT_TOKENS = 1024
"""Prompts times columns of one prefill: enough rows to keep the matrix products busy; more would only pad more."""
HEAD_ROWS = 256
"""Rows that pass the output head at once: 50 MB of fp32 logits at a vocabulary of 50k, 130 MB at 128k."""


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
    """Scores in the order of `requests`, and their reads, with every request as a sequence of its own.

    open_session: makes the session of a batch of prompts. on_scored: takes the number of requests scored since its last
    call. Raises UserError where the method did not run on every decode row.
    """
    scores: dict[int, Score] = {}
    reads = ReadStats()
    prompts = share(requests, lambda request: request.document)
    for group in batches(prompts, lambda prompt: (1, len(prompt.ids)), PROMPT_TOKENS):
        batch = PromptBatch(group, requests, attached, open_session)
        reads += batch.root.reads
        for branches in batch.slices():
            hidden, decoded = decode(batch, branches)
            decoded.check_fired()
            reads += decoded
            scores |= read_off(hidden, requests, attached)
            on_scored(len(hidden.addresses))
    return [scores[index] for index in range(len(requests))], reads


class HiddenRows:
    """Final hidden states of several forwards, one after another.

    addresses: for each request, by index, the positions of the last row of its prompt and then of its decode rows.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.addresses: dict[int, list[int]] = defaultdict(list)
        self._size = 0

    def add(self, hidden: Tensor, owners: Sequence[tuple[Sequence[int], int]]) -> None:
        """Append hidden [batch, rows, hidden_size]. owners: for each sequence its requests and number of real rows."""
        batch, width, _ = hidden.shape
        for at, (requests, count) in enumerate(owners):
            start = self._size + at * width
            for index in requests:
                self.addresses[index] += range(start, start + count)
        self.blocks.append(hidden.flatten(0, 1))
        self._size += batch * width


def decode(batch: PromptBatch, branches: Sequence[tuple[int, Branch]]) -> tuple[HiddenRows, ReadStats]:
    """Decode the shared rows of `branches`, then each request's own; returns hidden states and reads of both."""
    trunk, hidden = batch.decode_shared(branches)
    rows, reads = HiddenRows(), trunk.reads
    rows.add(hidden, [(branch.requests, 1 + len(branch.shared)) for _, branch in branches])
    # (branch, request, own rows), in groups in which none has twice the rows of another: little padding, few forwards.
    groups: dict[int, list[tuple[int, int, Sequence[int]]]] = defaultdict(list)
    for at, (_, branch) in enumerate(branches):
        for index in branch.requests:
            own = batch.requests[index].rows[len(branch.shared) :]
            if own:
                groups[len(own).bit_length()].append((at, index, own))
    for group in groups.values():
        ids, valid = pad([own for _, _, own in group], batch.device)
        tips = trunk.fork(
            torch.tensor([at for at, _, _ in group], device=batch.device), trunk.history.length + ids.shape[1]
        )
        rows.add(tips.decode(ids, valid), [([index], len(own)) for _, index, own in group])
        reads += tips.reads
    return rows, reads


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
