"""Texts through replay: the answers of a generated task, written side by side. They share prompts
as in `harness.scoring.answers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.budgets import ReadStats
from harness.model.generation import Draft, GenerationRule, write
from harness.replay.session import ReplaySession
from harness.replay.setup import Setup
from harness.scoring.answers import (
    Branch,
    PromptBatch,
    Request,
    SharedPrompt,
    prompt_batches,
    tokens_at_once,
)


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
    for group in prompt_batches(requests, attached, size, most_tokens):
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
            **request.sampling.settings,
        )
        super().__init__(request.ids, rule, request.key)
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
