"""The policy of each attention layer under a method, decided in this one place.

A layer that sees every token is under the method, or exempt from it and reads the full cache. A
local layer reads its window, whatever the method. Recurrent layers have no cache, and so no policy:
their states are the model's own.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.errors import UserError, line_in, line_of, message, reason
from harness.model.attached import Attached
from methods.attention import Softmax
from methods.base import (
    Calibration,
    Lengths,
    Method,
    QueryRows,
    Selection,
    State,
    When,
    Window,
    require,
)


class Policy(NamedTuple):
    """The policy of one attention layer.

    kind: `method`: it reads what the method selects; `full`: every token; `local`: its window.
    number: the layer's number among those that see every token, which is how methods count; -1 for
    a local one. when: when it is known which rows it reads (`methods.base.When`). prefetches: it
    selects by its own query, and what a query made in the layer before would select crosses the
    link early.
    """

    kind: Literal["method", "full", "local"]
    number: int
    when: When
    softmax: Softmax
    window: Window | None
    prefetches: bool = False

    @property
    def rehearses(self) -> bool:
        """True if a query of the layer is made in the layer before: to select by it, or to
        prefetch."""
        return self.when == "previous_layer" or self.prefetches


def policies_of(
    attached: Attached, method: Method, *, needs_method: bool = True, prefetch: bool = False
) -> list[Policy]:
    """The policy of each attention layer, in order.

    needs_method: at least one layer must be under the method. prefetch: layers prefetch where the
    method allows it (`Method.prefetches`). Raises ValueError where none is, and UserError for a
    method that the model does not take.
    """
    exempt, num_layers = method.num_exempt_layers, attached.geometry.num_layers
    require(
        exempt < num_layers or not needs_method,
        "num_exempt_layers",
        exempt,
        f"< {num_layers} layers",
    )
    if method.needs_inputs and method.rereads:
        raise UserError(
            f"method {method.title}: needs_inputs and rereads; a method can have one of them"
        )
    if method.holds_keys and attached.geometry.values_in_keys:
        raise UserError(
            f"method {method.title} keeps the keys: in this model they hold the values as well"
        )
    policies = []
    for layer, number, softmax in zip(
        attached.layers, attached.numbers, attached.softmaxes, strict=True
    ):
        if number is None:
            policies.append(Policy("local", -1, "kept", softmax, layer.window))
        elif number < exempt:
            policies.append(Policy("full", number, "kept", softmax, None))
        else:
            when = method.when_of(number)
            if (
                when == "previous_layer" and layer.before is None
            ):  # the model's first layer has none before it
                when = "own_query"
            prefetches = prefetch and layer.before is not None and method.prefetches(number)
            policies.append(Policy("method", number, when, softmax, None, prefetches))
    if any(policy.rehearses for policy in policies):
        attached.require_rehearsal()
    return policies


def new_states(
    attached: Attached, method: Method, lengths: Lengths, calibration: Calibration | None
) -> dict[torch.device, State]:
    """A method's fresh states for a batch, one on each device that has layers under the method, in
    their order; none where it reads everything.

    Raises ValueError where the method cannot work at these lengths or with these attention modules,
    and UserError for one on several devices that shares selections between layers and does not say
    what they hand on.
    """
    if method.needs_inputs:
        first = attached.numbers.index(method.num_exempt_layers)
        method.check_inputs(*attached.example(first))
    states: dict[torch.device, State] = {}
    for device in [] if method.reads_all else attached.method_devices(method.num_exempt_layers):
        on_device = Lengths(*(part.to(device) for part in lengths))
        measured = (
            None
            if calibration is None
            else {name: each.to(device) for name, each in calibration.items()}
        )
        states[device] = method.new_state(attached.geometry, on_device, measured)
    numbers = range(method.num_exempt_layers, attached.geometry.num_layers)
    shares = any(method.when_of(number) == "earlier_layer" for number in numbers)
    if len(states) > 1 and shares and not (state := next(iter(states.values()))).handed_on:
        raise UserError(
            f"model.device=map: {type(state).__name__} takes selections from earlier layers and names none of them in "
            "`handed_on`; allowed: auto, cuda"
        )
    return states


def select(state: State, layer: int, rows: QueryRows) -> Selection:
    """`state.select` with the types, dtypes and shapes of its result checked. No number is read, so
    no GPU waits.

    If a user's own method raises or returns something else, a UserError names the line of its file.
    """
    classes = [
        cls
        for cls in (type(state), type(state.method))
        if cls.__module__.partition(".")[0] != "methods"
    ]
    try:
        selection = state.select(layer, rows)
        fault = _fault(selection, state, rows)
    except (UserError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:
        if not classes or "DefaultCPUAllocator" in message(error):  # out of memory on a CPU
            raise
        files = {str(sys.modules[cls.__module__].__file__) for cls in classes}
        where = line_in(error, files) or next(iter(files))
        raise UserError(
            f"method {type(state.method).__name__}: {where}: select raised {reason(error)}"
        ) from error
    if fault is not None:
        where = f"method {type(state.method).__name__}: {line_of(type(state), 'select')}"
        raise (UserError if classes else TypeError)(f"{where}: select returned {fault}")
    return selection


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COUNTS = (torch.float64, torch.float32, torch.int64, torch.int32)


def _fault(selection: Any, state: State, rows: QueryRows) -> str | None:
    """The wrong part of a selection and what is allowed, by `methods.base.Selection`; None for a
    good one."""
    if not isinstance(selection, Selection):
        return f"{type(selection).__name__}; allowed: a Selection (methods/base.py)"
    (batch, num_rows), slots, geometry = (
        rows.positions.shape,
        rows.slot_positions.shape[-1],
        state.geometry,
    )
    kv_heads, group, rest = geometry.num_kv_heads, geometry.group, selection.rest
    parts: list[tuple[str, Any, tuple[torch.dtype, ...], list[tuple[int, ...]]]] = [
        ("num_read", selection.num_read, COUNTS, [(batch,), (num_rows,)]),
        ("mask", selection.mask, (torch.bool,), [(batch,), (1, kv_heads), (num_rows,), (slots,)]),
        ("side", selection.side, COUNTS, [(batch,), (num_rows,)]),
        (
            "bias",
            selection.bias,
            FLOATS,
            [(batch,), (1, kv_heads), (1, group), (num_rows,), (slots,)],
        ),
    ]
    if rest is not None:
        of_heads: list[tuple[int, ...]] = [(batch,), (kv_heads,), (group,), (num_rows,)]
        value_dim = geometry.value_dim or geometry.head_dim
        name, share = (
            ("rest.share", rest.share)
            if rest.log_mass is None
            else ("rest.log_mass", rest.log_mass)
        )
        if rest.log_mass is not None and not state.method.weighs_rest:
            return "rest.log_mass; allowed: for a method with weighs_rest = True"
        parts.append((name, share, FLOATS, of_heads))
        parts.append(
            (
                "rest.value",
                rest.value,
                FLOATS,
                [*of_heads[:2], (1, group), (num_rows,), (value_dim,)],
            )
        )
    for name, part, dtypes, sizes in parts:
        if part is None and name in ("mask", "side", "bias"):
            continue
        is_right = isinstance(part, Tensor) and part.dtype in dtypes and part.dim() == len(sizes)
        if not is_right or any(
            size not in allowed for size, allowed in zip(part.shape, sizes, strict=True)
        ):
            found = (
                f"{part.dtype} {[*part.shape]}" if isinstance(part, Tensor) else type(part).__name__
            )
            shape = ", ".join(" or ".join(map(str, dict.fromkeys(allowed))) for allowed in sizes)
            return f"{name} {found}; allowed: {' or '.join(map(str, dtypes))} [{shape}]"
    return None
