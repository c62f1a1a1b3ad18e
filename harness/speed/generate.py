"""`experiment=generate`: decodes text token by token, and says what its cache moved.

python run.py experiment=generate prompt="$(cat my.txt)" method=h2o placement=host
max_new_tokens=100 temperature=0.7
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness.data.text import prompt_ids
from harness.errors import UserError
from harness.live.session import LiveSession, generate
from harness.live.weights import StreamedWeights, streamed_weights
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.model.sampling import Draft
from harness.replay.setup import prepare
from harness.settings.config import RunConfig
from harness.speed.latency import compute_threads, source_of, two_memories
from methods.base import TokenCounts

MIB = 2**20


@dataclass(frozen=True)
class Generated:
    """A text that a live cache decoded. `print` shows the text, then times and transfers.

    text: without the prompt. num_tokens: new ones. prefill_s, decode_s: seconds; decode_s is of all
    steps together. rows, h2d_bytes, d2h_bytes: rows that the decode steps took from the link, their
    bytes, and the bytes written back; weight_bytes: of streamed weights. All as
    `experiment=latency` counts them. device_bytes: cache and method on the device at the end. size:
    share of the full cache that a decode step read; None without a step. source: measured or
    emulated.
    """

    prompt: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    prefill_s: float
    decode_s: float
    rows: int
    steps: int
    h2d_bytes: int
    d2h_bytes: int
    device_bytes: int
    size: float | None
    source: str
    counted: bool = True
    weight_bytes: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens a second after the first; None where there is none."""
        return (self.num_tokens - 1) / self.decode_s if self.num_tokens > 1 else None

    def summary(self) -> str:
        """Two lines: times; rows and bytes over the link, the share of the cache that was read, and
        device memory."""
        rate = "no decode step"
        if self.tokens_per_s is not None:
            rate = f"{self.tokens_per_s:.1f} tokens/s"
        prefill = f"prefill {self.num_prompt_tokens} tokens in {self.prefill_s:.2f} s"
        if self.counted:
            rows_of_step = self.rows / max(1, self.steps)
            moved = (
                f"fetched {self.rows} rows ({rows_of_step:.0f} a step, of one token and KV head "
                f"each): {self.h2d_bytes / MIB:.2f} MiB to the device, "
                f"{self.d2h_bytes / MIB:.2f} MiB to the host"
            )
        else:
            moved = "the driver moved pages, which are not counted"
        moved += f", {self.device_bytes / MIB:.2f} MiB kept on the device"
        streamed = ""
        if self.weight_bytes:
            streamed = f"{self.weight_bytes / MIB:.2f} MiB of weights streamed; "
        read = "read nothing" if self.size is None else f"read {self.size:.1%} of the cache"
        first = f"{prefill}; {self.num_tokens} new tokens, {rate}"
        return f"{first}\n{moved}; {streamed}{read}; source: {self.source}"

    def __str__(self) -> str:
        return f"{self.prompt}{self.text}\n\n{self.summary()}"


def run_generate(config: RunConfig, loaded: LoadedModel, write: Callable[[str], Any]) -> Generated:
    """Continue `config.prompt`, greedily or as `config.sampling` says, until the end-of-text token
    or `max_new_tokens`.

    write: takes each piece of text. Raises UserError for a model without a tokenizer, a prompt
    without tokens, or a sequence longer than the model's limit.
    """
    assert config.prompt is not None, "parse() asks for it"
    ids = prompt_ids(config.prompt, loaded.reader)
    total = len(ids) + config.max_new_tokens
    if not ids or total > loaded.max_length:
        raise UserError(
            f"prompt of {len(ids)} tokens and max_new_tokens={config.max_new_tokens}: must be "
            f"at least 1 and together at most {loaded.max_length}, the limit of {loaded.name}"
        )

    def decode_rows() -> list[TokenCounts]:
        return [TokenCounts(cached, len(ids), total) for cached in range(len(ids), total - 1)]

    with attach(loaded.model) as attached, compute_threads(attached.device):
        setup = prepare(config, loaded, attached, decode_rows)
        platform = config.platform
        with (
            two_memories(config, attached) as (_, link),
            streamed_weights(
                attached, link, platform.weights_on_device, pinned=platform.pinned
            ) as weights,
        ):
            session = LiveSession(
                attached,
                setup.method,
                max_new_tokens=config.max_new_tokens,
                codec=setup.codec,
                placement=config.placement,
                link=link,
                calibration=setup.calibration,
                device_rows=config.device_rows,
                prefetch=config.prefetch,
                pinned=platform.pinned,
            )
            # Where ids stand for no words, the prompt is shown as its ids too.
            prompt = config.prompt if loaded.random_ids is None else loaded.random_ids.decode(ids)
            with closing(session):
                write(prompt)
                continuation = _Continuation(config, loaded.reader.eos_token_id)
                streamed = _stream(session, ids, continuation, loaded.reader, write, weights)
                session.drain()
                return Generated(
                    prompt=prompt,
                    text=streamed.text,
                    num_prompt_tokens=len(ids),
                    num_tokens=streamed.num_tokens,
                    prefill_s=streamed.prefill_s,
                    decode_s=streamed.decode_s,
                    weight_bytes=streamed.weight_bytes,
                    rows=session.rows_loaded,
                    steps=session.steps,
                    h2d_bytes=session.h2d_bytes,
                    d2h_bytes=session.d2h_bytes,
                    device_bytes=session.device_bytes,
                    size=session.reads.size if session.steps else None,
                    source=source_of(config),
                    counted=session.placement != "managed",
                )


class _Continuation(Draft):
    """A text that the end-of-text token ends."""

    def __init__(self, config: RunConfig, eos: int | None) -> None:
        super().__init__(config.max_new_tokens, config.sampling.rule(), f"{config.seed}/0/0")
        self.eos = eos

    def ends_itself(self) -> bool:
        return self.tokens[-1] == self.eos


class _Streamed(NamedTuple):
    """A text that has been written, and what it took. Fields as in `Generated`."""

    text: str
    num_tokens: int
    prefill_s: float
    decode_s: float
    weight_bytes: int


def _stream(
    session: LiveSession,
    ids: Sequence[int],
    text: _Continuation,
    tokenizer: Any,
    write: Callable[[str], Any],
    weights: StreamedWeights | None,
) -> _Streamed:
    """Write the text as it grows."""
    prompt = torch.tensor([ids], device=session.attached.device)
    last = list(ids[-1:])
    before = str(tokenizer.decode(last))
    shown = ""
    began = time.perf_counter()
    logits = session.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))
    prompt_weight_bytes = 0 if weights is None else weights.num_bytes
    decoding_began = 0.0
    for _ in generate(session, logits, [text]):
        if len(text.tokens) == 1:
            decoding_began = time.perf_counter()
        if text.ends_itself():  # the end-of-text token is no part of the text
            text.tokens.pop()
            break
        # Decoded behind the prompt's last token, as some tokenizers drop the space at the beginning
        # of a text; and without a character whose bytes are not all there yet.
        so_far = str(tokenizer.decode([*last, *text.tokens])).removeprefix(before)
        so_far = so_far.rstrip("\ufffd")
        write(so_far.removeprefix(shown))
        shown = so_far
    ended = time.perf_counter()
    weight_bytes = 0 if weights is None else weights.num_bytes
    return _Streamed(
        text=shown,
        num_tokens=len(text.tokens),
        prefill_s=decoding_began - began,
        decode_s=ended - decoding_began,
        weight_bytes=weight_bytes - prompt_weight_bytes,
    )
