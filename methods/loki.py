"""Loki (Singhania et al., NeurIPS 2024): scores on the first principal components of a head's keys,
after their positions.

The rule, and where it differs (made into docs/methods.md):

**loki**: the first principal components of a KV head's keys on the calibration text. Defaults: a
quarter of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from methods.base import Calibration, Geometry
from methods.projection import Calibrated, right_vectors


@dataclass(frozen=True)
class Loki(Calibrated):
    """Scores on the first principal components. Defaults are the paper's k_f = d_f = 0.25.

    Source: Loki (NeurIPS 2024)
    Keeps: every token; a few principal components of its key
    Reads: the best by these components
    """

    budget: float = 0.25

    title = "Loki"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """rotation: components of the centred keys, fp32 [num_kv_heads, head_dim, head_dim],
        columns by variance."""
        centred = key.float() - key.float().mean(1, keepdim=True)
        return {"rotation": right_vectors(centred)}

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        return calibration["rotation"][..., : self.num_columns(head_dim)]
