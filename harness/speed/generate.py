"""Texts that a live cache decodes token by token.

`experiment=generate` continues a prompt, and says what its cache moved:

    python run.py experiment=generate prompt="$(cat my.txt)" method=h2o placement=host \\
      max_new_tokens=100 temperature=0.7

`Model.ask` puts questions to one context, which runs once and whose cache is reduced once:

    1. context     one dense pass, of which the method keeps what it will read
    2. question    its tokens are decode rows on a fork of the session (`LiveSession.fork`), and so
                   are those of its answer
    3. the next    goes on from the context again, and sees nothing of the question before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from harness.data.text import prompt_ids
from harness.decode.session import LiveSession, generate
from harness.decode.weights import StreamedWeights, streamed_weights
from harness.errors import UserError, printable
from harness.model.generation import ENDLESS, Draft, GenerationRule, Settings
from harness.model.load import LoadedModel
from harness.results.metrics import MISSING
from harness.results.step_stats import StepStats, stats_of
from harness.settings.config import NEW_TOKENS, RunConfig
from harness.speed.memories import opened, source_of
from methods.base import TokenCounts

MIB = 2**20
LETTERS = 60
"""Of a question that an error shows."""
Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Generated(StepStats):
    """A text that a live cache decoded. `print` shows the text, then times and transfers.

    text: without the prompt. num_tokens: new ones. rows, h2d_bytes, d2h_bytes: rows that the decode
    steps took from the link, their bytes, and the bytes written back; weight_bytes: of streamed
    weights. All as `experiment=latency` counts them. budget: share of the full cache that a decode
    step read; None without a step. source: measured or emulated. counted: False where the driver
    moves pages. The other numbers are those of `harness.results.step_stats`, of all steps.
    """

    prompt: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    rows: int
    steps: int
    h2d_bytes: int
    d2h_bytes: int
    budget: float | None
    source: str
    counted: bool = True
    weight_bytes: int = 0

    def summary(self) -> str:
        """Three lines: times; rows and bytes over the link; where the cache lies, and the share of
        it that was read."""
        return "\n".join((self._times(), self._transfers(), self._memory()))

    def _times(self) -> str:
        prompt = f"TTFT {self.ttft_s:.2f} s ({self.num_prompt_tokens} tokens)"
        if not self.steps:
            return f"{prompt}; {self.num_tokens} new tokens, no decode step"
        p50, p95 = _ms(self.tpot_p50_s), _ms(self.tpot_p95_s)
        p99, std = _ms(self.tpot_p99_s), _ms(self.tpot_std_s)
        tpot = f"TPOT p50 {p50} ms, p95 {p95}, p99 {p99} (std {std})"
        rate = f"{self.sequence_tokens_per_s:.1f} tokens/s"
        return f"{prompt}; {tpot}; {self.num_tokens} new tokens, {rate}"

    def _transfers(self) -> str:
        if not self.counted:
            return "the driver moved pages, which are not counted"
        if self.steps and self.hit_rate is None:
            return "no link: the cache was read in place"
        rows_of_step = self.rows / max(1, self.steps)
        home = "host" if self.disk_read_bytes is None else "disk"
        moved = (
            f"fetched {self.rows} rows ({rows_of_step:.0f} a step, of one token and KV head each): "
            f"{self.h2d_bytes / MIB:.2f} MiB to the device, {self.d2h_bytes / MIB:.2f} MiB to the "
            f"{home}"
        )
        if self.disk_read_bytes is not None:
            moved += f"; the disk read {self.disk_read_bytes / MIB:.2f} MiB in whole blocks"
        if self.weight_bytes:
            moved += f", {self.weight_bytes / MIB:.2f} MiB of weights streamed"
        if self.link_utilisation is not None:
            moved += f"; link busy {self.link_utilisation:.0%} of the time"
        if self.hit_rate:
            moved += f", hit rate {self.hit_rate:.0%}"
        return moved

    def _memory(self) -> str:
        kept = f"cache: {(self.device_kv_bytes or 0) / MIB:.2f} MiB on the device"
        if self.host_kv_bytes:
            kept += f", {self.host_kv_bytes / MIB:.2f} MiB in host memory"
        if self.disk_kv_bytes:
            kept += f", {self.disk_kv_bytes / MIB:.2f} MiB on the disk"
        read = "read nothing" if self.budget is None else f"read {self.budget:.1%} of the cache"
        if self.tokens_evicted is not None:
            read += f", {self.tokens_evicted:.1f} tokens evicted (mean over steps and KV heads)"
        return f"{kept}; {read}; source: {self.source}"

    def __str__(self) -> str:
        return f"{self.prompt}{self.text}\n\n{self.summary()}"


def _ms(seconds: float | None) -> str:
    """Milliseconds; - for None."""
    return MISSING if seconds is None else f"{1e3 * seconds:.1f}"


def run_generate(config: RunConfig, loaded: LoadedModel, write: Callable[[str], Any]) -> Generated:
    """Continue `config.prompt`, greedily or as `config.sampling` says, and else as the model's
    generation config says (`GenerationRule`).

    write: takes each piece of text. Raises UserError for a model without a tokenizer, a prompt
    without tokens, or a sequence longer than the model's limit.
    """
    assert config.prompt is not None, "parse() asks for it"
    ids = prompt_ids(config.prompt, loaded.reader)
    max_new_tokens = new_tokens_of(config, loaded, len(ids))
    total = len(ids) + max_new_tokens

    def decode_rows() -> list[TokenCounts]:
        return [TokenCounts(cached, len(ids), total) for cached in range(len(ids), total - 1)]

    with live(config, loaded, decode_rows) as (open_session, weights):
        # Where ids stand for no words, the prompt is shown as its ids too.
        prompt = config.prompt if loaded.random_ids is None else loaded.random_ids.decode(ids)
        with closing(open_session(max_new_tokens)) as session:
            write(prompt)
            given = torch.tensor([ids], device=session.attached.device)
            logits = session.prefill(given, torch.ones_like(given, dtype=torch.bool))
            of_prompt = 0 if weights is None else weights.num_bytes
            text, num_tokens = write_text(
                session, logits, config, loaded, ids, max_new_tokens, write
            )
            return Generated(
                **vars(stats_of(session)),
                prompt=prompt,
                text=text,
                num_prompt_tokens=len(ids),
                num_tokens=num_tokens,
                weight_bytes=0 if weights is None else weights.num_bytes - of_prompt,
                rows=int(session.traffic.loaded.num_rows),
                steps=session.steps,
                h2d_bytes=int(session.traffic.loaded.num_bytes),
                d2h_bytes=int(session.traffic.written.num_bytes),
                budget=session.reads.budget if session.steps else None,
                source=source_of(config),
                counted=session.placement != "managed",
            )


@contextmanager
def live(
    config: RunConfig, loaded: LoadedModel, decode_rows: Callable[[], list[TokenCounts]]
) -> Iterator[tuple[Callable[[int], LiveSession], StreamedWeights | None]]:
    """What opens a session of the run for so many new tokens, and the weights that are streamed.
    decode_rows: those on which a budget is met."""
    pinned, share = config.platform.pinned, config.platform.weights_on_device
    with opened(config, loaded, decode_rows) as (attached, setup, _, link):
        open_session = partial(
            setup.live,
            attached,
            placement=config.placement,
            link=link,
            pinned=pinned,
            graphs=config.platform.replays_steps,
        )
        with streamed_weights(attached, link, share, pinned=pinned) as weights:
            yield open_session, weights


def new_tokens_of(
    config: RunConfig, loaded: LoadedModel, num_prompt: int, what: str = "prompt"
) -> int:
    """Tokens of the text at most: as the setting says, else as the model's generation config does,
    within the model's limit. Raises UserError where there are no tokens or no new ones, or more
    than the model takes. what: the text of `num_prompt` tokens, in words."""
    count = config.max_new_tokens
    if count is None:
        of_model = Settings(loaded.model, {}).num_new_tokens(num_prompt)
        count = min(of_model or NEW_TOKENS, loaded.max_length - num_prompt)
    if num_prompt < 1 or count < 1 or num_prompt + count > loaded.max_length:
        raise UserError(
            f"{what} of {num_prompt} tokens and max_new_tokens={count}: must be at least 1 and "
            f"together at most {loaded.max_length}, the limit of {loaded.name}"
        )
    return count


def write_text(
    session: LiveSession,
    logits: Tensor,
    config: RunConfig,
    loaded: LoadedModel,
    ids: Sequence[int],
    max_new_tokens: int,
    write: Callable[[str], Any],
) -> tuple[str, int]:
    """Decode a text to its end, as `config.sampling` says, and else as the model's generation
    config does. Returns all of it, and its tokens.

    logits: [1, vocab], for its first token, after `ids`. write: takes each piece as it grows.
    """
    tokenizer, settings = loaded.reader, config.sampling.rule()
    if loaded.random_ids is not None:  # no token ends a text
        settings |= dict(ENDLESS)
    settings |= {"tokenizer": loaded.tokenizer, "max_new_tokens": max_new_tokens}
    rule = GenerationRule(loaded.model, ids, **settings)
    draft = Draft(ids, rule, f"{config.seed}/0/0")
    last = list(ids[-1:])
    spelled_before = str(tokenizer.decode(last))
    shown = ""
    for _ in generate(session, logits, [draft]):
        newest = draft.tokens[-1]
        is_end = newest in rule.ends
        if is_end and not tokenizer.decode([newest], skip_special_tokens=True):
            draft.tokens.pop()  # a special token is no part of the text; a full stop is
            break
        # Decoded behind the prompt's last token, as some tokenizers drop the space at the beginning
        # of a text; and without a character whose bytes are not all there yet.
        so_far = str(tokenizer.decode([*last, *draft.tokens])).removeprefix(spelled_before)
        so_far = so_far.rstrip("\ufffd")
        write(so_far.removeprefix(shown))
        shown = so_far
    return shown, len(draft.tokens)


# Questions to one context


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
