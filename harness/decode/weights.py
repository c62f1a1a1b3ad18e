"""Weights partly in host memory: a share of every decoder layer's crosses the link in each pass, a
layer ahead.

Whole matrices are streamed. Biases, norms and the matrix that makes queries stay on the device,
since a prediction reads the latter while the layer before computes. A layer's matrices lie side by
side in host memory and cross in one piece into one of two buffers on the device, which take turns:
one for the layer that computes, one for the next.

    with streamed_weights(attached, link, 0.7) as weights:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.decode.links import Link, Ticket
from harness.decode.memory import PinnedSlab, aligned, require_memory
from harness.decode.timeline import Timeline
from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.passes import launching_on


@contextmanager
def streamed_weights(
    attached: Attached,
    link: Link | None,
    on_device: float,
    *,
    timeline: Timeline | None = None,
    pinned: bool = True,
) -> Iterator[StreamedWeights | None]:
    """Keep the share `on_device` of the decoder layers' weights on the device, the rest in host
    memory, inside the `with` block; None where all stay. Afterwards the model is whole again.

    timeline: its steps wait for weights as `transfer`. pinned: as of `LiveSession`. Raises
    UserError for a share that is too small for the model, or weights that do not fit into host
    memory; on leaving, the error of a transfer that failed.
    """
    if on_device == 1:
        yield None
        return
    assert link is not None, "weights that stream need a link"
    weights = StreamedWeights(
        attached, link, on_device, timeline or Timeline(attached.device), pinned
    )
    try:
        weights.open()
        yield weights
    finally:
        weights.close()


class _Layer(NamedTuple):
    """The streamed part of a decoder layer. host: its bytes, flat uint8; views: each parameter's in
    either buffer."""

    parameters: Sequence[nn.Parameter]
    host: Tensor
    views: tuple[list[Tensor], list[Tensor]]


_Ahead = tuple[int, int, Ticket]
"""Weights under way: layer, number of the buffer, transfer."""


class StreamedWeights:
    """The streamed weights of a model.

    on_device: share of the decoder layers' bytes that stays, above the asked share by less than one
    matrix. num_bytes: crossed for the layers computed so far. host_bytes: of all streamed weights.
    device_bytes: of the buffers.
    """

    def __init__(
        self, attached: Attached, link: Link, on_device: float, timeline: Timeline, pinned: bool
    ) -> None:
        self.attached = attached
        self.timeline = timeline
        self.pinned = pinned and attached.device.type == "cuda"
        self.num_bytes = 0
        self._modules: list[nn.Module] = attached.decoder.blocks
        self._link = link
        self._chosen = self._choose(on_device)
        self._sizes = [_num_bytes(chosen) for chosen in self._chosen]
        self.host_bytes = sum(self._sizes)
        whole = sum(_num_bytes(module.parameters()) for module in self._modules)
        self.on_device = 1 - self.host_bytes / whole
        self.device_bytes = 2 * max(self._sizes)
        self._buffers: list[Tensor] = []
        self._ahead: _Ahead | None = None
        self._slab: PinnedSlab | None = None
        self._layers: list[_Layer] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    # A parameter that was an inference tensor would take no gradient later.
    @torch.inference_mode(False)
    def open(self) -> None:
        """Move the weights to host memory, make the parameters views of a buffer, and request the
        first layer's."""
        if self.attached.device.type == "cuda":
            what = f"platform.weights_on_device={self.on_device:.2f}: the rest"
            require_memory(self.host_bytes, torch.device("cpu"), what)
        options: dict[str, Any] = {"dtype": torch.uint8, "device": self.attached.device}
        for _ in range(2):
            self._buffers.append(torch.empty(max(self._sizes), **options))
        if self.pinned and self.host_bytes:
            self._slab = PinnedSlab(sum(map(aligned, self._sizes)))
        for chosen in self._chosen:
            shape = [_num_bytes(chosen)]
            host = self._slab.take(shape) if self._slab else torch.empty(shape, dtype=torch.uint8)
            first, second = (_split(buffer, chosen) for buffer in self._buffers)
            for parameter, held, view in zip(chosen, _split(host, chosen), first, strict=True):
                held.copy_(parameter.data)
                parameter.data = view
            self._layers.append(_Layer(chosen, host, (first, second)))
        for index, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_pre_hook(partial(self._layer_begins, index)))
        self._ahead = self._request(0, turn=0)

    @torch.inference_mode(False)
    def close(self) -> None:
        """Make the model whole again. Raises the error of a transfer that failed."""
        for hook in self._hooks:
            hook.remove()
        try:
            self._link.drain()
        finally:
            while self._layers:
                layer = self._layers.pop()
                weights = _split(layer.host, layer.parameters)
                for parameter, held in zip(layer.parameters, weights, strict=True):
                    parameter.data = held.to(self.attached.device, copy=True)
            self._buffers = []
            if self._slab:
                self._slab.close()

    def _choose(self, on_device: float) -> list[list[nn.Parameter]]:
        """The streamed matrices of each layer, larger ones first. Later layers make up for what
        whole matrices leave open."""
        decoder = self.attached.decoder
        early: set[int] = set()
        for layer in decoder.layers:
            early.update(map(id, decoder.query_parameters(layer)))
        layers: list[list[nn.Parameter]] = []
        sizes: list[int] = []
        least = 0.0
        for module in self._modules:
            matrices = []
            for parameter in sorted(module.parameters(), key=lambda weight: -weight.nbytes):
                if parameter.ndim > 1 and id(parameter) not in early:
                    matrices.append(parameter)
            layers.append(matrices)
            sizes.append(_num_bytes(module.parameters()))
            least = max(least, 1 - _num_bytes(matrices) / sizes[-1])
        if on_device < least:
            raise UserError(
                f"platform.weights_on_device={on_device:g}: must be at least "
                f"{math.ceil(100 * least) / 100:.2f} for this {self.attached.geometry.family} "
                "model, whose query projections, norms and biases stay there"
            )
        owed = 0.5  # half a byte, against rounding
        chosen: list[list[nn.Parameter]] = []
        for some, size in zip(layers, sizes, strict=True):
            owed += (1 - on_device) * size
            chosen.append([])
            for parameter in some:
                if parameter.nbytes <= owed:
                    chosen[-1].append(parameter)
                    owed -= parameter.nbytes
        return chosen

    def _layer_begins(self, index: int, *_: object) -> None:
        """Request the next layer's weights, then wait for this layer's. The other buffer was the
        previous layer's; the link starts after its work, which is queued by now."""
        assert self._ahead is not None, "`open` requests the first layer's"
        ahead, turn, ticket = self._ahead
        if ahead != index:  # the pass before ended early
            ahead, turn, ticket = self._request(index, 1 - turn)
        self._ahead = self._request((index + 1) % len(self._layers), 1 - turn)
        with launching_on(self.attached.device), self.timeline.within("transfer"):
            ticket.wait()
        layer = self._layers[index]
        for parameter, view in zip(layer.parameters, layer.views[turn], strict=True):
            parameter.data = view
        self.num_bytes += layer.host.nbytes

    def _request(self, index: int, turn: int) -> _Ahead:
        host, target = self._layers[index].host, self._buffers[turn]
        return index, turn, self._link.copy(host, target[: len(host)])


def _num_bytes(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _split(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Views of a flat uint8 tensor, one after another, of the parameters' types and shapes."""
    pieces = flat[: _num_bytes(parameters)].split([parameter.nbytes for parameter in parameters])
    views = []
    for piece, parameter in zip(pieces, parameters, strict=True):
        views.append(piece.view(parameter.dtype).view(parameter.shape))
    return views
