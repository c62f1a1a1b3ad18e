"""The settings of an analysis: which statistic of a model's attention, over which text and layers.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.errors import UserError
from harness.settings.schema import check_range

Statistic = Literal["memory", "similarity", "key_tokens", "columns", "layer_inputs", "sparsity"]
PAPER_NUM_LAYERS = 32
"""Of OPT-6.7B (Figs 4, 5, 7) and of Llama-3-8B (Fig 20)."""


@dataclass(frozen=True)
class AnalysisConfig:
    """What is measured, in one dense pass over the first `num_tokens` tokens of the corpus after its offset.

    statistic: one of `conf/experiment`'s analyses; None where the run is no analysis. layers: None takes those at the
    depth of the paper's. kept_frac: share of `num_tokens` that the compared method keeps (`similarity`).

    Raises:
        UserError: a value out of range.
    """

    statistic: Statistic | None = None
    num_tokens: int = 2048
    layers: tuple[int, ...] | None = None
    kept_frac: float = 0.1

    def __post_init__(self) -> None:
        check_range("analysis.num_tokens", self.num_tokens, 2)
        layers = self.layers
        if layers is not None and (not layers or min(layers) < 0 or len(set(layers)) < len(layers)):
            listed = ",".join(map(str, layers))
            raise UserError(f"analysis.layers=[{listed}]: must name at least one layer from 0 on, and none twice")
        if not 0 < self.kept_frac <= 1:
            raise UserError(f"analysis.kept_frac={self.kept_frac}: must be above 0 and at most 1")

    def layers_of(self, num_layers: int, paper_layers: tuple[int, ...], name: str) -> tuple[int, ...]:
        """The layers to look at in model `name`.

        paper_layers: of the paper's 32-layer model; without a setting, those at the same depth here.
        Raises UserError for a layer that the model does not have.
        """
        if self.layers is None:
            return tuple(sorted({layer * num_layers // PAPER_NUM_LAYERS for layer in paper_layers}))
        if max(self.layers) >= num_layers:
            listed = ",".join(map(str, self.layers))
            raise UserError(f"analysis.layers=[{listed}]: {name} has layers 0 to {num_layers - 1}")
        return self.layers
