"""StreamingLLM's window: the first tokens ("sinks") and the most recent ones (Xiao et al., ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from methods.base import Geometry, Method, Rows, Selection, State, floor_frac, require, require_fraction


@dataclass(frozen=True)
class Streaming(Method):
    """Keeps floor(kv_frac * T) cached tokens: `num_sinks` first and the rest most recent. Positions stay as they are."""

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

    def artifact_budget(self) -> float:
        """The kept share."""
        return self.kv_frac


class StreamingState(State):
    """Stateless but for the window's size, which follows from T."""

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: Streaming) -> None:
        super().__init__(geometry, final_lengths)
        self.method = method

    def select(self, layer: int, rows: Rows) -> Selection:
        """The sinks and the last `window - num_sinks` cached tokens."""
        sinks = self.method.num_sinks
        window = floor_frac(self.method.kv_frac, self.final_lengths)
        cached = rows.positions
        oldest_recent = (cached - (window - sinks)[:, None])[:, None, :, None]
        token = rows.slot_positions.unsqueeze(2)
        mask = rows.visible() & ((token < sinks) | (token >= oldest_recent))
        return Selection(mask, torch.minimum(cached, window[:, None]).double())
