"""`kind=generate`: text, printed token by token, and what its cache moved."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.errors import UserError
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome
from harness.settings.systems import check_live


class Generate(Experiment):
    """A text goes on; nothing is kept."""

    heeds = ("prompt", "max_new_tokens", "platform", "placement", "reuse", "calibration")
    code = ("speed",)
    live = True
    keeps_record = False

    def check(self, config: RunConfig) -> None:
        """There is a text, and a system that can go on from it."""
        check_live(config.method, config.placement, config.reuse, config.platform)
        if not config.prompt:
            raise UserError("prompt=null: experiment=generate needs a text to go on from")

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """Print; see `run_generate`."""
        from harness.speed.generate import run_generate

        made = run_generate(config, resources.model(config.model), partial(print, end="", flush=True))
        print(f"\n\n{made.summary()}")
        return Outcome({})

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """What is added to the prompt."""
        return {"max_new_tokens": config.max_new_tokens}


EXPERIMENT = Generate()
