"""What a statistic looks at: an attached model with a text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.model.attach import Attached
from harness.model.load import LoadedModel
from harness.settings.run import RunConfig


@dataclass(frozen=True)
class Subject:
    """ids: [1, num_tokens], on the model's device. Valid while `attached` is."""

    config: RunConfig
    loaded: LoadedModel
    attached: Attached
    ids: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1]

    def layers(self, paper_layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers to look at, `paper_layers` unless set; see `AnalysisConfig.layers_of`."""
        return self.config.analysis.layers_of(self.attached.geometry.num_layers, paper_layers, self.loaded.name)
