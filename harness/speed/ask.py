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
from itertools import chain, takewhile
from typing import Any

import torch

from harness.data.text import prompt_ids
from harness.decode.session import LiveSession
from harness.errors import UserError, printable
from harness.model.load import LoadedModel
from harness.results.step_stats import stats_of
from harness.settings.config import RunConfig
from harness.speed.generate import live, new_tokens_of, write_text
from methods.base import TokenCounts

LETTERS = 60
"""Of a question that an error shows."""
Ids = tuple[int, ...]


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


def _encoded(
    context: str, of_context: Sequence[int], question: str, tokenizer: Any
) -> tuple[Ids, Ids]:
    """The tokens of context and question as one text: those that run densely, before the method
    reduces the cache, and the decode rows. of_context: of the context alone.

    The question begins with the first token that the context alone does not have, which may begin
    with the context's last letters. Raises UserError where there is no token of either.
    """
    ids = tuple(prompt_ids(context + question, tokenizer))
    pairs = zip(of_context, ids, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not num_equal:
        raise UserError("context: makes no tokens that could be kept; give a longer text")
    if num_equal == len(ids):
        shown = printable(question[:LETTERS])
        raise UserError(f"questions: {shown!r} makes no tokens; give a text")
    return ids[:num_equal], ids[num_equal:]


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
    questions = [_encoded(context, of_context, text, reader) for text in texts]
    longest = max(len(prompt) + len(rows) for prompt, rows in questions)
    new = new_tokens_of(config, loaded, longest, "context and question")
    by_prompt: dict[Ids, list[Ids]] = {}
    for prompt, rows in dict.fromkeys(questions):
        by_prompt.setdefault(prompt, []).append(rows)
    rooms = {prompt: max(map(len, rows)) + new for prompt, rows in by_prompt.items()}
    begin(len(by_prompt) + sum(len(rows) + new for rows in chain(*by_prompt.values())))

    def decode_rows() -> list[TokenCounts]:
        counts = []
        for prompt, of_prompt in by_prompt.items():
            start, final = len(prompt), len(prompt) + rooms[prompt]
            for rows in of_prompt:
                for cached in range(start, start + len(rows) + new - 1):
                    counts.append(TokenCounts(cached, start, final))
        return counts

    def answer(session: LiveSession, prompt: Ids, rows: Ids) -> Answer:
        """Decode a question's rows, and write the answer behind them."""
        session.begin_turn(len(rows))
        for token in rows:
            logits = session.decode_step(torch.tensor([token], device=session.attached.device))
            on_step()
        text, num_tokens = write_text(
            session, logits, config, loaded, prompt + rows, new, lambda _: on_step()
        )
        stats = stats_of(session)
        return Answer(
            answer=text,
            num_tokens=num_tokens,
            budget=session.reads.budget if session.steps else None,
            ttft_s=stats.ttft_s,
            decode_s=stats.decode_s,
            kv_bytes=(stats.device_kv_bytes or 0) + (stats.host_kv_bytes or 0),
        )

    answers: dict[tuple[Ids, Ids], Answer] = {}
    context_s = 0.0
    with live(config, loaded, decode_rows) as (open_session, _):
        for prompt, of_prompt in by_prompt.items():
            with closing(open_session(rooms[prompt])) as session:
                ids = torch.tensor([prompt], device=session.attached.device)
                session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
                on_step()
                context_s += session.clock.ttft_s
                for rows in of_prompt:
                    with closing(session.fork()) as fork:
                        answers[prompt, rows] = answer(fork, prompt, rows)
    return [answers[question] for question in questions], context_s
