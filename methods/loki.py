"""Loki (Singhania et al., NeurIPS 2024): keys lie close to few dimensions, so score on their principal components.

Offline, the principal components of each KV head's keys, after their positions, are measured on a text. Queries and
keys are rotated onto them and cut to the first; the tokens that score best there are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from methods.base import Calibration, Geometry, Lengths, State
from methods.projected import FixedProjectionState, Projected, right_vectors


@dataclass(frozen=True)
class Loki(Projected):
    """Loki's settings; the defaults are the paper's k_f = d_f = 0.25."""

    read_frac: float = 0.25

    title = "Loki"

    @property
    def needs_calibration(self) -> bool:
        """The principal components."""
        return True

    def calibrate(self, query: Tensor, key: Tensor, geometry: Geometry) -> dict[str, Tensor]:
        """rotation: components of the centred keys, fp32 [num_kv_heads, head_dim, head_dim], columns by variance."""
        centred = key.float() - key.float().mean(1, keepdim=True)
        return {"rotation": right_vectors(centred)}

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> State:
        """`calibration` is required."""
        if calibration is None:
            raise ValueError("method=loki: needs a calibration; calibrate first")
        components = calibration["rotation"][..., : self.num_columns(geometry.head_dim)]
        return FixedProjectionState(self, geometry, lengths, components)
