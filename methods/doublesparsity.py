"""Double Sparsity (Yang et al., 2024): score on a few channels, chosen offline, and read the tokens that are best.

Channels are ranked by what they add to scores on a calibration text. The chosen ones of every key, after its position,
are the labels that lie on the device, in few bits where `index_bits` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Calibration, Geometry, Lengths, State
from methods.checks import require_one_of
from methods.projected import FixedProjectionState, Projected


@dataclass(frozen=True)
class DoubleSparsity(Projected):
    """Double Sparsity's settings; the defaults are the paper's 1/16 of the tokens by 1/16 of the channels.

    channels: ranked by the mean of |q k|, each token's query by its own key (`qk`), of |q| or of |k|.
    """

    channels: str = "qk"

    rank: float = 0.0625
    read_frac: float = 0.0625

    title = "Double Sparsity"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("channels", self.channels, ("qk", "q", "k"))

    @property
    def needs_calibration(self) -> bool:
        """The ranking."""
        return True

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """qk, q, k: mean magnitude of each channel, over tokens and the group, fp32 [num_kv_heads, head_dim]."""
        grouped, keys = query.float().view(len(key), -1, *key.shape[1:]), key.float()
        return {
            "qk": (grouped * keys.unsqueeze(1)).abs().mean((1, 2)),
            "q": grouped.abs().mean((1, 2)),
            "k": keys.abs().mean(1),
        }

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """`calibration` is required."""
        if calibration is None:
            raise ValueError("method=doublesparsity: needs a calibration; calibrate first")
        channels = calibration[self.channels].topk(self.num_columns(geometry.head_dim)).indices
        columns = torch.nn.functional.one_hot(channels, geometry.head_dim).mT
        return FixedProjectionState(self, geometry, lengths, columns)
