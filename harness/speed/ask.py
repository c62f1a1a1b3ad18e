"""Questions to one context (`Model.ask`): the context runs once, its cache is reduced once, and
each question goes on from there.

    1. context     one dense pass, of which the method keeps what it will read
    2. question    its tokens are decode rows on a fork of the session (`LiveSession.fork`), and so
                   are those of its answer
    3. the next    goes on from the context again, and sees nothing of the question before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness.data.text import prompt_ids
from harness.decode.session import LiveSession
from harness.errors import UserError, printable
from harness.model.load import LoadedModel
from harness.results.step_stats import stats_of
from harness.settings.config import RunConfig
from harness.speed.generate import live, new_draft, new_tokens_of, require_length, write_text
from methods.base import TokenCounts

LETTERS = 60
"""Of a question that an error shows."""


@dataclass(frozen=True)
class Answer:
    """What the model says to one question.

    answer: its text; num_tokens: of it. budget: share of the full cache that a decode
    step read, mean over the steps of question and answer; None without a step. ttft_s: seconds from
    the question to the first token of its answer. decode_s: seconds of all later tokens; None of an
    answer of one. kv_bytes: of cache, method and buffers, on the device and in host memory.
    """

    answer: str
    num_tokens: int
    budget: float | None
    ttft_s: float | None
    decode_s: float | None
    kv_bytes: int


class _Question(NamedTuple):
    """A question as tokens. ids: of context and question. num_prompt: first ones that run densely,
    before the method reduces the cache."""

    ids: tuple[int, ...]
    num_prompt: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens that run densely."""
        return self.ids[: self.num_prompt]

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens that are decode rows."""
        return self.ids[self.num_prompt :]


def _encoded(context: str, of_context: Sequence[int], question: str, tokenizer: Any) -> _Question:
    """A question's tokens, those of context and question as one text. of_context: of the context
    alone.

    The question begins with the first token that the context alone does not have, which may begin
    with the context's last letters. Raises UserError where there is no token of either.
    """
    ids = prompt_ids(context + question, tokenizer)
    num_equal = 0
    for own, whole in zip(of_context, ids, strict=False):
        if own != whole:
            break
        num_equal += 1
    if not num_equal:
        raise UserError("context: makes no tokens that could be kept; give a longer text")
    if num_equal == len(ids):
        shown = printable(question[:LETTERS])
        raise UserError(f"questions: {shown!r} makes no tokens; give a text")
    return _Question(tuple(ids), num_equal)


def ask_all(
    config: RunConfig,
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    begin: Callable[[int], Any],
    on_step: Callable[[], Any],
) -> tuple[list[Answer], float]:
    """Ask questions of the context `config.prompt`, each by itself. Returns the answers in their
    order, and the seconds of the context's pass.

    The answers have the T of the longest: a method may keep a share of T. begin: takes the number
    of steps at most, once; on_step: called after each. Raises UserError for a model without a
    tokenizer, texts without tokens, and sequences beyond the model's limit.
    """
    assert config.prompt is not None, "the context"
    if config.placement == "disk":
        raise UserError(
            "placement=disk: questions cannot go on from one cache there; allowed: host, device, "
            "managed"
        )
    context, reader = config.prompt, loaded.reader
    of_context = prompt_ids(context, reader)
    questions = []
    for text in texts:
        questions.append(_encoded(context, of_context, text, reader))
    longest = max(len(question.ids) for question in questions)
    max_new_tokens = new_tokens_of(config, loaded, longest)
    require_length("context and question", longest, max_new_tokens, loaded)
    by_prompt: dict[tuple[int, ...], list[_Question]] = {}
    for question in dict.fromkeys(questions):
        by_prompt.setdefault(question.prompt, []).append(question)
    rooms: dict[tuple[int, ...], int] = {}  # of a cache, behind its prompt
    num_steps = 0
    for prompt, of_prompt in by_prompt.items():
        lengths = [len(question.rows) for question in of_prompt]
        rooms[prompt] = max(lengths) + max_new_tokens
        num_steps += 1 + sum(lengths) + len(lengths) * max_new_tokens  # 1: the prompt's pass
    begin(num_steps)

    def decode_rows() -> list[TokenCounts]:
        counts = []
        for prompt, of_prompt in by_prompt.items():
            final = len(prompt) + rooms[prompt]
            for question in of_prompt:
                for cached in range(len(prompt), len(question.ids) + max_new_tokens - 1):
                    counts.append(TokenCounts(cached, len(prompt), final))
        return counts

    answers: dict[_Question, Answer] = {}
    context_s = 0.0

    def answer(session: LiveSession, question: _Question) -> None:
        """Decode a question's rows, and write the answer behind them."""
        draft = new_draft(config, loaded, question.ids, max_new_tokens)
        session.begin_turn(len(question.rows))
        for token in question.rows:
            logits = session.decode_step(torch.tensor([token], device=session.attached.device))
            on_step()
        text = write_text(session, logits, draft, question.ids, reader, lambda _: on_step())
        stats = stats_of(session)
        answers[question] = Answer(
            answer=text,
            num_tokens=len(draft.tokens),
            budget=session.reads.budget if session.steps else None,
            ttft_s=stats.ttft_s,
            decode_s=stats.decode_s,
            kv_bytes=(stats.device_kv_bytes or 0) + (stats.host_kv_bytes or 0),
        )

    with live(config, loaded, decode_rows) as (open_session, _):
        for prompt, of_prompt in by_prompt.items():
            with closing(open_session(rooms[prompt])) as session:
                ids = torch.tensor([prompt], device=session.attached.device)
                session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
                on_step()
                context_s += session.clock.ttft_s
                for question in of_prompt:
                    with closing(session.fork()) as fork:
                        answer(fork, question)
    return [answers[question] for question in questions], context_s
