"""Double Sparsity (Yang et al., 2024): scores on the channels that matter most on a text.

The rule, and where it differs (made into docs/methods.md):

**doublesparsity**: channels ranked on the calibration text by the mean of |q_j k_j|, after
positions. The official code can rank by |q_j| or |k_j|, too, before positions; its mean of |q_j
k_j| mixes the heads, as it reshapes [heads, tokens] to [tokens, heads] without a transpose, and is
of the last block of text alone. Defaults: 1/16 of the channels and of the tokens. DS-Offload is
`when=previous_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import Calibration, Geometry
from methods.projection import Calibrated


@dataclass(frozen=True)
class DoubleSparsity(Calibrated):
    """Scores on a few channels. Defaults are the paper's 1/16 of the tokens by 1/16 of the
    channels.

    Source: Double Sparsity (2024)
    Keeps: every token; a few channels of its key
    Reads: the best by these channels
    """

    rank: float = 0.0625
    budget: float = 0.0625
    dense_layers: int = 2  # `self.layer_idx < 2` in most of its modify_*.py

    title = "Double Sparsity"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """magnitude: mean of |q k| of each channel, over tokens, each with its own query, and over
        the group, fp32 [num_kv_heads, head_dim]."""
        grouped, keys = query.float().view(len(key), -1, *key.shape[1:]), key.float()
        return {"magnitude": (grouped * keys.unsqueeze(1)).abs().mean((1, 2))}

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        channels = calibration["magnitude"].topk(self.num_columns(head_dim)).indices
        return torch.nn.functional.one_hot(channels, head_dim).mT
