"""`kind=latency`: one timed cell of the figures of speed (Figs 14 to 18)."""

from __future__ import annotations

from typing import Any

from harness.data.text import offline_text
from harness.files import text_sha256
from harness.records import inputs
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome
from harness.settings.systems import check_live


class Latency(Experiment):
    """A system at one shape, timed in a process that cells of this shape share."""

    heeds = ("platform", "placement", "reuse", "latency", "seed", "calibration")
    table = "latency"
    code = ("speed",)
    live = True

    def check(self, config: RunConfig) -> None:
        """See `check_live`."""
        check_live(config.method, config.placement, config.reuse, config.platform)

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """The text of the prompts."""
        return inputs.calibration(config.calibration) | {"prompt": text_sha256(offline_text())}

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_latency`."""
        from harness.speed.latency import run_latency

        return run_latency(config, resources.model(config.model), resources.prompts)

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The shape."""
        return {"batch_size": config.latency.batch_size, "prompt_len": config.latency.prompt_len}

    def process(self, config: RunConfig) -> Any:
        """Model, machine and prompt, whose dense pass runs once."""
        return (repr(config.model), config.platform.name, config.latency.batch_size, config.latency.prompt_len)

    def shape(self, config: RunConfig) -> str:
        """Sequences and tokens of their prompts."""
        return f"{config.latency.batch_size}x{config.latency.prompt_len}"


EXPERIMENT = Latency()
