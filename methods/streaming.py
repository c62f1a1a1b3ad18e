"""StreamingLLM's window: the first tokens ("sinks") and the most recent ones (Xiao et al., ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Calibration, Geometry, Lengths, Row, floor_frac, share_above
from methods.checks import require, require_fraction
from methods.evicting import Evicting
from methods.windowed import WindowState


@dataclass(frozen=True)
class Streaming(Evicting):
    """Keeps floor(kept_frac * T) cached tokens: the `num_sinks` first and the most recent, at their own positions."""

    kept_frac: float = 0.2
    num_sinks: int = 4
    title = "Streaming"
    size_setting = "kept_frac"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("kept_frac", self.kept_frac)
        require(self.num_sinks >= 0, "num_sinks", self.num_sinks, "an integer >= 0")

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> StreamingState:
        """ValueError where a sequence's window would not exceed the sinks."""
        shortest = int(lengths.final.min())
        kept = int(self.kept_frac * shortest)
        more = f"more: it keeps {kept} of {shortest} tokens, which must exceed method.num_sinks={self.num_sinks}"
        require(kept > self.num_sinks, "kept_frac", f"{self.kept_frac:.4g}", more)
        return StreamingState(self, geometry, lengths)

    def tokens_kept(self, row: Row, layer: int) -> int:
        """The window, or all that is cached."""
        return min(row.cached, int(self.kept_frac * row.final))

    def min_size(self, row: Row) -> float:
        """What keeps one token more than the sinks."""
        require(self.num_sinks < row.final, "num_sinks", self.num_sinks, f"below {row.final}, the shortest sequence")
        return share_above(self.num_sinks, row.final)


class StreamingState(WindowState):
    """All KV heads stream; the window is a share of T."""

    @property
    def recent(self) -> Tensor:
        """What the sinks leave, int [batch]."""
        return floor_frac(self.method.kept_frac, self.lengths.final) - self.method.num_sinks

    def streams(self, layer: int) -> Tensor:
        """All."""
        return torch.ones(1, 1, 1, dtype=torch.bool, device=self.lengths.final.device)
