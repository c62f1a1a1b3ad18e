"""The policy of each attention layer under a method, decided in this one place.

A layer that sees every token is under the method, or dense and reads the full cache. A
local layer reads its window, whatever the method. Recurrent layers have no cache, and so no policy:
their states are the model's own.

Also here: the checks of what a state returns and keeps, which may be a user's own code.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from harness.errors import UserError, line_of
from harness.model.attached import Attached
from harness.model.passes import LayerPrompt
from methods.attention import Softmax
from methods.base import (
    NAMES_ROWS,
    Calibration,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    ShapeError,
    State,
    When,
    Window,
    checked,
    require,
)
from methods.codecs.split import CacheCodec, LayerCodecs
from methods.evicting import EvictingState


class Policy(NamedTuple):
    """The policy of one attention layer.

    kind: `method`: it reads what the method selects; `full`: every token; `local`: its window.
    number: the layer's number among those that see every token, which is how methods count; -1 for
    a local one. when: when it is known which rows it reads (`methods.base.When`).
    """

    kind: Literal["method", "full", "local"]
    number: int
    when: When
    softmax: Softmax
    window: Window | None

    @property
    def names_rows(self) -> bool:
        """True if `select` runs before the fetch and decides which rows are fetched."""
        return self.when in NAMES_ROWS

    @property
    def is_predicted(self) -> bool:
        """True if a query of the layer is made in the layer before, to select by it."""
        return self.when == "previous_layer"


def require_layers(codec: CacheCodec | None, num_layers: int) -> None:
    """Raise UserError for a codec of a layer that a model with `num_layers` layers that see every
    token does not have."""
    if not isinstance(codec, LayerCodecs):
        return
    for layers in codec.named:
        if max(layers.first, layers.last or 0) >= num_layers:
            allowed = f"the model has layers 0 to {num_layers - 1} that see every token"
            raise UserError(f"codec_layers=[{layers.words}]: {allowed}")


def policies_of(attached: Attached, method: Method, *, needs_method: bool = True) -> list[Policy]:
    """The policy of each attention layer, in order.

    needs_method: at least one layer must be under the method. Raises ValueError where none is, and
    UserError for a method that the model does not take.
    """
    dense_layers, num_layers = method.dense_layers, attached.geometry.num_layers
    is_met = dense_layers < num_layers or not needs_method
    require(is_met, "dense_layers", dense_layers, f"< {num_layers} layers")
    if method.needs_inputs and method.rereads_prompt:
        raise UserError(
            f"method {method.title}: needs_inputs and repetitions; a method can have one of them"
        )
    if method.keeps_keys and attached.geometry.values_in_keys:
        raise UserError(
            f"method {method.title} keeps the keys: in this model they hold the values as well"
        )
    policies = []
    for layer, number in zip(attached.layers, attached.numbers, strict=True):
        softmax = layer.softmax
        if number is None:
            policies.append(Policy("local", -1, "kept", softmax, layer.window))
        elif number < dense_layers:
            policies.append(Policy("full", number, "kept", softmax, None))
        else:
            is_first = layer.before is None  # of the model: no layer before it can predict
            policies.append(method_policy(method, number, softmax, is_first))
    if any(policy.is_predicted for policy in policies):
        attached.require_prediction()
    return policies


def method_policy(method: Method, number: int, softmax: Softmax, is_first: bool) -> Policy:
    """The policy of a layer under the method. is_first: no layer before it can predict."""
    when = method.when_of(number)
    if is_first and when == "previous_layer":
        when = "own_query"
    return Policy("method", number, when, softmax, None)


def new_state(
    attached: Attached, method: Method, lengths: Lengths, calibration: Calibration | None
) -> State | None:
    """A method's fresh state for a batch, of its class `state`; None where it reads everything.

    Raises ValueError where the method cannot work at these lengths or with these attention modules.
    """
    if method.needs_inputs:
        first = attached.numbers.index(method.dense_layers)
        method.check_inputs(*attached.example(first))
    if method.reads_all:
        return None
    device = attached.device
    on_device = Lengths(lengths.prompt.to(device), lengths.final.to(device))
    measured = None
    if calibration is not None:
        measured = {name: tensor.to(device) for name, tensor in calibration.items()}
    return method.new_state(attached.geometry, on_device, measured)


def loses_tokens(method: Method) -> bool:
    """Whether tokens leave the cache for good, as the method's class of states says. Their slots
    are used again."""
    state = method.state
    return state is not None and issubclass(state, EvictingState)


def evicts(method: Method) -> bool:
    """Whether a method evicts tokens and reads all others. A pool, of which a method reads a part,
    is not meant."""
    return method.when == "kept" and loses_tokens(method)


def check_selection(selection: Selection, state: State, rows: QueryRows) -> None:
    """Raise ShapeError for a selection of other shapes than `methods.base.Selection` says, or whose
    mask is not bool: torch would make wrong numbers of it. No number is read, so no GPU waits."""
    geometry, slots = state.geometry, rows.slot_positions.shape[-1]
    batch, num_rows = rows.positions.shape
    kv_heads, value_dim = geometry.num_kv_heads, geometry.value_dim or geometry.head_dim
    any_heads, any_group = (1, kv_heads), (1, geometry.group)

    def require(name: str, part: Tensor | None, axes: str, *sizes: int | tuple[int, ...]) -> None:
        checked(state.select, part, f"{name}: {axes}", *sizes)

    require("num_read", selection.num_read, "batch, rows", batch, num_rows)
    if selection.mask is not None:
        axes = "batch, KV heads, rows, slots"
        require("mask", selection.mask, axes, batch, any_heads, num_rows, slots)
        if selection.mask.dtype != torch.bool:
            words = f"select returned a mask of {selection.mask.dtype}; must be bool"
            raise ShapeError(words, line_of(type(state), "select"))
    if selection.side is not None:
        require("side", selection.side, "batch, rows", batch, num_rows)
    if selection.bias is not None:
        axes = "batch, KV heads, group, rows, slots"
        require("bias", selection.bias, axes, batch, any_heads, any_group, num_rows, slots)
    rest = selection.rest
    if rest is not None:
        # Live decoding asks for a log-mass of these methods alone.
        has_mass = rest.log_mass is not None and state.method.weighs_rest
        share = rest.log_mass if has_mass else rest.share
        axes = "batch, KV heads, group, rows"
        require("rest", share, axes, batch, kv_heads, geometry.group, num_rows)
        axes = f"{axes}, value_dim"
        require("rest.value", rest.value, axes, batch, kv_heads, any_group, num_rows, value_dim)


def take_prompt(state: State, layer: int, prompt: LayerPrompt, rows: PromptRows) -> None:
    """Let a state take in a layer's prompt. Raises UserError where it then keeps a tensor of the
    sequences, at least a number for each column of the prompt, that it does not declare: `fork`
    would not copy it, and it would not count as resident."""
    before = _tensors_of(state).keys()
    state.prompt(layer, prompt.query, prompt.key, prompt.value, rows)
    declared = {*state.sequence_tensors, *state.slot_tensors}
    batch, columns = rows.real.shape
    for path, tensor in _tensors_of(state).items():
        is_new = path not in before and path[0].key not in declared
        if is_new and tensor.shape[:1] == (batch,) and tensor[0].numel() >= columns:
            where = f"method {type(state.method).__name__}: {line_of(type(state), 'prompt')}"
            raise UserError(
                f"{where}: after prompt, `{path[0].key}` holds {[*tensor.shape]}; name it in "
                "slot_tensors (a row for each slot) or sequence_tensors: else it neither counts as "
                "resident nor is copied by fork"
            )


def _tensors_of(state: State) -> dict[Any, Tensor]:
    """The tensors in a state's attributes, and in dicts and lists there, by the keys on the way."""
    leaves, _ = tree_flatten_with_path(vars(state))
    return {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
