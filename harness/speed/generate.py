"""`experiment=generate`: prints text token by token as it is decoded, then times and transfers.

python run.py experiment=generate prompt="The KV cache" method=h2o placement=host max_new_tokens=100
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch

from harness.data.text import token_ids
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.offload.live import LiveSession, generate
from harness.offload.memory import smaller_card
from harness.offload.weights import StreamedWeights, streamed_weights
from harness.settings.config import RunConfig
from harness.setup import prepare
from harness.speed.latency import SOURCES, compute_threads, opened_links
from harness.speed.link_rate import link_rate
from methods.base import Row

MIB = 2**20


def run_generate(config: RunConfig, loaded: LoadedModel, write: Callable[[str], Any]) -> None:
    """Continue `config.prompt` greedily until the end-of-text token or `max_new_tokens`.

    write: takes each piece of text. Raises UserError for a model without a tokenizer, a prompt without
    tokens, or a sequence longer than the model's limit.
    """
    assert config.prompt is not None, "parse() asks for it"
    ids = token_ids(config.prompt, loaded.tokenizer)
    total = len(ids) + config.max_new_tokens
    if not ids or total > loaded.max_length:
        raise UserError(
            f"prompt of {len(ids)} tokens and max_new_tokens={config.max_new_tokens}: must be at least 1 and "
            f"together at most {loaded.max_length}, the limit of {loaded.name}"
        )
    with attach(loaded.model) as attached, compute_threads(attached.device):
        rate = link_rate(config.results_dir, attached.device, config.platform.link_gbps)
        setup = prepare(config, loaded, attached, lambda: [Row(n, len(ids), total) for n in range(len(ids), total - 1)])
        platform = config.platform
        with (
            smaller_card(attached.device, platform.device_gib),
            opened_links(config, attached, rate) as link,
            streamed_weights(attached, link, platform.weights_on_device, pinned=platform.pinned) as weights,
        ):
            session = LiveSession(
                attached,
                setup.method,
                max_new_tokens=config.max_new_tokens,
                codec=setup.codec,
                placement=config.placement,
                link=link,
                calibration=setup.calibration,
                reuse=config.reuse,
                pinned=platform.pinned,
            )
            with closing(session):
                _stream(session, ids, loaded.tokenizer, write)
                session.drain()
                write(f"\n{_summary(session, weights, SOURCES[platform.name])}\n")


def _stream(session: LiveSession, ids: Sequence[int], tokenizer: Any, write: Callable[[str], Any]) -> None:
    """Write the text as it grows, then a line with the times of prefill and decoding."""
    prompt = torch.tensor([ids], device=session.attached.device)
    began = time.perf_counter()
    logits = session.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))
    tokens: list[int] = []
    write(tokenizer.decode(ids))
    first_s, shown = 0.0, ""
    for step in generate(session, logits):
        token = int(step.argmax(-1))
        first_s = first_s or time.perf_counter()
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        text = str(tokenizer.decode(tokens)).rstrip("\ufffd")  # without a character whose bytes are not all there yet
        write(text.removeprefix(shown))
        shown = text
    decode_s = time.perf_counter() - first_s
    rate = f"{(len(tokens) - 1) / decode_s:.1f} tokens/s" if len(tokens) > 1 else "no decode step"
    write(f"\n\nprefill {len(ids)} tokens in {first_s - began:.2f} s; {len(tokens)} new tokens, {rate}")


def _summary(session: LiveSession, weights: StreamedWeights | None, source: str) -> str:
    """Rows and bytes over the link, the share of the cache that was read, and bytes on the device."""
    rows = sum(store.h2d_bytes // store.slot_bytes for store in session.stores)
    steps = max(1, session.steps)
    read = f"read {session.reads.size:.1%} of the cache" if session.steps else "read nothing"
    moved = (
        f"fetched {rows} rows ({rows / steps:.0f} a step, of one token and KV head each): "
        f"{session.h2d_bytes / MIB:.2f} MiB to the device, {session.d2h_bytes / MIB:.2f} MiB to the host"
    )
    if session.placement == "managed":
        moved = "the driver moved pages, which are not counted"
    streamed = f"{weights.num_bytes / MIB:.2f} MiB of weights streamed; " if weights else ""
    return f"{moved}, {session.device_bytes / MIB:.2f} MiB kept on the device; {streamed}{read}; source: {source}"
