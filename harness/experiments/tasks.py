"""`kind=tasks`: accuracy on any of lm-eval's tasks (Figs 11, 13, 17)."""

from __future__ import annotations

from typing import Any

from harness.errors import UserError
from harness.records import inputs
from harness.resources import Resources
from harness.settings.experiment import Experiment, Outcome
from harness.settings.run import OFFLINE_TASKS, RunConfig


class Tasks(Experiment):
    """Questions, asked and judged by lm-eval."""

    heeds = ("tasks", "task", "num_samples", "num_fewshot", "prefill", "scoring", "seed", "data", "calibration")
    code = ("accuracy",)

    def check(self, config: RunConfig) -> None:
        """Names are known, and only tasks that need no data are there offline."""
        from harness.data.catalogue import check_names, of_folder

        check_names(config.tasks, config.task.include_path)
        if config.data.name != "offline":
            return
        own = of_folder(config.task.include_path)  # whether they need data is seen when they are resolved
        for task in config.tasks:
            if task not in OFFLINE_TASKS and task not in own:
                here = ", ".join(OFFLINE_TASKS)
                raise UserError(f"tasks={task}: needs data=local data.root=DIR or data=hub; data=offline has {here}")

    def inputs(self, config: RunConfig) -> dict[str, str]:
        """Each task's data and prompts, or the text that it is generated from."""
        return inputs.calibration(config.calibration) | inputs.tasks(config)

    def run(self, config: RunConfig, resources: Resources) -> Outcome:
        """See `run_tasks`."""
        from harness.accuracy.tasks import run_tasks

        return run_tasks(config, resources.model(config.model))

    def lower(self, config: RunConfig) -> dict[str, Any]:
        """The examples before each question make the length."""
        return {"num_fewshot": config.num_fewshot}


EXPERIMENT = Tasks()
