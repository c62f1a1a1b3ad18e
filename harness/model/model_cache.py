"""The cache object that a model is given: it keeps recurrent states, and no keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class ModelCache(DynamicCache):
    """The cache object of one batch: it keeps the states of recurrent layers, and stores no keys
    and values.

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
        self.num_columns = 0
        self.latest: tuple[Tensor, Tensor] | None = None
        self.on_state: Callable[[], Any] = lambda: None
        self.instead: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.latest = key, value
        return self.instead or self.latest

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
        return sum(
            state.nbytes
            for states in self._states()
            for state in states.values()
            if isinstance(state, Tensor)
        )

    def fork(self, index: Tensor, layer: int | None = None) -> ModelCache:
        """A cache with the states of the sequences `index` int [new_batch]; layer: copy only this
        one."""
        child = copy(self)
        child.layers = [
            each if layer not in (None, at) else deepcopy(each)
            for at, each in enumerate(self.layers)
        ]
        for each in child.layers if layer is None else [child.layers[layer]]:
            each.reorder_cache(index)
        return child

    def join(self, parts: list[ModelCache], layer: int) -> None:
        """Take a layer's states from `parts`: one fork for each sequence of the batch, in order."""
        self.layers[layer] = parts[0].layers[layer]
        for states, *others in zip(
            *(part._states(layer) for part in (self, *parts[1:])), strict=True
        ):
            for name, state in states.items():
                if isinstance(state, Tensor):
                    states[name] = torch.cat([state, *(other[name] for other in others)])

    def _states(self, layer: int | None = None) -> Iterator[dict[int, Any]]:
        for each in self.layers if layer is None else [self.layers[layer]]:
            for kind in ("conv_states", "recurrent_states"):
                if hasattr(each, kind):
                    yield getattr(each, kind)
