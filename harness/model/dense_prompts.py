"""Dense passes over prompts that the runs of one process share: one for all methods of a sweep."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.model_cache import ModelCache
from methods.base import LayerInputs

ALIGNMENT = 64
"""A tensor in a file of prompts starts at a multiple of so many bytes, as torch's own allocations
do, so that the same kernels run on it."""


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
    last column [batch, hidden_size]; model_cache: recurrent layers' states. score: what second
    readings found, by method and layer, for the runs that share the prompt; None where none do.
    """

    ids: Tensor
    real: Tensor
    layers: list[LayerPrompt]
    hidden: Tensor
    model_cache: ModelCache
    score: dict[str, dict[int, Tensor]] | None = None

    def hand_to(self, keep: Keep) -> None:
        """Give every layer to `keep`."""
        for layer, prompt in enumerate(self.layers):
            keep(layer, prompt)


RunPrompt = Callable[[Keep], tuple[Tensor, ModelCache]]
"""Runs a prompt, whose layers it gives to `Keep`. Returns final hidden states of all columns
[batch, prompt, hidden_size] and recurrent layers' states."""


_Key = tuple[tuple[int, ...], bytes, bytes, bool]
"""A batch of prompts: its shape, its tokens, which of them are real, and whether the inputs of the
layers are kept."""


class DensePrompts:
    """Dense passes over prompts that several runs of a process share.

    They lie in files that are mapped into memory and deleted at once, so that the system keeps in
    memory what it has room for, and nothing is left when the process ends. A layer is written when
    it has run, so that a pass holds one layer at a time.

    most_bytes: of tensors that are kept. When they are full, prompts leave that the last two runs
    did not ask for. A prompt for which there is still no room runs anew each time: sweeps ask for
    their prompts in turns, so that any other would leave just before its next. So does one that
    takes more than half of what the disk then has free, which several processes share.
    free: bytes of `most_bytes` that are left. run: number of the present run.
    """

    def __init__(self, most_bytes: int) -> None:
        self.free = most_bytes
        self.run = 0
        self._most_tokens = sys.maxsize
        self._kept: dict[_Key, _KeptPrompt] = {}

    def get(
        self,
        ids: Tensor,
        real: Tensor,
        num_bytes: int,
        run: RunPrompt,
        *,
        needs_inputs: bool = False,
    ) -> tuple[PrefilledPrompt, Tensor] | None:
        """The pass over left-padded prompts ids, real [batch, prompt], and final hidden states of
        all their columns; None where there is no room for them.

        num_bytes: about what their tensors take. run: runs them, where they are not kept.
        needs_inputs: `run` gives the layers' inputs. These passes are kept beside those without.
        """
        tokens, are_real = ids.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
        key = tuple(ids.shape), tokens, are_real, needs_inputs
        if key not in self._kept:
            if not self._has_room(num_bytes):
                self._drop_unused()
            if not self._has_room(num_bytes):
                return None
            self._kept[key] = _run_into_file(ids, real, run)
            self.free -= self._kept[key].num_bytes
        kept = self._kept[key]
        kept.last_run = self.run
        return kept.prompt, kept.hidden

    def same_batches(self, most_tokens: int) -> int:
        """`most_tokens`, sequences times columns of a batch, but no more than a run before had:
        prompts are found again in the same batch alone, while the memory that is free comes and
        goes."""
        self._most_tokens = min(self._most_tokens, most_tokens)
        return self._most_tokens

    def _has_room(self, num_bytes: int) -> bool:
        return num_bytes <= min(self.free, disk_usage(gettempdir()).free // 2)

    def _drop_unused(self) -> None:
        """Forget the prompts that neither this run nor the one before has asked for."""
        for key, kept in list(self._kept.items()):
            if kept.last_run < self.run - 1:
                del self._kept[key]
                self.free += kept.num_bytes


@dataclass
class _KeptPrompt:
    """hidden: [batch, prompt, hidden_size]; last_run: the last that asked for it."""

    prompt: PrefilledPrompt
    hidden: Tensor
    num_bytes: int
    last_run: int = 0


def _run_into_file(ids: Tensor, real: Tensor, run: RunPrompt) -> _KeptPrompt:
    """A prompt that runs now, its tensors one after another in a file without a name.

    A tensor keeps the order of its elements in memory, since a product may sum in another order
    where its factors lie otherwise. Position embeddings stay in memory.
    """
    layers: list[LayerPrompt] = []
    written: list[Tensor] = []  # on no device: their dtypes, shapes and strides
    with TemporaryFile() as file:

        def write(tensor: Tensor) -> Tensor:
            dense = torch.empty_like(tensor).copy_(tensor)
            flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
            file.write(flat.numpy().data)
            file.write(bytes(_padded(dense) - dense.nbytes))
            written.append(torch.empty_like(dense, device="meta"))
            return written[-1]

        def keep(_: int, prompt: LayerPrompt) -> None:
            layers.append(prompt.with_tensors([write(tensor) for tensor in prompt.tensors()]))

        hidden, model_cache = run(keep)
        write(hidden)
        file.flush()
        sizes = [_padded(like) for like in written]
        mapped = mmap.mmap(file.fileno(), sum(sizes), access=mmap.ACCESS_COPY)
    found = []
    parts = torch.frombuffer(mapped, dtype=torch.uint8).split(sizes)
    for like, part in zip(written, parts, strict=True):
        flat = part[: like.nbytes].view(like.dtype)
        found.append(flat.as_strided(like.shape, like.stride()))
    hidden, each = found.pop(), len(found) // len(layers)
    for at, prompt in enumerate(layers):
        layers[at] = prompt.with_tensors(found[at * each : (at + 1) * each])
    whole = PrefilledPrompt(ids, real, layers, hidden[:, -1], model_cache, score={})
    return _KeptPrompt(whole, hidden, sum(sizes))


def _padded(tensor: Tensor) -> int:
    """Bytes of a tensor in the file, up to the start of the next one."""
    return tensor.nbytes + -tensor.nbytes % ALIGNMENT
