"""Answers through replay: scores of continuations, and texts that are written side by side. Each
piece of work is done once.

prompt   ids[:prefill_len]         dense, once per distinct prompt
  branch   equal rows that follow    decoded once per question, counted as often as requests share
           them
    own rows                           decoded per request

Prompts of similar length are padded left into a batch and run once. Sessions of branches are forked
from it, and their rows are padded right. Every request counts as a sequence of its own in the
reads. A model that takes no padding runs one sequence at a time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from harness.errors import UserError
from harness.files import available_bytes
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.generation import Draft, GenerationRule, write
from harness.model.prompts import kept_bytes, prompt_bytes
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup
from harness.settings.config import GREEDY

CACHE_TOKENS = 32_768
"""Sequences times columns decoded at once, at most, so that a machine with more memory gets the
same batches. Where they do not fit into memory there are fewer: `tokens_at_once`."""
COPIES = 4
"""Of the rows of a batch that memory is counted for: the prompts', their branches', the requests',
and what a method's state holds."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, which a batch may take."""
PROMPT_TOKENS = 1024
"""Prompts times columns of one prefill, for scores: enough rows to keep the matrix products busy;
more only pad."""
HEAD_ROWS = 256
"""Rows that pass the output head at once: 50 MB of fp32 logits at a vocabulary of 50k, 130 MB at
128k."""

Document = tuple[str | None, int | None]
"""Task and number of a question."""
Item = TypeVar("Item")


class Request(NamedTuple):
    """A context, `ids[:context_len]`, whose continuation is scored, or that is to be continued.

    ids: the context, and the continuation to score if there is one. prefill_len: rows that attend
    densely, at least 1. final_length: T. Where text is generated, T is the context and
    `max_new_tokens`, as in live decoding; else the context and the longest choice of the question.
    document: requests of one document are the choices of one question. max_new_tokens: 0 where a
    continuation is scored. stops: texts that end the answer once it holds one. settings:
    arguments of transformers' `generate`, as JSON. Tokens are drawn by random numbers made from
    `seed`, the question's number and `repeat`.
    """

    ids: tuple[int, ...]
    context_len: int
    prefill_len: int
    final_length: int
    document: Document
    max_new_tokens: int = 0
    stops: tuple[str, ...] = ()
    settings: str = json.dumps(GREEDY)
    seed: int = 0
    repeat: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the dense rows."""
        return self.ids[: self.prefill_len]

    @property
    def num_rows(self) -> int:
        """Decode rows at most. The last token, given or generated, has none: its prediction is not
        used."""
        return len(self.ids) + self.max_new_tokens - 1 - self.prefill_len

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of the decode rows that are known beforehand."""
        return self.ids[self.prefill_len :][: self.num_rows]


class Score(NamedTuple):
    """Sum of a continuation's token log-probabilities in nats, and whether greedy decoding would
    produce it."""

    log_likelihood: float
    is_greedy: bool


# Shared work


class Branch(NamedTuple):
    """Requests after one prompt, by index, and the decode rows that are equal in all of them: of
    one document, or equal ones whose text is generated."""

    requests: list[int]
    shared: tuple[int, ...]


class SharedPrompt(NamedTuple):
    """A prompt and the branches that follow it, all of one final length."""

    ids: tuple[int, ...]
    final_length: int
    branches: list[Branch]


def share(requests: Sequence[Request]) -> list[SharedPrompt]:
    """The tree of prompts, branches and requests; longest prompts first, so that batches are even.

    Prompts count as equal only if T is equal too: a method may evict by T at the end of the prompt.
    """
    tree: dict[tuple, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, request in enumerate(requests):
        branch = request if request.max_new_tokens else request.document
        tree[request.prompt, request.final_length][branch].append(index)
    prompts = []
    for (ids, final_length), groups in tree.items():
        branches = []
        for group in groups.values():
            columns = zip(*(requests[index].rows for index in group), strict=False)
            equal = takewhile(lambda column: len(set(column)) == 1, columns)
            branches.append(Branch(group, tuple(column[0] for column in equal)))
        prompts.append(SharedPrompt(ids, final_length, branches))
    return sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.final_length), reverse=True)


class PromptBatch:
    """A batch of prompts after their prefill, whose branches are decoded slice by slice.

    root: the session of the prompts; its `reads` are those of the prefill. most_tokens: sequences
    times columns of a slice.
    """

    def __init__(
        self,
        prompts: Sequence[SharedPrompt],
        requests: Sequence[Request],
        attached: Attached,
        setup: Setup,
        most_tokens: int,
    ) -> None:
        self.requests = requests
        self.most_tokens = most_tokens
        self.device = attached.device
        self.branches: list[tuple[int, Branch]] = []
        requests_of_prompt = []
        for parent, prompt in enumerate(prompts):
            self.branches += [(parent, branch) for branch in prompt.branches]
            requests_of_prompt.append(sum(len(branch.requests) for branch in prompt.branches))
        ids, valid = pad([prompt.ids for prompt in prompts], self.device, left=True)
        self.num_columns = ids.shape[1]
        final_lengths = self.tensor([prompt.final_length for prompt in prompts])
        self.root = setup.replay(attached, final_lengths, self.num_columns)
        hidden = self.root.prefill(ids, valid, self.tensor(requests_of_prompt))
        self.last_hidden = hidden[:, -1:]  # [prompts, 1, hidden_size]

    def slices(self) -> Iterator[list[tuple[int, Branch]]]:
        """The branches, each with the index of its prompt in the batch, in slices of bounded
        memory."""

        def size(item: tuple[int, Branch]) -> tuple[int, int]:
            members = [self.requests[index] for index in item[1].requests]
            own = sum(len(request.rows) > len(item[1].shared) for request in members)
            return max(1, own), self.num_columns + max(request.num_rows for request in members)

        return batches(self.branches, size, self.most_tokens)

    def decode_shared(
        self, branches: Sequence[tuple[int, Branch]], more_columns: int = 0
    ) -> tuple[ReplaySession, Tensor]:
        """Fork the prompts to `branches` and decode the rows that each one's requests share.

        more_columns: room for rows that follow. Returns the session, which has read these rows
        only, and hidden states [branches, 1 + longest, hidden_size], the prompt's last row before
        the shared ones.
        """
        parents = self.tensor([parent for parent, _ in branches])
        shared, valid = pad([branch.shared for _, branch in branches], self.device)
        session = self.root.fork(parents, self.num_columns + shared.shape[1] + more_columns)
        hidden = [self.last_hidden[parents]]
        if shared.shape[1]:
            counts = self.tensor([len(branch.requests) for _, branch in branches])
            hidden.append(session.decode(shared, valid, counts))
        return session, torch.cat(hidden, 1)

    def tensor(self, values: list[Any]) -> Tensor:
        """The values on the model's device."""
        return torch.tensor(values, device=self.device)


def tokens_at_once(attached: Attached) -> int:
    """Sequences times columns that are decoded at once: `CACHE_TOKENS`, or its half, quarter, ...
    that fits into the free memory of the device, so that a few MiB more or less change nothing; 1,
    which is one sequence, of a model that takes no padding.

    Counted are `COPIES` of the rows of all layers and a layer's dense pass.
    """
    if attached.decoder.no_padding is not None:
        return 1
    token_bytes = COPIES * kept_bytes(attached, 1) + prompt_bytes(attached, 1)
    free = available_bytes(attached.device)
    most = CACHE_TOKENS
    while most > 1 and most * token_bytes > MEMORY_SHARE * free:
        most //= 2
    return most if attached.prompts is None else attached.prompts.same_batches(most)


def batches(
    items: Iterable[Item], size: Callable[[Item], tuple[int, int]], most: int
) -> Iterator[list[Item]]:
    """Consecutive items whose sequences times columns stay within `most`, at least one; size:
    (sequences, columns)."""
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


def pad(
    sequences: Sequence[Sequence[int]], device: torch.device, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Ids int [batch, longest], 0 where padded, and bool of the same shape, True where real."""
    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    real = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    padded = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return padded(rows).to(device), padded(real).to(device)


# Scores


def score(
    requests: Sequence[Request],
    attached: Attached,
    setup: Setup,
    on_scored: Callable[[int], object],
) -> tuple[list[Score], ReadStats]:
    """Scores in the order of `requests`, and their reads.

    on_scored: takes the number of requests scored since its last call. Raises UserError where the
    method did not run on every decode row.
    """
    scores: dict[int, Score] = {}
    reads = ReadStats()
    most_tokens = tokens_at_once(attached)

    def size(prompt: SharedPrompt) -> tuple[int, int]:
        return 1, len(prompt.ids)

    for group in batches(share(requests), size, min(PROMPT_TOKENS, most_tokens)):
        batch = PromptBatch(group, requests, attached, setup, most_tokens)
        reads += batch.root.reads
        for branches in batch.slices():
            states, of_choices = _decode_choices(batch, branches)
            if of_choices.rows:  # a request may have no decode row
                of_choices.check_fired()
            reads += of_choices
            scores |= _read_off(states, requests, attached)
            on_scored(len(states))
    return [scores[index] for index in range(len(requests))], reads


def _decode_choices(
    batch: PromptBatch, branches: Sequence[tuple[int, Branch]]
) -> tuple[dict[int, Tensor], ReadStats]:
    """Decode the shared rows of `branches`, then each request's own. Returns final states
    [rows, hidden_size] of each request, by index, from the last row of its prompt on."""
    trunk, hidden = batch.decode_shared(branches)
    reads = trunk.reads
    states: dict[int, Tensor] = {}
    # (branch, request, own rows), in groups in which none has twice the rows of another: little
    # padding, few forwards. Of a model that takes no padding all of a group have as many.
    groups: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
    for at, (_, branch) in enumerate(branches):
        num_shared = len(branch.shared)
        for index in branch.requests:
            states[index] = hidden[at, : 1 + num_shared]
            own = batch.requests[index].rows[num_shared:]
            if own:
                length = len(own) if batch.most_tokens == 1 else len(own).bit_length()
                groups[length].append((at, index, own))
    for group in groups.values():
        ids, valid = pad([own for _, _, own in group], batch.device)
        parents = batch.tensor([at for at, _, _ in group])
        tips = trunk.fork(parents, trunk.history.length + ids.shape[1])
        decoded = tips.decode(ids, valid)
        for (_, index, own), rows in zip(group, decoded, strict=True):
            states[index] = torch.cat([states[index], rows[: len(own)]])
        reads += tips.reads
    return states, reads


def _read_off(
    states: dict[int, Tensor], requests: Sequence[Request], attached: Attached
) -> dict[int, Score]:
    """Scores of the requests whose rows were decoded."""
    targets = {index: requests[index].ids[requests[index].context_len :] for index in states}
    # The continuation's first token is predicted by the row of the context's last: one row before
    # its own.
    rows = torch.cat([states[index][-len(tokens) :] for index, tokens in targets.items()])
    wanted = torch.tensor([*chain.from_iterable(targets.values())], device=attached.device)
    log_probs, greedy = [], []
    for hidden, tokens in zip(rows.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True):
        logits = attached.logits(hidden)  # [rows, vocab]
        own_logits = logits.gather(-1, tokens[:, None]).squeeze(-1)
        log_probs.append(own_logits - logits.logsumexp(-1))
        greedy.append(logits.argmax(-1) == tokens)
    lengths = [len(tokens) for tokens in targets.values()]
    sums, all_greedy = (
        torch.cat(log_probs).double().split(lengths),
        torch.cat(greedy).split(lengths),
    )
    scores = {}
    for index, total, same in zip(targets, sums, all_greedy, strict=True):
        scores[index] = Score(float(total.sum()), bool(same.all()))
    return scores


# Texts


class Written(NamedTuple):
    """A generated answer. tokens: the one that ended it included. at_limit: `max_new_tokens` ended
    it."""

    tokens: list[int]
    at_limit: bool


def generate(
    requests: Sequence[Request],
    attached: Attached,
    setup: Setup,
    on_answered: Callable[[int], object],
    *,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Written], ReadStats]:
    """The answers, in the order of `requests`, and their reads.

    The rest of the context after the prompt is decoded teacher-forced, then each step decodes one
    row of every sequence. The model's generation config holds as in lm-eval's `HFLM`
    (`GenerationRule`). tokenizer: spells tokens, to find the texts that end an answer. on_answered:
    takes the number of requests answered since its last call. Raises UserError where the method did
    not run on every decode row, or there was none; the full cache needs none.
    """
    written: dict[int, Written] = {}
    reads = ReadStats()

    def size(prompt: SharedPrompt) -> tuple[int, int]:
        rows = max(requests[branch.requests[0]].num_rows for branch in prompt.branches)
        return len(prompt.branches), len(prompt.ids) + rows

    most_tokens = tokens_at_once(attached)
    for group in batches(share(requests), size, most_tokens):
        batch = PromptBatch(group, requests, attached, setup, most_tokens)
        reads += batch.root.reads
        for branches in batch.slices():
            answers = []
            for _, branch in branches:
                request = requests[branch.requests[0]]
                answers.append(_Answer(branch, request, attached, tokenizer))
            most_left = max(answer.left for answer in answers)
            session, hidden = batch.decode_shared(branches, most_left - 1)
            last = batch.tensor([len(branch.shared) for _, branch in branches])
            writing = _Writing(session, attached)
            first_logits = attached.logits(hidden[range(len(last)), last])
            num_told = 0
            for _ in write(answers, first_logits, writing.feed):
                num_ended = sum(len(answer.requests) for answer in answers if answer.ended)
                on_answered(num_ended - num_told)
                num_told = num_ended
            reads += writing.reads + writing.session.reads
            for answer in answers:
                result = Written(answer.tokens, not answer.ended_itself)
                written |= dict.fromkeys(answer.requests, result)
    if reads.rows:
        reads.check_fired()
    elif not batch.root.reads_everything:
        raise UserError(
            "every answer ended with its first token, which the dense prompt gives, so the method "
            "decoded nothing: use prefill=question, or leave the task out"
        )
    return [written[index] for index in range(len(requests))], reads


class _Answer(Draft):
    """An answer under way, and the requests that ask for it.

    Besides the ends of its rule, the text of a stop ends it: lm-eval's criteria find it in the
    spelling of the last tokens.
    """

    def __init__(
        self,
        branch: Branch,
        request: Request,
        attached: Attached,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        stops = stop_sequences_criteria(
            tokenizer, list(request.stops), len(request.ids), batch_size=1
        )
        rule = GenerationRule(
            attached.model,
            request.ids,
            tokenizer=tokenizer,
            criteria=stops,
            max_new_tokens=request.max_new_tokens,
            **json.loads(request.settings),
        )
        key = f"{request.seed}/{request.document[1]}/{request.repeat}"
        super().__init__(request.ids, rule, key)
        self.requests = branch.requests


class _Writing:
    """A batch of answers under way in replay.

    A sequence that has ended is padding. Once half of a batch has ended, the others are forked into
    a batch of their own. reads: of the sessions so far.
    """

    def __init__(self, session: ReplaySession, attached: Attached) -> None:
        self.session = session
        self.attached = attached
        self.reads = ReadStats()

    def feed(self, answers: Sequence[_Answer]) -> tuple[Sequence[_Answer], Tensor]:
        """Run the last token of each answer."""
        device = self.attached.device
        going = [at for at, answer in enumerate(answers) if not answer.ended]
        if 2 * len(going) <= len(answers):
            self.reads += self.session.reads
            answers = [answers[at] for at in going]
            most = max(answer.left for answer in answers)
            columns = self.session.history.length + most
            self.session = self.session.fork(torch.tensor(going, device=device), columns)
        ids = torch.tensor([[answer.tokens[-1]] for answer in answers], device=device)
        valid = torch.tensor([[not answer.ended] for answer in answers], device=device)
        counts = torch.tensor([len(answer.requests) for answer in answers], device=device)
        hidden = self.session.decode(ids, valid, counts)[:, -1]
        return answers, self.attached.logits(hidden)
