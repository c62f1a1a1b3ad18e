"""How far runs are, by experiment: done, running, failed, interrupted, missing; and the time left.

    python run.py status=true                         # of all that was started there
    python run.py experiment=board status=true        # of the runs of a command

Of a folder no run is missing: only a command names runs that were never begun. A run is running if
a living process holds its lock. The time left is for one process: the mean time of the done runs
of the same experiment, for each run that is not done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tabulate import tabulate

from harness.results import record as records
from harness.run.runner import Run, is_held

STATES = ("done", "running", "failed", "interrupted", "missing")


class Progress(NamedTuple):
    """How far a run is. seconds: that it took, or has been running; None where it did not end.
    error: of a failed one."""

    experiment: str
    title: str
    state: str
    seconds: float | None = None
    error: str | None = None


def of_runs(runs: Iterable[Run]) -> Iterator[Progress]:
    """How far the runs of a command are."""
    for run in runs:
        yield _progress(run.title, run.path, run.found())


def of_folder(results_dir: str | Path) -> Iterator[Progress]:
    """All that was started in a results folder: of runs that differ in code alone, the one that is
    furthest."""
    best: dict[tuple[str, str], Progress] = {}
    for record in records.read_all(results_dir):
        path = records.record_path(results_dir, record["experiment"], record["run_id"])
        run = _progress(f"{record['experiment']} {record['config']['label']}", path, record)
        key = (record["experiment"], record["settings_id"])
        if key not in best or STATES.index(run.state) < STATES.index(best[key].state):
            best[key] = run
    yield from best.values()


def _progress(title: str, path: Path, record: Mapping[str, Any] | None) -> Progress:
    experiment = path.parts[-3]
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
