"""transformers' own `model.generate`, over a method's live cache.

with attach(model) as attached:
    cached = CachedModel(attached, method)
    ids = cached.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=True, top_p=0.9)
    print(cached.usage)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from harness.errors import UserError
from harness.model.attach import Attached
from harness.model.decoder import replaced_forward
from harness.offload.links import Links
from harness.offload.live import LiveSession
from harness.settings.config import Placement
from harness.sizes import sized_as_stored
from methods.base import Calibration, Method, Row
from methods.codec import AnyCodec

ONLY = {
    "num_beams": 1,
    "use_cache": True,
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size", "past_key_values")),
}
"""Settings of transformers' `generate` that a live cache does not take, and the only value it does."""


class Usage(NamedTuple):
    """What one `generate` took.

    steps: decode steps, one less than the new tokens of a sequence. seconds: from the first decode step to the last.
    size: share of the full cache that a step read; None without a step. h2d_bytes, d2h_bytes: rows that the steps took
    from the link, and wrote back, as `experiment=latency` counts them. device_bytes: cache and method, on the device at
    the end.
    """

    steps: int
    seconds: float
    size: float | None
    h2d_bytes: int
    d2h_bytes: int
    device_bytes: int


@dataclass
class CachedModel:
    """An attached model that generates with a method's cache.

    size: share of the full cache that a step is to read, met for each call's lengths; None takes the method as it is.
    nearest: accept the nearest possible size. The other fields are those of `LiveSession`. usage: of the last
    `generate`; None before the first.
    """

    attached: Attached
    method: Method
    size: float | None = None
    nearest: bool = False
    codec: AnyCodec | None = None
    calibration: Calibration | None = None
    placement: Placement = "device"
    link: Links | None = None
    device_rows: float = 0
    prefetch: bool = False
    pinned: bool = True
    usage: Usage | None = field(default=None, init=False)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **settings: Any) -> Any:
        """Run transformers' `generate` and return its result, [batch, prompt + new tokens] by default.

        input_ids: int [batch, prompt], padding on the left. settings: any of transformers', such as attention_mask,
        do_sample, temperature, streamer. Raises UserError for those in `ONLY`, and for padding on the right.
        """
        model: Any = self.attached.model
        config = settings.get("generation_config") or model.generation_config
        asked = {name: settings.get(name, getattr(config, name, None)) for name in ONLY}
        for name, value in asked.items():
            if value not in (None, ONLY[name]):
                raise UserError(f"{name}={value!r}: a live cache takes one token a step; allowed: {ONLY[name]}")
        device, own = self.attached.device, model.forward
        cache = self.attached.new_cache()
        session: LiveSession | None = None
        began = 0.0

        @wraps(own)  # transformers looks at the signature, which stays the model's
        def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
            """The model's forward pass as a step of the session."""
            nonlocal session, began
            ids = input_ids.to(device)
            with replaced_forward(model, own):  # which makes the logits
                if session is None:
                    real = _real_tokens(ids, attention_mask)
                    session = self.open_session(real, max_new_tokens)
                    session.model_cache = cache
                    logits = session.prefill(ids, real)
                    began = time.perf_counter()
                else:
                    logits = session.decode_step(ids[:, 0])
            return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)

        try:
            with replaced_forward(model, forward):
                settings |= {"past_key_values": cache, "use_cache": True}
                made = model.generate(input_ids, max_new_tokens=max_new_tokens, **settings)
            assert session is not None, "generate runs the prompt"
            self.usage = _usage_of(session, began)
        finally:
            if session is not None:
                session.close()
        return made

    def open_session(self, real: Tensor, max_new_tokens: int) -> LiveSession:
        """The session of a batch; real: bool [batch, prompt], False for padding."""
        method = self.method
        if self.size is not None:
            prompts = real.sum(-1).tolist()
            steps = range(max(1, max_new_tokens - 1))
            rows = [Row(prompt + step, prompt, prompt + max_new_tokens) for prompt in prompts for step in steps]
            geometry = self.attached.geometry
            method = sized_as_stored(method, self.codec, geometry, rows, self.size, nearest=self.nearest)
        return LiveSession(
            self.attached, method, max_new_tokens=max_new_tokens, codec=self.codec, placement=self.placement,
            link=self.link, calibration=self.calibration, device_rows=self.device_rows, prefetch=self.prefetch,
            pinned=self.pinned,
        )  # fmt: skip


def _real_tokens(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """bool [batch, prompt], False for padding. Raises UserError for padding on the right."""
    real = torch.ones_like(ids) if attention_mask is None else attention_mask
    if not bool(real[:, -1].all()) or bool((real.diff() < 0).any()):
        raise UserError("attention_mask: the padding of a live batch lies on the left; set padding_side='left'")
    return real.bool().to(ids.device)


def _usage_of(session: LiveSession, began: float) -> Usage:
    session.drain()
    seconds = time.perf_counter() - began
    size = session.reads.size if session.steps else None
    return Usage(session.steps, seconds, size, session.h2d_bytes, session.d2h_bytes, session.device_bytes)
