"""`kind=analysis`: statistics of one dense pass over a text, or of a model's shape (Figs 2, 4, 5, 7, 20, Table 1)."""

from __future__ import annotations

from typing import Any, get_args

from harness.errors import UserError
from harness.records import inputs
from harness.resources import Resources
from harness.settings.config import RunConfig, Statistic
from harness.settings.experiment import Experiment, Outcome

OF_THE_SHAPE = "memory"
"""The statistic for which nothing is loaded."""


class Analysis(Experiment):
    """`analysis.statistic`."""

    heeds = ("analysis", "corpus", "data", "calibration")
    table = "analysis"
    code = ("paper/analysis", "model/shape.py")

    def check(self, config: RunConfig) -> None:
        """There is a statistic, no setting that none of them heeds, and a method that it can compare."""
        statistic = config.analysis.statistic
        if statistic is None:
            raise UserError(f"analysis.statistic=null: kind=analysis needs one of {', '.join(get_args(Statistic))}")
        if config.model.device == "map":
            raise UserError("model.device=map: kind=analysis compares layers on one device; allowed: auto, cpu, cuda")
        for name in ("codec", "size"):
            if getattr(config, name) is not None:
                raise UserError(f"{name}={getattr(config, name)}: plays no part in kind=analysis; leave it out")
        if statistic == "similarity" and (config.method.reads_all or config.method.when != "kept"):
            raise UserError(f"method={config.method_name}: analysis.statistic=similarity compares h2o or streaming")

    def needs_weights(self, config: RunConfig) -> bool:
        """Sizes follow from the shape."""
        return config.analysis.statistic != OF_THE_SHAPE

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """The two texts, where there is a pass over one."""
        if not self.needs_weights(config):
            return {}
        return inputs.calibration(config.calibration) | inputs.corpus(config.corpus, config.data)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_memory` and `run_analysis`."""
        if not self.needs_weights(config):
            from harness.paper.analysis.study import run_memory

            return run_memory(config)
        from harness.paper.analysis.study import run_analysis

        return run_analysis(config, resources.model(config.model))

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The text."""
        return {"analysis.num_tokens": config.analysis.num_tokens}


EXPERIMENT = Analysis()
