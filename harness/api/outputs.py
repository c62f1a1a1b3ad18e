"""What an attached model's calls return: its cache, and what they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from harness.decode.session import LiveSession
from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.model_cache import ModelCache
from harness.results.step_stats import StepStats, stats_of


@dataclass(frozen=True, kw_only=True)
class Usage(StepStats):
    """What one `generate`, or one batch of decode steps, took.

    steps: decode steps, one less than the new tokens of a generated sequence; of a scored text the
    rows that the method decoded. budget: share of the full cache that a step read; None without a
    step. h2d_bytes, d2h_bytes: rows that the steps took from the link, and wrote back, as
    `experiment=latency` counts them. The other numbers are those of `harness.results.step_stats`;
    a step lasts from the logits before it to its own, what the caller does in between included.

    Of several turns on one cache the times are those of the last turn: its TTFT is that of decoding
    its prompt. Steps, budget and bytes are of all turns.

    A scored text has steps, budget, tokens_evicted and score_s, the seconds of the call: replay has
    no steps in time and moves nothing.
    """

    steps: int
    budget: float | None
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    score_s: float | None = None


class MethodCache(ModelCache):
    """The `past_key_values` of an attached model: a handle of the method's live cache of one batch.

    The keys and values lie in a `LiveSession`, which is closed with the last reference to this
    object, and at the end of `harness.attach` at the latest. max_new_tokens: room for tokens behind
    the first prompt. why_closed: what a call is told that comes too late; None while the cache may
    be used.

    num_wanted: new tokens, at most, of the `generate` that runs on it; 0 outside of one. real: bool
    [batch, prompt], False for the padding of the first prompt.
    """

    def __init__(self, attached: Attached, max_new_tokens: int) -> None:
        super().__init__(attached.decoder.stack.config)
        self.max_new_tokens = max_new_tokens
        self.why_closed: str | None = None
        self.num_wanted = 0
        self.session: LiveSession | None = None
        self.real: Tensor = torch.empty(0, 0, dtype=torch.bool)
        self._ids: list[Tensor] = []

    @property
    def follows_prompt(self) -> bool:
        """Whether a prompt has run, so that a call with this cache is one of decode rows."""
        return self.session is not None or self.why_closed is not None

    def open(self, session: LiveSession, ids: Tensor, real: Tensor) -> None:
        """Take over a session whose prompt has run: ids [batch, prompt], padding on the left; real:
        bool of the same shape, False for padding."""
        self.session = session
        self.real = real
        # transformers looks here for the states of recurrent layers.
        self.layers = session.model_cache.layers
        self._free = finalize(self, session.close)
        self._free.atexit = False
        self.advance(ids)

    def advance(self, ids: Tensor) -> None:
        """Note the rows that the session has run, ids [batch, rows]."""
        self.num_columns += ids.shape[1]
        self._ids.append(ids)

    def require_begins(self, ids: Tensor) -> None:
        """Raise UserError for sequences, int [batch, columns], that are not the cache's with new
        tokens behind them."""
        held = torch.cat(self._ids, 1).to(ids.device)
        self._ids = [held]
        batch, num_held = held.shape
        allowed = f"allowed: the {num_held} columns that past_key_values holds, and new ones"
        if len(ids) != batch or ids.shape[1] <= num_held:
            raise UserError(f"input_ids: of shape {tuple(ids.shape)}; {allowed} behind them")
        other = held != ids[:, :num_held]
        other[:, : self.real.shape[1]] &= self.real.to(ids.device)
        if bool(other.any()):
            column = int(other.any(0).long().argmax())
            raise UserError(
                f"input_ids: column {column} is not the token that past_key_values holds there; "
                f"{allowed} (a chat template that writes earlier turns anew, or text that is "
                "tokenized anew, needs a new cache)"
            )

    def close(self, why: str) -> None:
        """Free the session. Idempotent."""
        self.why_closed = self.why_closed or why
        if self.session is not None:
            self.session = None
            self._free()

    @property
    def usage(self) -> Usage:
        """What the steps so far took. Raises UserError once the cache is closed."""
        session = self.require_open()
        return Usage(
            **vars(stats_of(session)),
            steps=session.steps,
            budget=session.reads.budget if session.steps else None,
            h2d_bytes=int(session.traffic.loaded.num_bytes),
            d2h_bytes=int(session.traffic.written.num_bytes),
        )

    def require_open(self) -> LiveSession:
        """The session; UserError where there is none any more."""
        if self.session is None:
            raise UserError(f"past_key_values: {self.why_closed}")
        return self.session

    # What transformers' own code, or a user's, may do to a cache that stores keys and values

    def _refuse(self, *_: Any, **__: Any) -> Any:
        self.require_open()
        raise UserError(
            "past_key_values: the cache of an attached model grows by the model's calls alone; it "
            "is not cropped, copied, reordered, saved or filled by hand"
        )

    update = update_conv_state = update_recurrent_state = get_mask_sizes = _refuse
    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    __reduce_ex__ = __iter__ = __getitem__ = _refuse
