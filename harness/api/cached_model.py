"""A transformers model whose own calls run on a method's live cache: `harness.attach` makes one.

    with attach(model) as attached, CachedModel(attached, method) as cached:
        ids = model.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=True)
        print(cached.usage)

Inside the `with` block the model's `forward` and `generate` are those of `CachedModel`, so that
pipelines, streamers and lm-eval's `HFLM` run on the method's cache without knowing of it. A call of
the model is one of three things:

    a prompt       no `past_key_values`: its rows attend densely, and the logits of the last one may
                   be read. The `past_key_values` that it returns is the method's cache
    decode rows    after such a cache, one live step for each row. A further prompt of `generate`
                   with `past_key_values=` is decoded so, too
    a whole text   with `prefill_len=`: its first rows are the prompt, the method decodes all
                   others. Replay scores them at once, with the selections that live decoding would
                   make (`harness.replay.session`)
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from harness.api.arguments import (
    TRANSFORMERS_NEW_TOKENS,
    by_name,
    checked_ids,
    first_given,
    real_tokens,
    require_continued,
    require_handled,
    require_positions,
    require_taken,
)
from harness.api.outputs import ENDED, GENERATED, MethodCache, PartialLogits, Usage, require_own
from harness.api.texts import SCORE_WITH, SCORED, Texts, require_predicted, require_prefill_len
from harness.decode.links import Links
from harness.decode.session import LiveSession
from harness.errors import UserError
from harness.model.attached import IS_COPIED, Attached
from harness.model.budgets import with_budget_as_stored
from harness.model.calls import replaced_forward, replaced_method
from harness.model.generation import Settings, require_count
from harness.model.passes import require_eager
from harness.model.prompts import positions_of
from harness.replay.session import Setup
from harness.settings.config import Placement
from methods.base import Calibration, Method, TokenCounts
from methods.codecs.split import CacheCodec


@dataclass(eq=False)
class CachedModel:
    """An attached model on a method's cache, which stands in for the model inside its `with` block.

    budget: share of the full cache that a step is to read, met for each call's lengths; None takes
    the method as it is. nearest: accept the nearest possible budget. max_new_tokens: tokens for
    which a prompt's cache has room where no `generate` says it: T = prompt + max_new_tokens, at
    most `max_length`. prefill_len: how many first tokens of a whole text are its prompt; None:
    whole texts are refused. max_length: the model's limit in tokens; None: none. tokenizer: finds
    `stop_strings` where a call of `generate` gives none. The other fields are those of
    `LiveSession`. usage: of the last `generate` or scored text; None before the first.

    Calls from several threads take turns. What it does not have itself is the model's: `device`,
    `config`, ...
    """

    attached: Attached
    method: Method
    budget: float | None = None
    nearest: bool = False
    codec: CacheCodec | None = None
    calibration: Calibration | None = None
    placement: Placement = "device"
    link: Links | None = None
    gpu_cache: float = 0
    pinned: bool = True
    max_new_tokens: int = 64
    prefill_len: int | None = None
    max_length: int | None = None
    tokenizer: Any = None
    usage: Usage | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        model: Any = self.attached.model
        self._parameters = inspect.signature(model.forward)
        self._own_generate: Callable[..., Any] = model.generate
        self._turns = threading.RLock()
        self._is_open = False
        self._in_place = ExitStack()
        self._caches: WeakSet[MethodCache] = WeakSet()
        self._with_budget: dict[tuple[tuple[int, int], ...], Method] = {}

    def __enter__(self) -> CachedModel:
        model: Any = self.attached.model

        @wraps(model.forward)  # transformers looks at the signature, which stays the model's
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        @wraps(model.generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self.generate(*args, **kwargs)

        self._in_place.enter_context(replaced_forward(model, forward))
        self._in_place.enter_context(replaced_method(model, "generate", generate))
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._turns:  # a pass of another thread ends first
            self._is_open = False
            self._in_place.close()
            with ExitStack() as stack:  # all are closed, also where one's transfer has failed
                for cache in list(self._caches):
                    stack.callback(cache.close, ENDED)

    def __getattr__(self, name: str) -> Any:
        if name == "attached" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.attached.model, name)

    def __getstate__(self) -> Any:
        raise UserError(IS_COPIED)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call."""
        self._require_open()
        return self.attached.model(*args, **kwargs)

    def _require_open(self) -> None:
        if not self._is_open:
            raise UserError(ENDED)

    # generate

    def generate(self, *args: Any, **settings: Any) -> Any:
        """transformers' `generate` on the method's cache: returns ids [batch, prompt + new tokens].

        The first argument is input_ids, int [batch, prompt], padding on the left. settings: any of
        transformers', such as attention_mask, max_new_tokens, do_sample, temperature, streamer. T
        is the prompt and the largest number of new tokens: max_new_tokens, else what max_length
        leaves, else transformers' 20. past_key_values: what `new_cache` or the model's call
        returned. The input_ids then are the whole sequence, and the columns that are not in the
        cache yet are decoded row by row; T is the cache's. What the model's own file says of a
        cache plays no part. Raises UserError for arguments that are not taken, padding on the
        right, and lengths beyond the model's limit.
        """
        self._require_open()
        require_eager()
        asked = by_name(inspect.signature(self._own_generate), args, settings)
        given_ids = first_given(asked.pop("inputs", None), asked.pop("input_ids", None))
        require_taken(asked)
        ids = checked_ids("input_ids", given_ids, self.attached)
        cache = asked.pop("past_key_values", None)
        require_own(cache, self._caches)
        chosen = Settings(self.attached.model, asked)
        asked |= chosen.set_aside()
        stop_strings = chosen.get("stop_strings")
        if stop_strings is not None:
            if asked.get("tokenizer") is None:
                asked["tokenizer"] = self.tokenizer
            if asked["tokenizer"] is None:
                raise UserError(
                    f"stop_strings={stop_strings}: a tokenizer finds them; give generate "
                    "tokenizer=, or harness.attach the model's tokenizer"
                )
        num_wanted = chosen.num_new_tokens(ids.shape[1])
        if num_wanted is None:
            num_wanted = TRANSFORMERS_NEW_TOKENS
            if self.max_length is not None:
                num_wanted = max(1, min(num_wanted, self.max_length - ids.shape[1]))
        is_kept = cache is not None
        if cache is None:
            cache = self._new_cache(num_wanted)
        elif cache.follows_prompt:
            self._begin_turn(cache, ids, asked.get("attention_mask"), num_wanted)
        asked["past_key_values"] = cache
        asked["use_cache"] = True
        cache.num_wanted = num_wanted
        try:
            made = self._own_generate(ids, **asked)
            self.usage = cache.usage
        finally:
            cache.num_wanted = 0
            if not is_kept:
                cache.close(GENERATED)
        return made

    def new_cache(self, max_new_tokens: int | None = None) -> MethodCache:
        """An empty cache for several turns: `generate(input_ids, past_key_values=cache)`.

        max_new_tokens: room for the tokens of all turns behind the first prompt, so that T = first
        prompt + max_new_tokens, within the model's limit; None: that of `attach`.
        """
        self._require_open()
        if max_new_tokens is None:
            max_new_tokens = self.max_new_tokens
        return self._new_cache(require_count("max_new_tokens", max_new_tokens))

    def _begin_turn(
        self, cache: MethodCache, ids: Tensor, mask: Tensor | None, num_wanted: int
    ) -> None:
        """Begin a further turn on a cache. ids: the whole sequences, [batch, columns]. Raises
        UserError for what is not a continuation, or more tokens than there is room for."""
        session = cache.require_open()
        cache.require_begins(ids)
        num_rows = ids.shape[1] - cache.num_columns
        require_continued(mask, cache.real, cache.num_columns, num_rows)
        num_behind = session.steps + num_rows + num_wanted
        if num_behind > session.max_new_tokens:
            raise UserError(
                f"past_key_values: room for {session.max_new_tokens} tokens behind its first "
                f"prompt, and with this turn there are {num_behind}, {num_wanted} of them new; "
                "make it by cached.new_cache(max_new_tokens=N), or lower max_new_tokens"
            )
        session.begin_turn(num_rows)

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass as a prompt, as decode rows, or as a whole text; see the module.

        The arguments are transformers': input_ids int [batch, rows], attention_mask, labels,
        past_key_values (what an earlier call returned), use_cache, logits_to_keep. Returns its
        output: logits fp32 [batch, rows, vocab], the loss where there are labels, and the cache.
        Raises UserError, in one line, for what cannot be computed so.
        """
        require_eager()
        with self._turns:
            self._require_open()
            try:
                return self._forward(by_name(self._parameters, args, kwargs))
            except ValueError as error:
                if isinstance(error, UserError) or not str(error).startswith("method."):
                    raise
                raise UserError(str(error)) from error  # `methods` knows no UserError

    def _forward(self, given: Mapping[str, Any]) -> Any:
        """`forward`, of arguments by name."""
        model: Any = self.attached.model
        if model.training:
            raise UserError(
                "the model is in training mode: an attached model computes no gradients; call its "
                "eval()"
            )
        cache = given.get("past_key_values")
        require_own(cache, self._caches)
        in_generate = cache is not None and cache.in_generate
        follows = cache is not None and cache.follows_prompt
        if in_generate and follows:
            # A token that transformers has chosen: to look at it would wait for a GPU.
            ids = given["input_ids"]
        else:
            require_handled(given)
            ids = checked_ids("input_ids", given.get("input_ids"), self.attached)
        ids = ids.to(self.attached.device)
        mask, labels = given.get("attention_mask"), given.get("labels")
        positions = None if in_generate else given.get("position_ids")

        loss = None
        if cache is not None and follows:
            logits = self._decode(cache, ids, mask, positions)
            loss = None if labels is None else self._loss(logits, labels)
        elif not in_generate and self._is_text(given):
            logits, loss = self._score(ids, mask, positions, labels)
            cache = None
            if given.get("use_cache") is not False:
                cache = self._new_cache(0, why_closed=SCORED)
        else:
            if cache is None:
                cache = self._new_cache(self.max_new_tokens)
            logits = self._prefill(cache, ids, mask, positions)

        last_rows = first_given(given.get("logits_to_keep"), given.get("num_logits_to_keep"), 0)
        if isinstance(last_rows, Tensor):
            logits = logits[:, last_rows]
        elif last_rows:
            logits = logits[:, -last_rows:]
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        own_setting = getattr(model.config, "return_dict", True)
        if first_given(given.get("return_dict"), own_setting) is False:
            return output.to_tuple()
        return output

    def _is_text(self, given: Mapping[str, Any]) -> bool:
        """Whether a call without a cache scores a whole text, and runs no prompt to go on from."""
        use_cache = given.get("use_cache")
        if given.get("labels") is not None or use_cache is False:
            return True
        return self.prefill_len is not None and use_cache is None

    def _new_cache(self, max_new_tokens: int, why_closed: str | None = None) -> MethodCache:
        cache = MethodCache(self.attached, max_new_tokens, why_closed=why_closed)
        self._caches.add(cache)
        return cache

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own loss."""
        model: Any = self.attached.model
        return model.loss_function(
            logits=logits, labels=labels.to(logits.device), vocab_size=logits.shape[-1]
        )

    # A prompt

    def _prefill(
        self, cache: MethodCache, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Run prompts [batch, prompt], and open their cache. Returns logits: the last row may be
        read."""
        real = real_tokens(ids, mask)
        if not bool(real[:, -1].all()) or bool((real.long().diff() < 0).any()):
            raise UserError(
                "attention_mask: the padding of a live batch lies on the left; set "
                "padding_side='left'"
            )
        require_positions(positions, positions_of(real), real)
        first = int(real.any(0).long().argmax())  # the columns before it are padding alone
        session = self.open_session(real[:, first:], self._room(cache, int(real.sum(-1).max())))
        try:
            last = session.prefill(ids[:, first:], real[:, first:])
        except BaseException:
            session.close()
            raise
        cache.open(session, ids, real)
        num_rows = ids.shape[1]
        logits = last.clone()[:, None]
        if num_rows == 1 or cache.in_generate:  # generate reads the last row alone
            return logits
        hidden = torch.ones_like(ids, dtype=torch.bool)
        hidden[:, -1] = False
        why = (
            f"logits of a prompt of {num_rows} rows: it ran densely, so only logits[:, -1] may be "
            f"read; to score a text by the method {SCORE_WITH}"
        )
        return PartialLogits.of(logits.expand(-1, num_rows, -1), hidden, why)

    def _room(self, cache: MethodCache, num_prompt: int) -> int:
        """The room for tokens behind a prompt; UserError where it is too small for those wanted."""
        room, wanted = cache.max_new_tokens, max(1, cache.num_wanted)
        if self.max_length is not None:
            room = min(room, self.max_length - num_prompt)
        if room >= wanted:
            return room
        if cache.max_new_tokens < wanted:
            raise UserError(
                f"past_key_values: room for {cache.max_new_tokens} tokens behind its prompt, and "
                f"max_new_tokens={wanted}; make it by cached.new_cache(max_new_tokens=N)"
            )
        raise UserError(
            f"a prompt of {num_prompt} tokens and max_new_tokens="
            f"{cache.num_wanted or cache.max_new_tokens}: together at most {self.max_length}, the "
            "model's limit"
        )

    # Decode rows

    def _decode(
        self, cache: MethodCache, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Run decode rows [batch, rows], one step each. Returns logits [batch, rows, vocab]."""
        session = cache.require_open()
        batch, num_rows = ids.shape
        num_sequences = len(session.batch.prompts)
        if batch != num_sequences:
            raise UserError(
                f"input_ids: {batch} sequences, and past_key_values of {num_sequences}; they must "
                "agree"
            )
        steps = session.steps + num_rows
        if steps > session.max_new_tokens:
            raise UserError(
                f"max_new_tokens={session.max_new_tokens}: the cache of this prompt has room for "
                f"so many tokens, and this is number {steps}; give harness.attach a larger "
                "max_new_tokens"
            )
        # Inside generate transformers makes masks and positions; to look would wait for a GPU.
        if not cache.in_generate:
            require_continued(mask, cache.real, cache.num_columns, num_rows)
            rows = torch.arange(num_rows, device=ids.device)
            expected = session.batch.positions[:, None] + rows
            require_positions(positions, expected, torch.ones_like(ids, dtype=torch.bool))
        logits: list[Tensor] = []
        for column in ids.unbind(1):
            if cache.in_generate:  # it reads the last row alone
                logits.clear()
            logits.append(session.decode_step(column))
        cache.advance(ids)
        return torch.stack(logits, 1).clone()  # no longer a tensor of inference mode

    # A whole text

    def _score(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Score texts by replay. Returns logits [batch, rows, vocab], and the loss of `labels`.

        T is the tokens of a text. Without labels the token that its last row predicts is one of
        them, though it is not given: lm-eval's `HFLM` leaves it out.
        """
        began = time.perf_counter()
        prompt = require_prefill_len(self.prefill_len, ids, mask, reads_all=self.method.reads_all)
        texts = Texts(ids, real_tokens(ids, mask))
        texts.require_lengths(prompt, self.max_length)
        if positions is not None:
            require_positions(positions, positions_of(texts.real), texts.real)
        final_lengths = texts.lengths
        if labels is None:  # the last row predicts one more token
            final_lengths = texts.lengths + 1
        method = self._method_at([(prompt, final) for final in final_lengths.tolist()])
        setup = Setup(method, self.codec, self.calibration, self.gpu_cache)
        session = setup.replay(self.attached, final_lengths, texts.longest)
        dense = session.prefill(texts.tokens[:, :prompt], texts.within[:, :prompt])
        decoded = session.decode(texts.tokens[:, prompt:], texts.within[:, prompt:])
        session.reads.check_fired()
        found = self.attached.logits(torch.cat([dense[:, -1:], decoded], 1))
        self.usage = Usage(
            steps=int(texts.lengths.sum()) - prompt * len(ids),
            score_s=time.perf_counter() - began,
            budget=session.reads.budget,
            tokens_evicted=session.reads.tokens_evicted,
        )
        logits = texts.in_place(found, prompt)

        # The prompt's rows are hidden, but for its last, which predicts the first decode row.
        in_prompt = texts.real.long().cumsum(-1) < prompt
        hidden = texts.real & in_prompt
        loss = None
        if labels is not None:
            require_predicted(labels.to(ids.device), texts.real, texts.real & ~in_prompt, prompt)
            loss = self._loss(logits, labels)
        if not bool(hidden.any()):
            return logits.clone(), loss
        logits = logits.masked_fill(hidden[:, :, None], float("nan")).clone()
        why = (
            f"logits of a prompt's rows: with prefill_len={prompt} the first {prompt} tokens of a "
            f"text ran densely, so only logits[:, {prompt - 1}:] may be read; with prefill_len=1 "
            "all rows may"
        )
        return PartialLogits.of(logits, hidden, why), loss

    # The method at the lengths of a call

    def open_session(self, real: Tensor, max_new_tokens: int) -> LiveSession:
        """The session of a batch; real: bool [batch, prompt], False for padding."""
        prompts = real.sum(-1).tolist()
        method = self._method_at([(prompt, prompt + max_new_tokens) for prompt in prompts])
        setup = Setup(method, self.codec, self.calibration, self.gpu_cache)
        return setup.live(
            self.attached,
            max_new_tokens,
            placement=self.placement,
            link=self.link,
            pinned=self.pinned,
        )

    def _method_at(self, lengths: list[tuple[int, int]]) -> Method:
        """The method of the asked budget for sequences of (prompt tokens, T)."""
        if self.budget is None:
            return self.method
        key = tuple(sorted(lengths))
        if key not in self._with_budget:
            rows = []
            for prompt, final in lengths:
                for cached in range(prompt, max(prompt + 1, final - 1)):
                    rows.append(TokenCounts(cached, prompt, final))
            self._with_budget[key] = with_budget_as_stored(
                self.method,
                self.codec,
                self.attached.geometry,
                rows,
                self.budget,
                nearest=self.nearest,
            )
        return self._with_budget[key]
