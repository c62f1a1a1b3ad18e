"""What live decoding needs of the host's and the device's memory, and whether it fits: asked before it is made.

Counted before a prompt runs: the slots of all layers; under host placement the buffers for fetched rows; and what a
layer of the prompt's dense pass holds at its peak, which is more than a decode step does. What a method keeps beside
the rows (partial keys, which token lies where) its state alone knows: its first layer shows it, and then as much is
asked for in all others. Not counted: the weights and a calibration, which lie there already, and what a method needs
only while it takes in a layer's prompt (its scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.model.attach import Attached
from harness.model.room import available_bytes
from harness.offload.pinned import aligned
from methods.base import State

OWN = 1
"""Behind the fetched rows of a head a buffer has room for the step's own one."""


LOWER = "lower batch_size, prompt_len or gen_len, or choose a codec of fewer bits"
"""What to do where a cache does not fit."""


class LayerSlots(NamedTuple):
    """The slots of a layer's store: so many of each head of the batch."""

    heads: int
    capacity: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the slots."""
        return self.bytes_of(self.capacity)

    def bytes_of(self, rows: int) -> int:
        """Of so many rows of each head."""
        return self.heads * rows * self.slot_bytes


class SessionBytes(NamedTuple):
    """What a session needs, beside the weights. managed: of memory that lies in either (`harness.offload.managed`)."""

    host: int
    device: int
    managed: int = 0


def session_bytes(
    layers: Sequence[LayerSlots], placement: str, *, ahead: int, selected: int, reuse: bool, activations: int
) -> SessionBytes:
    """ahead, selected, reuse: of the `Fetcher`. activations: `prompt_bytes`, 0 where no prompt is run."""
    cache = sum(aligned(layer.num_bytes) for layer in layers)
    if placement == "host":
        return SessionBytes(cache, buffer_bytes(layers, ahead=ahead, selected=selected, reuse=reuse) + activations)
    if placement == "managed":
        return SessionBytes(0, activations, cache)
    return SessionBytes(0, cache + activations)


def buffer_bytes(layers: Sequence[LayerSlots], *, ahead: int, selected: int, reuse: bool) -> int:
    """Of the buffers that a `Fetcher` of these layers has: one of each of the first `ahead` layers, two that the others
    take turns in, and under reuse one for `selected` rows of each of those."""
    others = layers[ahead:]
    largest = max(others, key=lambda layer: layer.num_bytes)
    in_turn = largest.bytes_of((min(selected, largest.capacity) if ahead else largest.capacity) + OWN)
    kept = sum(layer.bytes_of(selected + OWN) for layer in others) if reuse else 0
    return sum(layer.bytes_of(layer.capacity + OWN) for layer in layers[:ahead]) + 2 * in_turn + kept


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """At most what a layer of a dense pass over `num_tokens` tokens, all prompts', holds at once.

    Of a token that is its hidden state and three more of the kind, its rotation, and either what the FFN makes of it,
    or query, key, value and output, the query once more, and the packed row and a copy.
    """
    geometry, hidden = attached.geometry, attached.model.config.hidden_size
    of_attention = _weights(attached.attentions[0])
    of_layer = _weights(attached.adapter.layers(attached.model)[0])
    packed = geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    made = sum(weight.numel() for weight in of_attention.values()) // hidden + packed
    ffn = _ffn_elements([weight for name, weight in of_layer.items() if name not in of_attention], hidden)
    return num_tokens * (4 * hidden + 4 * geometry.head_dim + max(made, ffn)) * attached.dtype.itemsize


def _ffn_elements(weights: Sequence[Tensor], hidden: int) -> int:
    """A token's activations in an FFN: one for each matrix, and another where two matrices are one, whose product
    stays as long as its halves are used."""
    fused = max(weight.shape[0] for weight in weights) - max(weight.shape[1] for weight in weights)
    return sum(weight.numel() for weight in weights) // hidden + fused


def _weights(module: nn.Module) -> dict[int, Tensor]:
    """The matrices of a module, by identity."""
    return {id(weight): weight for weight in module.parameters() if weight.dim() == 2}


def require_session(needed: SessionBytes, device: torch.device) -> None:
    """Refuse a session whose host and device memory, one and the same on a CPU, is too small; raises UserError."""
    if device.type == "cpu":
        require_memory(sum(needed), device, "live decoding")
    else:
        require_memory(needed.host, torch.device("cpu"), "live decoding")
        require_memory(needed.device, device, "live decoding")


def require_memory(num_bytes: int, home: torch.device, what: str = "the KV cache") -> None:
    """Refuses what does not fit into the memory of device `home`.

    Raises UserError with the bytes needed and available and the settings to lower.
    """
    available = available_bytes(home)
    if num_bytes > available:
        raise UserError(
            f"{what} needs {num_bytes / 2**30:.1f} GiB of {home.type} memory and "
            f"{available / 2**30:.1f} GiB are available; {LOWER}"
        )


def layer_bytes(state: State, layer: int) -> int:
    """Of what a state declares to keep by layer, those of one."""
    declared = (getattr(state, name) for name in (*state.sequence_tensors, *state.slot_tensors))
    return sum(tensor_bytes(kept[layer]) for kept in declared if isinstance(kept, dict) and layer in kept)


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a mapping or tuple of them; 0 for anything else."""
    if isinstance(value, Mapping | tuple):
        return sum(map(tensor_bytes, value.values() if isinstance(value, Mapping) else value))
    return value.nbytes if isinstance(value, Tensor) else 0
