"""Tracking: each record, once it is written, is sent to the tracker of `tracker=`.

A record never depends on a tracker. One that cannot be used is refused before any work. One that fails later costs a
line of warning, and this sends what it missed:

    python -m harness.launch.tracking mlflow --results-dir results

MLflow and Weights & Biases are optional packages, imported when they are used. Their own settings hold
(MLFLOW_TRACKING_URI, WANDB_API_KEY, WANDB_MODE, ...). All runs go to one project, `kv-offload` unless
MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT says otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from harness.errors import UserError, exit_code, missing, reason, refused
from harness.files import files_sha256
from harness.records import record as records

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


# Sending records and figures


NONE = "none"


def require(names: Iterable[str]) -> None:
    """Raise UserError where one of these trackers is not installed or cannot be sent to."""
    for name in sorted({*names} - {NONE}):
        with refused(f"tracker={name}: cannot be used"):
            try:
                TRACKERS[name]().check()
            except ImportError as error:
                raise UserError(f"tracker={name}: {missing(error)}; docs/sharing.md says how to add it") from error


def send(name: str, path: Path) -> bool:
    """Send the record at `path`, of a run that has ended; False, and a line on stderr, where that fails."""
    return name == NONE or _send(name, lambda: _of_record(records.read_record(path), path), path)


def send_figures(name: str, paths: Iterable[Path]) -> None:
    """Send the figures of a results folder, the same ones only once; a line on stderr where that fails."""
    images = [path for path in paths if path.suffix == ".png"]
    if name != NONE and images:
        _send(name, lambda: _of_figures(images), images[0].parent)


def _send(name: str, entry: Callable[[], Entry], source: Path) -> bool:
    try:
        TRACKERS[name]().send(entry())
    except Exception as error:  # of a foreign package, a network or a server: none is worth a measurement
        tqdm.write(f"warning: tracker={name}: {source} was not sent ({reason(error)})", file=sys.stderr)
        return False
    return True


def _of_record(record: Mapping[str, Any], path: Path) -> Entry:
    config, status = record["config"], record["status"]
    settings_id, _, code = record["run_id"].partition("-")
    tags = {name: record[name] for name in ("run_id", "experiment", "kind")}
    tags |= {"settings_id": settings_id, "code": code, "method": config["method_name"], "label": config["label"]}
    tags |= {"model": config["model"]["name"], "platform": config["platform"]["name"]}
    return Entry(
        key=record["run_id"],
        title=f"{record['experiment']} {config['label']}",
        started=datetime.fromisoformat(record["started"]).timestamp(),
        seconds=record["seconds"] or 0.0,  # of a process that died nobody knows
        status=status,
        metrics=_numbers(record["metrics"] | {"seconds": record["seconds"]}),
        parameters=parameters(record),
        tags=tags if status == FINISHED else tags | {"error": record["error"]},
        files={"": [path]},
    )


def _of_figures(paths: Sequence[Path]) -> Entry:
    key = f"figures-{files_sha256(paths)[:16]}"
    tags = {"run_id": key, "experiment": "figures"}
    return Entry(key, "figures", time.time(), 0.0, FINISHED, {}, {}, tags, {"figures": paths})


def parameters(record: Mapping[str, Any]) -> dict[str, str]:
    """The settings that decide the numbers of a record, as a user writes them: `method.alpha`; nothing that is null.

    Every record of one run_id has the same, so that a run that is repeated changes none.
    """
    settings = records.flat(records.deciding(record["config"]))
    return {name: _text(value) for name, value in settings.items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of metrics, by name: `kv_recall/acc`."""
    numbers = {name: value for name, value in records.flat(metrics, "/").items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def send_all(name: str, results_dir: str | Path) -> str:
    """Send every finished record of a results folder that the tracker has not got; returns what was done, in words.

    Raises:
        UserError: the tracker cannot be used, or some records were not sent.
    """
    require([name])
    runs = [record for record in records.read_all(results_dir) if record["status"] == FINISHED]
    paths = [records.record_path(results_dir, record["experiment"], record["run_id"]) for record in runs]
    there = sum(send(name, path) for path in paths)
    if there < len(runs):
        raise UserError(
            f"tracker={name}: {len(runs) - there} of {len(runs)} finished runs of {results_dir} were not sent"
        )
    return f"{name} has all {there} finished runs of {results_dir}"


def main(argv: Sequence[str] | None = None) -> int:
    """Send what a tracker has not got; returns the exit code, 2 for what a user can put right."""
    parser = argparse.ArgumentParser(prog="python -m harness.launch.tracking", description="Send records to a tracker.")
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("--results-dir", default="results", metavar="DIR", help="default: results")
    args = parser.parse_args(argv)
    return exit_code(lambda: print(send_all(args.tracker, args.results_dir)))


if __name__ == "__main__":
    sys.exit(main())
