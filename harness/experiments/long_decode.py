"""`kind=long_decode`: texts decoded freely under a method and under the full cache, and how they part."""

from __future__ import annotations

from typing import Any

from harness.errors import UserError
from harness.records import inputs
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome

LOWEST = {"prefill_len": 1, "max_new_tokens": 2}
"""A text goes on from a prompt, whose dense pass names the first token; a method decodes from the second on."""


class LongDecode(Experiment):
    """Greedy texts of one length, scored by the full cache."""

    heeds = ("corpus", "data", "calibration", "prefill_len", "max_new_tokens", "num_windows")
    code = ("accuracy",)

    def check(self, config: RunConfig) -> None:
        """There is a prompt, and a token that the method decodes."""
        for name, lowest in LOWEST.items():
            if (value := getattr(config, name)) < lowest:
                raise UserError(f"{name}={value}: must be at least {lowest} in kind=long_decode")

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """The two texts."""
        return inputs.calibration(config.calibration) | inputs.corpus(config.corpus, config.data)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_long_decode`."""
        from harness.accuracy.long_decode import run_long_decode

        return run_long_decode(config, resources.model(config.model), resources.references)

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The length; prompts beyond a batch come one batch after another."""
        return {"max_new_tokens": config.max_new_tokens, "prefill_len": config.prefill_len}


EXPERIMENT = LongDecode()
