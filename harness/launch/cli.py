"""The command line: Hydra in front, one line for whatever the user got wrong behind.

Exit codes: 0; 2 for what a user can put right; 1 for a defect of ours; 75 for a grid that put cells off, since their
minutes were spent (the same command goes on); 130 after Ctrl-C, 143 after SIGTERM, which ends a run in the same way;
141 where nobody reads on (`| head`).
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.errors import DEFECT, UNFINISHED, USERS, DefectError, UnfinishedError, UserError, is_users, reason
from harness.files import until_settled
from harness.launch import console, grid, interrupts, overrides, runner, status, tracking
from harness.launch.cluster import Batch, own_overrides
from harness.launch.export import export
from harness.launch.hydra_front import OF_HYDRA, TRACEBACKS, as_command_line, in_words
from harness.launch.plan import Plan, read_plan
from harness.resources import Resources
from harness.settings import schema
from harness.settings.compose import asks_status, parse
from harness.settings.experiment import find
from harness.settings.schema import setting_of

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""


@dataclass
class Jobs:
    """What Hydra calls, once, or for each job of a sweep (`-m`); a job that fails does not stop the others.

    A launcher with processes of its own calls a copy there: each writes the tables and brings its error back.

    tracebacks: show them. paths: records of the finished runs. gaps: what a grid left out, in lines.
    exit_code: a defect's, else the last failure's, else 0. draws: a grid ran, so draw its figures, which `tracker` gets
    as well. has_copies, is_copy: sent to another process. batch: what is to run on a cluster.
    resources: what the jobs share. draw: makes the figures of a results folder.
    """

    tracebacks: bool
    resources: Resources = field(default_factory=Resources)
    draw: Draw | None = None
    paths: list[Path] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    exit_code: int = 0
    has_copies: bool = False
    draws: bool = False
    tracker: str = tracking.NONE
    is_copy: bool = False
    batch: Batch | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.has_copies = True
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_copy=True)

    def __call__(self, config: DictConfig) -> None:
        try:
            self._execute(config)
        except Exception as error:
            self.fail(error)
            if self.is_copy:
                raise
        finally:
            if self.is_copy:
                self.report()

    def _execute(self, config: DictConfig) -> None:
        given = list(HydraConfig.get().overrides.task)
        if config.export is not None:
            print(export(config.export, config.results_dir, given))
            return
        if config.get("cluster") is not None:
            given = self._start_batch(config, given)
        has_grid = HydraConfig.get().runtime.choices.get("grid") is not None
        if asks_status(config.status):
            print(_status(config, given) if has_grid else status.render(status.of_folder(config.results_dir)))
            return
        if not has_grid:
            self._run_one(config, given)
            return
        self.draws = True
        plan = _plan(config, given)
        self.tracker = config.tracker
        self.gaps += plan.gaps()
        for line in plan.gaps():
            print(line)
        if self.batch is not None:
            self.batch.deal(given, plan.cells)
            return
        for path in grid.run_cells(plan.cells, plan.minutes, self.resources):
            self.paths.append(path)

    def _run_one(self, config: DictConfig, overrides: list[str]) -> None:
        for override in overrides:
            if setting_of(override).startswith("grid."):
                raise UserError(f"{override}: needs grid=NAME")
        checked = parse(config, overrides)
        if self.batch is not None:
            self.batch.add(overrides, [checked])
            return
        runner.require_devices([checked])
        if find(checked.kind).keeps_record:
            run = runner.Run.of(checked)
            tracking.require([] if run.is_finished() else [checked.tracker])
            self.paths.append(runner.run(run, self.resources))
        else:
            runner.show(checked, self.resources)

    def _start_batch(self, config: DictConfig, given: list[str]) -> list[str]:
        """From here on, gather what is to run on a cluster; returns the overrides that are not about it."""
        batch = Batch.of(config, HydraConfig.get().runtime.choices.get("grid") or config.experiment)
        if self.is_copy:
            raise UserError("cluster=slurm: starts processes itself; leave hydra/launcher out")
        if config.grid is not None and config.grid.share is not None:
            raise UserError(f"grid.share={config.grid.share}: cluster=slurm deals the cells itself, cluster.jobs=N")
        if self.batch is not None and self.batch.cluster != batch.cluster:
            raise UserError("cluster: its settings are those of all jobs of a sweep, so none of them can vary")
        self.batch, config.cluster = self.batch or batch, None
        return own_overrides(given)

    def start(self, command: Callable[[], None]) -> None:
        """Hand over to Hydra, which calls this for each job. UserError for whatever it raises by itself: it knows
        nothing but what the user typed."""
        try:
            command()
        except Exception as error:
            if self.has_copies or _is_users(error):
                raise
            raise UserError(f"{shlex.join(sys.argv[1:])}: Hydra refuses it ({reason(error)})") from error

    def run_batch(self) -> None:
        """Run what was gathered for a cluster, and wait for it."""
        if self.batch is not None and self.batch.jobs:
            code = self.batch.run()
            self.exit_code = self.exit_code or code
            self.paths += self.batch.finished()

    def fail(self, error: Exception) -> None:
        """Say in one line on stderr what went wrong; nothing where nobody reads on."""
        if isinstance(error, BrokenPipeError):
            self.exit_code = console.BROKEN_PIPE
            console.mute()
            return
        users_fault = _is_users(error)
        unfinished = isinstance(error, UnfinishedError)
        if self.exit_code != DEFECT:  # of another job
            self.exit_code = UNFINISHED if unfinished else USERS if users_fault else DEFECT
        if self.tracebacks:
            traceback.print_exception(error)
        defect = "" if isinstance(error, DefectError) else f"{type(error).__name__}, a defect; "
        hint = "" if users_fault else f" ({defect}{TRACEBACKS}=1 shows where)"
        print(f"{'unfinished' if unfinished else 'error'}: {in_words(error)}{hint}", file=sys.stderr)

    def report(self) -> None:
        """Write the tables of what has run, print its table, and name the figures and what was left out."""
        if self.paths:
            print(runner.report(self.paths))
        draw = self.draw
        if self.paths and self.draws and draw is not None:
            results = self.paths[0].parents[3]
            figures = until_settled(results, "tables/*.csv", lambda: draw(results))
            for figure in figures:
                print(figure)
            tracking.send_figures(self.tracker, figures)
        for line in self.gaps:
            print(line)


def main(argv: Sequence[str], resources: Resources | None = None, draw: Draw | None = None) -> int:
    """Run a command line as a shell would; returns the exit code and raises nothing.

    resources: what its runs share, for a caller that starts several. draw: makes the figures of a results folder once a
    grid has run, and returns their paths.
    """
    console.open_streams()
    jobs = Jobs(os.environ.get(TRACEBACKS, "0") not in ("0", ""), resources or Resources(), draw)
    command = hydra.main(version_base="1.3", config_path=str(schema.CONF_DIR), config_name="config")(jobs)
    try:
        overrides.check(argv)
        with as_command_line(argv):
            jobs.start(command)
            jobs.run_batch()
    except KeyboardInterrupt as stop:
        print(f"interrupted; {stop}" if stop.args else interrupts.SAID, file=sys.stderr)
        jobs.exit_code = interrupts.exit_code(stop)
        jobs.draws = False  # whoever stops a process may kill it soon
    except SystemExit as end:  # of --help, or of an unknown flag
        jobs.exit_code = _code_of(end)
    except Exception as error:
        jobs.fail(error)
    try:
        jobs.report()
        sys.stdout.flush()
    except Exception as error:
        jobs.fail(error)
    return jobs.exit_code


def _is_users(error: Exception) -> bool:
    return is_users(error) or isinstance(error, OF_HYDRA)


def _code_of(end: SystemExit) -> int:
    """The exit code that Python would end with, after what it would print."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return DEFECT


def _plan(config: DictConfig, overrides: Sequence[str]) -> Plan:
    """What the chosen grid consists of, after a line that says that it is being read: that takes seconds."""
    print(f"grid={HydraConfig.get().runtime.choices['grid']}: composing its cells", file=sys.stderr, flush=True)
    return read_plan(config.grid, overrides)


def _status(config: DictConfig, overrides: Sequence[str]) -> str:
    """How far a grid is with these overrides."""
    return status.render(status.of_runs(map(runner.Run.of, _plan(config, overrides).cells)))
