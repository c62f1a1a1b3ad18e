"""Tracking: what a record says, sent to the tracker of `tracker=` once the record is written.

A record never depends on a tracker. One that cannot be used is refused before any work; one that fails later costs a
line of warning, and what it missed is sent by

    python -m harness.launch.tracking mlflow --results-dir results
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness.errors import UserError, exit_code, missing, reason, refused
from harness.files import files_sha256
from harness.launch.trackers import FINISHED, TRACKERS, Entry
from harness.records import record as records

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
