"""StreamingLLM's window: the first tokens ("sinks") and the most recent ones (Xiao et al., ICLR 2024)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from methods.base import EMPTY, Calibration, Geometry, Lengths, PromptRows, Row, Rows, Selection, floor_frac
from methods.checks import require, require_fraction
from methods.evicting import Evicting, EvictingState


@dataclass(frozen=True)
class Streaming(Evicting):
    """Keeps floor(kv_frac * T) cached tokens: the `num_sinks` first and the most recent, at their own positions."""

    kv_frac: float = 0.2
    num_sinks: int = 4
    title = "Streaming"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kv_frac", self.kv_frac)
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> EvictingState:
        """ValueError where a sequence's window would not exceed the sinks."""
        shortest = int(lengths.final.min())
        if int(self.kv_frac * shortest) <= self.num_sinks:
            keeps = f"keeps {int(self.kv_frac * shortest)} of {shortest} tokens, which must exceed"
            raise ValueError(f"method.kv_frac={self.kv_frac:.4g}: {keeps} method.num_sinks={self.num_sinks}")
        return StreamingState(self, geometry, lengths)

    def tokens_kept(self, row: Row, layer: int) -> int:
        """The window, or all that is cached."""
        return min(row.cached, int(self.kv_frac * row.final))

    def with_size(self, frac: float) -> "Streaming":
        """Sized by `kv_frac`."""
        return replace(self, kv_frac=frac)

    def min_size(self, row: Row) -> float:
        """What keeps one token more than the sinks, rounded up so that the floor does."""
        require(self.num_sinks < row.final, "num_sinks", self.num_sinks, f"below {row.final}, the shortest sequence")
        return min(1.0, math.nextafter((self.num_sinks + 1) / row.final, 1))

    def artifact_budget(self) -> float:
        """The kept share."""
        return self.kv_frac


class StreamingState(EvictingState):
    """What a row reads follows from T and the positions; the tokens behind the window leave their slots."""

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        self.enter_prompt(layer, rows)
        self._leave(layer, rows.lengths)

    def select(self, layer: int, rows: Rows) -> Selection:
        mask = rows.visible() & self._stays(rows.slot_positions.unsqueeze(2), rows.positions[:, None, :, None])
        self.enter(layer, rows)
        self._leave(layer, torch.where(rows.real, rows.positions + 1, 0).amax(-1))
        return Selection(mask, torch.minimum(rows.positions, self._window(rows.positions)).double())

    def _window(self, like: Tensor) -> Tensor:
        return floor_frac(self.method.kv_frac, self.lengths.final).view(-1, *([1] * (like.dim() - 1)))

    def _stays(self, token: Tensor, cached: Tensor) -> Tensor:
        sinks = self.method.num_sinks
        return (token < sinks) | (token >= cached - (self._window(cached) - sinks))

    def _leave(self, layer: int, cached: Tensor) -> None:
        gone = ~self._stays(self.tokens[layer], cached[:, None, None])
        self.tokens[layer].masked_fill_(gone, EMPTY)
