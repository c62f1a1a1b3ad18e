"""`kind=perplexity`: windows of a text, and fidelity to the full cache (Figs 12, 19, Table 2)."""

from __future__ import annotations

from typing import Any

from harness.errors import UserError
from harness.records import inputs
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import Experiment, Outcome


class Perplexity(Experiment):
    """Windows, scored against the next token and a dense pass."""

    heeds = ("corpus", "data", "calibration", "seq_len", "prefill_len", "num_windows")
    code = ("accuracy",)

    def check(self, config: RunConfig) -> None:
        """A window has a decode row that predicts, and a prompt where the method learns from it."""
        needed = max(1, config.prefill_len) + 2
        if config.seq_len < needed:
            raise UserError(
                f"prefill_len={config.prefill_len}, seq_len={config.seq_len}: seq_len must be at least {needed}, "
                "so that a decode row predicts a token of the window"
            )
        if config.method.needs_prompt and config.prefill_len < 1:
            raise UserError(f"prefill_len=0: must be at least 1, {config.method_name} learns from the prompt")

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """The two texts."""
        return inputs.calibration(config.calibration) | inputs.corpus(config.corpus, config.data)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_perplexity`."""
        from harness.accuracy.perplexity import run_perplexity

        return run_perplexity(config, resources.model(config.model), resources.references)

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The windows."""
        return {"seq_len": config.seq_len, "num_windows": config.num_windows}


EXPERIMENT = Perplexity()
