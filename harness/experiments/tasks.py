"""`kind=tasks`: accuracy on multiple-choice tasks (Figs 11, 13, 17)."""

from __future__ import annotations

from typing import Any

from harness.errors import UserError
from harness.records import inputs
from harness.resources import Resources
from harness.settings.experiment import Experiment, Outcome
from harness.settings.run import OFFLINE_TASKS, RunConfig


class Tasks(Experiment):
    """Questions, scored by lm-eval."""

    heeds = ("tasks", "task", "num_samples", "num_fewshot", "prefill", "scoring", "seed", "data", "calibration")
    code = ("accuracy",)

    def check(self, config: RunConfig) -> None:
        """Only tasks that need no data are there offline."""
        if config.data.name != "offline":
            return
        for task in config.tasks:
            if task not in OFFLINE_TASKS:
                here = ", ".join(OFFLINE_TASKS)
                raise UserError(f"tasks={task}: needs data=local data.root=DIR or data=hub; data=offline has {here}")

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """Each task's data, or the text that it is generated from; what the hub serves has a name and no file."""
        return inputs.calibration(config.calibration) | inputs.tasks(config.tasks, config.data)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_tasks`."""
        from harness.accuracy.tasks import run_tasks

        return run_tasks(config, resources.model(config.model))

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The examples before each question make the length."""
        return {"num_fewshot": config.num_fewshot}


EXPERIMENT = Tasks()
