"""The clients of trackers: MLflow and Weights & Biases, each an optional package, imported when it is made.

Where they send to, and as whom, they are told as ever: by MLFLOW_TRACKING_URI, WANDB_API_KEY, WANDB_MODE and their kin,
or by files of their own. All runs go to one project, `kv-offload` unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT says
otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.errors import UserError

PROJECT = "kv-offload"
FINISHED = "finished"


@dataclass(frozen=True)
class Entry:
    """What becomes one run of a tracker.

    key: what it is found again by, in the tag `run_id`. started: seconds since 1970. status: finished or failed.
    metrics: finite numbers. parameters, tags: text. files: by the folder in which the tracker shows them.
    """

    key: str
    title: str
    started: float
    seconds: float
    status: str
    metrics: Mapping[str, float]
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    files: Mapping[str, Sequence[Path]]


class Tracker(Protocol):
    """Raises its package's own errors."""

    def check(self) -> None:
        """Raise where it cannot be sent to; leaves nothing there but the project."""

    def send(self, entry: Entry) -> None:
        """Make the entry's run; nothing where a finished one is there, and what is left of a failed one is renewed."""


class MLflow:
    """MLflow: a server, a database file, or its older folder of files."""

    NAME_LENGTH = 250
    BATCHES = {"metrics": 1000, "params": 100, "tags": 100}
    """How many of each one request may carry."""
    DEFAULTS = {
        "MLFLOW_DISABLE_TELEMETRY": "true",  # a thread that talks to a server, beside what is timed
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # 7 would hold up every run of a grid for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }

    def __init__(self) -> None:
        for name, value in self.DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow.entities
        from mlflow import MlflowClient

        self._entities = mlflow.entities
        self._client = MlflowClient()

    def check(self) -> None:
        self._experiment()

    def send(self, entry: Entry) -> None:
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.run_id = '{entry.key}'", max_results=1)
        if found and found[0].data.tags.get("status") == FINISHED:
            return
        run = found[0] if found else self._create(experiment, entry)
        self._fill(run.info.run_id, entry)

    def _create(self, experiment: str, entry: Entry) -> Any:
        start, tags = _milliseconds(entry.started), {"run_id": entry.key}
        return self._client.create_run(experiment, start_time=start, tags=tags, run_name=entry.title)

    def _experiment(self) -> str:
        """The id of the project, made where it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name)
            except Exception:
                if (found := self._client.get_experiment_by_name(name)) is None:  # no other process has made it
                    raise
        return found.experiment_id

    def _fill(self, run: str, entry: Entry) -> None:
        """Write all but the key; the status last, so that a run cut short is not taken for a finished one."""
        entities, ended = self._entities, _milliseconds(entry.started + entry.seconds)
        items = {
            "metrics": [entities.Metric(self._name(key), value, ended, 0) for key, value in entry.metrics.items()],
            "params": [entities.Param(self._name(key), value) for key, value in entry.parameters.items()],
            "tags": [entities.RunTag(key, value) for key, value in entry.tags.items()],
        }
        for kind, values in items.items():
            for first in range(0, len(values), self.BATCHES[kind]):
                self._client.log_batch(run, **{kind: values[first : first + self.BATCHES[kind]]})
        for folder, paths in entry.files.items():
            for path in paths:
                self._client.log_artifact(run, str(path), folder or None)
        self._client.set_tag(run, "status", entry.status)
        self._client.set_terminated(run, entry.status.upper(), ended)

    def _name(self, name: str) -> str:
        """`name` as MLflow takes it."""
        return re.sub(r"[^\w\-./ :]", "_", name)[: self.NAME_LENGTH]


class WandB:
    """Weights & Biases: a run is named by its key, so that sending again renews it."""

    FINISH_S = 60.0
    """How long an upload may hold up the next run."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb

    def check(self) -> None:
        online = self._wandb.setup().settings.mode in ("online", "shared")
        if online and not self._wandb.login(prompt=False, verify=True):
            raise UserError("tracker=wandb: no API key; `wandb login` asks for it, WANDB_MODE=offline needs none")

    def send(self, entry: Entry) -> None:
        limits = {"finish_timeout": self.FINISH_S, "finish_timeout_raises": True}
        run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=entry.key,
            resume="allow",
            name=entry.title,
            group=entry.tags.get("experiment"),
            config=dict(entry.parameters) | dict(entry.tags) | {"status": entry.status},
            settings=self._wandb.Settings(console="off", x_disable_stats=True, **limits),
        )
        try:
            run.summary.update(dict(entry.metrics))
            for path in (path for paths in entry.files.values() for path in paths):
                self._show(run, path)
            run.finish(exit_code=int(entry.status != FINISHED))
        finally:
            self._wandb.teardown()  # its process would go on beside the next run, which may be timed

    def _show(self, run: Any, path: Path) -> None:
        if path.suffix == ".png":
            run.log({path.stem: self._wandb.Image(str(path))})
        else:
            run.save(str(path), base_path=str(path.parent), policy="now")


TRACKERS: Mapping[str, Callable[[], Tracker]] = {"mlflow": MLflow, "wandb": WandB}


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
