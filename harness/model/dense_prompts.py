"""Dense passes over prompts that the runs of one process share: one for all methods of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.model.model_cache import ModelCache
from methods.base import LayerInputs


class LayerPrompt(NamedTuple):
    """What a dense pass over prompts makes in one attention layer.

    query, key, value: [batch, heads, prompt, size]. inputs: of the layer's module, where the pass
    was asked for them. index_keys: of a layer with an indexer of its own, [batch, prompt, size].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: LayerInputs | None = None
    index_keys: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All but the inputs, which last no longer than the layer's turn."""
        found = [self.query, self.key, self.value]
        return found if self.index_keys is None else [*found, self.index_keys]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> LayerPrompt:
        """The layer of which these are the `tensors`."""
        query, key, value, *index_keys = tensors
        return cls(query, key, value, None, *index_keys)


Keep = Callable[[int, LayerPrompt], None]
"""Takes a layer and its prompt."""


@dataclass
class PrefilledPrompt:
    """A prompt that has run, from which several methods can start.

    ids, real: [batch, prompt]; layers: the attention layers; hidden: final hidden states of the
    last column [batch, hidden_size]; model_cache: recurrent layers' states. worth: what second
    readings found, by method and layer, for the runs that share the prompt; None where none do.
    """

    ids: Tensor
    real: Tensor
    layers: list[LayerPrompt]
    hidden: Tensor
    model_cache: ModelCache
    worth: dict[str, dict[int, Tensor]] | None = None

    def hand_to(self, keep: Keep) -> None:
        """Give every layer to `keep`."""
        for layer, prompt in enumerate(self.layers):
            keep(layer, prompt)


class DensePrompts:
    """Dense passes over prompts that several runs of a process share.

    They lie in files that are mapped into memory and deleted at once, so that the system keeps in
    memory what it has room for, and nothing is left when the process ends.

    most_bytes: of queries, keys and values that are kept. When they are full, prompts leave that
    the last two runs did not ask for. A prompt for which there is still no room runs anew each
    time: sweeps ask for their prompts in turns, so that any other would leave just before its next.
    free: bytes of `most_bytes` that are left. run: number of the present run.
    """

    def __init__(self, most_bytes: int) -> None:
        self.free = most_bytes
        self.run = 0
        self._kept: dict[tuple[Any, ...], _KeptPrompt] = {}

    def get(
        self, ids: Tensor, real: Tensor, run: Callable[[], tuple[PrefilledPrompt, Tensor]]
    ) -> tuple[PrefilledPrompt, Tensor]:
        """The pass over left-padded prompts ids, real [batch, prompt], and final hidden states of
        all their columns. run: makes both, where they are not kept."""
        key = tuple(ids.shape), ids.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
        if key not in self._kept:
            prompt, hidden = run()
            num_bytes = hidden.nbytes
            for layer in prompt.layers:
                num_bytes += sum(tensor.nbytes for tensor in layer.tensors())
            if num_bytes > self.free:
                self._drop_unused()
            if num_bytes > self.free:
                return prompt, hidden
            self.free -= num_bytes
            self._kept[key] = _mapped(prompt, hidden, num_bytes)
        kept = self._kept[key]
        kept.last_run = self.run
        return kept.prompt, kept.hidden

    def _drop_unused(self) -> None:
        """Forget the prompts that neither this run nor the one before has asked for."""
        for key, kept in list(self._kept.items()):
            if kept.last_run < self.run - 1:
                self.free += kept.num_bytes
                del self._kept[key]


@dataclass
class _KeptPrompt:
    """hidden: [batch, prompt, hidden_size]; last_run: the last that asked for it."""

    prompt: PrefilledPrompt
    hidden: Tensor
    num_bytes: int
    last_run: int = 0


def _mapped(prompt: PrefilledPrompt, hidden: Tensor, num_bytes: int) -> _KeptPrompt:
    """The prompt, its tensors in a file without a name."""
    with NamedTemporaryFile(suffix=".pt") as file:
        torch.save([[layer.tensors() for layer in prompt.layers], hidden], file)
        file.flush()
        layers, hidden = torch.load(file.name, mmap=True, weights_only=True)
    mapped = replace(prompt, layers=[*map(LayerPrompt.of, layers)], hidden=hidden[:, -1], worth={})
    return _KeptPrompt(mapped, hidden, num_bytes)
