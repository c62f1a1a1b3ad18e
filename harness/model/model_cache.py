"""What a model is given as its cache: it keeps the states of recurrent layers, and lets keys and values pass.

Keys and values are stored by replay and live decoding, which get them from the attention function. Linear attention,
state-space and convolution layers keep transformers' own states here, one set for each sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class ModelCache(DynamicCache):
    """The cache of one batch.

    num_columns: rows that the model has run so far, by which a model that is not told positions counts.
    latest: what an attention layer wanted to store last, (key, value). on_state: called where a module writes a
    recurrent state. instead: what `update` returns; None: what it was given.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.num_columns = 0
        self.latest: tuple[Tensor, Tensor] | None = None
        self.on_state: Callable[[], Any] | None = None
        self.instead: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store nothing."""
        self.latest = key, value
        return (key, value) if self.instead is None else self.instead

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Columns before this pass."""
        return self.num_columns

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        if self.on_state is not None:
            self.on_state()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        if self.on_state is not None:
            self.on_state()
        return super().update_recurrent_state(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent states."""
        return sum(state.nbytes for states in self._states() for state in states.values() if isinstance(state, Tensor))

    def fork(self, index: Tensor, layer: int | None = None) -> ModelCache:
        """The states of the sequences `index` int [new_batch]; of one layer only, where it is named."""
        child = copy(self)
        child.layers = [each if layer not in (None, at) else deepcopy(each) for at, each in enumerate(self.layers)]
        for states in child._states(layer):
            for name, state in states.items():
                if isinstance(state, Tensor):
                    states[name] = state.index_select(0, index.to(state.device))
        return child

    def join(self, parts: list[ModelCache], layer: int) -> None:
        """Take over a layer's states from `parts`, which are forks of the batch's sequences, one after another."""
        self.layers[layer] = parts[0].layers[layer]
        for states, *others in zip(*(part._states(layer) for part in (self, *parts[1:])), strict=True):
            for name, state in states.items():
                if isinstance(state, Tensor):
                    states[name] = torch.cat([state, *(other[name] for other in others)])

    def _states(self, layer: int | None = None) -> Iterator[dict[int, Any]]:
        for each in self.layers if layer is None else [self.layers[layer]]:
            for kind in ("conv_states", "recurrent_states"):
                if hasattr(each, kind):
                    yield getattr(each, kind)
