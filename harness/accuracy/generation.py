"""Greedy answers through replay: the model's own tokens as decode rows, each reading the rows that the method selects.

The prompt attends densely, the rest of the context is decoded teacher-forced, and then each step decodes one row of
every sequence. Requests with the same prompt share its prefill; equal requests run once. A sequence that has ended is
padding. Once half of a batch has ended, the others are forked into a batch of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from transformers import PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from harness.accuracy.requests import (
    CACHE_TOKENS,
    Branch,
    GenerationRequest,
    OpenSession,
    PromptBatch,
    SharedContext,
    batches,
    share,
)
from harness.errors import UserError
from harness.model.attach import Attached
from harness.replay import ReplaySession
from harness.sizes import ReadStats


def generate(
    requests: Sequence[GenerationRequest],
    attached: Attached,
    open_session: OpenSession,
    tokenizer: PreTrainedTokenizerBase,
    on_answered: Callable[[int], object],
) -> tuple[list[list[int]], ReadStats]:
    """The tokens of each answer, the one that ended it included, in the order of `requests`; and their reads, with
    every request as a sequence of its own.

    open_session: makes the session of a batch of prompts. tokenizer: spells tokens, to find the texts that end an
    answer. on_answered: takes the number of requests answered since its last call. Raises UserError where the method
    did not run on every decode row, or there was none; the full cache needs none.
    """
    tokens: dict[int, list[int]] = {}
    reads, greedy = ReadStats(), _Greedy(attached)

    def size(prompt: SharedContext) -> tuple[int, int]:
        rows = max(requests[branch.requests[0]].num_rows for branch in prompt.branches)
        return len(prompt.branches), len(prompt.ids) + rows

    for group in batches(share(requests, lambda request: request), size, CACHE_TOKENS):
        batch = PromptBatch(group, requests, attached, open_session)
        reads += batch.root.reads
        for branches in batch.slices():
            begun = [_Answer(branch, requests[branch.requests[0]], tokenizer, greedy.eos) for _, branch in branches]
            session, hidden = batch.decode_shared(branches, max(answer.left for answer in begun) - 1)
            last = torch.tensor([len(branch.shared) for _, branch in branches], device=hidden.device)
            reads += _decode(begun, session, hidden[range(len(last)), last], greedy, on_answered)
            tokens |= {index: answer.tokens for answer in begun for index in answer.requests}
    if reads.rows:
        reads.check_fired()
    elif not batch.root.reads_everything:
        raise UserError(
            "every answer ended with its first token, which the dense prompt gives, so the method decoded nothing: use "
            "prefill=question, or leave the task out"
        )
    return [tokens[index] for index in range(len(requests))], reads


class _Answer:
    """An answer under way: the requests that ask for it, its tokens so far, and whether it has ended.

    It ends with a token of `eos`, with the text of a stop (found by lm-eval's criteria in the spelling of the last
    tokens), or at the request's `max_new_tokens`.
    """

    def __init__(
        self, branch: Branch, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase, eos: set[int]
    ) -> None:
        self.requests = branch.requests
        self.request = request
        self.tokens: list[int] = []
        self.ended = False
        self._eos = eos
        self._criteria = stop_sequences_criteria(tokenizer, list(request.stops), 0, 1)
        self._looks_back = max((each.sequence_id_len for each in self._criteria), default=0)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_new_tokens - len(self.tokens)

    def take(self, token: int) -> None:
        """Append the next token."""
        self.tokens.append(token)
        last = torch.tensor([self.tokens[-self._looks_back :]])
        stopped = any(criterion(last, None) for criterion in self._criteria)
        self.ended = token in self._eos or not self.left or stopped


class _Greedy:
    """The most likely next token, with the settings of the model's generation config that `HFLM` keeps too: the tokens
    that end an answer, and a repetition penalty."""

    def __init__(self, attached: Attached) -> None:
        config = attached.model.generation_config
        ends, penalty = config.eos_token_id, config.repetition_penalty
        self.eos = set(ends) if isinstance(ends, list) else {ends} - {None}
        self._attached = attached
        self._penalty = RepetitionPenaltyLogitsProcessor(penalty) if penalty not in (None, 1.0) else None

    def next_tokens(self, hidden: Tensor, answers: Sequence[_Answer]) -> list[int]:
        """One token for each of `answers`, whose last rows' final hidden states [batch, hidden_size] are given."""
        logits = self._attached.logits(hidden)
        if self._penalty is not None:
            so_far = [torch.tensor([[*each.request.ids, *each.tokens]], device=hidden.device) for each in answers]
            rows = zip(so_far, logits.split(1), strict=True)
            logits = torch.cat([self._penalty(tokens, row) for tokens, row in rows])
        return logits.argmax(-1).tolist()


def _decode(
    answers: Sequence[_Answer],
    session: ReplaySession,
    hidden: Tensor,
    greedy: _Greedy,
    on_answered: Callable[[int], object],
) -> ReadStats:
    """Decode until every answer has ended; returns the reads of `session` and its forks.

    hidden: of each context's last row, [batch, hidden_size].
    """
    reads, device = ReadStats(), hidden.device
    while True:
        for answer, token in zip(answers, greedy.next_tokens(hidden, answers), strict=True):
            if not answer.ended:
                answer.take(token)
                on_answered(len(answer.requests) * answer.ended)
        going = [at for at, answer in enumerate(answers) if not answer.ended]
        if not going:
            return reads + session.reads
        if 2 * len(going) <= len(answers):
            reads += session.reads
            answers = [answers[at] for at in going]
            most = max(answer.left for answer in answers)
            session = session.fork(torch.tensor(going, device=device), session.history.length + most)
        ids = torch.tensor([[answer.tokens[-1]] for answer in answers], device=device)
        valid = torch.tensor([[not answer.ended] for answer in answers], device=device)
        counts = torch.tensor([len(answer.requests) for answer in answers], device=device)
        hidden = session.decode(ids, valid, counts)[:, -1]
