"""The cache object that a model is given: it keeps recurrent states, and no keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from harness.model.calls import refusal


class ModelCache(DynamicCache):
    """The cache object of one batch.

    Replay and live decoding store keys and values, which they get from the attention function.
    Linear attention, state-space and convolution layers keep transformers' own states here, one set
    for each sequence.

    num_columns: rows that the model has run so far, from which some models count positions. latest:
    the last (key, value) that an attention layer stored. on_state: called when a module writes a
    recurrent state. instead: the keys and values that `update` returns; None: those that it was
    given. Method names are transformers'.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.family: str = config.model_type
        self.num_columns = 0
        self.latest: tuple[Tensor, Tensor] | None = None
        self.on_state: Callable[[], Any] = lambda: None
        self.instead: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.latest = key, value
        return self.instead or self.latest

    def update_indexer(self, *_: Any, **__: Any) -> Tensor:
        why = "its own indexer chooses the tokens that a row reads, and a method would replace it"
        raise refusal(self.family, why)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.num_columns

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.on_state()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self.on_state()
        return super().update_recurrent_state(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent states."""
        num_bytes = 0
        for states in self.states():
            for state in states.values():
                if isinstance(state, Tensor):
                    num_bytes += state.nbytes
        return num_bytes

    def states(self) -> Iterator[dict[int, Any]]:
        """The recurrent states of all layers, by their numbers in a layer."""
        for layer in self.layers:
            yield from _states_of(layer)

    def fork(self, index: Tensor) -> ModelCache:
        """A cache with copies of the states of the sequences `index` int [new_batch]."""
        forked = copy(self)
        forked.layers = deepcopy(self.layers)
        for layer in forked.layers:
            layer.reorder_cache(index)
        return forked

    def fork_layer(self, layer: int, index: Tensor) -> ModelCache:
        """As `fork`, but of one layer; the others are shared with this cache."""
        forked = copy(self)
        forked.layers = list(self.layers)
        forked.layers[layer] = deepcopy(self.layers[layer])
        forked.layers[layer].reorder_cache(index)
        return forked

    def join_layer(self, layer: int, forks: Sequence[ModelCache]) -> None:
        """Take a layer's states from `forks`: one for each sequence of the batch, in order."""
        joined = forks[0].layers[layer]
        of_forks = [_states_of(fork.layers[layer]) for fork in forks]
        for of_sequences in zip(*of_forks, strict=True):
            states = of_sequences[0]
            for name, state in states.items():
                if isinstance(state, Tensor):
                    states[name] = torch.cat([sequence[name] for sequence in of_sequences])
        self.layers[layer] = joined


def _states_of(layer: Any) -> Iterator[dict[int, Any]]:
    """The states of a recurrent layer; a layer of keys and values has none."""
    for kind in ("conv_states", "recurrent_states"):
        if hasattr(layer, kind):
            yield getattr(layer, kind)
