"""The policy of each attention layer under a method, decided in this one place.

A layer that sees every token is under the method, or dense and reads the full cache. A
local layer reads its window, whatever the method. Recurrent layers have no cache, and so no policy:
their states are the model's own.

Also here: the checks around `State.select`, which may be a user's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from harness.errors import UserError, line_in, line_of, message, reason
from harness.model.attached import Attached
from harness.model.dense_prompts import LayerPrompt
from methods.attention import Softmax
from methods.base import (
    NAMES_ROWS,
    Calibration,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    State,
    When,
    Window,
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
    for layer, number, softmax in zip(
        attached.layers, attached.numbers, attached.softmaxes, strict=True
    ):
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


def new_states(
    attached: Attached, method: Method, lengths: Lengths, calibration: Calibration | None
) -> dict[torch.device, State]:
    """A method's fresh states for a batch, one on each device that has layers under the method, in
    their order; none where it reads everything.

    They are of its class `state`. Raises ValueError where the method cannot work at these lengths
    or with these attention modules, and UserError for one on several devices that shares selections
    between layers and does not say what they hand on.
    """
    if method.needs_inputs:
        first = attached.numbers.index(method.dense_layers)
        method.check_inputs(*attached.example(first))
    states: dict[torch.device, State] = {}
    if method.reads_all:
        return states
    for device in attached.method_devices(method.dense_layers):
        on_device = Lengths(lengths.prompt.to(device), lengths.final.to(device))
        measured = None
        if calibration is not None:
            measured = {name: tensor.to(device) for name, tensor in calibration.items()}
        states[device] = method.new_state(attached.geometry, on_device, measured)
    if len(states) > 1 and _shares_selections(method, attached.geometry.num_layers):
        state = next(iter(states.values()))
        if not state.handed_on:
            raise UserError(
                f"model.device=map: {type(state).__name__} takes selections from earlier layers "
                "and names none of them in `handed_on`; allowed: auto, cuda"
            )
    return states


def loses_tokens(method: Method) -> bool:
    """Whether tokens leave the cache for good, as the method's class of states says. Their slots
    are used again."""
    state = method.state
    return state is not None and issubclass(state, EvictingState)


def evicts(method: Method) -> bool:
    """Whether a method evicts tokens and reads all others. A pool, of which a method reads a part,
    is not meant."""
    return method.when == "kept" and loses_tokens(method)


def _shares_selections(method: Method, num_layers: int) -> bool:
    layers = range(method.dense_layers, num_layers)
    return any(method.when_of(layer) == "earlier_layer" for layer in layers)


# State.select may be a user's own code: its errors name a line of the user's file, and the types,
# dtypes and shapes of its results are checked. No number is read, so no GPU waits.

HARMLESS = (UserError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, BrokenPipeError)
"""Errors that are not changed."""


class SelectErrors:
    """Around `State.select`: an error of a user's own method becomes a UserError that names the
    line of its file. Other errors pass."""

    __slots__ = ("state",)

    def __init__(self, state: State) -> None:
        self.state = state

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, HARMLESS):
            return
        classes = own_classes(self.state)
        if not classes or "DefaultCPUAllocator" in message(error):  # out of memory on a CPU
            return
        files = {str(sys.modules[cls.__module__].__file__) for cls in classes}
        where = line_in(error, files) or next(iter(files))
        raise UserError(
            f"method {type(self.state.method).__name__}: {where}: select raised {reason(error)}"
        ) from error


def own_classes(state: State) -> list[type]:
    """The classes of a state and its method that are a user's own."""
    classes = (type(state), type(state.method))
    return [cls for cls in classes if cls.__module__.partition(".")[0] != "methods"]


def check_selection(selection: Any, state: State, rows: QueryRows) -> None:
    """Check the result of `State.select`. Raises UserError for a user's own method and TypeError
    for any other."""
    fault = _fault(selection, state, rows)
    if fault is None:
        return
    where = f"method {type(state.method).__name__}: {line_of(type(state), 'select')}"
    error = UserError if own_classes(state) else TypeError
    raise error(f"{where}: select returned {fault}")


def take_prompt(state: State, layer: int, prompt: LayerPrompt, rows: PromptRows) -> None:
    """Let a state take in a layer's prompt. Raises UserError where it then keeps a tensor of the
    sequences, at least a number for each column of the prompt, that it does not declare: `fork`
    would not copy it, and it would not count as resident."""
    before = _tensors_of(state).keys()
    state.prompt(layer, prompt.query, prompt.key, prompt.value, rows)
    declared = {*state.sequence_tensors, *state.slot_tensors, *getattr(state, "handed_on", ())}
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


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COUNTS = (torch.float64, torch.float32, torch.int64, torch.int32)
Sizes = Sequence[tuple[int, ...]]
"""The allowed sizes of each axis."""


def _fault(selection: Any, state: State, rows: QueryRows) -> str | None:
    """The wrong part of a selection and what is allowed, by `methods.base.Selection`; None for a
    good one."""
    if not isinstance(selection, Selection):
        return f"{type(selection).__name__}; allowed: a Selection (methods/base.py)"
    rest = selection.rest
    if rest is not None and rest.log_mass is not None and not state.method.weighs_rest:
        return "rest.log_mass; allowed: for a method with weighs_rest = True"
    batch, num_rows = rows.positions.shape
    slots = rows.slot_positions.shape[-1]
    geometry = state.geometry
    kv_heads, group = geometry.num_kv_heads, geometry.group
    of_rows = [(batch,), (num_rows,)]
    of_slots = [(batch,), (1, kv_heads), (num_rows,), (slots,)]
    of_group_slots = [(batch,), (1, kv_heads), (1, group), (num_rows,), (slots,)]
    fault = _fault_of("num_read", selection.num_read, COUNTS, of_rows)
    if fault is None and selection.mask is not None:
        fault = _fault_of("mask", selection.mask, (torch.bool,), of_slots)
    if fault is None and selection.side is not None:
        fault = _fault_of("side", selection.side, COUNTS, of_rows)
    if fault is None and selection.bias is not None:
        fault = _fault_of("bias", selection.bias, FLOATS, of_group_slots)
    if fault is not None or rest is None:
        return fault
    value_dim = geometry.value_dim or geometry.head_dim
    of_heads = [(batch,), (kv_heads,), (group,), (num_rows,)]
    of_value = [(batch,), (kv_heads,), (1, group), (num_rows,), (value_dim,)]
    if rest.log_mass is None:
        fault = _fault_of("rest.share", rest.share, FLOATS, of_heads)
    else:
        fault = _fault_of("rest.log_mass", rest.log_mass, FLOATS, of_heads)
    return fault or _fault_of("rest.value", rest.value, FLOATS, of_value)


def _fault_of(name: str, part: Any, dtypes: Sequence[torch.dtype], sizes: Sizes) -> str | None:
    """What is wrong with one tensor of a selection, and what is allowed; None for a good one."""
    if not isinstance(part, Tensor):
        found = type(part).__name__
    elif part.dtype in dtypes and _fits(part.shape, sizes):
        return None
    else:
        found = f"{part.dtype} {[*part.shape]}"
    shape = ", ".join(" or ".join(map(str, dict.fromkeys(allowed))) for allowed in sizes)
    return f"{name} {found}; allowed: {' or '.join(map(str, dtypes))} [{shape}]"


def _fits(shape: Sequence[int], sizes: Sizes) -> bool:
    if len(shape) != len(sizes):
        return False
    return all(size in allowed for size, allowed in zip(shape, sizes, strict=True))
