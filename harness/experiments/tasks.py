"""`kind=tasks`: accuracy on any of lm-eval's tasks (Figs 11, 13, 17)."""

from __future__ import annotations

from typing import Any

from harness.records import inputs
from harness.resources import Resources
from harness.settings.config import OFFLINE_TASKS, TASKS, RunConfig
from harness.settings.experiment import Experiment, Outcome


class Tasks(Experiment):
    """Questions, asked and judged by lm-eval."""

    heeds = ("tasks", "task", "num_samples", "num_fewshot", "prefill", "scoring", "seed", "data", "calibration")
    code = ("accuracy",)

    def check(self, config: RunConfig) -> None:
        """Names are known, and offline none needs data."""
        if {*config.tasks} <= {*TASKS} and (config.data.name != "offline" or {*config.tasks} <= {*OFFLINE_TASKS}):
            return  # spares loading lm-eval
        from harness.data.lm_tasks import check_names, plan

        check_names(config.tasks, config.task.include_path)
        if config.data.name == "offline":
            plan(config)

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """Each task's data and prompts, or the text that it is generated from."""
        return inputs.calibration(config.calibration) | inputs.tasks(config)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_tasks`."""
        from harness.accuracy.evaluation import run_tasks

        return run_tasks(config, resources.model(config.model))

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The examples before each question make the length."""
        return {"num_fewshot": config.num_fewshot}


EXPERIMENT = Tasks()
