"""`kind=contract`: whether a method keeps what every method must; see `harness.contract`."""

from __future__ import annotations

from functools import partial

from harness.errors import UserError
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome


class Contract(Experiment):
    """A line for each check; nothing is kept."""

    heeds = ("platform",)
    code = ("contract.py",)
    keeps_record = False

    def check(self, config: RunConfig) -> None:
        """The method alone, as its settings say."""
        for name in ("codec", "size"):
            if (value := getattr(config, name)) is not None:
                raise UserError(f"{name}={value}: plays no part in experiment=contract; leave it out")

    def needs_weights(self, config: RunConfig) -> bool:
        """Its models are made on the spot."""
        return False

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_contract`."""
        from harness.contract import run_contract

        run_contract(config, partial(print, flush=True))
        return Outcome({})


EXPERIMENT = Contract()
