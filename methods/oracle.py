"""Oracle: InfiniGen's selection with the true scores, the upper bound of any selection of that size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.base import Calibration, Geometry, Lengths, Rows, Selection, State, When
from methods.selection import ScoreSelecting


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores. They need every key on the device, so this is no offloading method."""

    when: ClassVar[When] = "true_scores"  # type: ignore[misc]  # known no earlier
    own_query_layers: ClassVar[int] = 0  # type: ignore[misc]
    choices_of_when = ("true_scores",)

    title = "Oracle"

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> OracleState:
        """No calibration, nothing carried."""
        self.check_lengths(lengths)
        return OracleState(self, geometry, lengths)


class OracleState(State):
    """Stateless."""

    def select(self, layer: int, rows: Rows) -> Selection:
        """Step 4 over the true scores of the cached tokens."""
        return self.method.select(rows.true_scores().clone(), rows, self.lengths.final, self.geometry)
