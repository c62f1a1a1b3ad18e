"""The attention layers of a model, read from one run of two tokens: no code here knows a model
family by its name.

The arguments of the model's calls to transformers' attention function tell the number of heads, the
softmax, and the tokens that each layer sees. The arguments of its calls to the cache tell how a
token is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from harness.model.calls import (
    Call,
    attention_function,
    first_tensor,
    options_of,
    readable,
    refusal,
)
from harness.model.model_cache import ModelCache
from methods.attention import Softmax
from methods.base import Window

HARMLESS_OPTIONS = {
    "attention_mask", "cache_position", "cross_attn_layer_idx", "dropout", "encoder_attention_mask",
    "encoder_hidden_states", "head_mask", "is_causal", "layer_head_mask", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value",
    "past_key_values", "per_layer_input", "position_embeddings", "position_ids", "return_dict",
    "s_aux", "scaling", "shared_kv_states", "sliding_window", "softcap", "token_type_ids",
    "use_cache", "use_kernels",
}  # fmt: skip
"""Arguments of an attention function that are handled here, or do not change its result."""
FAR = 2**20
"""A position beyond every window: whether a row there sees the first token tells a window from full
attention."""


class PositionSource(NamedTuple):
    """The submodule that makes a layer's position embeddings, and its non-tensor arguments."""

    module: nn.Module
    options: tuple[Any, ...]

    def embeddings(self, states: Tensor, positions: Tensor) -> Any:
        """What it makes for `positions`. Its hooks, for a pass under way, do not run."""
        return self.module.forward(states, positions, *self.options)


class Latent(NamedTuple):
    """The matrices of multi-head latent attention over cached latents: a token has one key for all
    heads, of `rank` latent elements and its rotary ones (DeepSeek-V2, section 2.1.2, "absorbed"
    matrices).

    to_query: [heads, head_dim, rank + rotary], turns a head's query into one for this key.
    to_value: [heads, rank, value_dim], turns a head's mean latent into its output.
    """

    to_query: Tensor
    to_value: Tensor

    @property
    def rank(self) -> int:
        """Latent elements of a token."""
        return self.to_value.shape[1]


class DirectQuery(NamedTuple):
    """A layer's query without the code of its module, which makes a key and a value as well.

    modules: the projection and norms, in order; the heads are apart behind the first `num_whole`.
    num_heads: of the query; more, in a projection to keys too, come behind. is_turned: the first
    elements of a head are turned, halves against each other.
    """

    modules: tuple[nn.Module, ...]
    num_whole: int
    num_heads: int
    head_dim: int
    is_turned: bool

    def query(self, hidden: Tensor, embeddings: Any) -> Tensor:
        """The query [batch, heads, rows, head_dim] of an input [batch, rows, hidden_size].

        embeddings: cosines and sines, [batch or 1, rows, turned elements] each.
        """
        states = hidden
        for module in self.modules[: self.num_whole]:
            states = module(states)
        states = states.unflatten(-1, (-1, self.head_dim))[..., : self.num_heads, :]
        for module in self.modules[self.num_whole :]:
            states = module(states)
        states = states.transpose(1, 2)
        if not self.is_turned:
            return states
        cos, sin = (each.unsqueeze(1) for each in embeddings)
        size = cos.shape[-1]
        turned, others = states[..., :size], states[..., size:]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([turned, others], -1) if others.shape[-1] else turned


@dataclass
class Layer:
    """An attention layer. Its sizes are those of its cache: under latent attention there is one KV
    head.

    block: the decoder layer around it. window: the tokens that a row sees; None: all earlier ones.
    before: the mixer of the previous block, whose input stands in for this layer's in a prediction;
    None in the first. positions: the source of its position embeddings; None where it gets none.
    call: its call in the trace. prescales: the module multiplies its
    queries by its own `scaling` and passes a scale of 1; while attached it multiplies by 1, as
    methods get queries before the scale. unused: submodules that the query does not depend on, and
    the size of their output. query_modules: the submodules that it depends on. direct: gives the
    same query, to the bit, as the module's own code; None where none is known. output_factor: see
    `harness.model.decoder`; None until it is asked for. is_output_plain: its output is
    known to be a projection alone.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    softmax: Softmax
    window: Window | None
    positions: PositionSource | None
    call: Call
    prescales: bool = False
    block: nn.Module = field(default_factory=nn.Identity)
    before: nn.Module | None = None
    unused: dict[str, int] = field(default_factory=dict)
    query_modules: tuple[str, ...] = ()
    direct: DirectQuery | None = None
    latent: Latent | None = None
    output_factor: Tensor | None = None
    is_output_plain: bool = False

    def rerun(self, hidden: Tensor, cache: ModelCache, **changed: Any) -> Call:
        """The call in the trace, with another input, and with arguments of the call `changed`."""
        return self.call.with_hidden(hidden, attention_mask=None, past_key_values=cache, **changed)

    @property
    def elements(self) -> int:
        """Elements of a token in a KV head's cache."""
        return self.head_dim + (0 if self.latent else self.value_dim)


class Trace:
    """A run of two tokens through a decoder, with hooks on every module.

    recurrent: modules that wrote a recurrent state. stored: by attention module, its key and value
    for the cache. output_type: the type that the stack returns.
    """

    def __init__(self, stack: Any, family: str) -> None:
        self.stack = stack
        self.family = family
        self.device = stack.device
        self.layers: list[Layer] = []
        self.recurrent: list[nn.Module] = []
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.output_type: type = type(None)
        self._cache = ModelCache(stack.config)
        self._running: list[nn.Module] = []
        self._calls: dict[int, Call] = {}
        """By module."""
        self._made: dict[int, tuple[PositionSource, Any]] = {}
        self._masks: list[tuple[Tensor, Window | None]] = []

    def run(self) -> list[Layer]:
        """The attention layers, in order."""
        stack = self.stack
        self._cache.on_state = self._note_recurrent
        ids = torch.ones(1, 2, dtype=torch.long, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        with ExitStack() as hooks:
            for module in stack.modules():
                entering = module.register_forward_pre_hook(self._enters, with_kwargs=True)
                hooks.callback(entering.remove)
                leaving = module.register_forward_hook(self._leaves, with_kwargs=True)
                hooks.callback(leaving.remove)
            hooks.enter_context(readable(self.family))
            hooks.enter_context(attention_function(stack, self._attend, self._mask))
            output = stack(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=False,
            )
            self.output_type = type(output)
        if not self.layers:
            raise refusal(self.family, "its attention is not transformers' attention function")
        return self.layers

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._running.append(module)
        self._calls[id(module)] = Call(args, dict(kwargs))

    def _leaves(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        self._running.pop()
        first = first_tensor(output)
        if first is not None and id(first) not in self._made:
            source = PositionSource(module, options_of(args, kwargs))
            self._made[id(first)] = source, output  # kept, so that no other tensor gets its id

    def _note_recurrent(self) -> None:
        if self._running[-1] not in self.recurrent:
            self.recurrent.append(self._running[-1])

    # Windows

    def _mask(
        self, *_: Any, mask_function: Any, local_size: int | None = None, **__: Any
    ) -> Tensor:
        """Make a mask of ones. The attention call gets this same object: it tells the window."""
        stand_in = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=self.device)
        self._masks.append((stand_in, self._window(mask_function, local_size)))
        return stand_in

    def _window(self, mask_function: Any, size: int | None) -> Window | None:
        """The window of a mask function, found by calls; None where it hides no earlier token."""
        if mask_function is causal_mask_function:
            return None
        zero = torch.zeros((), dtype=torch.long, device=self.device)

        def visible(row: int) -> Tensor:
            """Whether a row sees each token, up to the one after its own."""
            tokens = torch.arange(row + 2, device=zero.device)
            return mask_function(zero, zero, zero + row, tokens).expand(len(tokens))

        def is_described_by(window: Window) -> bool:
            for row in _telling_rows(window.size):
                tokens = torch.arange(row + 2, device=zero.device)
                first = window.first_visible(zero + row)
                if not torch.equal(visible(row), (tokens >= first) & (tokens <= row)):
                    return False
            return True

        num_seen = int(visible(FAR).sum())
        if num_seen == FAR + 1:
            return None
        for window in (Window(num_seen), Window(size or num_seen, is_chunk=True)):
            if is_described_by(window):
                return window
        why = "a layer sees neither all earlier tokens, nor a sliding window, nor a chunk of them"
        raise refusal(self.family, why)

    def _windows_of(self, mask: Any) -> list[Window | None]:
        """The windows of the masks that `_mask` made and an attention call received, itself or as
        a view of it."""
        known = {id(mask), id(getattr(mask, "_base", None))}
        return [window for stand_in, window in self._masks if id(stand_in) in known]

    # The attention call

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> Any:
        """Note a layer at its call of the attention function."""
        mask = args[0] if args else options.get("attention_mask")
        under_way = [self._calls[id(running)] for running in reversed(self._running)]
        windows = self._windows_of(mask)
        unknown = []
        for name, option in options.items():
            if name not in HARMLESS_OPTIONS and option is not None:
                unknown.append(name)
        if unknown:
            raise refusal(self.family, f"its attention takes {', '.join(sorted(unknown))}")
        if mask is not None and not windows:
            raise refusal(self.family, "its attention takes a mask of its own")
        if not getattr(module, "is_causal", True):
            raise refusal(self.family, "its attention is not causal")
        if any(layer.module is module for layer in self.layers):
            raise refusal(self.family, "a layer attends more than once")
        if query.shape[2] != 2 or key.shape[2] != 2:
            raise refusal(self.family, "a layer does not attend to each of the tokens")

        window = windows[0] if windows else None
        window_size = options.get("sliding_window")
        if not windows and window_size:
            window = Window(window_size)
        batch, num_heads, num_rows, head_dim = query.shape
        scale = options.get("scaling")
        if scale is None:
            scale = head_dim**-0.5
        prescales = scale == 1 and getattr(module, "scaling", 1) != 1
        if prescales:
            scale = module.scaling
        sinks = options.get("s_aux")
        softmax = Softmax(
            scale=float(scale),
            softcap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float(),
        )
        layer = Layer(
            module=module,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            value_dim=value.shape[3],
            softmax=softmax,
            window=window,
            positions=self._position_source(under_way),
            call=self._calls[id(module)],
            prescales=prescales,
        )
        self.layers.append(layer)
        if self._cache.latest is not None:
            self.stored[id(module)] = self._cache.latest
            self._cache.latest = None
        return value.new_zeros(batch, num_rows, num_heads, value.shape[3]), None

    def _position_source(self, under_way: list[Call]) -> PositionSource | None:
        """What made the position embeddings of the innermost call that has any known ones."""
        for call in under_way:
            embeddings = first_tensor(call.kwargs.get("position_embeddings"))
            if id(embeddings) in self._made:
                return self._made[id(embeddings)][0]
        return None


def _telling_rows(size: int) -> set[int]:
    """Rows around the edges of a window of this size, and one far from the first token."""
    rows = {FAR}
    for multiple in (0, size, 2 * size, 5 * size):
        for row in range(multiple - 2, multiple + 2):
            rows.add(max(0, row))
    return rows
