"""How far runs are, by experiment: done, running, failed, interrupted, missing, and the time that is left.

    python run.py status=true results_dir=results     # of all that was started there
    python run.py grid=leaderboard status=true        # of the cells of a command, with status=true at its end

A run is running if a living process holds its lock. The time left is for one process: the mean time of the done cells
of the same experiment, for each cell that is not done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tabulate import tabulate

from harness.errors import UserError
from harness.launch.runner import Run, is_held
from harness.records import record as records

STATES = ("done", "running", "failed", "interrupted", "missing")


class Cell(NamedTuple):
    """How far a run is. seconds: that it took, or has been running; None where it did not end. error: of a failed
    one."""

    experiment: str
    title: str
    state: str
    seconds: float | None = None
    error: str | None = None


def of_runs(runs: Iterable[Run]) -> Iterator[Cell]:
    """The cells of a command."""
    for run in runs:
        yield _cell(run.title, run.path, *run.found())


def of_folder(results_dir: str | Path) -> Iterator[Cell]:
    """All that was started in a results folder: of runs that differ in code alone, the one that is furthest."""
    best: dict[tuple[str, str], Cell] = {}
    for record in records.read_all(results_dir):
        path = records.record_path(results_dir, record["experiment"], record["run_id"])
        cell = _cell(f"{record['experiment']} {record['config']['label']}", path, record)
        key = (record["experiment"], record["settings_id"])
        if key not in best or STATES.index(cell.state) < STATES.index(best[key].state):
            best[key] = cell
    yield from best.values()


def _cell(title: str, path: Path, record: Mapping[str, Any] | None, damage: UserError | None = None) -> Cell:
    experiment = path.parts[-3]
    if damage is not None:
        return Cell(experiment, title, "failed", error=str(damage))
    if record is None:
        return Cell(experiment, title, "missing")
    status, seconds = record["status"], record["seconds"]
    if status == "finished":
        return Cell(experiment, title, "done", seconds)
    if is_held(path):
        elapsed = datetime.now(UTC) - datetime.fromisoformat(record["started"])
        return Cell(experiment, title, "running", elapsed.total_seconds())
    return Cell(experiment, title, status, seconds, record["error"])


def render(cells: Iterable[Cell]) -> str:
    """A line for each experiment, then those that run, failed or were interrupted, by name."""
    found = list(cells)
    if not found:
        return "nothing was started yet"
    experiments: dict[str, list[Cell]] = {}
    for cell in found:
        experiments.setdefault(cell.experiment, []).append(cell)
    left = {name: _seconds_left(own) for name, own in experiments.items()}
    if len(experiments) > 1:
        experiments["all"] = found
        known = [seconds for seconds in left.values() if seconds is not None]
        left["all"] = sum(known) if len(known) == len(left) else None
    table = []
    for name, own in experiments.items():
        counts = [str(sum(cell.state == state for cell in own)) for state in STATES]
        seconds = left[name]
        table.append([name, *counts, "?" if seconds is None else _duration(seconds)])
    header, sides = ["experiment", *STATES, "time left"], ["left", *["right"] * (len(STATES) + 1)]
    lines = [tabulate(table, header, "plain", colalign=sides, disable_numparse=True)]
    named = [cell for state in ("running", "failed", "interrupted") for cell in found if cell.state == state]
    if named:
        lines.append("")
    for cell in named:
        since = f" for {_duration(cell.seconds)}" if cell.state == "running" and cell.seconds is not None else ""
        lines.append(f"{cell.state}{since}: {cell.title}" + (f": {cell.error}" if cell.error else ""))
    return "\n".join(lines)


def _seconds_left(cells: list[Cell]) -> float | None:
    """Of the cells of one experiment; None where some are left and none is done."""
    took = [cell.seconds for cell in cells if cell.state == "done" and cell.seconds is not None]
    todo = [cell.seconds or 0.0 if cell.state == "running" else 0.0 for cell in cells if cell.state != "done"]
    if todo and not took:
        return None
    return sum(max(0.0, fmean(took) - elapsed) for elapsed in todo)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
