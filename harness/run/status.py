"""How far runs are, by experiment: done, running, failed, interrupted, missing; and the time left.

    python run.py status=true                         # of all that was started there
    python run.py experiment=board status=true        # of the runs of a command

A sweep leaves a list of its runs in `runs/sweeps` until all have begun, so that after an
interruption a folder counts those that were never begun as missing, too. A run is running if a
living process holds its lock. The time left is for one process: the mean time of the done runs of
the same experiment, for each run that is not done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tabulate import tabulate

from harness.errors import UserError
from harness.files import text_sha256, write_atomic
from harness.results import record as records
from harness.run.runner import Run, is_held

SWEEPS = "sweeps"
"""The folder beside those of the experiments with the lists of runs of sweeps that have not
ended."""
STATES = ("done", "running", "failed", "interrupted", "missing")


class Progress(NamedTuple):
    """How far a run is. seconds: that it took, or has been running; None where it did not end.
    error: of a failed one."""

    experiment: str
    title: str
    state: str
    seconds: float | None = None
    error: str | None = None


def note(runs: Sequence[Run]) -> Path:
    """Write the list of a sweep's runs beside their records. Returns its path, which is the same
    at every start of the sweep. Raises UserError where the folder cannot be written."""
    listed = [_identity(run.path) | {"title": run.title} for run in runs]
    text = json.dumps(listed, indent=1)
    path = runs[0].path.parents[2] / SWEEPS / f"{text_sha256(text)[:16]}.json"
    write_atomic(path, text)
    return path


def _identity(path: Path) -> dict[str, str]:
    """What a record is of, whatever the code."""
    return {"experiment": path.parts[-3], "settings_id": records.settings_of(path.parent.name)}


def _noted(results_dir: str | Path) -> Iterator[dict[str, str]]:
    """The runs in the lists of a results folder; lists that are damaged are left out."""
    for path in sorted((Path(results_dir) / "runs" / SWEEPS).glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            listed_runs = json.loads(path.read_text(encoding="utf-8"))
            names = ("experiment", "settings_id", "title")
            yield from [{name: str(listed[name]) for name in names} for listed in listed_runs]


def of_runs(runs: Iterable[Run]) -> Iterator[Progress]:
    """How far the runs of a command are."""
    for run in runs:
        yield _progress(run.title, run.path, *run.found())


def of_folder(results_dir: str | Path) -> Iterator[Progress]:
    """All that was started in a results folder: of runs that differ in code alone, the one that is
    furthest. The runs of a sweep that has not ended are missing where they have no record."""
    best: dict[tuple[str, str], Progress] = {}
    for record in records.read_all(results_dir):
        path = records.record_path(results_dir, record["experiment"], record["run_id"])
        run = _progress(f"{record['experiment']} {record['config']['label']}", path, record)
        key = (record["experiment"], record["settings_id"])
        if key not in best or STATES.index(run.state) < STATES.index(best[key].state):
            best[key] = run
    for noted in _noted(results_dir):
        key = (noted["experiment"], noted["settings_id"])
        best.setdefault(key, Progress(noted["experiment"], noted["title"], "missing"))
    yield from best.values()


def _progress(
    title: str, path: Path, record: Mapping[str, Any] | None, damage: UserError | None = None
) -> Progress:
    experiment = path.parts[-3]
    if damage is not None:
        return Progress(experiment, title, "failed", error=str(damage))
    if record is None:
        return Progress(experiment, title, "missing")
    status, seconds = record["status"], record["seconds"]
    if status == "finished":
        return Progress(experiment, title, "done", seconds)
    if is_held(path):
        elapsed = datetime.now(UTC) - datetime.fromisoformat(record["started"])
        return Progress(experiment, title, "running", elapsed.total_seconds())
    return Progress(experiment, title, status, seconds, record["error"])


def render(runs: Iterable[Progress]) -> str:
    """A line for each experiment, then those that run, failed or were interrupted, by name."""
    found = list(runs)
    if not found:
        return "nothing was started yet"
    experiments: dict[str, list[Progress]] = {}
    for run in found:
        experiments.setdefault(run.experiment, []).append(run)
    left = {name: _seconds_left(own) for name, own in experiments.items()}
    if len(experiments) > 1:
        experiments["all"] = found
        known = [seconds for seconds in left.values() if seconds is not None]
        left["all"] = sum(known) if len(known) == len(left) else None
    table = []
    for name, own in experiments.items():
        counts = [str(sum(run.state == state for run in own)) for state in STATES]
        seconds = left[name]
        table.append([name, *counts, "?" if seconds is None else _duration(seconds)])
    header, sides = ["experiment", *STATES, "time left"], ["left", *["right"] * (len(STATES) + 1)]
    lines = [tabulate(table, header, "plain", colalign=sides, disable_numparse=True)]
    by_name = []
    for state in ("running", "failed", "interrupted"):
        by_name += [_line(run) for run in found if run.state == state]
    if by_name:
        lines.append("")
    return "\n".join([*lines, *by_name])


def _line(run: Progress) -> str:
    """A run by its name."""
    since = error = ""
    if run.state == "running" and run.seconds is not None:
        since = f" for {_duration(run.seconds)}"
    if run.error:
        error = f": {run.error}"
    return f"{run.state}{since}: {run.title}{error}"


def _seconds_left(runs: list[Progress]) -> float | None:
    """Of the runs of one experiment; None where some are left and none is done."""
    took: list[float] = []
    elapsed: list[float] = []
    for run in runs:
        if run.state == "running":
            elapsed.append(run.seconds or 0.0)
        elif run.state != "done":
            elapsed.append(0.0)
        elif run.seconds is not None:
            took.append(run.seconds)
    if elapsed and not took:
        return None
    return sum(max(0.0, fmean(took) - seconds) for seconds in elapsed)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
