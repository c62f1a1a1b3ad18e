"""The layers of a decoder, read from the loaded model itself: no code here knows a model family by
its name.

The model runs two tokens once. The arguments of its calls to transformers' attention function tell
the number of heads, the softmax, and the tokens that each layer sees. The arguments of its calls to
the cache tell how a token is stored. `harness.model.attach` compares the result with the model's
own logits before anything runs.

    decoder = read_decoder(model)
    decoder.layers[3].window, decoder.layers[3].softmax, decoder.recurrent
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from harness.errors import UserError, reason
from methods.attention import Softmax
from methods.base import Window

HARMLESS_OPTIONS = {
    "attention_mask", "cache_position", "cross_attn_layer_idx", "dropout", "encoder_attention_mask",
    "encoder_hidden_states", "head_mask", "is_causal", "layer_head_mask", "logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values", "per_layer_input",
    "position_embeddings", "position_ids", "return_dict", "s_aux", "scaling", "shared_kv_states", "sliding_window",
    "softcap", "token_type_ids", "use_cache", "use_kernels",
}  # fmt: skip
"""Arguments of an attention function that are handled here, or do not change its result."""
ROWS_AT_ONCE = 2048
"""Rows of a prompt that a feed-forward network takes at once, so that what it makes on the way does
not grow with the prompt."""
FAR = 2**20
"""A position beyond every window: whether a row there sees the first token tells a window from full
attention."""

_names = (f"kv_harness_{number}" for number in count())


class ModelCache(DynamicCache):
    """The cache object of one batch: it keeps the states of recurrent layers, and stores no keys
    and values.

    Replay and live decoding store keys and values, which they get from the attention function.
    Linear attention, state-space and convolution layers keep transformers' own states here, one set
    for each sequence.

    num_columns: rows that the model has run so far, from which some models count positions. latest:
    the last (key, value) that an attention layer stored. on_state: called when a module writes a
    recurrent state. instead: the keys and values that `update` returns; None: those that it was
    given. Method names are transformers'.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.num_columns = 0
        self.latest: tuple[Tensor, Tensor] | None = None
        self.on_state: Callable[[], Any] = lambda: None
        self.instead: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.latest = key, value
        return self.instead or self.latest

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.num_columns

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.on_state()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self.on_state()
        return super().update_recurrent_state(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent states."""
        return sum(
            state.nbytes
            for states in self._states()
            for state in states.values()
            if isinstance(state, Tensor)
        )

    def fork(self, index: Tensor, layer: int | None = None) -> ModelCache:
        """A cache with the states of the sequences `index` int [new_batch]; layer: copy only this
        one."""
        child = copy(self)
        child.layers = [
            each if layer not in (None, at) else deepcopy(each)
            for at, each in enumerate(self.layers)
        ]
        for each in child.layers if layer is None else [child.layers[layer]]:
            each.reorder_cache(index)
        return child

    def join(self, parts: list[ModelCache], layer: int) -> None:
        """Take a layer's states from `parts`: one fork for each sequence of the batch, in order."""
        self.layers[layer] = parts[0].layers[layer]
        for states, *others in zip(
            *(part._states(layer) for part in (self, *parts[1:])), strict=True
        ):
            for name, state in states.items():
                if isinstance(state, Tensor):
                    states[name] = torch.cat([state, *(other[name] for other in others)])

    def _states(self, layer: int | None = None) -> Iterator[dict[int, Any]]:
        for each in self.layers if layer is None else [self.layers[layer]]:
            for kind in ("conv_states", "recurrent_states"):
                if hasattr(each, kind):
                    yield getattr(each, kind)


class Call(NamedTuple):
    """The arguments of a module's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The module's input [batch, rows, hidden_size]."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def with_hidden(self, hidden: Tensor, **changed: Any) -> Call:
        """The same call with another input. changed: new values of keyword arguments; others than
        the call's go."""
        kwargs = dict(self.kwargs) | {
            name: value for name, value in changed.items() if name in self.kwargs
        }
        if not self.args:
            return Call((), kwargs | {"hidden_states": hidden})
        # A module that takes the inputs of query, key and value separately gets the same tensor
        # three times.
        return Call(tuple(hidden if each is self.hidden else each for each in self.args), kwargs)


class PositionSource(NamedTuple):
    """The submodule that makes a layer's position embeddings, and its arguments that are no
    tensors."""

    module: nn.Module
    options: tuple[Any, ...]


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


@dataclass
class Layer:
    """An attention layer. Its sizes are those of its cache: under latent attention there is one KV
    head.

    block: the decoder layer around it. window: the tokens that a row sees; None: all earlier ones.
    before: the mixer of the previous block, whose input stands in for this layer's in a rehearsal;
    None in the first. positions: the source of its position embeddings; None where it gets none.
    call: its call in the trace. device: where it computes. prescales: the module multiplies its
    queries by its own `scaling` and passes a scale of 1; while attached it multiplies by 1, as
    methods get queries before the scale. unused: submodules that the query does not depend on, and
    the size of their output. query_modules: the submodules that it depends on. output_factor: see
    `harness.model.rereading`; None until it is asked for.
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
    device: torch.device
    prescales: bool = False
    block: nn.Module = field(default_factory=nn.Identity)
    before: nn.Module | None = None
    unused: dict[str, int] = field(default_factory=dict)
    query_modules: tuple[str, ...] = ()
    latent: Latent | None = None
    output_factor: Tensor | None = None

    @property
    def elements(self) -> int:
        """Elements of a token in a KV head's cache."""
        return self.head_dim + (0 if self.latent else self.value_dim)


class Reached(Exception):  # noqa: N818 - no error: it ends a module's run
    """Ends the run of an attention module at its call of the attention function."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query, self.key, self.value = query, key, value


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes `forward` inside the `with` block."""
    with replaced_method(module, "forward", forward):
        yield


@contextmanager
def replaced_method(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """`module` has another method of this name inside the `with` block."""
    before = module.__dict__.get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            setattr(module, name, before)


@contextmanager
def attention_function(
    model: Any, attend: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Inside the `with` block `attend` is the model's attention function, and `mask` makes its
    masks.

    Without a `mask` transformers makes none: its code would read the positions of every step and so
    wait for the device. `attend` then masks by itself.
    """
    name, before = next(_names), model.config._attn_implementation
    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def refusal(family: str, why: str) -> UserError:
    """The one line in which a model is refused."""
    return UserError(f"model family {family!r} is not supported: {why}")


@contextmanager
def readable(family: str) -> Iterator[None]:
    """Refuse a model whose own code fails inside the `with` block, where it runs in a way that it
    does not expect."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, TypeError, RuntimeError, ValueError, KeyError, IndexError) as error:
        reraise_out_of_memory(error)
        raise refusal(family, reason(error)) from error


def reraise_out_of_memory(error: Exception) -> None:
    """Raise an error that says nothing about the model: too little memory on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        raise error


_decoders: WeakKeyDictionary[Any, Decoder] = WeakKeyDictionary()


def read_decoder(model: Any) -> Decoder:
    """The decoder of a loaded model, read once. Raises UserError for a model that does not compute
    attention through transformers' attention interface."""
    if model not in _decoders:
        _decoders[model] = Decoder(model)
    return _decoders[model]


class Decoder:
    """A loaded model's layers. It does not keep the model alive.

    family: transformers' name of it. stack: the module that turns token ids into final hidden
    states. layers: its attention layers, in order. blocks: its decoder layers. recurrent: modules
    that keep a state of the sequence instead of keys and values. output_type: the type that the
    stack returns. row_wise: modules of the blocks, feed-forward networks, that compute each row by
    itself; rows_at_once: how many they take.

    is_checked: whether its logits were compared with the model's own. takes_rows: whether recurrent
    modules take several rows at once after a state. no_rehearsal, no_padding: why the model takes
    no rehearsal, or no batch with padding; None where it does.
    """

    def __init__(self, model: Any) -> None:
        self.family: str = model.config.model_type
        self.stack: Any = stack_of(model)
        self.is_checked = False
        self.takes_rows = True
        self.no_rehearsal: str | None = None
        self.no_padding: str | None = None
        with torch.no_grad():
            trace = _Trace(self)
            self.layers: list[Layer] = trace.run()
            self.recurrent: list[nn.Module] = trace.recurrent
            self.output_type = trace.output_type
            self.blocks = self._find_blocks()
            self.row_wise = self._find_row_wise()
            self.rows_at_once = ROWS_AT_ONCE
            with attention_function(self.stack, stop):
                for layer in self.layers:
                    self._find_unused(layer)
                    layer.latent = self._read_latent(layer, trace.stored.get(id(layer.module)))
        for layer in self.layers:
            if layer.latent is not None:
                layer.num_kv_heads, layer.head_dim, layer.value_dim = (
                    1,
                    layer.latent.to_query.shape[2],
                    layer.latent.rank,
                )

    def _find_row_wise(self) -> list[nn.Module]:
        """The blocks' children with several matrices that hold neither attention nor a recurrent
        module."""
        mixers = {id(layer.module) for layer in self.layers} | {
            id(module) for module in self.recurrent
        }
        children = [child for block in self.blocks for child in block.children()]
        return [
            child
            for child in children
            if sum(weight.dim() > 1 for weight in child.parameters()) > 1
            and not mixers & {id(module) for module in child.modules()}
        ]

    def expand_latents(self) -> None:
        """Store keys and values of every head, where latents do not give the model's own
        numbers."""
        for layer in self.layers:
            if layer.latent is not None:
                to_query, to_value = layer.latent
                layer.num_kv_heads, layer.head_dim = to_query.shape[:2]
                layer.value_dim, layer.latent = to_value.shape[2], None

    def run_to_attention(self, layer: Layer, call: Call) -> Reached:
        """Run an attention module up to the attention function, which is `stop` or raises `Reached`
        as well."""
        try:
            layer.module.forward(*call.args, **call.kwargs)
        except Reached as reached:
            return reached
        raise AssertionError("an attention module calls the attention function")

    def query_parameters(self, layer: Layer) -> list[nn.Parameter]:
        """The weights that make a layer's query; a rehearsal reads them while the previous layer
        computes."""
        return [
            each
            for name in layer.query_modules
            for each in layer.module.get_submodule(name).parameters()
        ]

    def _find_blocks(self) -> list[nn.Module]:
        """The list of modules that holds all attention modules. Sets `block` and `before` of each
        attention layer.

        The mixer of a block is its attention module, else a child with a layer index.
        """
        attentions = {id(layer.module): layer for layer in self.layers}
        for blocks in self.stack.modules():
            if not isinstance(blocks, nn.ModuleList):
                continue
            if not attentions.keys() <= {
                id(inner) for block in blocks for inner in block.modules()
            }:
                continue
            previous: nn.Module | None = None
            for block in blocks:
                inside = [
                    attentions[id(each)] for each in block.modules() if id(each) in attentions
                ]
                for layer in inside:
                    layer.block, layer.before = block, previous
                    previous = layer.module
                if not inside:
                    previous = next(
                        (each for each in block.children() if hasattr(each, "layer_idx")), previous
                    )
            return list(blocks)
        raise refusal(self.family, "its layers are in no list")

    def _find_unused(self, layer: Layer) -> None:
        """Find the submodules that the query does not depend on by autograd's graph; a rehearsal
        leaves them out."""
        outputs: dict[str, Tensor] = {}
        names = {
            each: name
            for name, each in layer.module.named_modules()
            if name and not list(each.children())
        }

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[names[module]] = output

        with ExitStack() as hooks, torch.enable_grad():
            for module in names:
                hooks.callback(module.register_forward_hook(note).remove)
            hidden = layer.call.hidden.clone().requires_grad_()
            call = layer.call.with_hidden(hidden, past_key_values=ModelCache(self.stack.config))
            query = self.run_to_attention(layer, call).query
        ancestors: set[Any] = {None}  # None: made of nothing that autograd follows
        todo: list[Any] = [query.grad_fn]
        while todo:
            node = todo.pop()
            if node not in ancestors:
                ancestors.add(node)
                todo += [before for before, _ in node.next_functions]
        unused = {
            name
            for name, each in outputs.items()
            if query.requires_grad and each.grad_fn not in ancestors
        }
        layer.unused = {name: each.shape[-1] for name, each in outputs.items() if name in unused}
        layer.query_modules = tuple(name for name in outputs if name not in unused)

    def _read_latent(self, layer: Layer, cached: tuple[Tensor, Tensor] | None) -> Latent | None:
        """The matrices that turn a stored latent into every head's key and value: the output of the
        module's own code for unit latents. None where the module stores the keys and values that it
        attends to."""
        if (
            cached is None
            or cached[0].shape[1] == layer.num_kv_heads
            or any(each.shape[1] != 1 for each in cached)
        ):
            return None
        rank, rotary = (
            torch.eye(each.shape[-1], dtype=each.dtype, device=each.device)[None, None]
            for each in cached
        )

        def expanded(latents: Tensor, rotaries: Tensor) -> Reached:
            cache = ModelCache(self.stack.config)
            cache.instead = latents, rotaries
            return self.run_to_attention(
                layer, layer.call.with_hidden(layer.call.hidden, past_key_values=cache)
            )

        try:
            of_rank = expanded(rank, rank.new_zeros(1, 1, rank.shape[2], rotary.shape[2]))
            of_rotary = expanded(rotary.new_zeros(1, 1, rotary.shape[2], rank.shape[2]), rotary)
        except (
            RuntimeError
        ) as error:  # its code takes no other number of tokens than that of its queries
            reraise_out_of_memory(error)
            return None
        to_query = torch.cat(
            [of_rank.key[0], of_rotary.key[0]], 1
        ).mT  # [heads, head_dim, rank + rotary]
        return Latent(to_query.contiguous(), of_rank.value[0].contiguous())


class _Trace:
    """A run of two tokens through a decoder, with hooks on every module.

    recurrent: modules that wrote a recurrent state. stored: by attention module, its key and value
    for the cache. output_type: the type that the stack returns.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.device = decoder, decoder.stack.device
        self.layers: list[Layer] = []
        self.recurrent: list[nn.Module] = []
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.output_type: type = type(None)
        self._cache = ModelCache(decoder.stack.config)
        self._running: list[nn.Module] = []
        self._calls: dict[int, Call] = {}
        """By module. On several devices a block's call has the tensors of which its attention gets
        copies."""
        self._made: dict[int, tuple[PositionSource, Any]] = {}
        self._masks: list[tuple[Tensor, Window | None]] = []

    def run(self) -> list[Layer]:
        """The attention layers, in order."""
        stack = self.decoder.stack
        self._cache.on_state = self._note_recurrent
        ids = torch.ones(1, 2, dtype=torch.long, device=self.device)
        given = {"input_ids": ids, "position_ids": torch.arange(2, device=self.device)[None]}
        with ExitStack() as hooks:
            for module in stack.modules():
                hooks.callback(
                    module.register_forward_pre_hook(self._enters, with_kwargs=True).remove
                )
                hooks.callback(module.register_forward_hook(self._leaves, with_kwargs=True).remove)
            hooks.enter_context(readable(self.decoder.family))
            hooks.enter_context(attention_function(stack, self._attend, self._mask))
            self.output_type = type(stack(**given, past_key_values=self._cache, use_cache=False))
        if not self.layers:
            raise refusal(
                self.decoder.family, "its attention is not transformers' attention function"
            )
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

    def _mask(
        self, *_: Any, mask_function: Any, local_size: int | None = None, **__: Any
    ) -> Tensor:
        """Make a mask of ones, by whose identity the attention call tells its layer's window."""
        stand_in = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=self.device)
        self._masks.append((stand_in, self._window(mask_function, local_size)))
        return stand_in

    def _window(self, mask_function: Any, size: int | None) -> Window | None:
        """The window of a mask function, found by calling it; None where it hides no earlier
        token."""
        if mask_function is causal_mask_function:
            return None
        zero = torch.zeros((), dtype=torch.long, device=self.device)

        def visible(row: int) -> Tensor:
            """Whether a row sees each token, up to the one after its own."""
            tokens = torch.arange(row + 2, device=zero.device)
            return mask_function(zero, zero, zero + row, tokens).expand(len(tokens))

        num_seen = int(visible(FAR).sum())
        if num_seen == FAR + 1:
            return None
        for window in (Window(num_seen), Window(size or num_seen, is_chunk=True)):
            # around its edges, and far from the first token
            rows = {
                max(0, times * window.size + step)
                for times in (0, 1, 2, 5)
                for step in (-2, -1, 0, 1)
            } | {FAR}
            for row in rows:
                tokens = torch.arange(row + 2, device=zero.device)
                if not torch.equal(
                    visible(row), (tokens >= window.first_visible(zero + row)) & (tokens <= row)
                ):
                    break
            else:
                return window
        raise refusal(
            self.decoder.family,
            "a layer sees neither all earlier tokens, nor a sliding window, nor a chunk of them",
        )

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> Any:
        """Note a layer at its call of the attention function."""
        given = args[0] if args else options.get("attention_mask")
        under_way = [self._calls[id(each)] for each in reversed(self._running)]
        asked = [given, getattr(given, "_base", None)]
        if isinstance(given, Tensor) and given.device != self.device:
            asked += [each for call in under_way for each in (*call.args, *call.kwargs.values())]
        masks = [window for mask, window in self._masks if any(each is mask for each in asked)]
        odd = sorted(
            name
            for name, each in options.items()
            if name not in HARMLESS_OPTIONS and each is not None
        )
        for why, is_so in {
            f"its attention takes {', '.join(odd) or 'a mask of its own'}": given is not None
            and not masks
            or odd,
            "its attention is not causal": not getattr(module, "is_causal", True),
            "a layer attends more than once": any(layer.module is module for layer in self.layers),
            "a layer does not attend to each of the tokens": query.shape[2] != 2
            or key.shape[2] != 2,
        }.items():
            if is_so:
                raise refusal(self.decoder.family, why)
        call, (num_heads, rows, head_dim) = self._calls[id(module)], query.shape[1:]
        positions = [id(first_tensor(each.kwargs.get("position_embeddings"))) for each in under_way]
        source = next((self._made[each] for each in positions if each in self._made), None)
        scale, sinks, size = (
            options.get("scaling"),
            options.get("s_aux"),
            options.get("sliding_window"),
        )
        scale = head_dim**-0.5 if scale is None else scale
        prescales = scale == 1 and getattr(module, "scaling", 1) != 1
        layer = Layer(
            module=module,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            value_dim=value.shape[3],
            softmax=Softmax(
                scale=float(module.scaling if prescales else scale),
                softcap=options.get("softcap"),
                sinks=None if sinks is None else sinks.detach().float(),
            ),
            window=masks[0] if masks else Window(size) if size else None,
            positions=source and source[0],
            call=call,
            device=query.device,
            prescales=prescales,
        )
        self.layers.append(layer)
        if self._cache.latest is not None:
            self.stored[id(module)], self._cache.latest = self._cache.latest, None
        return value.new_zeros(query.shape[0], rows, num_heads, value.shape[3]), None


def stop(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """The attention function that ends a module's run."""
    raise Reached(query, key, value)


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of a module's output."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def options_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call that are strings or whole numbers."""
    return tuple(each for each in (*args, *kwargs.values()) if isinstance(each, str | int))


def stack_of(model: Any) -> Any:
    """The module that turns ids into final hidden states; of a vision-language model its text
    decoder's."""
    stack = model.get_decoder()
    if stack is model or not isinstance(stack, PreTrainedModel):
        stack = next((each for each in model.children() if isinstance(each, PreTrainedModel)), None)
    if stack is None or "position_ids" not in inspect.signature(stack.forward).parameters:
        raise refusal(model.config.model_type, "its decoder is given no positions")
    return stack
