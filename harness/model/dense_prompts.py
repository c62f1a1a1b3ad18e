"""Dense passes over prompts that the runs of one process share: one for all methods of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from shutil import disk_usage
from tempfile import NamedTemporaryFile, gettempdir
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.model_cache import ModelCache
from methods.base import LayerInputs


class LayerPrompt(NamedTuple):
    """What a dense pass over prompts makes in one attention layer.

    query, key, value: [batch, heads, prompt, size]. inputs: of the layer's module, where the pass
    was asked for them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: LayerInputs | None = None

    def tensors(self) -> list[Tensor]:
        """All of its tensors but the position embeddings, which layers share."""
        own = [self.query, self.key, self.value]
        return own if self.inputs is None else [*own, self.inputs.hidden]

    def with_tensors(self, tensors: Sequence[Tensor]) -> LayerPrompt:
        """This layer with others in the place of its `tensors`, in the same order."""
        query, key, value, *hidden = tensors
        inputs = self.inputs
        if inputs is not None:
            inputs = inputs._replace(hidden=hidden[0])
        return LayerPrompt(query, key, value, inputs)


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
    the system keeps in memory what it has room for, and nothing is left when the process ends.

    free: bytes that further prompts may take. A prompt for which there is no room runs anew each
    time; so does one that takes more than half of what the disk then has free, which several
    processes share.
    """

    def __init__(self, most_bytes: int) -> None:
        self.free = most_bytes
        self._most_tokens = sys.maxsize
        self._kept: dict[Hashable, tuple[PrefilledPrompt, Tensor]] = {}

    def get(
        self, key: Hashable, num_bytes: int, run: Callable[[], tuple[PrefilledPrompt, Tensor]]
    ) -> tuple[PrefilledPrompt, Tensor] | None:
        """What `run` gives, at the first call with this key; None where there is no room for it.
        num_bytes: about what its tensors take."""
        if key not in self._kept:
            if num_bytes > min(self.free, disk_usage(gettempdir()).free // 2):
                return None
            self._kept[key] = run()
            self.free -= num_bytes
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
