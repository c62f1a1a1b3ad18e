"""A loaded model with our attention under it: the hooks into its forward pass.

A forward pass hands each attention layer's fresh query, key and value to a *handler*, which owns
the history. The model itself stores no keys and values, and is given explicit positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.errors import UserError
from harness.model.attention import Rotary, rotary_of
from harness.model.calls import (
    Call,
    Reached,
    attention_function,
    options_of,
    refusal,
    replaced_forward,
)
from harness.model.decoder import Decoder, output_matrix
from harness.model.model_cache import ModelCache
from harness.model.passes import (
    DensePrompts,
    Handler,
    launching_on,
    require_eager,
    require_embedded,
    require_in_range,
)
from harness.model.trace import Layer, PositionSource
from methods.base import Geometry, LayerInputs

ELSEWHERE = (
    "the model is attached to a KV-cache method, and its decoder cannot be called by itself: "
    "inside harness.attach call the model or its generate, elsewhere wait until the run that "
    "attached it has ended"
)


class Attached:
    """A model with our attention under it. Valid inside `attach`.

    layers: all attention layers, in order. numbers: by layer, its number among the layers that see
    every token, which is how methods count; None for a local layer. longest: tokens of the longest
    sequence that all layers see whole, where all of them are local; None: any. prompts: kept
    passes. device: where it computes.
    """

    def __init__(self, model: Any, decoder: Decoder) -> None:
        self.model = model
        self.decoder = decoder
        self.prompts: DensePrompts | None = None
        self.layers: list[Layer] = decoder.layers
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        windows = [layer.window for layer in self.layers if layer.window is not None]
        all_local = len(windows) == len(self.layers)
        self.longest = min(window.size for window in windows) if all_local else None
        self.numbers: list[int | None] = []
        self._counted: list[Layer] = []  # those with a number
        for layer in self.layers:
            if all_local or layer.window is None:
                self.numbers.append(len(self._counted))
                self._counted.append(layer)
            else:
                self.numbers.append(None)
        self.geometry = self._geometry()
        self._index = {id(layer.module): index for index, layer in enumerate(self.layers)}
        self._rotaries: dict[int, Rotary | None] = {}
        # The model's own: `harness.api.cached_model` puts another in its place.
        self._forward = model.forward
        # What the pass relies on, and a user may change
        self.attention_name = ""
        configs = [getattr(layer.module, "config", decoder.stack.config) for layer in self.layers]
        self._configs = list({id(config): config for config in configs}.values())
        # Of a pass under way
        self._thread: int | None = None
        self._handler: Handler | None = None
        self._positions: Tensor | None = None
        self._cache = self.new_cache()
        self._recurrent_rows: RecurrentRows | None = None
        self.packing: Packing | None = None
        self._made: dict[PositionSource, Any] = {}
        self._predicting = False

    def _geometry(self) -> Geometry:
        """The sizes of the layers that see every token; UserError where they differ."""
        layers = self._counted
        first = layers[0]
        if any(_sizes_of(layer) != _sizes_of(first) for layer in layers):
            why = "its layers that see every token have several shapes or scales"
            raise refusal(self.decoder.family, why)
        softmaxes = tuple(layer.softmax for layer in layers)
        is_plain = all(softmax.is_plain for softmax in softmaxes)
        windows = []
        for layer, number in zip(self.layers, self.numbers, strict=True):
            if number is None and layer.window is not None:
                elements = layer.num_kv_heads * layer.elements
                weight = elements / (first.num_kv_heads * first.elements)
                windows.append(layer.window._replace(weight=weight))
        return Geometry(
            num_layers=len(layers),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            scale=first.softmax.scale,
            family=self.decoder.family,
            rotate=self._rotate,
            output_matrix=self._output_matrix,
            value_dim=first.value_dim,
            values_in_keys=first.latent is not None,
            softmaxes=() if is_plain else softmaxes,
            windows=tuple(windows),
        )

    def new_cache(self) -> ModelCache:
        """The cache object for one batch, with the states of recurrent layers."""
        return ModelCache(self.decoder.stack.config)

    # Passes

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        handler: Handler,
        cache: ModelCache | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [batch, rows, hidden_size] of `ids` at `positions`, all on `device`.

        ids, positions: int [batch, rows]. cache: the batch's, from `new_cache`; None: these are its
        first and only rows. real: bool [batch, rows], False for padding, which the model does not
        run over: its hidden states are zeros; None: there is none.
        Raises UserError for a token without an embedding, and where activations are not finite. A
        pass over one row is not checked: a decode step waits for no device.
        """
        num_rows = ids.shape[1]
        if num_rows > 1:
            require_embedded(ids, self.decoder.stack.get_input_embeddings())
        packing = None if real is None or bool(real.all()) else Packing(real)
        self._handler = handler
        self._cache = self.new_cache() if cache is None else cache
        if self.decoder.recurrent:
            self._recurrent_rows = RecurrentRows(
                self._cache,
                torch.ones_like(ids, dtype=torch.bool) if real is None else real,
                packing,
                takes_rows=self.decoder.takes_rows,
            )
        elif packing is not None:
            ids, positions = packing.packed(ids), packing.packed(positions)
            self.packing = packing
        self._positions = positions
        try:
            with self._running():
                output = self.decoder.stack(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=self._cache,
                    use_cache=False,
                )
            hidden = output.last_hidden_state
            if num_rows > 1:
                require_in_range(hidden)
            if self.packing is not None:
                hidden = self.packing.padded(hidden)
        finally:
            self._handler = None
            self.packing = None
            self._recurrent_rows = None
            self._made.clear()
        self._cache.num_columns += num_rows
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The model's output head over final hidden states [..., hidden_size], its softcap and
        scale included: fp32 [..., vocab]."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        any_ids = flat.new_zeros(flat.shape[:2], dtype=torch.long)
        made = self.decoder.output_type(last_hidden_state=flat)
        with replaced_forward(self.decoder.stack, lambda *_, **__: made), self._running():
            output = self._forward(input_ids=any_ids, use_cache=False)
        return output.logits.view(*hidden.shape[:-1], -1).float()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """This thread runs the decoder inside the `with` block."""
        self._thread = threading.get_ident()
        try:
            with launching_on(self.device):
                yield
        finally:
            self._thread = None

    def _require_own_call(self, *_: Any) -> None:
        """Called before the decoder runs. Raises UserError for a call that is not made by `forward`
        or `logits`: it would read and disturb the caches of the run that has the model. Also where
        another attention was set."""
        if self._thread != threading.get_ident():
            raise UserError(ELSEWHERE)
        for config in self._configs:
            if config._attn_implementation != self.attention_name:
                raise UserError(
                    f"attention implementation {config._attn_implementation!r}: it was set while "
                    "the model was attached, whose attention is the method's; set it before, or "
                    "after the block"
                )

    # What a model does not take

    def require_length(self, num_tokens: int) -> None:
        """Raise UserError for a sequence that is too long to be decoded as one pass computes it:
        beyond the window of a model with local layers only, or beyond the length from which rotary
        frequencies depend on the sequence's length (dynamic, longrope)."""
        limits = {"sliding window": self.longest}
        config = self.decoder.stack.config
        parameters = getattr(config, "rope_parameters", None) or {}
        ropes = [parameters] if "rope_type" in parameters else parameters.values()
        for rope in ropes:
            kind = rope.get("rope_type") if rope else None
            if kind in ("longrope", "dynamic"):
                limit = rope.get("original_max_position_embeddings")
                limit = limit or config.max_position_embeddings
                limits[f"length up to which {kind} rope keeps its positions"] = limit
        for name, limit in limits.items():
            if limit and num_tokens > limit:
                raise UserError(
                    f"a sequence of {num_tokens} tokens: {limit} is the model's {name}; "
                    "lower seq_len, or prompt_len, gen_len or max_new_tokens"
                )

    def require_even(self, real: Tensor) -> None:
        """Raise UserError for a batch with padding, real bool [batch, prompt], where padding
        changes the results."""
        if self.decoder.no_padding and not bool(real.all()):
            raise UserError(
                f"model family {self.geometry.family!r} takes no batch of prompts of unequal "
                f"lengths: {self.decoder.no_padding}; run them one by one"
            )

    def require_prediction(self) -> None:
        """Raise UserError where the model's queries cannot be made ahead of their layer."""
        if self.decoder.no_prediction:
            raise UserError(
                f"model family {self.geometry.family!r} takes no method that predicts a layer's "
                f"query (method.when=previous_layer): {self.decoder.no_prediction}"
            )

    # Queries of a layer, outside of its own call

    def early_query(self, layer: int, hidden: Tensor) -> Tensor:
        """The query of `layer` for an input [batch, rows, hidden_size], as a handler gets it."""
        wanted = self.layers[layer]
        embeddings = None
        if wanted.positions is not None:
            embeddings = self._made.get(wanted.positions)
        if wanted.direct is not None:
            return self._as_handled(layer, wanted.direct.query(hidden, embeddings))
        call = wanted.rerun(
            hidden, self._cache, position_embeddings=embeddings, position_ids=self._positions
        )
        return self._query_of(layer, call)

    def example(self, layer: int) -> tuple[LayerInputs, Tensor]:
        """A layer's inputs in the trace of the model, a few tokens, and the query made of them."""
        known = self.layers[layer]
        call = known.rerun(known.call.hidden, self.new_cache())
        return self._inputs_of(layer, call), self._query_of(layer, call)

    def _query_of(self, layer: int, call: Call) -> Tensor:
        """The query of a layer for the arguments of its module, as a handler gets it."""
        wanted = self.layers[layer]
        self._predicting = True
        try:
            with ExitStack() as stack:
                for name, size in wanted.unused.items():
                    unused = wanted.module.get_submodule(name)
                    stack.enter_context(replaced_forward(unused, partial(_zeros, size)))
                query = self.decoder.run_to_attention(wanted, call).query
        finally:
            self._predicting = False
        return self._as_handled(layer, query)

    def _as_handled(self, layer: int, query: Tensor) -> Tensor:
        """A module's query as handlers get it: of latent keys for the latent."""
        latent = self.layers[layer].latent
        return query if latent is None else query @ latent.to_query

    def _inputs_of(self, layer: int, call: Call) -> LayerInputs:
        """The arguments of a layer's attention module, as methods get them."""
        known = self.layers[layer]
        given = call.kwargs.get("position_embeddings")
        embeddings = None
        if isinstance(given, tuple | list) and len(given) == 2:
            embeddings = given[0], given[1]
        rotary = None if known.positions is None else known.positions.embeddings
        return LayerInputs(known.module, call.hidden, embeddings, rotary)

    def _rotate(
        self, states: Tensor, positions: Tensor, inverse: bool = False, layer: int = 0
    ) -> Tensor:
        """`Geometry.rotate`."""
        if layer not in self._rotaries:
            self._rotaries[layer] = rotary_of(self.decoder, self._counted[layer])
        rotary = self._rotaries[layer]
        if rotary is None:
            raise ValueError(
                f"model family {self.geometry.family!r} applies its positions in a way that is "
                "not known"
            )
        return rotary.apply(states, positions, inverse)

    def _output_matrix(self, layer: int) -> Tensor:
        """`Geometry.output_matrix`."""
        return output_matrix(self.decoder, self._counted[layer])

    # Hooks

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        """The attention function under the model."""
        if self._predicting:
            raise Reached(query, key, value)
        if self._handler is None:
            raise UserError(ELSEWHERE)
        require_eager()
        index = self._index[id(module)]
        latent = self.layers[index].latent
        query = self._as_handled(index, query)
        stored = self._cache.latest
        self._cache.latest = None  # not held beyond the layer
        if latent is not None:
            assert stored is not None
            key = torch.cat(stored, -1)
        del stored
        if self.packing is not None:
            query, key, value = map(self.packing.padded_heads, (query, key, value))
        if latent is not None:
            value = key[..., : latent.rank]
        output = self._handler.attention(index, query, key, value)
        if self.packing is not None:
            output = self.packing.packed(output)
        if latent is not None:
            output = (output.transpose(1, 2) @ latent.to_value).transpose(1, 2)
        return output, None

    def _begins(self, layer: int, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._handler is None:
            return
        if self._handler.needs_inputs:
            inputs = self._inputs_of(layer, Call(args, kwargs))
            if self.packing is not None:
                inputs = self.packing.padded_inputs(inputs)
            self._handler.take_inputs(layer, inputs)
        self._handler.layer_begins(layer)

    def _ends(self, layer: int, *_: Any) -> None:
        if self._handler is not None:
            self._handler.layer_ends(layer)

    def _predict(
        self, layer: int, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called when the mixer before `layer` has its input."""
        if self._handler is None or self.numbers[layer] is None:
            return
        if self._handler.predicts(layer):
            query = self.early_query(layer, Call(args, kwargs).hidden)
            if self.packing is not None:
                query = self.packing.padded_heads(query)
            self._handler.predict(layer, query)

    def _positions_made(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any
    ) -> None:
        """Keep the position embeddings of this pass, for predictions of other layers."""
        self._made[PositionSource(module, options_of(args, kwargs))] = made

    def _recurrent(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a recurrent module, whose code is `forward`."""
        if self._recurrent_rows is None:
            return forward(*args, **kwargs)
        return self._recurrent_rows.run(module, forward, Call(args, kwargs))


def _sizes_of(layer: Layer) -> tuple[float, ...]:
    heads, scale = (layer.num_heads, layer.num_kv_heads), layer.softmax.scale
    return *heads, layer.head_dim, layer.value_dim, layer.elements, scale


def _zeros(size: int, states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Zeros for a projection that is left out."""
    return states.new_zeros(*states.shape[:-1], size)


@contextmanager
def attached_unchecked(model: Any, decoder: Decoder) -> Iterator[Attached]:
    """Run `model` through our attention inside the `with` block, as its `decoder` describes it."""
    attached = Attached(model, decoder)
    with ExitStack() as stack:

        def before(module: nn.Module, hook: Callable[..., Any]) -> None:
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)

        def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
            stack.enter_context(replaced_forward(module, forward))

        before(decoder.stack, attached._require_own_call)
        position_modules = {}
        for index, layer in enumerate(decoder.layers):
            before(layer.module, partial(attached._begins, index))
            ending = layer.module.register_forward_hook(partial(attached._ends, index))
            stack.callback(ending.remove)
            if layer.before is not None:
                before(layer.before, partial(attached._predict, index))
            if layer.prescales:
                stack.callback(setattr, layer.module, "scaling", layer.module.scaling)
                layer.module.scaling = 1.0  # type: ignore[assignment]
            if layer.positions is not None:
                position_modules[id(layer.positions.module)] = layer.positions.module
        for module in position_modules.values():
            making = module.register_forward_hook(attached._positions_made, with_kwargs=True)
            stack.callback(making.remove)
        for module in decoder.recurrent:
            replace(module, partial(attached._recurrent, module, module.forward))
        for module in decoder.row_wise:
            replace(module, partial(in_parts, decoder, module.forward))
        attached.attention_name = stack.enter_context(
            attention_function(decoder.stack, attached._attend)
        )
        yield attached


# Modules that a pass runs over some of its rows at a time: recurrent modules must not see padding,
# and some take only one row after a state. Feed-forward networks make much more on the way than
# they return, so a long prompt's rows go in parts.


def in_parts(decoder: Decoder, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a module that computes each row by itself, some rows at a time.

    Its input is [batch, rows, ...]. What else it is given row by row is split alike.
    """
    hidden = Call(args, kwargs).hidden
    batch, num_rows = shape = hidden.shape[:2]
    most = decoder.rows_at_once // batch or 1
    if hidden.dim() != 3 or num_rows <= most:
        return forward(*args, **kwargs)

    outputs = []
    for rows in torch.arange(num_rows).split(most):
        part = _part_of(Call(args, kwargs), shape, slice(None), rows)
        outputs.append(forward(*part.args, **part.kwargs))

    def joined(*parts: Tensor) -> Tensor:
        if parts[0].dim() > 2:
            return torch.cat(parts, 1)
        # The rows of all sequences lie in the first axis.
        by_sequence = [part.unflatten(0, (batch, -1)) for part in parts]
        return torch.cat(by_sequence, 1).flatten(0, 1)

    return tree_map(joined, *outputs)


class Packing:
    """The rows of a padded batch, real bool [batch, rows], as the model runs over them: the real
    ones of all sequences, n in number, one behind the other as [1, n, ...]. All modules but the
    attention compute each row by itself."""

    def __init__(self, real: Tensor) -> None:
        self.shape = real.shape
        index = [at for at, is_real in enumerate(real.flatten().tolist()) if is_real]
        self.index = torch.tensor(index, device=real.device)

    def packed(self, rows: Tensor) -> Tensor:
        """[batch, rows, ...] as [1, n, ...]."""
        return rows.flatten(0, 1).index_select(0, self.index)[None]

    def padded(self, packed: Tensor) -> Tensor:
        """[1, n, ...] as [batch, rows, ...], zeros in the padding."""
        rows = packed.new_zeros(self.shape.numel(), *packed.shape[2:])
        rows[self.index] = packed[0]
        return rows.unflatten(0, self.shape)

    def padded_heads(self, packed: Tensor) -> Tensor:
        """[1, heads, n, size] as [batch, heads, rows, size], zeros in the padding."""
        return self.padded(packed.transpose(1, 2)).transpose(1, 2)

    def padded_inputs(self, packed: LayerInputs) -> LayerInputs:
        """A layer's inputs with all rows."""
        embeddings = packed.position_embeddings
        if embeddings is not None:
            embeddings = self.padded(embeddings[0]), self.padded(embeddings[1])
        hidden = self.padded(packed.hidden)
        return packed._replace(hidden=hidden, position_embeddings=embeddings)


class RecurrentRows:
    """Runs recurrent modules during one pass.

    cache: of the batch. real: bool [batch, rows], False for padding. packing: of these rows; None
    where all are real. In a padded batch each sequence's own rows run alone, with its own state.
    Rows run one by one where the module takes only one row after a state.
    """

    def __init__(
        self, cache: ModelCache, real: Tensor, packing: Packing | None, *, takes_rows: bool
    ) -> None:
        self.cache = cache
        self.real = real
        self.packing = packing
        self.one_by_one = not takes_rows and cache.num_columns > 0 and real.shape[1] > 1

    def run(self, module: nn.Module, forward: Callable[..., Any], call: Call) -> Any:
        """The output of a recurrent module, whose code is `forward`."""
        if self.packing is None and not self.one_by_one:
            return forward(*call.args, **call.kwargs)
        if self.packing is None:
            rows = torch.arange(self.real.shape[1])
            return self._run_rows(forward, call, self.cache, slice(None), rows)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        forks, outputs = [], []
        for at, real in enumerate(self.real):
            fork = self.cache.fork_layer(layer, torch.tensor([at]))
            forks.append(fork)
            if real.any():  # else these are rows after the sequence's end
                rows = real.nonzero().flatten()
                outputs.append(self._run_rows(forward, call, fork, slice(at, at + 1), rows))
        self.cache.join_layer(layer, forks)
        packing = self.packing
        return tree_map(lambda *parts: packing.padded(torch.cat(parts, 1)), *outputs)

    def _run_rows(
        self,
        forward: Callable[..., Any],
        call: Call,
        cache: ModelCache,
        sequences: slice,
        rows: Tensor,
    ) -> Any:
        """The module's output for the rows int [n] of some sequences, whose states `cache` has."""
        outputs = []
        for some_rows in rows.split(1) if self.one_by_one else [rows]:
            part = _part_of(call, self.real.shape, sequences, some_rows)
            args = [cache if value is self.cache else value for value in part.args]
            kwargs = {}
            for name, value in part.kwargs.items():
                if name != "attention_mask":
                    kwargs[name] = cache if value is self.cache else value
            outputs.append(forward(*args, **kwargs))
        if not self.one_by_one:
            return outputs[0]
        return tree_map(lambda *parts: torch.cat(parts, 1), *outputs)


def _part_of(call: Call, shape: torch.Size, sequences: slice, rows: Tensor) -> Call:
    """The call of some sequences' rows, int [n]. Arguments that have all rows are of shape [batch,
    rows] first; others stay as they are."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            return value[sequences, rows.to(value.device)]
        return value

    args = tuple(part(value) for value in call.args)
    return Call(args, {name: part(value) for name, value in call.kwargs.items()})
