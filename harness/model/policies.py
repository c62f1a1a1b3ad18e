"""What each attention layer of a model does under a method: the one place where that is decided.

A layer that sees every token is under the method, or exempt from it and reads the full cache. A local layer reads its
window, whatever the method. Recurrent layers have no cache, and so no policy: their states are the model's own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from harness.errors import UserError
from harness.model.attach import Attached
from methods.attention import Softmax
from methods.base import Calibration, Lengths, Method, State, When, Window, require


class Policy(NamedTuple):
    """Of one attention layer.

    kind: `method`: it reads what the method selects; `full`: every token; `local`: its window. number: the layer's
    number among those that see every token, which is how methods count; -1 for a local one. when: when it is known
    which rows it reads (`methods.base.When`).
    """

    kind: Literal["method", "full", "local"]
    number: int
    when: When
    softmax: Softmax
    window: Window | None


def policies_of(attached: Attached, method: Method, *, needs_method: bool = True) -> list[Policy]:
    """The policy of each attention layer, in order.

    needs_method: at least one layer must be under the method. Raises ValueError where none is, and UserError for a
    method that the model does not take.
    """
    exempt, num_layers = method.num_exempt_layers, attached.geometry.num_layers
    require(exempt < num_layers or not needs_method, "num_exempt_layers", exempt, f"< {num_layers} layers")
    if method.holds_keys and attached.geometry.values_in_keys:
        raise UserError(f"method {method.title} keeps the keys: in this model they hold the values as well")
    policies = []
    for layer, number, softmax in zip(attached.layers, attached.numbers, attached.softmaxes, strict=True):
        if number is None:
            policies.append(Policy("local", -1, "kept", softmax, layer.window))
        elif number < exempt:
            policies.append(Policy("full", number, "kept", softmax, None))
        else:
            when = method.when_of(number)
            if when == "previous_layer" and layer.before is None:  # the model's first layer has none before it
                when = "own_query"
            policies.append(Policy("method", number, when, softmax, None))
    if any(policy.when == "previous_layer" for policy in policies):
        attached.require_rehearsal()
    return policies


def new_states(
    attached: Attached, method: Method, lengths: Lengths, calibration: Calibration | None
) -> dict[torch.device, State]:
    """A method's fresh states for a batch, one on each device that has layers under the method, in their order; none
    where it reads everything.

    Raises ValueError where the method cannot work at these lengths, and UserError for one that shares selections
    between layers and does not say what they hand on.
    """
    states: dict[torch.device, State] = {}
    for device in [] if method.reads_all else attached.method_devices(method.num_exempt_layers):
        on_device = Lengths(*(part.to(device) for part in lengths))
        measured = None if calibration is None else {name: each.to(device) for name, each in calibration.items()}
        states[device] = method.new_state(attached.geometry, on_device, measured)
    numbers = range(method.num_exempt_layers, attached.geometry.num_layers)
    if len(states) > 1 and any(method.when_of(number) == "earlier_layer" for number in numbers):
        state = next(iter(states.values()))
        if not state.handed_on:
            raise UserError(
                f"model.device=map: {type(state).__name__} takes selections from earlier layers and names none of them "
                "in `handed_on`; allowed: auto, cuda"
            )
    return states
