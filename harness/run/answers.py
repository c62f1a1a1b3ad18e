"""Runs that keep no record: what they say is printed.

`advise` and `trust` compose runs of their own, so they lie above `harness.run.kinds`.
"""

from __future__ import annotations

from harness.model.resources import Resources
from harness.run.kinds import measurement_of
from harness.settings.config import RunConfig


def answer(config: RunConfig, resources: Resources) -> None:
    """Make a run whose kind keeps no record, and print what it says. Raises as the run."""
    if config.kind == "advise":
        from harness.run.advise import advise

        print(advise(config))
    elif config.kind == "trust":
        from harness.run.trust import run_trust

        run_trust(config, resources)
    else:
        measurement_of(config.kind).run(config, resources)
