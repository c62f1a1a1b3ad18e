"""Oracle: InfiniGen's selection with the true scores, the upper bound of any selection of that size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from methods.base import Geometry, Rows, Selection, State
from methods.selection import ScoreSelecting


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores. They need every key on the device, so this is no offloading method."""

    needs_all_keys: ClassVar[bool] = True

    def new_state(self, geometry: Geometry, final_lengths: Tensor, calibration: Any = None) -> OracleState:
        """No calibration, nothing carried."""
        return OracleState(geometry, final_lengths, self)


class OracleState(State):
    """Stateless."""

    def __init__(self, geometry: Geometry, final_lengths: Tensor, method: Oracle) -> None:
        super().__init__(geometry, final_lengths)
        self.method = method

    def select(self, layer: int, rows: Rows) -> Selection:
        """Step 4 over the true scores of the cached tokens."""
        hidden = ~rows.visible().unsqueeze(2)
        return self.method.select(rows.true_scores().masked_fill(hidden, float("-inf")), rows.positions, self.geometry)
