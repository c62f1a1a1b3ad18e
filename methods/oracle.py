"""Oracle: InfiniGen's selection with the true scores, the upper bound of any selection of that size."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Calibration, Geometry, Lengths, Rows, Selection, Selects, State
from methods.checks import require
from methods.selection import ScoreSelecting


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores. They need every key on the device, so this is no offloading method."""

    title = "Oracle"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.when == "layer", "when", self.when, "layer: the true scores are known no earlier")

    @property
    def selects(self) -> Selects:
        """By the true scores."""
        return "scores"

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> OracleState:
        """No calibration, nothing carried."""
        self.check_lengths(lengths)
        return OracleState(self, geometry, lengths)


class OracleState(State):
    """Stateless."""

    def select(self, layer: int, rows: Rows) -> Selection:
        """Step 4 over the true scores of the cached tokens."""
        return self.method.select(rows.true_scores().clone(), rows, self.lengths.final, self.geometry)
