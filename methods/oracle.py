"""Oracle: InfiniGen's selection with the true scores, the upper bound of any selection of that size."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Calibration, Geometry, Lengths, Rows, Selection, State
from methods.selection import ScoreSelecting


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores. They need every key on the device, so this is no offloading method."""

    title = "Oracle"
    selects = "scores"

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> OracleState:
        """No calibration, nothing carried."""
        return OracleState(self, geometry, lengths)


class OracleState(State):
    """Stateless."""

    def select(self, layer: int, rows: Rows) -> Selection:
        """Step 4 over the true scores of the cached tokens."""
        scores = rows.true_scores().masked_fill(~rows.visible().unsqueeze(2), float("-inf"))
        return self.method.select(scores, rows.positions, self.lengths.final, self.geometry)
