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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from harness.api.interface import Model, load
from harness.decode.session import LiveSession
from harness.decode.weights import streamed_weights
from harness.errors import UserError
from harness.files import stated_memory
from harness.model.attached import Attached
from harness.model.budgets import with_budget_as_stored
from harness.model.calls import replaced_forward, replaced_method
from harness.model.generation import Settings, require_count, short
from harness.model.load import UNLIMITED
from harness.model.model_cache import ModelCache
from harness.model.passes import require_eager
from harness.replay.session import Setup
from harness.results.step_stats import StepStats, stats_of
from harness.settings.config import NEW_TOKENS
from harness.speed.memories import opened
from methods.base import TokenCounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRANSFORMERS_NEW_TOKENS = 20
"""What transformers' `generate` makes where nothing says how many tokens."""
ENDED = "the block of harness.attach has ended, or the generate that made this cache"
OWN_CACHE = (
    "an attached model makes its own cache; leave it out, or give a call of the model what an "
    "earlier one with use_cache=True returned"
)
HARMLESS = {"cache_position", "num_items_in_batch", "tokenizer"}
"""Further arguments of a model's `forward`. `cache_position` follows from the cache. The
`tokenizer` is that of stop strings, which transformers' `generate` hands on."""


@contextmanager
def attach(
    model: PreTrainedModel | Model | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: str = "infinigen",
    budget: float | str | None = None,
    max_new_tokens: int = NEW_TOKENS,
    prefill_len: int | None = None,
    **settings: Any,
) -> Iterator[CachedModel]:
    """Run a transformers model on a method's live cache, whoever calls it.

    Inside the `with` block the model's own `generate` and forward pass use the method's cache, also
    where a pipeline, a streamer in another thread, or lm-eval's `HFLM` calls them.
    `cached.generate` is the same. `cached.usage` has TTFT, TPOT and bytes. `model(ids,
    use_cache=True)` runs a prompt, and its `past_key_values` take the rows after it. `model(ids)`
    is a whole text, which needs `prefill_len`: `HFLM`, which does not say where a context ends,
    takes 1, and batches of one. The model is left in evaluation mode, and else as it was. It takes
    one `attach` or run at a time, of all threads.

    Args:
        model, tokenizer: as of `harness.load`, or what it returns. A method that is calibrated on
            a text needs the tokenizer.
        method, budget, settings: as of `Model.generate`. A budget is met for each call's lengths.
        max_new_tokens: tokens for which the cache of a prompt has room that a call of the model
            runs. T, on which a method's budget depends, is the prompt and these; `generate` knows
            its own.
        prefill_len: how many first tokens of a whole text, `model(input_ids)` or with `labels`, are
            its prompt; the method decodes all others. Logits before that are NaN.

    Raises:
        UserError: the model is refused or attached already, a setting is wrong, or there is no
            tokenizer to calibrate with.
    """
    require_count("max_new_tokens", max_new_tokens)
    if prefill_len is not None:
        require_count("prefill_len", prefill_len)
    used = load(model, tokenizer)
    own = {"experiment": "generate", "prompt": "-", "method": method, "budget": budget}
    config = used.configured(own, settings)
    loaded, platform = used.loaded, config.platform
    asked = None
    if not config.budget_is_measured:  # else once, on a text of which half is the prompt
        asked, config = config.budget, replace(config, budget=None)
    with ExitStack() as stack:
        stack.enter_context(stated_memory(platform.host_gib))
        run = opened(config, loaded, lambda: [TokenCounts(1, 1, 2)])
        attached, setup, _, link = stack.enter_context(run)
        streamed = streamed_weights(
            attached, link, platform.weights_on_device, pinned=platform.pinned
        )
        stack.enter_context(streamed)
        cached = CachedModel(
            attached,
            setup,
            {
                "placement": config.placement,
                "link": link,
                "pinned": platform.pinned,
                "graphs": platform.replays_steps,
            },
            asked,
            nearest=config.budget_rule == "nearest",
            max_new_tokens=max_new_tokens,
            prefill_len=prefill_len,
            max_length=loaded.max_length,
        )
        yield stack.enter_context(cached)


@dataclass(frozen=True, kw_only=True)
class Usage(StepStats):
    """What one `generate`, or one batch of decode steps, took.

    steps: decode steps, one less than the new tokens of a generated sequence; of a scored text the
    rows that the method decoded. budget: share of the full cache that a step read; None without a
    step. h2d_bytes, d2h_bytes: rows that the steps took from the link, and wrote back, as
    `experiment=latency` counts them. The other numbers are those of `harness.results.step_stats`;
    a step lasts from the logits before it to its own, what the caller does in between included.

    A scored text has steps, budget and tokens_evicted: replay has no steps in time and moves
    nothing.
    """

    steps: int
    budget: float | None
    h2d_bytes: int = 0
    d2h_bytes: int = 0


class MethodCache(ModelCache):
    """The `past_key_values` of an attached model: a handle of the method's live cache of one batch.

    The keys and values lie in a `LiveSession`, which is closed with the last reference to this
    object, and at the end of `harness.attach` at the latest. max_new_tokens: room for tokens behind
    the prompt. in_generate: it is that of a `generate`, which closes it at its end. real: bool
    [batch, prompt], False for the padding of the prompt.
    """

    def __init__(self, attached: Attached, max_new_tokens: int, *, in_generate: bool) -> None:
        super().__init__(attached.decoder.stack.config)
        self.max_new_tokens = max_new_tokens
        self.in_generate = in_generate
        self.session: LiveSession | None = None
        self.is_closed = False
        self.real: Tensor = torch.empty(0, 0, dtype=torch.bool)

    def open(self, session: LiveSession, real: Tensor) -> None:
        """Take over a session whose prompt has run; real: bool [batch, prompt], False for
        padding."""
        self.session = session
        self.real = real
        self.num_columns = real.shape[1]
        # transformers looks here for the states of recurrent layers.
        self.layers = session.model_cache.layers
        self._free = finalize(self, session.close)
        self._free.atexit = False

    def close(self) -> None:
        """Free the session. Idempotent."""
        self.is_closed = True
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
            raise UserError(f"past_key_values: {ENDED}")
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


@dataclass(eq=False)
class CachedModel:
    """An attached model on a method's cache, whose calls are these inside its `with` block.

    options: of `LiveSession`, such as placement and link. budget: share of the full cache that a
    step is to read, met for each call's lengths; None takes the method as it is. nearest: accept
    the nearest possible budget. max_new_tokens: tokens for which a prompt's cache has room where no
    `generate` says it. prefill_len: how many first tokens of a whole text are its prompt; None:
    whole texts are refused. max_length: the model's limit in tokens. usage: of the last `generate`
    or scored text; None before the first.

    Calls from several threads take turns.
    """

    attached: Attached
    setup: Setup
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    nearest: bool = False
    max_new_tokens: int = NEW_TOKENS
    prefill_len: int | None = None
    max_length: int = UNLIMITED
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
                    stack.callback(cache.close)

    def _require_open(self) -> None:
        if not self._is_open:
            raise UserError(ENDED)

    def _new_cache(self, max_new_tokens: int, *, in_generate: bool) -> MethodCache:
        cache = MethodCache(self.attached, max_new_tokens, in_generate=in_generate)
        self._caches.add(cache)
        return cache

    # generate

    def generate(self, *args: Any, **settings: Any) -> Any:
        """transformers' `generate` on the method's cache: returns ids [batch, prompt + new tokens].

        The first argument is input_ids, int [batch, prompt], padding on the left. T is the prompt
        and the largest number of new tokens: max_new_tokens, else what max_length leaves, else
        transformers' 20. Raises UserError for arguments that are not taken, padding on the right,
        and lengths beyond the model's limit.
        """
        self._require_open()
        require_eager()
        asked = by_name(inspect.signature(self._own_generate), args, settings)
        chosen = Settings(self.attached.model, asked)
        asked |= chosen.set_aside()
        given, named = asked.pop("inputs", None), asked.pop("input_ids", None)
        ids = checked_ids(named if given is None else given)
        other = asked.get("past_key_values")
        if other is not None:
            raise UserError(f"past_key_values={short(other)}: {OWN_CACHE}")
        num_new = chosen.num_new_tokens(ids.shape[1])
        if num_new is None:
            num_new = max(1, min(TRANSFORMERS_NEW_TOKENS, self.max_length - ids.shape[1]))
        cache = self._new_cache(num_new, in_generate=True)
        try:
            made = self._own_generate(ids, **asked | {"past_key_values": cache, "use_cache": True})
            self.usage = cache.usage
        finally:
            cache.close()
        return made

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass as a prompt, as decode rows, or as a whole text; see the module.

        The arguments are transformers': input_ids int [batch, rows], attention_mask, labels,
        past_key_values (what an earlier call returned), use_cache, logits_to_keep. Returns its
        output: logits fp32 [batch, rows, vocab], the loss of a whole text with labels, and the
        cache. Raises UserError, in one line, for what cannot be computed so.
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
        cache = past_key_values
        if cache is not None and cache not in self._caches:
            raise UserError(f"past_key_values={short(cache)}: {OWN_CACHE}")
        is_behind = cache is not None and (cache.session is not None or cache.is_closed)
        if cache is None or not cache.in_generate:
            require_harmless(others)
        elif not is_behind:  # later, to look would wait for a GPU
            others.pop("position_ids", None)  # of transformers' own code
            require_harmless(others)
        ids = checked_ids(input_ids).to(self.attached.device)

        loss = None
        if is_behind:
            require_harmless({"labels": labels})
            logits = self._decode(cache, ids, attention_mask)
        elif cache is None and (use_cache is not True or labels is not None):
            logits, loss = self._score(ids, attention_mask, labels)
        else:
            if cache is None:
                cache = self._new_cache(self.max_new_tokens, in_generate=False)
            logits = self._prefill(cache, ids, attention_mask)

        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _prefill(self, cache: MethodCache, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Run prompts [batch, prompt], and open their cache. Returns logits [batch, 1, vocab]: the
        rows before the last ran densely, and are no method's."""
        real = torch.ones_like(ids) if mask is None else mask.to(ids.device)
        real = real.bool()
        is_left = real.shape == ids.shape and bool(real[:, -1].all())
        if not is_left or bool((real.long().diff() < 0).any()):
            raise UserError(
                f"attention_mask: of shape {tuple(real.shape)}; allowed: that of input_ids, "
                f"{tuple(ids.shape)}, with all padding on the left (padding_side='left')"
            )
        first = int(real.any(0).long().argmax())  # the columns before it are padding alone
        lengths = real.sum(-1).tolist()
        most = self.max_length - max(lengths)
        if most < (cache.max_new_tokens if cache.in_generate else 1):
            raise UserError(
                f"max_new_tokens={cache.max_new_tokens}: behind a prompt of {max(lengths)} tokens "
                f"the model has room for {max(0, most)}, within its limit of {self.max_length}"
            )
        room = min(cache.max_new_tokens, most)
        setup = self.setup_at([(prompt, prompt + room) for prompt in lengths])
        session = setup.live(self.attached, room, **self.options)
        try:
            last = session.prefill(ids[:, first:], real[:, first:])
        except BaseException:
            session.close()
            raise
        cache.open(session, real)
        return last.clone()[:, None]

    def _decode(self, cache: MethodCache, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Run decode rows [batch, rows], one step each. Returns logits [batch, rows, vocab]."""
        session = cache.require_open()
        batch, num_rows = ids.shape
        num_sequences = len(session.batch.prompts)
        if batch != num_sequences:
            raise UserError(
                f"input_ids: {batch} sequences, and past_key_values of {num_sequences}; they must "
                "agree"
            )
        num_behind = session.steps + num_rows
        if num_behind > session.max_new_tokens:
            raise UserError(
                f"max_new_tokens={session.max_new_tokens}: the cache of this prompt has room for "
                f"so many tokens behind it, and with these there are {num_behind}; give "
                "harness.attach a larger max_new_tokens"
            )
        # In generate the masks are transformers' own: to look would wait for a GPU.
        if mask is not None and not cache.in_generate:
            num_later = cache.num_columns + num_rows - cache.real.shape[1]
            seen = pad(cache.real, (0, num_later), value=True)
            if mask.shape != seen.shape or not torch.equal(mask.to(seen.device).bool(), seen):
                raise UserError(
                    "attention_mask: behind this cache it is the prompt's with ones for all later "
                    f"tokens, of shape {tuple(seen.shape)}; or leave it out"
                )
        logits: list[Tensor] = []
        for column in ids.unbind(1):
            logits.append(session.decode_step(column))
        cache.num_columns += num_rows
        return torch.stack(logits, 1).clone()  # no longer a tensor of inference mode

    def _score(
        self, ids: Tensor, mask: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Score a text by replay. Returns logits [1, rows, vocab], NaN in the rows before the
        prompt's last, which ran densely, and the loss of `labels`.

        Labels of the prompt's tokens must be -100; else the loss is NaN. T is the tokens of the
        text. Without labels the token that its last row predicts is one of them, though it is not
        given: lm-eval's `HFLM` leaves it out.
        """
        batch, num_rows = ids.shape
        prompt = self.prefill_len
        if prompt is None:
            raise UserError(
                f"a text of {num_rows} rows without a cache: which of them are its prompt is not "
                "known; to score it by the method give harness.attach prefill_len=N, the tokens of "
                "its prompt (1: the method decodes every row), or use harness.lm(model, ...), "
                "which knows them of each request; a prompt to go on from takes use_cache=True and "
                "no labels"
            )
        if batch > 1 or mask is not None and not bool(mask.all()):
            raise UserError(
                f"a batch of {batch} texts, or one with padding: T, on which the method's budget "
                "depends, is of one text; give one a call, without padding (lm-eval's HFLM: "
                "batch_size=1)"
            )
        if not prompt < num_rows <= self.max_length:
            raise UserError(
                f"input_ids: a text of {num_rows} tokens; allowed: {prompt + 1} (prefill_len="
                f"{prompt}) to {self.max_length} (the model's limit), or past_key_values where "
                "these tokens continue a prompt"
            )
        final = num_rows if labels is not None else num_rows + 1
        real = torch.ones_like(ids, dtype=torch.bool)
        session = self.setup_at([(prompt, final)]).replay(
            self.attached, torch.tensor([final], device=ids.device), num_rows
        )
        dense = session.prefill(ids[:, :prompt], real[:, :prompt])
        hidden = session.decode(ids[:, prompt:], real[:, prompt:])
        session.reads.check_fired()
        # The prompt's last row predicts the first token that the method decodes.
        found = self.attached.logits(torch.cat([dense[:, -1:], hidden], 1))
        logits = pad(found, (0, 0, prompt - 1, 0), value=math.nan)
        self.usage = Usage(
            steps=num_rows - prompt,
            budget=session.reads.budget,
            tokens_evicted=session.reads.tokens_evicted,
        )
        if labels is None:
            return logits, None
        model: Any = self.attached.model
        loss = model.loss_function(
            logits=logits, labels=labels.to(logits.device), vocab_size=logits.shape[-1]
        )
        return logits, loss

    def setup_at(self, lengths: list[tuple[int, int]]) -> Setup:
        """The method of the asked budget for sequences of (prompt tokens, T), with its codec."""
        if self.budget is None:
            return self.setup
        key = tuple(sorted(lengths))
        if key not in self._setups:  # a search may take seconds
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


# Arguments of the model's calls


def by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def checked_ids(ids: Any) -> Tensor:
    """Token ids, int [batch, tokens]; UserError for anything else."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2 or not ids.numel():
        found = short(ids)
        if isinstance(ids, Tensor):
            found = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise UserError(f"input_ids: {found}; allowed: a tensor of token ids, int [batch, tokens]")
    return ids


def require_harmless(others: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that would change the result and is not taken."""
    for name, value in others.items():
        if name in HARMLESS:
            continue
        changes = value.any() if isinstance(value, Tensor) else value not in (None, False)
        if changes:
            why = "an attached model does not take it; leave it out"
            raise UserError(f"{name}={short(value)}: {why}")
