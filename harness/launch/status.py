"""How far runs are, by experiment: done, running, failed, interrupted, missing, and the time that is left.

    python run.py status=true results_dir=results     # of all that was started there
    python run.py grid=leaderboard status=true        # of the cells of a command, with status=true at its end

Running is what a living process holds the lock of. The time left is for one process: the mean of what is done of the
same experiment, for each cell that is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.errors import UserError
from harness.launch.runner import Run, is_held
from harness.records import record as records

STATES = ("done", "running", "failed", "interrupted", "missing")
NAMED = ("running", "failed", "interrupted")
"""States whose cells are named, each with what there is to say of it."""


@dataclass(frozen=True)
class Cell:
    """A run, as far as it is. seconds: it took, or it has been running; None where it did not end. error: of a failed
    one."""

    experiment: str
    title: str
    state: str
    seconds: float | None = None
    error: str | None = None


def of_runs(runs: Iterable[Run]) -> Iterator[Cell]:
    """The cells of a command."""
    for run in runs:
        try:
            record = records.read_record(run.path)
        except FileNotFoundError:
            yield Cell(run.config.experiment, run.title, "missing")
        except UserError as damage:
            yield Cell(run.config.experiment, run.title, "failed", error=str(damage))
        else:
            yield _cell(run.title, record, run.path)


def of_folder(results_dir: str | Path) -> Iterator[Cell]:
    """All that was started in a results folder: of runs that differ in code alone, the one that is furthest."""
    best: dict[tuple[str, str], Cell] = {}
    for record in records.read_all(results_dir):
        path = records.record_path(results_dir, record["experiment"], record["run_id"])
        cell = _cell(f"{record['experiment']} {record['config']['label']}", record, path)
        key = (record["experiment"], record["settings_id"])
        if key not in best or STATES.index(cell.state) < STATES.index(best[key].state):
            best[key] = cell
    yield from best.values()


def _cell(title: str, record: Mapping[str, Any], path: Path) -> Cell:
    status, seconds = record["status"], record["seconds"]
    if status == "finished":
        return Cell(record["experiment"], title, "done", seconds)
    if is_held(path):
        elapsed = datetime.now(UTC) - datetime.fromisoformat(record["started"])
        return Cell(record["experiment"], title, "running", elapsed.total_seconds())
    return Cell(record["experiment"], title, status, seconds, record["error"])


def render(cells: Iterable[Cell]) -> str:
    """A line for each experiment, then those that run, failed or were interrupted, by name."""
    found = list(cells)
    if not found:
        return "nothing was started yet"
    experiments = list(dict.fromkeys(cell.experiment for cell in found))
    rows = [_row(name, [cell for cell in found if cell.experiment == name]) for name in experiments]
    if len(rows) > 1:
        rows.append(_row("all", found))
    table = [["experiment", *STATES, "time left"], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    named = [cell for state in NAMED for cell in found if cell.state == state]
    return "\n".join([*lines, *("" for _ in named[:1]), *map(_named, named)])


def _row(name: str, cells: list[Cell]) -> list[str]:
    counts = [sum(cell.state == state for cell in cells) for state in STATES]
    seconds = _seconds_left(cells)
    return [name, *map(str, counts), "?" if seconds is None else _duration(seconds)]


def _seconds_left(cells: list[Cell]) -> float | None:
    """None where nothing is done of an experiment of which something is left."""
    left = 0.0
    for name in {cell.experiment for cell in cells if cell.state != "done"}:
        own = [cell for cell in cells if cell.experiment == name]
        took = [cell.seconds for cell in own if cell.state == "done" and cell.seconds is not None]
        if not took:
            return None
        running = [cell.seconds or 0.0 for cell in own if cell.state == "running"]
        waiting = sum(cell.state not in ("done", "running") for cell in own)
        left += waiting * fmean(took) + sum(max(0.0, fmean(took) - elapsed) for elapsed in running)
    return left


def _named(cell: Cell) -> str:
    since = f" for {_duration(cell.seconds)}" if cell.state == "running" and cell.seconds is not None else ""
    return f"{cell.state}{since}: {cell.title}" + (f": {cell.error}" if cell.error else "")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
