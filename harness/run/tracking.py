"""Tracking: each record, once it is written, is sent to the tracker of `tracker=`.

A record never depends on a tracker. One that cannot be used is refused before any work. One that
fails later costs a line of warning, and this sends what it missed:

    python -m harness.run.tracking mlflow --results-dir results

MLflow and Weights & Biases are optional packages, imported when they are used. Their own settings
hold (MLFLOW_TRACKING_URI, WANDB_API_KEY, WANDB_MODE, ...). All runs go to one project, `kv-offload`
unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT says otherwise.
"""

from __future__ import annotations

import argparse
import itertools
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
from typing import Any

from tqdm import tqdm

from harness.errors import UserError, exit_code, missing, reason, refused
from harness.files import files_sha256
from harness.results import record as records
from harness.settings.paths import RESULTS

PROJECT = "kv-offload"
FINISHED = "finished"


@dataclass(frozen=True)
class Entry:
    """What becomes one run of a tracker.

    key: what it is found again by, in the tag `run_id`. started: seconds since 1970. status:
    finished or failed. metrics: finite numbers. parameters, tags: text. files: by the folder in
    which the tracker shows them.
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


class MLflow:
    """MLflow: a server, a database file, or its older folder of files."""

    BATCHES = {"metrics": 1000, "params": 100, "tags": 100}
    """How many of each one request may carry."""
    DEFAULTS = {
        "MLFLOW_DISABLE_TELEMETRY": "true",  # a thread that talks to a server, beside what is timed
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # 7 would hold up every run of a sweep for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }

    def __init__(self) -> None:
        for name, value in self.DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow.entities
        from mlflow import MlflowClient

        self._entities = mlflow.entities
        self._client = MlflowClient()

    def check(self) -> str:
        """The id of the project, made where it is not there. Raises where it cannot be sent to."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except Exception:
                found = self._client.get_experiment_by_name(name)
                if found is None:  # no other process has made it
                    raise
        return found.experiment_id

    def send(self, entry: Entry) -> None:
        """Make the entry's run, or renew one that failed; nothing where a finished one is there.

        The status is written last, so that a run cut short is not taken for a finished one.
        """
        project, entities, client = self.check(), self._entities, self._client
        start, end = round(1000 * entry.started), round(1000 * (entry.started + entry.seconds))
        found = client.search_runs([project], f"tags.run_id = '{entry.key}'", max_results=1)
        if found and found[0].data.tags.get("status") == FINISHED:
            return
        if not found:
            tags = {"run_id": entry.key}
            made = client.create_run(project, start_time=start, tags=tags, run_name=entry.title)
            found = [made]
        run = found[0].info.run_id
        items: dict[str, list[Any]] = {"metrics": [], "params": [], "tags": []}
        for key, value in entry.metrics.items():
            items["metrics"].append(entities.Metric(_mlflow_name(key), value, end, 0))
        for key, text in entry.parameters.items():
            items["params"].append(entities.Param(_mlflow_name(key), text))
        for key, text in entry.tags.items():
            items["tags"].append(entities.RunTag(key, text))
        for kind, values in items.items():
            for first in range(0, len(values), self.BATCHES[kind]):
                client.log_batch(run, **{kind: values[first : first + self.BATCHES[kind]]})
        for folder, paths in entry.files.items():
            for path in paths:
                client.log_artifact(run, str(path), folder or None)
        client.set_tag(run, "status", entry.status)
        client.set_terminated(run, entry.status.upper(), end)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-./ :]", "_", name)[:250]


class WandB:
    """Weights & Biases: a run is named by its key, so that sending again renews it."""

    FINISH_S = 60.0
    """How long an upload may hold up the next run."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb

    def check(self) -> None:
        """Raise where it cannot be sent to."""
        online = self._wandb.setup().settings.mode in ("online", "shared")
        if online and not self._wandb.login(prompt=False, verify=True):
            login = "`wandb login` asks for it, WANDB_MODE=offline needs none"
            raise UserError(f"tracker=wandb: no API key; {login}")

    def send(self, entry: Entry) -> None:
        """Make the entry's run, or renew it."""
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
            for path in itertools.chain.from_iterable(entry.files.values()):
                if path.suffix == ".png":
                    run.log({path.stem: self._wandb.Image(str(path))})
                else:
                    run.save(str(path), base_path=str(path.parent), policy="now")
            run.finish(exit_code=int(entry.status != FINISHED))
        finally:
            # Its process would go on beside the next run, which may be timed.
            self._wandb.teardown()


TRACKERS: Mapping[str, Callable[[], MLflow | WandB]] = {"mlflow": MLflow, "wandb": WandB}
NONE = "none"


def require(names: Iterable[str]) -> None:
    """Raise UserError where one of these trackers is not installed or cannot be sent to."""
    for name in sorted({*names} - {NONE}):
        with refused(f"tracker={name}: cannot be used"):
            try:
                TRACKERS[name]().check()
            except ImportError as error:
                raise UserError(
                    f"tracker={name}: {missing(error)}; docs/running.md says how to add it"
                ) from error


def send(name: str, path: Path) -> bool:
    """Send the record at `path`, of a run that has ended; False, and a line on stderr, where that
    fails."""
    return name == NONE or _send(name, lambda: _of_record(records.read_record(path), path), path)


def send_figures(name: str, paths: Iterable[Path]) -> None:
    """Send the figures of a results folder, the same ones only once; a line on stderr where that
    fails."""
    images = [path for path in paths if path.suffix == ".png"]
    if name != NONE and images:
        key = f"figures-{files_sha256(images)[:16]}"
        tags, files = {"run_id": key, "experiment": "figures"}, {"figures": images}
        _send(
            name,
            lambda: Entry(key, "figures", time.time(), 0.0, FINISHED, {}, {}, tags, files),
            images[0].parent,
        )


def _send(name: str, entry: Callable[[], Entry], source: Path) -> bool:
    try:
        TRACKERS[name]().send(entry())
    except Exception as error:
        # Of a foreign package, a network or a server: none is worth a measurement.
        warning = f"tracker={name}: {source} was not sent ({reason(error)})"
        tqdm.write(f"warning: {warning}", file=sys.stderr)
        return False
    return True


def _of_record(record: Mapping[str, Any], path: Path) -> Entry:
    """Parameters are the settings that decide its numbers, the same in each record of a run_id;
    without nulls."""
    config, status = record["config"], record["status"]
    settings_id, _, code = record["run_id"].partition("-")
    tags = {name: record[name] for name in ("run_id", "experiment", "kind")}
    tags |= {
        "settings_id": settings_id,
        "code": code,
        "method": config["method_name"],
        "label": config["label"],
    }
    tags |= {"model": config["model"]["name"], "platform": config["platform"]["name"]}
    metrics: dict[str, float] = {}
    measured = records.flat(record["metrics"] | {"seconds": record["seconds"]}, "/")
    for name, value in measured.items():
        if type(value) in (int, float) and math.isfinite(value):
            metrics[name] = float(value)
    parameters: dict[str, str] = {}
    for name, value in records.flat(records.deciding(config)).items():
        if value is not None:
            parameters[name] = value if isinstance(value, str) else json.dumps(value)
    return Entry(
        key=record["run_id"],
        title=f"{record['experiment']} {config['label']}",
        started=datetime.fromisoformat(record["started"]).timestamp(),
        seconds=record["seconds"] or 0.0,  # of a process that died nobody knows
        status=status,
        metrics=metrics,
        parameters=parameters,
        tags=tags if status == FINISHED else tags | {"error": record["error"]},
        files={"": [path]},
    )


def send_all(name: str, results_dir: str | Path) -> None:
    """Send every finished record of a results folder that the tracker has not got; prints how many
    it has.

    Raises:
        UserError: the tracker cannot be used, or some records were not sent.
    """
    require([name])
    paths = []
    for record in records.read_all(results_dir):
        if record["status"] == FINISHED:
            path = records.record_path(results_dir, record["experiment"], record["run_id"])
            paths.append(path)
    num_sent = sum(send(name, path) for path in paths)
    all_of_them = f"{len(paths)} finished runs of {results_dir}"
    if num_sent < len(paths):
        raise UserError(f"tracker={name}: {len(paths) - num_sent} of {all_of_them} were not sent")
    print(f"{name} has all {all_of_them}")


def main(argv: Sequence[str] | None = None) -> int:
    """Send what a tracker has not got; returns the exit code, 2 for what a user can put right."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.run.tracking", description="Send records to a tracker."
    )
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument(
        "--results-dir", default=RESULTS, metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: send_all(args.tracker, args.results_dir))


if __name__ == "__main__":
    sys.exit(main())
