"""A pass of an attached model: who computes its attention, what it cannot have, and what a pass
over a prompt leaves for several runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from shutil import disk_usage
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.model_cache import ModelCache
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


# Dense passes over prompts that the runs of one process share: one for all methods of a sweep


class LayerPrompt(NamedTuple):
    """What a dense pass over prompts makes in one attention layer.

    query, key, value: [batch, heads, prompt, size]. inputs: of the layer's module, where the pass
    was asked for them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: LayerInputs | None = None


Keep = Callable[[int, LayerPrompt], None]
"""Takes a layer and its prompt."""


@dataclass
class PrefilledPrompt:
    """A prompt that has run, from which several methods can start.

    ids, real: [batch, prompt]; layers: the attention layers; hidden: final hidden states of the
    last column [batch, hidden_size]; model_cache: recurrent layers' states.
    """

    ids: Tensor
    real: Tensor
    layers: list[LayerPrompt]
    hidden: Tensor
    model_cache: ModelCache

    def hand_to(self, keep: Keep) -> None:
        """Give every layer to `keep`."""
        for layer, prompt in enumerate(self.layers):
            keep(layer, prompt)


class DensePrompts:
    """Dense passes over prompts that several runs of a process share.

    Their tensors lie in files that are mapped into memory and deleted at once (`in_file`), so that
    the system keeps in memory what it has room for, and nothing is left when the process ends. A
    prompt that takes more than half of what the disk then has free, which several processes share,
    runs anew each time.
    """

    def __init__(self) -> None:
        self._most_tokens = sys.maxsize
        self._kept: dict[Hashable, tuple[PrefilledPrompt, Tensor]] = {}

    def get(
        self, key: Hashable, num_bytes: int, run: Callable[[], tuple[PrefilledPrompt, Tensor]]
    ) -> tuple[PrefilledPrompt, Tensor] | None:
        """What `run` gives, at the first call with this key; None where there is no room for it.
        num_bytes: about what its tensors take."""
        if key not in self._kept:
            if num_bytes > disk_usage(gettempdir()).free // 2:
                return None
            self._kept[key] = run()
        return self._kept[key]

    def same_batches(self, most_tokens: int) -> int:
        """`most_tokens`, sequences times columns of a batch, but no more than a run before had:
        prompts are found again in the same batch alone, while the memory that is free comes and
        goes."""
        self._most_tokens = min(self._most_tokens, most_tokens)
        return self._most_tokens


def alone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, copied where they are a part of a larger one, as a fused projection, that would
    be kept with it."""
    found = []
    for tensor in tensors:
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        found.append(tensor.clone() if is_part else tensor)
    return found


def in_file(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in a file without a name. They keep the order of their elements in memory, since
    a product may sum in another order where its factors lie otherwise."""
    with NamedTemporaryFile() as file:
        torch.save(alone(tensors), file)
        file.flush()
        return list(torch.load(file.name, mmap=True))
