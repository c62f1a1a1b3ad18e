"""How many bytes a method's state will keep of a batch, and read in a step, without the batch: the
state's own code runs on tensors that have a shape and no numbers.

Queries, keys and values lie on torch's `meta` device, where an operation makes the shape of its
result and allocates nothing. The lengths of the sequences are real numbers, since states size their
tensors by them. So the bytes are those that the state would have, and nothing is stated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.decode.memory import layer_bytes, tensor_bytes
from harness.errors import UserError
from harness.model.budgets import FLOAT_BYTES
from methods.base import (
    Calibration,
    Geometry,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    State,
    When,
)
from methods.evicting import EvictingState

META = torch.device("meta")
CALIBRATION_TOKENS = 1024
"""Of a calibration without numbers, as by default of one with numbers."""


@dataclass(frozen=True)
class StateSizes:
    """Bytes of a state after the prompt.

    whole: all of it, calibration included. by_layer: of the tensors that it declares to keep, by
    the layer's number. read: of the layer's index, by a step in the middle of the decoding
    (`Selection.side`); where the data decides, all that is kept.
    """

    whole: int
    by_layer: Mapping[int, int]
    read: Mapping[int, int]


class ShapesAlone(TorchDispatchMode):
    """Operations on tensors with and without numbers: a result of any without has none either.

    A tensor with numbers that is written in place from one without keeps its numbers, which then
    mean nothing; its size is right.
    """

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(_has_no_numbers, tree_leaves((args, kwargs)))):
            return operation(*args, **kwargs)
        written = _written(operation, args, kwargs)
        without = tree_map(_without_numbers, (args, kwargs))
        out = operation(*without[0], **without[1])
        return out if written is None else written


def _has_no_numbers(value: object) -> bool:
    is_meta_tensor = isinstance(value, Tensor) and value.device == META
    return is_meta_tensor or value == META


def _without_numbers(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    if not isinstance(value, Tensor) or value.device == META:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that an operation writes and returns; None where it makes a new one."""
    schema = operation._schema
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return None


def state_sizes(
    method: Method,
    geometry: Geometry,
    prompts: Sequence[int],
    max_new_tokens: int,
    dtype: torch.dtype,
    capacity_of: Callable[[int], int],
    calibration: Calibration | None = None,
) -> StateSizes:
    """The sizes of a method's state for sequences with prompts of these numbers of tokens.

    capacity_of: slots of a layer's store, by the layer's number. calibration: None: it is made
    without numbers, as if of a text of `CALIBRATION_TOKENS` tokens, where one is needed. Raises
    UserError for a method whose sizes depend on the numbers, and ValueError as `Method.new_state`.
    """
    if method.reads_all:
        return StateSizes(0, {}, {})
    # Masks and positions without numbers are faster; some states read how many tokens are real.
    lengths = prompts, max_new_tokens
    for real_device in (META, torch.device("cpu")):
        try:
            return _sizes(method, geometry, *lengths, dtype, capacity_of, calibration, real_device)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            fault = error
    raise UserError(
        f"method {method.title}: what it keeps depends on the text, so that its memory is "
        "known only after a prompt has run"
    ) from fault


@torch.inference_mode()
def _sizes(
    method: Method,
    geometry: Geometry,
    prompts: Sequence[int],
    max_new_tokens: int,
    dtype: torch.dtype,
    capacity_of: Callable[[int], int],
    calibration: Calibration | None,
    real_device: torch.device,
) -> StateSizes:
    batch, columns = len(prompts), max(prompts)
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    value_dim = geometry.value_dim or head_dim
    first = method.dense_layers
    prompt = torch.tensor(prompts)
    lengths = Lengths(prompt, prompt + max_new_tokens)
    real = torch.zeros(batch, columns, dtype=torch.bool)
    for sequence, length in enumerate(prompts):
        real[sequence, columns - length :] = True
    real = real.to(real_device)
    query = torch.empty(batch, heads, columns, head_dim, dtype=dtype, device=META)
    key = torch.empty(batch, kv_heads, columns, head_dim, dtype=dtype, device=META)
    value = torch.empty(batch, kv_heads, columns, value_dim, dtype=dtype, device=META)
    with ShapesAlone():
        if calibration is None and method.needs_calibration:
            calibration = _calibration(method, geometry, dtype)
        state = method.new_state(geometry, lengths, calibration)
        if method.rereads_prompt:
            score = torch.empty(batch, kv_heads, columns, device=META)
            numbers = range(first, geometry.num_layers)
            state.take_scores(dict.fromkeys(numbers, score), PromptRows(real, columns))
        # Layers of the same slots that choose at the same time keep the same: one of them is run.
        by_layer: dict[int, int] = {}
        of_kind: dict[tuple[int, When], tuple[int, int]] = {}
        before = whole = tensor_bytes(vars(state))
        for number in range(first, geometry.num_layers):
            capacity = capacity_of(number)
            kind = capacity, method.when_of(number)
            if kind not in of_kind:
                if isinstance(state, EvictingState):
                    state.prompt(number, query, key, value, PromptRows(real, columns))
                    state.compact(number, capacity)
                else:
                    state.prompt(number, query, key, value, PromptRows(real, capacity))
                if method.keeps_keys:
                    state.resident(number)
                after = tensor_bytes(vars(state))
                of_kind[kind] = layer_bytes(state, number), after - before
                before = after
            by_layer[number], added = of_kind[kind]
            whole += added
        # At the end, since to select may change what the state holds.
        token = batch * kv_heads * geometry.elements * FLOAT_BYTES
        read: dict[int, int] = {}
        read_of_kept: dict[tuple[int, When], int] = {}
        for number, kept in by_layer.items():
            kind = kept, method.when_of(number)
            if kind not in read_of_kept:
                in_tokens = _index_read(state, number, columns + max_new_tokens // 2, dtype)
                read_of_kept[kind] = kept if in_tokens is None else round(token * in_tokens)
            read[number] = read_of_kept[kind]
    return StateSizes(whole, by_layer, read)


def _index_read(state: State, layer: int, row: int, dtype: torch.dtype) -> float | None:
    """What a step at this row reads of a layer's index, in tokens, mean over the sequences; None
    where the data decides."""
    when, geometry = state.method.when_of(layer), state.geometry
    if when in ("kept", "earlier_layer"):  # it chooses nothing here
        return 0.0
    batch, kv_heads = len(state.lengths.prompt), geometry.num_kv_heads
    query = torch.empty(batch, geometry.num_heads, 1, geometry.head_dim, dtype=dtype, device=META)
    key, value = query[:, :kv_heads], query[:, :kv_heads, :, : geometry.value_dim]
    scores = torch.empty(batch, kv_heads, geometry.group, 1, row + 1, device=META)
    positions = torch.full((batch, 1), row)
    slots, own = torch.arange(row + 1).expand(batch, 1, -1), positions.unsqueeze(1)
    is_real = torch.ones(batch, 1, dtype=torch.bool)
    rows = QueryRows(query, positions, is_real, slots, own, lambda: scores)
    try:
        state.append(layer, key, value, positions, slice(row, row + 1))
        side = state.select(layer, rows).side
    except (NotImplementedError, RuntimeError):  # it looks at numbers
        return None
    if side is None:
        return 0.0
    return None if side.device == META else float(side.mean())


def _calibration(method: Method, geometry: Geometry, dtype: torch.dtype) -> Calibration:
    """A calibration without numbers, of all layers."""
    size = CALIBRATION_TOKENS, geometry.head_dim
    query = torch.empty(geometry.num_heads, *size, dtype=dtype, device=META)
    key = torch.empty(geometry.num_kv_heads, *size, dtype=dtype, device=META)
    measured: list[Calibration] = []
    for _ in range(geometry.num_layers):
        measured.append(method.calibrate(query, key, geometry, measured))
    stacked = {}
    for name in measured[0]:
        stacked[name] = torch.stack([of_layer[name] for of_layer in measured])
    return stacked
