"""Upper bounds of hard selection of rows: by the exact attention scores.

The rule, and where it differs (made into docs/methods.md):

**oracle** selects by the true scores: the upper bound of hard selection of rows, which a method
that estimates the unread tokens may pass. **oracle-infinigen** does so by InfiniGen's rule for a
group, and **oracle-sampled** draws the sample of **infinigen2-sampled** by the true probabilities
alone. They need every key on the device (`placement=device`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from methods.base import QueryRows, Selection, State
from methods.infinigen import ScoreSelecting
from methods.infinigen2 import SampledRest


class OracleState(State):
    """A selection by the true scores of the cached tokens."""

    replayable = True

    def select(self, layer: int, rows: QueryRows) -> Selection:
        scores = rows.true_scores().clone()
        every_key = self.geometry.every_key(rows.positions)
        return self.choose(layer, scores, rows)._replace(side=every_key)

    def choose(self, layer: int, scores: Tensor, rows: QueryRows) -> Selection:
        return self.method.choose(scores, rows, self.lengths.final, self.geometry)


class OracleSampledState(OracleState):
    """A sample by the true probabilities."""

    replayable = True

    def choose(self, layer: int, scores: Tensor, rows: QueryRows) -> Selection:
        return self.method.draw(layer, scores, rows, self.lengths.final)


@dataclass(frozen=True)
class Oracle(ScoreSelecting):
    """Selects by the true scores.

    Keeps: every token
    Reads: the best by the true scores; by InfiniGen's rule for a group
    """

    when = "true_scores"  # they are known no earlier

    title = "Oracle"
    state = OracleState


@dataclass(frozen=True)
class OracleSampled(SampledRest):
    """Draws tokens by their true probabilities; a weighted sample stands for the others.

    Keeps: every token
    Reads: a weighted sample by the true scores
    """

    when = "true_scores"

    title = "Oracle, sampled rest"
    state = OracleSampledState
