"""Attach our attention to a loaded Hugging Face decoder, once it is known to give the model's own
numbers.

While attached, a forward pass hands each attention layer's fresh query, key and value to a
*handler*, which owns the history. The model itself stores no keys and values, and is given explicit
positions. All hooks go at the end.

The description of a model by `harness.model.decoder` is not trusted: at the first use
`check_decoder` compares with the model's own forward.

    with attach(model) as attached:
        hidden = attached.forward(ids, positions, handler)
        logits = attached.logits(hidden)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.errors import UserError
from harness.model.attention import Rotary, dense_attention, prompt_attention, rotary_of
from harness.model.decoder import (
    Call,
    Decoder,
    Layer,
    ModelCache,
    PositionSource,
    Reached,
    attention_function,
    options_of,
    read_decoder,
    readable,
    refusal,
    replaced_forward,
    reraise_out_of_memory,
    stack_of,
)
from methods.base import Geometry, LayerInputs

LOOK_AT = (
    "look at its weights, and at the numbers in its configuration (rope_parameters, eps, scales)"
)
PASSES = (4, 3, 1)
"""Rows of each pass."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.02}
COARSE = 0.08
"""Largest difference of a logit over the largest logit; `COARSE` in bfloat16."""


ELSEWHERE = (
    "the model is attached to a KV-cache method, and its decoder cannot be called by itself: inside harness.attach "
    "call the model or its generate, elsewhere wait until the run that attached it has ended"
)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` CUDA's current one inside the block: Triton launches and events are recorded
    there, wherever the tensors lie."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


class Handler:
    """Computes attention during a forward pass. Layer numbers count all attention layers of the
    model."""

    needs_inputs = False

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a layer's fresh rows.

        query: [batch, heads, rows, head_dim], post-position, before the softmax scale; key, value:
        [batch, num_kv_heads, rows, head_dim or value_dim]. Returns [batch, rows, heads, value_dim].
        All on the layer's device, which is CUDA's current one.
        """
        raise NotImplementedError

    def rehearses(self, layer: int) -> bool:
        """Whether `rehearse` is to be called with an early query of `layer`."""
        return False

    def rehearse(self, layer: int, query: Tensor) -> None:
        """Take an early query of `layer`, made in the previous layer from that layer's attention
        input."""

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        """Take what the layer's attention module is called with, before its `attention`, if this
        `needs_inputs`."""

    def layer_begins(self, layer: int) -> None:
        """Called when the layer's attention module has its input."""

    def layer_ends(self, layer: int) -> None:
        """Called when the layer's attention module is done."""


class Attached:
    """A model with our attention under it. Valid inside `attach`.

    layers: all attention layers, in order. softmaxes: theirs, for queries as handlers get them.
    numbers: by layer, its number among the layers that see every token, which is how methods count;
    None for a local layer. longest: tokens of the longest sequence that all layers see whole, where
    all of them are local; None: any. prompts: kept passes. device: of ids, positions, hidden states
    and logits. devices: of the layers, each once, in their order.
    """

    def __init__(self, model: Any, decoder: Decoder, prompts: DensePrompts | None = None) -> None:
        self.model = model
        self.decoder = decoder
        self.prompts = (
            None if decoder.recurrent else prompts
        )  # recurrent layers would go on from a prompt's states
        self.layers: list[Layer] = decoder.layers
        self.device: torch.device = model.device
        self.devices = list(dict.fromkeys(layer.device for layer in self.layers))
        self.dtype: torch.dtype = model.dtype
        windows = [layer.window for layer in self.layers if layer.window is not None]
        all_local, number = len(windows) == len(self.layers), count()
        self.longest = min(window.size for window in windows) if all_local else None
        self.numbers = [
            next(number) if all_local or layer.window is None else None for layer in self.layers
        ]
        self._numbered = list(zip(self.layers, self.numbers, strict=True))
        self.geometry = self._geometry()
        self.softmaxes = [
            layer.softmax if number is None else layer.softmax._replace(scale=self.geometry.scale)
            for layer, number in self._numbered
        ]
        self._index = {id(layer.module): index for index, layer in enumerate(self.layers)}
        self._rotaries: dict[int, Rotary | None] = {}
        self._handler: Handler | None = None
        self._cache = self.new_cache()
        self._real = torch.ones(0, 0)
        self._made: dict[PositionSource, Any] = {}
        self._rehearsing = False
        self._forward = (
            model.forward
        )  # the model's own: `harness.api.cached_model` puts another in its place
        self._thread: int | None = None  # the one that runs a pass

    def _geometry(self) -> Geometry:
        """The sizes of the layers that see every token; UserError where they differ."""
        layers = [layer for layer, number in self._numbered if number is not None]
        first = layers[0]
        sizes = {
            (each.num_heads, each.num_kv_heads, each.head_dim, each.value_dim, each.elements)
            for each in layers
        }
        if len(sizes) > 1:
            raise refusal(
                self.decoder.family, "its layers that see every token have several shapes"
            )
        softmaxes = tuple(each.softmax._replace(scale=first.softmax.scale) for each in layers)
        token = first.num_kv_heads * first.elements
        return Geometry(
            num_layers=len(layers),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            scale=first.softmax.scale,
            family=self.decoder.family,
            rotate=self._rotate,
            value_dim=first.value_dim,
            values_in_keys=first.latent is not None,
            softmaxes=() if all(each.is_plain for each in softmaxes) else softmaxes,
            windows=tuple(
                layer.window._replace(weight=layer.num_kv_heads * layer.elements / token)
                for layer, number in self._numbered
                if number is None and layer.window is not None
            ),
        )

    def method_devices(self, num_exempt_layers: int) -> list[torch.device]:
        """The devices of the layers under a method, each once."""
        under = [
            layer
            for layer, number in self._numbered
            if number is not None and number >= num_exempt_layers
        ]
        return list(dict.fromkeys(layer.device for layer in under))

    def new_cache(self) -> ModelCache:
        """The cache object for one batch, with the states of recurrent layers."""
        return ModelCache(self.decoder.stack.config)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        handler: Handler,
        cache: ModelCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [batch, rows, hidden_size] of `ids` [batch, rows] at `positions`, all
        on `device`.

        cache: the batch's, from `new_cache`; None: these are its first and only rows. real: bool
        [batch, rows], False for padding, which recurrent layers must not see; None: there is none.
        Raises UserError for a token without an embedding, and where activations are not finite. A
        pass over one row is not checked: a decode step waits for no device.
        """
        if ids.shape[1] > 1:
            require_embedded(ids, self.decoder.stack.get_input_embeddings())
        self._handler, self._positions = handler, positions
        self._cache = self.new_cache() if cache is None else cache
        self._real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        self._is_padded = bool(self.decoder.recurrent) and real is not None and not bool(real.all())
        try:
            with self._running():
                output = self.decoder.stack(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=self._cache,
                    use_cache=False,
                )
        finally:
            self._handler = None
            self._made.clear()
        self._cache.num_columns += ids.shape[1]
        if ids.shape[1] > 1:
            require_in_range(output.last_hidden_state)
        return output.last_hidden_state.to(self.device)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The model's output head over final hidden states [..., hidden_size], its softcap and
        scale included: fp32 [..., vocab]."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        made = self.decoder.output_type(
            last_hidden_state=flat
        )  # what the model's own code is given instead
        with replaced_forward(self.decoder.stack, lambda *_, **__: made), self._running():
            logits = self._forward(
                input_ids=flat.new_zeros(flat.shape[:2], dtype=torch.long), use_cache=False
            ).logits
        return logits.view(*hidden.shape[:-1], -1).float()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """This thread runs the decoder inside the `with` block."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _require_own_call(self, *_: Any) -> None:
        """Called before the decoder runs. Raises UserError for a call that is not made by `forward`
        or `logits`: it would read and disturb the caches of the run that has the model."""
        if self._thread != threading.get_ident():
            raise UserError(ELSEWHERE)

    def require_length(self, num_tokens: int) -> None:
        """Raise UserError for a sequence that is too long to be decoded as one pass computes it:
        beyond the window of a model with local layers only, or beyond the length from which rotary
        frequencies depend on the sequence's length (dynamic, longrope)."""
        limits = {"sliding window": self.longest}
        config = self.decoder.stack.config
        parameters = getattr(config, "rope_parameters", None) or {}
        for rope in (
            [parameters] if "rope_type" in parameters else filter(None, parameters.values())
        ):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                limit = (
                    rope.get("original_max_position_embeddings") or config.max_position_embeddings
                )
                limits[f"length up to which {rope['rope_type']} rope keeps its positions"] = limit
        for name, limit in limits.items():
            if limit and num_tokens > limit:
                raise UserError(
                    f"a sequence of {num_tokens} tokens: {limit} is the model's {name}; lower seq_len, or prompt_len, "
                    "gen_len or max_new_tokens"
                )

    def require_even(self, real: Tensor) -> None:
        """Raise UserError for a batch with padding, real bool [batch, prompt], where padding
        changes the results."""
        if self.decoder.no_padding and not bool(real.all()):
            raise UserError(
                f"model family {self.geometry.family!r} takes no batch of prompts of unequal lengths: "
                f"{self.decoder.no_padding}; run them one by one"
            )

    def require_rehearsal(self) -> None:
        """Raise UserError where the model's queries cannot be made ahead of their layer."""
        if self.decoder.no_rehearsal:
            raise UserError(
                f"model family {self.geometry.family!r} takes no method that rehearses a layer's query "
                f"(method.when=previous_layer): {self.decoder.no_rehearsal}"
            )

    def early_query(self, layer: int, hidden: Tensor) -> Tensor:
        """The query of `layer` for the input `hidden` [batch, rows, hidden_size], as a handler gets
        it."""
        wanted = self.layers[layer]
        call = wanted.call.with_hidden(
            hidden,
            position_embeddings=None
            if wanted.positions is None
            else self._made.get(wanted.positions),
            position_ids=self._positions,
            attention_mask=None,
            past_key_values=self._cache,
        )
        return self._query_of(layer, call)

    def example(self, layer: int) -> tuple[LayerInputs, Tensor]:
        """The inputs of a layer in the trace of the model, a few tokens, and the query that it
        makes of them."""
        call = self.layers[layer].call
        call = call.with_hidden(call.hidden, attention_mask=None, past_key_values=self.new_cache())
        return self._inputs_of(layer, call), self._query_of(layer, call)

    def _query_of(self, layer: int, call: Call) -> Tensor:
        """The query of a layer for the arguments of its module, as a handler gets it."""
        wanted = self.layers[layer]
        self._rehearsing = True
        try:
            with ExitStack() as stack:
                for name, size in wanted.unused.items():
                    stack.enter_context(
                        replaced_forward(wanted.module.get_submodule(name), partial(_zeros, size))
                    )
                query = self.decoder.run_to_attention(wanted, call).query
        finally:
            self._rehearsing = False
        return self._as_handled(layer, query)

    def _as_handled(self, layer: int, query: Tensor) -> Tensor:
        """A module's query as handlers get it: scaled for the softmax that all layers share, and
        for latent keys."""
        known = self.layers[layer]
        if known.softmax.scale != self.softmaxes[layer].scale:
            query = query * (known.softmax.scale / self.softmaxes[layer].scale)
        return query @ known.latent.to_query if known.latent is not None else query

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        """The attention function under the model."""
        if self._rehearsing:
            raise Reached(query, key, value)
        if self._handler is None:
            raise UserError(ELSEWHERE)
        index = self._index[id(module)]
        latent = self.layers[index].latent
        query = self._as_handled(index, query)
        stored, self._cache.latest = self._cache.latest, None  # not held beyond the layer
        with launching_on(query.device):
            if latent is None:
                del stored
                return self._handler.attention(index, query, key, value), None
            assert stored is not None
            key = torch.cat(stored, -1)
            output = self._handler.attention(index, query, key, key[..., : latent.rank])
        return (output.transpose(1, 2) @ latent.to_value).transpose(1, 2), None

    def _begins(self, layer: int, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._handler is not None:
            with launching_on(self.layers[layer].device):
                if self._handler.needs_inputs:
                    self._handler.take_inputs(layer, self._inputs_of(layer, Call(args, kwargs)))
                self._handler.layer_begins(layer)

    def _inputs_of(self, layer: int, call: Call) -> LayerInputs:
        """The arguments of a layer's attention module, as methods get them."""
        known = self.layers[layer]
        given = call.kwargs.get("position_embeddings")
        embeddings = (
            (given[0], given[1]) if isinstance(given, tuple | list) and len(given) == 2 else None
        )
        rotary = None if known.positions is None else partial(_embedded, known.positions)
        return LayerInputs(known.module, call.hidden, embeddings, rotary)

    def _ends(self, layer: int, *_: Any) -> None:
        if self._handler is not None:
            with launching_on(self.layers[layer].device):
                self._handler.layer_ends(layer)

    def _rehearse(
        self, layer: int, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called when the mixer before `layer` has its input."""
        if (
            self._handler is not None
            and self.numbers[layer] is not None
            and self._handler.rehearses(layer)
        ):
            with launching_on(self.layers[layer].device):
                self._handler.rehearse(layer, self.early_query(layer, Call(args, kwargs).hidden))

    def _positions_made(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any
    ) -> None:
        """Keep the position embeddings of this pass, for rehearsals of other layers."""
        self._made[PositionSource(module, options_of(args, kwargs))] = made

    def _rotate(
        self, states: Tensor, positions: Tensor, inverse: bool = False, layer: int = 0
    ) -> Tensor:
        """`Geometry.rotate`."""
        if layer not in self._rotaries:
            self._rotaries[layer] = rotary_of(self.decoder, self.layers[self.numbers.index(layer)])
        rotary = self._rotaries[layer]
        if rotary is None:
            raise ValueError(
                f"model family {self.geometry.family!r} applies its positions in a way that is not known"
            )
        return rotary.apply(states, positions, inverse)

    def _recurrent(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a recurrent module. In a padded batch each sequence's own rows run alone, with its
        own state. Rows run one by one where the module takes only one row after a state."""
        cache, columns = self._cache, self._real
        one_by_one = not self.decoder.takes_rows and cache.num_columns > 0 and columns.shape[1] > 1
        if self._handler is None or not (self._is_padded or one_by_one):
            return forward(*args, **kwargs)

        def run(cache_of_part: ModelCache, at: slice, rows: Tensor) -> Any:
            """The module's output for the rows [n] of some sequences."""

            def part(each: Any) -> Any:
                return cache_of_part if each is cache else _rows_of(each, columns.shape, at, rows)

            named = {name: part(each) for name, each in kwargs.items() if name != "attention_mask"}
            return forward(*map(part, args), **named)

        def run_all(cache_of_part: ModelCache, at: slice, rows: Tensor) -> Any:
            if not one_by_one:
                return run(cache_of_part, at, rows)
            return tree_map(
                lambda *parts: torch.cat(parts, 1),
                *(run(cache_of_part, at, row) for row in rows.split(1)),
            )

        if not self._is_padded:
            return run_all(cache, slice(None), torch.arange(columns.shape[1]))
        layer, states, outputs = int(module.layer_idx), [], []  # type: ignore[arg-type]
        for at, real in enumerate(columns):
            states.append(cache.fork(torch.tensor([at]), layer))
            if real.any():  # else these are rows after the sequence's end
                outputs.append(run_all(states[-1], slice(at, at + 1), real.nonzero().flatten()))
        cache.join(states, layer)

        def padded(*parts: Tensor) -> Tensor:
            joined = parts[0].new_zeros(*columns.shape, *parts[0].shape[2:])
            joined[columns.to(joined.device)] = torch.cat([each[0] for each in parts])
            return joined

        return tree_map(padded, *outputs)


def _embedded(
    source: PositionSource, states: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The position embeddings that a layer is given. The source's hooks do not run: they are for
    the model's pass."""
    return source.module.forward(states, position_ids, *source.options)


def require_embedded(ids: Tensor, embedding: Any) -> None:
    """Raise UserError where a token has no embedding: on a GPU the lookup would end the process's
    use of it."""
    highest = int(ids.max())
    if highest >= embedding.weight.shape[0]:
        raise UserError(
            f"the text has token {highest}, but the model's embedding has {embedding.weight.shape[0]} tokens: its "
            "tokenizer has tokens that the model does not know; give the model its own tokenizer, or another text"
        )


def require_in_range(hidden: Tensor) -> None:
    """Raise UserError where a pass gives numbers that are infinite or NaN."""
    if not hidden.sum(dtype=torch.float32).isfinite():
        if hidden.dtype == torch.float16:
            raise UserError(
                "model.dtype=float16: the model's activations overflow in it (beyond 65504); choose bfloat16 or float32"
            )
        raise UserError(f"the model's activations are not finite; {LOOK_AT}")


def _zeros(size: int, states: Tensor, *_: Any, **__: Any) -> Tensor:
    """The output of a projection that is left out: zeros, allocated once for each shape of a decode
    step."""
    shape = (*states.shape[:-1], size)
    return (
        _blank(shape, states.dtype, states.device)
        if states.shape[-2] == 1
        else states.new_zeros(shape)
    )


def _rows_of(each: Any, shape: torch.Size, at: slice, rows: Tensor) -> Any:
    """Some sequences' rows, int [n], of an argument that has all of them, of shape [batch, rows]
    first; else itself."""
    has_rows = isinstance(each, Tensor) and each.shape[:2] == shape
    return each[at, rows.to(each.device)] if has_rows else each


def _in_parts(decoder: Decoder, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a module that computes each row by itself, `decoder.rows_at_once` rows at a
    time.

    Its input is [batch, rows, ...]. What else it is given row by row is split alike.
    """
    hidden = Call(args, kwargs).hidden
    batch, num_rows = shape = hidden.shape[:2]
    most = decoder.rows_at_once // batch or 1
    if hidden.dim() != 3 or num_rows <= most:
        return forward(*args, **kwargs)

    def run(rows: Tensor) -> Any:
        """The module's output for rows [n] of each sequence."""
        part = partial(_rows_of, shape=shape, at=slice(None), rows=rows)
        return forward(*map(part, args), **{name: part(each) for name, each in kwargs.items()})

    def joined(*parts: Tensor) -> Tensor:
        if parts[0].dim() > 2:
            return torch.cat(parts, 1)
        return torch.cat([each.unflatten(0, (batch, -1)) for each in parts], 1).flatten(
            0, 1
        )  # rows of all sequences

    return tree_map(joined, *map(run, torch.arange(num_rows).split(most)))


@cache
def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def attached_unchecked(
    model: Any, decoder: Decoder, prompts: DensePrompts | None = None
) -> Iterator[Attached]:
    """Run `model` through our attention inside the `with` block, as its `decoder` describes it."""
    attached = Attached(model, decoder, prompts)
    sources = {
        id(layer.positions.module): layer.positions.module
        for layer in decoder.layers
        if layer.positions
    }
    with ExitStack() as stack:
        stack.callback(decoder.stack.register_forward_pre_hook(attached._require_own_call).remove)
        for index, layer in enumerate(decoder.layers):
            begins = partial(attached._begins, index)
            stack.callback(layer.module.register_forward_pre_hook(begins, with_kwargs=True).remove)
            stack.callback(
                layer.module.register_forward_hook(partial(attached._ends, index)).remove
            )
            if layer.before is not None:
                hook = layer.before.register_forward_pre_hook(
                    partial(attached._rehearse, index), with_kwargs=True
                )
                stack.callback(hook.remove)
            if layer.prescales:
                stack.callback(setattr, layer.module, "scaling", layer.module.scaling)
                layer.module.scaling = 1.0  # type: ignore[assignment]
        for module in sources.values():
            hook = module.register_forward_hook(attached._positions_made, with_kwargs=True)
            stack.callback(hook.remove)
        for module in decoder.recurrent:
            stack.enter_context(
                replaced_forward(module, partial(attached._recurrent, module, module.forward))
            )
        for module in decoder.row_wise:
            stack.enter_context(
                replaced_forward(module, partial(_in_parts, decoder, module.forward))
            )
        stack.enter_context(attention_function(decoder.stack, attached._attend))
        yield attached


# Dense passes over prompts

Keep = Callable[..., None]
"""Takes a layer, and its query, key and value [batch, heads, prompt, size]; behind them its
`LayerInputs` where the pass was asked for them."""


class PromptPass(Handler):
    """A dense causal pass over prompts. `keep` is given every layer's number, query, key and value
    as they come.

    real: bool [batch, prompt], False for the padding on the left; None: there is none.
    needs_inputs: `keep` is given the inputs of each layer's module, too.
    """

    def __init__(
        self,
        attached: Attached,
        real: Tensor | None = None,
        keep: Keep | None = None,
        *,
        needs_inputs: bool = False,
    ) -> None:
        self.attached = attached
        self.padding = () if real is None else (~real).sum(-1).tolist()
        self.keep = keep
        self.needs_inputs = needs_inputs
        self.inputs: LayerInputs | None = None

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        self.inputs = inputs

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.keep is not None:
            inputs = (self.inputs,) if self.needs_inputs else ()
            self.keep(layer, query, key, value, *inputs)
            self.inputs = None  # not held beyond the layer
        softmax, window = self.attached.softmaxes[layer], self.attached.layers[layer].window
        return prompt_attention(query, key, value, softmax, self.padding, window)


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


@dataclass
class PrefilledPrompt:
    """A prompt that has run, from which several methods can start.

    ids, real: [batch, prompt]; layers: (query, key, value) of each attention layer, [batch, heads,
    prompt, size]; hidden: final hidden states of the last column [batch, hidden_size]; model_cache:
    recurrent layers' states. worth: what second readings found, by method and layer, for the runs
    that share the prompt; None where none do.
    """

    ids: Tensor
    real: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor]]
    hidden: Tensor
    model_cache: ModelCache
    worth: dict[str, dict[int, Tensor]] | None = None


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> PrefilledPrompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    attached.require_even(real)
    return held_prompt(attached, ids, real, attached.new_cache())[0]


def held_prompt(
    attached: Attached, ids: Tensor, real: Tensor, model_cache: ModelCache
) -> tuple[PrefilledPrompt, Tensor]:
    """A prompt that has run, and the final hidden states of all its columns [batch, prompt,
    hidden_size]."""
    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def alone(states: Tensor) -> Tensor:
        """Copied where it is a part of a larger tensor, a fused projection, that would be kept with
        it."""
        return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states

    def keep(_: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        layers.append((alone(query), alone(key), alone(value)))

    hidden = attached.forward(
        ids, positions_of(real), PromptPass(attached, real, keep), model_cache, real
    )
    return PrefilledPrompt(ids, real, layers, hidden[:, -1], model_cache), hidden


class DensePrompts:
    """Dense passes over prompts that several runs of a process share: one for all methods of a
    sweep.

    They lie in files that are mapped into memory and deleted at once, so that the system keeps in
    memory what it has room for, and nothing is left when the process ends.

    most_bytes: of queries, keys and values that are kept. When they are full, what neither this run
    nor the one before has asked for leaves. A prompt for which there is still no room runs anew
    each time: sweeps ask for their prompts in turns, so that any other would leave just before its
    next.
    """

    def __init__(self, most_bytes: int) -> None:
        self.free = most_bytes
        self.run = 0
        self._kept: dict[tuple[Any, ...], _KeptPrompt] = {}

    def get(
        self, ids: Tensor, real: Tensor, run: Callable[[], tuple[PrefilledPrompt, Tensor]]
    ) -> tuple[PrefilledPrompt, Tensor]:
        """The pass over left-padded prompts ids, real [batch, prompt], and final hidden states of
        all their columns. run: makes both, where they are not kept."""
        key = tuple(ids.shape), ids.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
        if key not in self._kept:
            found = run()
            num_bytes = found[1].nbytes + sum(
                states.nbytes for layer in found[0].layers for states in layer
            )
            if num_bytes > self.free:
                for old in [
                    old for old, kept in self._kept.items() if kept.last_run < self.run - 1
                ]:
                    self.free += self._kept.pop(old).num_bytes
            if num_bytes > self.free:
                return found
            self.free -= num_bytes
            self._kept[key] = _KeptPrompt(*_mapped(*found), num_bytes)
        kept = self._kept[key]
        kept.last_run = self.run
        return kept.prompt, kept.hidden


@dataclass
class _KeptPrompt:
    """hidden: [batch, prompt, hidden_size]; last_run: the last that asked for it."""

    prompt: PrefilledPrompt
    hidden: Tensor
    num_bytes: int
    last_run: int = 0


def _mapped(prompt: PrefilledPrompt, hidden: Tensor) -> tuple[PrefilledPrompt, Tensor]:
    """The same, its tensors in a file without a name."""
    with NamedTemporaryFile(suffix=".pt") as file:
        torch.save([prompt.layers, hidden], file)
        file.flush()
        layers, hidden = torch.load(file.name, mmap=True, weights_only=True)
    return replace(prompt, layers=layers, hidden=hidden[:, -1], worth={}), hidden


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """An upper bound of the bytes that a layer of a dense pass over `num_tokens` tokens, all
    prompts', holds at once.

    Per token: four hidden states, the rotary tables, and the larger of FFN and attention
    activations. Attention makes query, key, value and output, the query once more, and the packed
    row and a copy. An FFN that takes some rows at a time holds the activations of these.
    """
    layer, geometry = attached.layers[0], attached.geometry
    hidden = layer.call.hidden.shape[-1]
    of_attention = {id(each) for each in layer.module.parameters()}
    attention = sum(each.numel() for each in layer.module.parameters() if each.dim() == 2) // hidden
    attention += geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    ffn = [each for each in layer.block.parameters() if id(each) not in of_attention]
    matrices = [weight for weight in ffn if weight.dim() == 2]
    # Of a tensor of experts a token meets a few. A product of two matrices in one stays as long as
    # its halves are used.
    num_experts = getattr(attached.decoder.stack.config, "num_experts_per_tok", None) or 1
    activations = num_experts * sum(max(weight.shape[1:]) for weight in ffn if weight.dim() == 3)
    if matrices:
        fused = max(weight.shape[0] for weight in matrices) - max(
            weight.shape[1] for weight in matrices
        )
        activations += sum(weight.numel() for weight in matrices) // hidden + max(0, fused)
    in_parts = {id(each) for module in attached.decoder.row_wise for each in module.parameters()}
    rows = num_tokens
    if {id(weight) for weight in matrices} <= in_parts:
        rows = min(num_tokens, attached.decoder.rows_at_once)
    elements = num_tokens * (4 * hidden + 4 * geometry.head_dim) + max(
        num_tokens * attention, rows * activations
    )
    return elements * attached.dtype.itemsize


# The check of a model at its first use


@contextmanager
def attach(model: Any, prompts: DensePrompts | None = None) -> Iterator[Attached]:
    """Run `model` through our attention inside the `with` block, in evaluation mode.

    prompts: kept passes of this model, from which runs start. The first time, the model is read and
    checked. Raises UserError for a model that is attached already, whose attention is not
    transformers' attention interface, or which fails a check. At the end the model is as it was.
    """
    with _claimed(stack_of(model)), _evaluating(model):
        decoder = read_decoder(model)
        if not decoder.is_checked:
            check_decoder(model, decoder)
        with attached_unchecked(model, decoder, prompts) as attached:
            yield attached


_claims = threading.Lock()
_claimed_by: dict[int, int] = {}
"""Which thread has attached a decoder, by the ids of the decoder and of its configuration, which
names the attention function."""


@contextmanager
def _claimed(stack: Any) -> Iterator[None]:
    """No other thread, and nothing inside the `with` block, attaches the same decoder. Raises
    UserError if one has."""
    parts = {id(stack), id(stack.config)}
    with _claims:
        threads = {_claimed_by[part] for part in parts if part in _claimed_by}
        if threads:
            where = "in this thread" if threading.get_ident() in threads else "by another thread"
            raise UserError(
                f"the model is attached already {where}: it takes one harness.attach, generate, perplexity or tasks at "
                "a time; wait until that has ended, or load the model a second time"
            )
        _claimed_by.update(dict.fromkeys(parts, threading.get_ident()))
    try:
        yield
    finally:
        with _claims:
            for part in parts:
                del _claimed_by[part]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model is in evaluation mode inside the `with` block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        model.eval()
        for module in training:
            module.training = True


@torch.inference_mode()
def check_decoder(model: Any, decoder: Decoder) -> None:
    """Raise UserError where our attention under the model gives other logits than the model's own.

    Where only a rehearsal or a padded batch does, the decoder notes why, and only these are
    refused. Where only a feed-forward network that takes some rows at a time does, it takes all.
    """
    ids = torch.arange(3, 3 + sum(PASSES), device=model.device)[None]
    tolerance = TOLERANCE.get(model.dtype, COARSE)
    expected = model(ids, use_cache=False).logits.float()
    if model.dtype != torch.float16 and not (
        expected.isfinite().all() and expected.any()
    ):  # else the pass says it
        raise UserError(
            f"model family {decoder.family!r}: the model's own logits are all zero or not finite; {LOOK_AT}"
        )
    with readable(decoder.family):
        off = _difference(model, decoder, ids, expected)
        if decoder.recurrent and not off <= tolerance:
            decoder.takes_rows = False
            off = _difference(model, decoder, ids, expected)
        if any(layer.latent is not None for layer in decoder.layers) and not off <= tolerance:
            decoder.expand_latents()
            off = _difference(model, decoder, ids, expected)
    if not off <= tolerance:
        raise refusal(
            decoder.family, f"under our attention its logits are off by {off:.1e} of the largest"
        )
    if not _is_row_wise(model, decoder, ids, expected, tolerance):
        decoder.row_wise = []
    decoder.no_rehearsal = _why_no_rehearsal(model, decoder, ids, tolerance)
    decoder.no_padding = _why_no_padding(model, decoder, ids, tolerance)
    decoder.is_checked = True


def _is_row_wise(
    model: Any, decoder: Decoder, ids: Tensor, expected: Tensor, tolerance: float
) -> bool:
    """Whether the logits are the same where modules take two rows at a time."""
    most, decoder.rows_at_once = decoder.rows_at_once, 2
    try:
        return _difference(model, decoder, ids, expected) <= tolerance
    except (RuntimeError, TypeError, ValueError) as error:
        reraise_out_of_memory(error)
        return False
    finally:
        decoder.rows_at_once = most


def _difference(model: Any, decoder: Decoder, ids: Tensor, expected: Tensor) -> float:
    """The largest error of the logits of several passes, relative to the largest logit."""
    with attached_unchecked(model, decoder) as attached:
        handler, cache, logits = _History(attached), attached.new_cache(), []
        for part in ids.split(PASSES, 1):
            positions = torch.arange(
                cache.num_columns, cache.num_columns + part.shape[1], device=ids.device
            )[None]
            logits.append(attached.logits(attached.forward(part, positions, handler, cache)))
    return _relative(torch.cat(logits, 1), expected)


def _why_no_rehearsal(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why early queries are refused; None where each is the true one."""
    for layer in decoder.layers:
        if any(module in decoder.recurrent for module in layer.module.modules()):
            return "its queries depend on a state of the sequence"
        tensors = {name for name, each in layer.call.kwargs.items() if isinstance(each, Tensor)}
        unknown = sorted(
            tensors - {"hidden_states", "position_ids", "position_embeddings", "attention_mask"}
        )
        if layer.positions is None and layer.call.kwargs.get("position_embeddings") is not None:
            unknown.append("position_embeddings")
        if unknown:
            return f"its queries depend on {', '.join(unknown)}"
    try:
        off = early_difference(model, decoder, ids)
    except RuntimeError as error:
        reraise_out_of_memory(error)
        return "the layer before has no input that it could be made of"
    if not off <= tolerance and any(layer.unused for layer in decoder.layers):
        for (
            layer
        ) in decoder.layers:  # a submodule may matter though no derivative passes through it
            layer.query_modules, layer.unused = (*layer.query_modules, *layer.unused), {}
        off = early_difference(model, decoder, ids)
    return (
        None
        if off <= tolerance
        else f"a query made ahead of its layer is off by {off:.1e} of the largest"
    )


def early_difference(model: Any, decoder: Decoder, ids: Tensor) -> float:
    """The largest error of early queries, each made of its layer's own input, relative to the
    largest query.

    Each layer is also rehearsed in the one before, to see that this works.
    """
    early: dict[int, Tensor] = {}
    with attached_unchecked(model, decoder) as attached, ExitStack() as hooks:

        def make_early(index: int, _: Any, args: Any, kwargs: Any) -> None:
            early[index] = attached.early_query(index, Call(args, kwargs).hidden)

        for index, layer in enumerate(decoder.layers):
            hook = layer.module.register_forward_pre_hook(
                partial(make_early, index), with_kwargs=True
            )
            hooks.callback(hook.remove)
        handler = _History(attached, is_rehearsing=True)
        attached.forward(ids, torch.arange(ids.shape[1], device=ids.device)[None], handler)
    return max(_relative(early[index], query) for index, query in handler.queries.items())


def _why_no_padding(model: Any, decoder: Decoder, ids: Tensor, tolerance: float) -> str | None:
    """Why a batch with padding is refused; None where its sequences give the same as each alone."""
    shorter = ids.shape[1] - 3
    batch = torch.cat([ids, ids.roll(3, 1)])
    real = torch.ones_like(batch, dtype=torch.bool)
    real[1, :3] = False
    with attached_unchecked(model, decoder) as attached:
        hidden = attached.forward(batch, positions_of(real), PromptPass(attached, real), real=real)
        own = torch.arange(shorter, device=ids.device)[None]
        alone = attached.logits(attached.forward(ids[:, :shorter], own, PromptPass(attached)))
        together = attached.logits(hidden)
    off = _relative(together[1:, 3:], alone)
    return (
        None
        if off <= tolerance
        else f"a sequence beside a longer one is off by {off:.1e} of the largest logit"
    )


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


class _History(Handler):
    """Dense attention over all passes so far. queries: by layer, of the last pass."""

    def __init__(self, attached: Attached, *, is_rehearsing: bool = False) -> None:
        self.attached = attached
        self.is_rehearsing = is_rehearsing
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.queries: dict[int, Tensor] = {}

    def rehearses(self, layer: int) -> bool:
        return self.is_rehearsing

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.stored:
            before = self.stored[layer]
            key, value = (torch.cat(pair, 2) for pair in zip(before, (key, value), strict=True))
        self.stored[layer], self.queries[layer] = (key, value), query
        tokens = torch.arange(key.shape[2], device=key.device)
        rows = tokens[-query.shape[2] :]
        visible = tokens <= rows[:, None]
        window = self.attached.layers[layer].window
        if window is not None:
            visible &= tokens >= window.first_visible(rows)[:, None]
        visible = visible.expand(len(key), 1, *visible.shape)
        return dense_attention(query, key, value, self.attached.softmaxes[layer], visible)
