"""A transformers model whose own calls run on a method's live cache: `harness.attach`.

    with harness.attach(model, method="h2o", budget=0.2) as cached:
        ids = model.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=True)
        print(cached.usage)

Inside the `with` block the model's `forward` and `generate` are those of `CachedModel`, so that
pipelines, streamers and lm-eval's `HFLM` run on the method's cache without knowing of it. A call of
the model is a prompt, decode rows behind one, or a whole text; docs/design.md has the table
("An attached model").
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from harness.api.arguments import (
    by_name,
    checked_ids,
    real_tokens,
    require_continued,
    require_harmless,
    require_positions,
)
from harness.api.interface import Model, in_memory, network_of, require_tokenizer
from harness.api.outputs import MethodCache, Usage
from harness.decode.session import LiveSession
from harness.decode.weights import streamed_weights
from harness.errors import UserError
from harness.files import stated_memory
from harness.model.attach import attach as attach_decoder
from harness.model.attached import Attached
from harness.model.budgets import ReadStats, with_budget_as_stored
from harness.model.calls import replaced_forward, replaced_method
from harness.model.generation import Settings, require_count, short
from harness.model.passes import require_eager
from harness.model.prompts import positions_of
from harness.replay.session import Setup
from harness.replay.setup import prepare
from harness.settings.task_config import NEW_TOKENS
from harness.speed.memories import compute_threads, two_memories
from methods.base import TokenCounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRANSFORMERS_NEW_TOKENS = 20
"""What transformers' `generate` makes where nothing says how many tokens."""
ENDED = "the block of harness.attach has ended, and its cache with it; attach the model again"
GENERATED = (
    "the cache of a generate that has ended; for several turns give each generate one cache, "
    "past_key_values=cached.new_cache(max_new_tokens=N)"
)
SCORE_WITH = (
    "give harness.attach prefill_len=N, the tokens of a text's prompt (1: the method decodes every "
    "row), or use harness.lm(model, ...), which knows them of each request"
)


@contextmanager
def attach(
    model: PreTrainedModel | Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: str = "infinigen",
    budget: float | str | None = None,
    max_new_tokens: int | None = None,
    prefill_len: int | None = None,
    **settings: Any,
) -> Iterator[CachedModel]:
    """Run a loaded transformers model on a method's live cache, whoever calls it.

    Inside the `with` block the model's own `generate` and forward pass use the method's cache, also
    where a pipeline, a streamer in another thread, or lm-eval's `HFLM` calls them.
    `cached.generate` is the same. `cached.usage` has TTFT, TPOT and bytes. `model(ids,
    use_cache=True)` runs a prompt, and its `past_key_values` take the rows after it. `model(ids)`
    is a whole text, which needs `prefill_len`: `HFLM`, which does not say where a context ends,
    takes 1, and batches of one. The model is left as it was. It takes one `attach` or run at a
    time, of all threads.

    Args:
        model: a loaded transformers model, or a `Model`.
        tokenizer: needed by methods that read a text; by default the one at the model's
        `name_or_path`. method, budget, settings: as of `Model.generate`. A budget is met for each
        call's lengths.
        max_new_tokens: tokens for which the cache of such a prompt has room. T, on which a
            method's budget depends, is the prompt and these; `generate` knows its own. None: the
            model's `generation_config`, else 64.
        prefill_len: how many first tokens of a whole text, `model(input_ids)` or with `labels`, are
            its prompt; the method decodes all others. Logits before that are NaN.

    Raises:
        UserError: the model is refused or attached already, a setting is wrong, or there is no
            tokenizer to calibrate with.
    """
    for name, value in {"max_new_tokens": max_new_tokens, "prefill_len": prefill_len}.items():
        if value is not None:
            require_count(name, value)
    with ExitStack() as stack:
        attached = stack.enter_context(attach_decoder(network_of(model)))
        held = in_memory(model, tokenizer)
        own = {"experiment": "generate", "prompt": "-", "method": method, "budget": budget}
        config = held.configured(own, settings)
        loaded, platform = held.loaded, config.platform
        reads_text = config.method.needs_calibration or config.method.rereads_prompt
        if reads_text or config.budget_is_measured:
            require_tokenizer(loaded, method)
        stack.enter_context(stated_memory(platform.host_gib))
        stack.enter_context(compute_threads(attached.device))
        asked = None
        if not config.budget_is_measured:  # else once, on a text of which half is the prompt
            asked, config = config.budget, replace(config, budget=None)
        setup = prepare(config, loaded, attached, lambda: [TokenCounts(1, 1, 2)])
        if max_new_tokens is None:
            max_new_tokens = Settings(attached.model, {}).get("max_new_tokens") or NEW_TOKENS
        _, link = stack.enter_context(two_memories(config, attached))
        streamed = streamed_weights(
            attached, link, platform.weights_on_device, pinned=platform.pinned
        )
        stack.enter_context(streamed)
        cached = CachedModel(
            attached,
            setup,
            {"placement": config.placement, "link": link, "pinned": platform.pinned},
            asked,
            nearest=config.budget_rule == "nearest",
            max_new_tokens=max_new_tokens,
            prefill_len=prefill_len,
            max_length=loaded.max_length,
            tokenizer=loaded.tokenizer,
        )
        yield stack.enter_context(cached)


@dataclass(eq=False)
class CachedModel:
    """An attached model on a method's cache, which stands in for the model inside its `with` block.

    options: of `LiveSession`, such as placement and link. budget: share of the full cache that a
    step is to read, met for each call's lengths; None takes the method as it is. nearest: accept
    the nearest possible budget. max_new_tokens: tokens for which a prompt's cache has room where no
    `generate` says it: T = prompt + max_new_tokens, at most `max_length`. prefill_len: how many
    first tokens of a whole text are its prompt; None: whole texts are refused. max_length: the
    model's limit in tokens; None: none. tokenizer: finds `stop_strings` where a call of `generate`
    gives none. usage: of the last `generate` or scored text; None before the first.

    Calls from several threads take turns. What it does not have itself is the model's: `device`,
    `config`, ...
    """

    attached: Attached
    setup: Setup
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    nearest: bool = False
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
        self._setups: dict[tuple[tuple[int, int], ...], Setup] = {}

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

        The first argument is input_ids, int [batch, prompt], padding on the left. T is the prompt
        and the largest number of new tokens: max_new_tokens, else what max_length leaves, else
        transformers' 20. past_key_values: what `new_cache` or the model's call returned. The
        input_ids then are the whole sequence, and the columns that are not in the cache yet are
        decoded row by row; T is the cache's. Raises UserError for arguments that are not taken,
        padding on the right, and lengths beyond the model's limit.
        """
        self._require_open()
        require_eager()
        asked = by_name(inspect.signature(self._own_generate), args, settings)
        chosen = Settings(self.attached.model, asked)
        aside = chosen.set_aside()
        given, named = asked.pop("inputs", None), asked.pop("input_ids", None)
        ids = checked_ids(named if given is None else given)
        cache = self._own(asked.pop("past_key_values", None))
        if chosen.get("stop_strings") is not None and asked.get("tokenizer") is None:
            asked["tokenizer"] = self.tokenizer
        num_wanted = chosen.num_new_tokens(ids.shape[1])
        if num_wanted is None:
            num_wanted = TRANSFORMERS_NEW_TOKENS
            if self.max_length is not None:
                num_wanted = max(1, min(num_wanted, self.max_length - ids.shape[1]))
        is_kept = cache is not None
        if cache is None:
            cache = self.new_cache(num_wanted)
        elif cache.follows_prompt:  # a further turn
            session = cache.require_open()
            cache.require_begins(ids)
            require_continued(asked.get("attention_mask"), cache.real, ids.shape[1])
            num_rows = ids.shape[1] - cache.num_columns
            _require_room(session, num_rows + num_wanted)
            session.begin_turn(num_rows)
        asked |= aside | {"past_key_values": cache, "use_cache": True}
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
        cache = MethodCache(self.attached, require_count("max_new_tokens", max_new_tokens))
        self._caches.add(cache)
        return cache

    def _own(self, cache: Any) -> MethodCache | None:
        """`past_key_values` of a call; UserError for a cache that this model has not made."""
        if cache is None or cache in self._caches:
            return cache
        own = "an attached model makes its own cache; leave it out of the first call, or give "
        why = getattr(cache, "why_closed", None) or f"{own}cached.new_cache()"
        raise UserError(f"past_key_values={short(cache)}: {why}")

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
            return self._forward(**by_name(self._parameters, args, kwargs))

    @can_return_tuple
    def _forward(
        self,
        *,
        input_ids: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """`forward`, of arguments by name."""
        model: Any = self.attached.model
        if model.training:
            raise UserError(
                "the model is in training mode: an attached model computes no gradients; call its "
                "eval()"
            )
        cache = self._own(past_key_values)
        follows = cache is not None and cache.follows_prompt
        in_generate = cache is not None and cache.num_wanted > 0
        if in_generate:
            position_ids = None  # transformers made them: to look would wait for a GPU
        if not (in_generate and follows):
            require_harmless(others)
        ids = checked_ids(input_ids).to(self.attached.device)

        loss = None
        if cache is not None and follows:
            logits = self._decode(cache, ids, attention_mask, position_ids)
            loss = None if labels is None else self._loss(logits, labels)
        elif cache is None and (use_cache is not True or labels is not None):
            logits, loss = self._score(ids, attention_mask, position_ids, labels)
        else:
            if cache is None:
                cache = self.new_cache()
            logits = self._prefill(cache, ids, attention_mask, position_ids)

        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own loss."""
        model: Any = self.attached.model
        return model.loss_function(
            logits=logits, labels=labels.to(logits.device), vocab_size=logits.shape[-1]
        )

    def _prefill(
        self, cache: MethodCache, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Run prompts [batch, prompt], and open their cache. Returns logits [batch, 1, vocab]: the
        rows before the last ran densely, and are no method's."""
        real = real_tokens(ids, mask)
        if not bool(real[:, -1].all()) or bool((real.long().diff() < 0).any()):
            raise UserError(
                "attention_mask: the padding of a live batch lies on the left; set "
                "padding_side='left'"
            )
        require_positions(positions, positions_of(real), real)
        first = int(real.any(0).long().argmax())  # the columns before it are padding alone
        lengths = real.sum(-1).tolist()
        room = self._room(cache, max(lengths))
        setup = self.setup_at([(prompt, prompt + room) for prompt in lengths])
        session = setup.live(self.attached, room, **self.options)
        try:
            last = session.prefill(ids[:, first:], real[:, first:])
        except BaseException:
            session.close()
            raise
        cache.open(session, ids, real)
        return last.clone()[:, None]

    def _room(self, cache: MethodCache, num_prompt: int) -> int:
        """The room for tokens behind a prompt; UserError where it is too small for those wanted."""
        room, limit, wanted = cache.max_new_tokens, "", max(1, cache.num_wanted)
        if self.max_length is not None:
            room = min(room, self.max_length - num_prompt)
            limit = f", within the model's limit of {self.max_length}"
        if room < wanted:
            raise UserError(
                f"max_new_tokens={wanted}: behind a prompt of {num_prompt} tokens this cache has "
                f"room for {max(0, room)}; cached.new_cache(max_new_tokens=N) makes a larger "
                f"one{limit}"
            )
        return room

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
        _require_room(session, num_rows)
        # Inside generate transformers makes masks and positions; to look would wait for a GPU.
        if not cache.num_wanted:
            require_continued(mask, cache.real, cache.num_columns + num_rows)
            rows = torch.arange(num_rows, device=ids.device)
            first = session.batch.lengths.prompt[:, None] + session.steps
            require_positions(positions, first + rows)
        logits: list[Tensor] = []
        for column in ids.unbind(1):
            if cache.num_wanted:  # generate reads the last row alone
                logits.clear()
            logits.append(session.decode_step(column))
        cache.advance(ids)
        return torch.stack(logits, 1).clone()  # no longer a tensor of inference mode

    def _score(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Score texts by replay, one after another. Returns logits [batch, rows, vocab], NaN in the
        rows before the prompt's last, which ran densely, and the loss of `labels`.

        T is the tokens of a text. Without labels the token that its last row predicts is one of
        them, though it is not given: lm-eval's `HFLM` leaves it out.
        """
        began = time.perf_counter()
        batch, num_rows = ids.shape
        prompt = self.prefill_len
        if prompt is None:
            raise UserError(
                f"a text of {num_rows} rows without a cache: which of them are its prompt is not "
                f"known; to score it by the method {SCORE_WITH}; a prompt to go on from takes "
                "use_cache=True and no labels"
            )
        if mask is None and batch > 1 and not self.setup.method.reads_all:
            raise UserError(
                f"a batch of {batch} texts without attention_mask: padding on the right looks like "
                "tokens, and T, on which the method's budget depends, would count it; give "
                "attention_mask, or one text a call (lm-eval's HFLM: batch_size=1)"
            )
        real = real_tokens(ids, mask)
        require_positions(positions, positions_of(real), real)
        lengths: list[int] = real.sum(-1).tolist()
        if self.max_length is not None and max(lengths) > self.max_length:
            raise UserError(
                f"input_ids: a text of {max(lengths)} tokens, and the model takes {self.max_length}"
            )
        if min(lengths) <= prompt:
            raise UserError(
                f"prefill_len={prompt}: a text of {min(lengths)} tokens leaves no row that the "
                "method decodes; give longer texts, or past_key_values where these tokens continue "
                "a prompt"
            )
        more = 1 if labels is None else 0
        setup = self.setup_at([(prompt, length + more) for length in lengths])
        reads, scored = ReadStats(), []
        for row, length in enumerate(lengths):
            first = int(real[row].long().argmax())
            end = first + length
            if not bool(real[row, first:end].all()):
                raise UserError(
                    "attention_mask: a text's tokens follow one another; allowed: padding at its "
                    "ends"
                )
            text = ids[row : row + 1, first:end]
            within = torch.ones_like(text, dtype=torch.bool)
            final = torch.tensor([length + more], device=ids.device)
            session = setup.replay(self.attached, final, length)
            dense = session.prefill(text[:, :prompt], within[:, :prompt])
            hidden = session.decode(text[:, prompt:], within[:, prompt:])
            session.reads.check_fired()
            reads += session.reads
            # The prompt's last row predicts the first token that the method decodes.
            found = self.attached.logits(torch.cat([dense[:, -1:], hidden], 1))[0]
            around = (0, 0, first + prompt - 1, num_rows - end)
            scored.append(pad(found, around, value=math.nan))
        logits = torch.stack(scored)
        self.usage = Usage(
            steps=sum(lengths) - prompt * batch,
            score_s=time.perf_counter() - began,
            budget=reads.budget,
            tokens_evicted=reads.tokens_evicted,
        )
        loss = None if labels is None else self._loss(logits, labels)
        if loss is not None and loss.isnan():
            raise UserError(
                f"labels: the tokens of the prompt (prefill_len={prompt}) and padding are not "
                "predicted by the method; set their labels to -100"
            )
        return logits, loss

    def setup_at(self, lengths: list[tuple[int, int]]) -> Setup:
        """The method of the asked budget for sequences of (prompt tokens, T), with its codec."""
        if self.budget is None:
            return self.setup
        key = tuple(sorted(lengths))
        if key not in self._setups:
            rows = []
            for prompt, final in lengths:
                for cached in range(prompt, max(prompt + 1, final - 1)):
                    rows.append(TokenCounts(cached, prompt, final))
            method = with_budget_as_stored(
                self.setup.method,
                self.setup.codec,
                self.attached.geometry,
                rows,
                self.budget,
                nearest=self.nearest,
            )
            self._setups[key] = replace(self.setup, method=method)
        return self._setups[key]


def _require_room(session: LiveSession, num_rows: int) -> None:
    """Raise UserError where a cache has no room for so many further rows."""
    num_behind = session.steps + num_rows
    if num_behind > session.max_new_tokens:
        raise UserError(
            f"max_new_tokens={session.max_new_tokens}: the cache of this prompt has room for so "
            f"many tokens behind it, and with these there are {num_behind}; make it by "
            "cached.new_cache(max_new_tokens=N), or give harness.attach a larger max_new_tokens"
        )
