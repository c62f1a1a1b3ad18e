"""Dense passes over prompts that the runs of one process share: one for all methods of a sweep."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import IO, NamedTuple

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
        """All of its tensors, those of the inputs last."""
        found = [self.query, self.key, self.value]
        if self.inputs is not None:
            found.append(self.inputs.hidden)
            found += self.inputs.position_embeddings or ()
        return found

    def with_tensors(self, tensors: Sequence[Tensor]) -> LayerPrompt:
        """This layer with others in the place of its `tensors`, in the same order."""
        query, key, value, *others = tensors
        inputs = None
        if self.inputs is not None:
            hidden, *embeddings = others
            pair = (embeddings[0], embeddings[1]) if embeddings else None
            inputs = self.inputs._replace(hidden=hidden, position_embeddings=pair)
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

    def hand_to(self, keep: Keep, *, with_inputs: bool = False) -> None:
        """Give every layer to `keep`. with_inputs: with its inputs, where they are there."""
        for layer, prompt in enumerate(self.layers):
            keep(layer, prompt if with_inputs else prompt._replace(inputs=None))


RunPrompt = Callable[[Keep], tuple[Tensor, ModelCache]]
"""Runs a prompt, whose layers it gives to `Keep`. Returns final hidden states of all columns
[batch, prompt, hidden_size] and recurrent layers' states."""


_Key = tuple[tuple[int, ...], bytes, bytes]
"""A batch of prompts: its shape, its tokens, and which of them are real."""


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
        needs_inputs: `run` gives the layers' inputs. A pass that was kept without them runs once
        more and takes the place of the first.
        """
        key = tuple(ids.shape), ids.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
        before = self._kept.get(key)
        if before is not None:
            before.last_run = self.run
            if before.has_inputs or not needs_inputs:
                return before.prompt, before.hidden
            self._drop(key)  # now, so that both do not take room at once
        if not self._has_room(num_bytes):
            self._drop_unused()
        if not self._has_room(num_bytes):
            if before is not None:
                self._keep(key, before)
            return None
        kept = _run_into_file(ids, real, run, has_inputs=needs_inputs)
        kept.last_run = self.run
        if before is not None:
            kept.prompt.score = before.prompt.score
        self._keep(key, kept)
        return kept.prompt, kept.hidden

    def same_batches(self, most_tokens: int) -> int:
        """`most_tokens`, sequences times columns of a batch, but no more than a run before had:
        prompts are found again in the same batch alone, while the memory that is free comes and
        goes."""
        self._most_tokens = min(self._most_tokens, most_tokens)
        return self._most_tokens

    def _has_room(self, num_bytes: int) -> bool:
        return num_bytes <= min(self.free, disk_usage(gettempdir()).free // 2)

    def _keep(self, key: _Key, kept: _KeptPrompt) -> None:
        self._kept[key] = kept
        self.free -= kept.num_bytes

    def _drop(self, key: _Key) -> None:
        self.free += self._kept.pop(key).num_bytes

    def _drop_unused(self) -> None:
        """Forget the prompts that neither this run nor the one before has asked for."""
        for key, kept in list(self._kept.items()):
            if kept.last_run < self.run - 1:
                self._drop(key)


@dataclass
class _KeptPrompt:
    """hidden: [batch, prompt, hidden_size]; last_run: the last that asked for it."""

    prompt: PrefilledPrompt
    hidden: Tensor
    num_bytes: int
    has_inputs: bool
    last_run: int = 0


def _run_into_file(ids: Tensor, real: Tensor, run: RunPrompt, *, has_inputs: bool) -> _KeptPrompt:
    """A prompt that runs now, its tensors in a file without a name."""
    written: list[tuple[LayerPrompt, list[_Place]]] = []
    with TemporaryFile() as nameless:
        file = _TensorFile(nameless)

        def keep(_: int, prompt: LayerPrompt) -> None:
            places = file.write_layer(prompt)
            emptied = prompt.with_tensors([torch.empty(0)] * len(places))
            written.append((emptied, places))

        hidden, model_cache = run(keep)
        place_of_hidden = file.write(hidden)
        mapped = file.mapped()
    layers = []
    for emptied, places in written:
        layers.append(emptied.with_tensors([place.tensor(mapped) for place in places]))
    hidden = place_of_hidden.tensor(mapped)
    prompt = PrefilledPrompt(ids, real, layers, hidden[:, -1], model_cache, score={})
    return _KeptPrompt(prompt, hidden, file.num_bytes, has_inputs)


class _TensorFile:
    """Tensors that are written one after another into `file`, and mapped together at the end.

    A tensor keeps the order of its elements in memory, since a product may sum in another order
    where its factors lie otherwise. num_bytes: written so far.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.num_bytes = 0
        self._embeddings: dict[int, tuple[Tensor, _Place]] = {}

    def write(self, tensor: Tensor) -> _Place:
        """Append a tensor."""
        stride = torch.empty_like(tensor).stride()
        dense = tensor if tensor.stride() == stride else tensor.clone()
        in_memory = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        padding = -self.num_bytes % ALIGNMENT
        place = _Place(self.num_bytes + padding, tensor.dtype, tensor.shape, dense.stride())
        self.file.write(bytes(padding))
        self.file.write(in_memory.view(torch.uint8).numpy().data)
        self.num_bytes = place.start + tensor.nbytes
        return place

    def write_layer(self, prompt: LayerPrompt) -> list[_Place]:
        """Append the `tensors` of a layer. Position embeddings that layers share are written
        once."""
        shared = () if prompt.inputs is None else prompt.inputs.position_embeddings or ()
        places = []
        for tensor in prompt.tensors():
            if not any(tensor is embedding for embedding in shared):
                places.append(self.write(tensor))
                continue
            if id(tensor) not in self._embeddings:
                self._embeddings[id(tensor)] = tensor, self.write(tensor)
            places.append(self._embeddings[id(tensor)][1])
        return places

    def mapped(self) -> Tensor:
        """All bytes that were written."""
        self.file.flush()
        private = mmap.mmap(self.file.fileno(), self.num_bytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(private, dtype=torch.uint8)


class _Place(NamedTuple):
    """Where a tensor lies in a file. start: its first byte, a multiple of `ALIGNMENT`."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self, mapped: Tensor) -> Tensor:
        """The tensor in the bytes of the mapped file."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        flat = mapped[self.start : self.start + num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)
