"""A pass of an attached model: who computes its attention, and what it cannot have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from methods.base import LayerInputs
from methods.codecs.base import FP16_MAX
from methods.codecs.split import AnyCodec

SATURATED = 0.01
"""Share of the largest element by which a row may read back otherwise than in a smaller scale."""
LOOK_AT = (
    "look at its weights, and at the numbers in its configuration (rope_parameters, eps, scales)"
)
IS_COMPILED = (
    "torch.compile: an attached model runs a method's own code in every step, which is not "
    "compiled; call the model itself, without compile()"
)


def require_eager() -> None:
    """Raise UserError where torch.compile traces or wraps the running call."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    if torch.compiler.is_compiling() or callback() is not None:
        raise UserError(IS_COMPILED)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` CUDA's current one, where Triton launches and events are recorded."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread inside the `with` block: the order of sums, and so the last
    digits, depend on the number of threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Handler:
    """Computes attention during a pass. Layer numbers count all attention layers of the model."""

    needs_inputs = False

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a layer's fresh rows.

        query: [batch, heads, rows, head_dim], post-position, before the softmax scale; key, value:
        [batch, num_kv_heads, rows, head_dim or value_dim]. Returns [batch, rows, heads, value_dim].
        All on the model's device, which is CUDA's current one.
        """
        raise NotImplementedError

    def predicts(self, layer: int) -> bool:
        """Whether `predict` is to be called with an early query of `layer`."""
        return False

    def predict(self, layer: int, query: Tensor) -> None:
        """Take an early query of `layer`, made of the previous layer's attention input."""

    def take_inputs(self, layer: int, inputs: LayerInputs) -> None:
        """Take the arguments of a layer's attention module. Called before `attention`, if this
        `needs_inputs`."""

    def layer_begins(self, layer: int) -> None:
        """Called when the layer's attention module has its input."""

    def layer_ends(self, layer: int) -> None:
        """Called when the layer's attention module is done."""


def require_embedded(ids: Tensor, embedding: Any) -> None:
    """Raise UserError where a token has no embedding: on a GPU the lookup would end the process's
    use of it."""
    highest = int(ids.max())
    num_embedded = embedding.weight.shape[0]
    if highest >= num_embedded:
        raise UserError(
            f"the text has token {highest}, but the model's embedding has {num_embedded} tokens: "
            "its tokenizer has tokens that the model does not know; give the model its own "
            "tokenizer, or another text"
        )


def require_in_range(hidden: Tensor) -> None:
    """Raise UserError where a pass gives numbers that are infinite or NaN."""
    if hidden.sum(dtype=torch.float32).isfinite():
        return
    if hidden.dtype == torch.float16:
        raise UserError(
            "model.dtype=float16: the model's activations overflow in it (beyond 65504); choose "
            "bfloat16 or float32"
        )
    raise UserError(f"the model's activations are not finite; {LOOK_AT}")


def require_codable(codec: AnyCodec, layer: int, keys: Tensor, values: Tensor) -> None:
    """Raise UserError where the codec of a layer saturates at its keys or values, or gives finite
    ones back as infinite or NaN. That fp8 saturates is its format.

    Codecs store fp16 numbers: elements, or the minimum, step or scale of a group. A number of a
    group is at most sqrt(head_dim) times its largest element, whatever the rotation. Only rows that
    come near the range are coded to look: a 256th of them then reads back as something else than a
    256th. A GPU is not waited for, so there nothing is checked.
    """
    if keys.device.type != "cpu":
        return
    for what, row_codec, rows in (("keys", codec.keys, keys), ("values", codec.values, values)):
        least, most = rows.aminmax()
        largest = float(torch.maximum(most, -least))
        if largest * math.sqrt(rows.shape[-1]) <= FP16_MAX or not math.isfinite(largest):
            continue
        back, smaller = row_codec.roundtrip(rows), row_codec.roundtrip(rows / 256) * 256
        is_right = (back.float() - smaller.float()).abs().amax() <= SATURATED * largest
        if not is_right and row_codec.name != "fp8":
            raise UserError(
                f"codec={row_codec.name}: the {what} of layer {layer} reach {largest:.3g}, and it "
                f"stores fp16 numbers, up to {FP16_MAX:.0f}; choose codec=bf16 for this layer "
                "(codec_layers, dense_layers) or for all"
            )
