"""StreamingLLM's window: the first tokens ("sinks") and the most recent ones (Xiao et al., ICLR 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from methods.base import (
    EMPTY,
    EvictingState,
    Geometry,
    Method,
    PromptRows,
    Rows,
    Selection,
    floor_frac,
    require,
    require_fraction,
)


@dataclass(frozen=True)
class Streaming(Method):
    """Keeps floor(kv_frac * T) cached tokens: the `num_sinks` first and the most recent, at their own positions."""

    kv_frac: float = 0.2
    num_sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kv_frac", self.kv_frac)
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")

    def new_state(self, geometry: Geometry, final_lengths: Tensor, calibration: Any = None) -> StreamingState:
        """ValueError where a sequence's window would not exceed the sinks."""
        window = floor_frac(self.kv_frac, final_lengths)
        if bool((window <= self.num_sinks).any()):
            shortest = int(final_lengths.min())
            raise ValueError(
                f"method.kv_frac={self.kv_frac:.4g}: keeps {int(window.min())} of {shortest} tokens, which must exceed "
                f"method.num_sinks={self.num_sinks}; raise kv_frac or lower num_sinks"
            )
        return StreamingState(geometry, final_lengths, self)

    def tokens_read(self, cached: int, final_length: int) -> float:
        """The window, or all that is cached."""
        return min(cached, int(self.kv_frac * final_length))

    def with_size(self, frac: float) -> Streaming:
        """Sized by `kv_frac`."""
        return replace(self, kv_frac=frac)

    def min_size(self, final_length: int) -> float:
        """What keeps one token more than the sinks."""
        least, longest = self.num_sinks + 1, f"below {final_length}, the tokens of the shortest sequence"
        require(least <= final_length, "num_sinks", self.num_sinks, longest)
        return min(1.0, math.nextafter(least / final_length, 1))  # rounded up, so that the floor is `least`

    def artifact_budget(self) -> float:
        """The kept share."""
        return self.kv_frac


class StreamingState(EvictingState):
    """What a row reads follows from T and the positions; the tokens behind the window leave their slots."""

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: Streaming) -> None:
        super().__init__(geometry, final_lengths)
        self.method = method

    @property
    def window(self) -> Tensor:
        """Tokens kept, int [batch]."""
        return floor_frac(self.method.kv_frac, self.final_lengths)

    @property
    def capacity(self) -> int:
        """The largest window."""
        return int(self.window.max())

    def prompt(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> None:
        """Only the window of the prompt stays."""
        self.enter_prompt(layer, rows, key.shape[1])
        self._leave(layer, rows.lengths)

    def select(self, layer: int, rows: Rows) -> Selection:
        """The sinks and the last `window - num_sinks` cached tokens."""
        token = rows.slot_positions.unsqueeze(2)
        mask = rows.visible() & self._stays(token, rows.positions[:, None, :, None])
        self.enter(layer, rows)
        self._leave(layer, torch.where(rows.real, rows.positions + 1, 0).amax(-1))
        return Selection(mask, torch.minimum(rows.positions, self.window[:, None]).double())

    def _stays(self, token: Tensor, cached: Tensor) -> Tensor:
        """Whether `token` is in the window when `cached` tokens are cached."""
        sinks = self.method.num_sinks
        recent = (self.window - sinks).view(-1, *([1] * (cached.dim() - 1)))
        return (token < sinks) | (token >= cached - recent)

    def _leave(self, layer: int, cached: Tensor) -> None:
        tokens = self.tokens[layer]
        tokens.masked_fill_(~self._stays(tokens, cached[:, None, None]), EMPTY)
