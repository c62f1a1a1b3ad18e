"""The command line: settings are composed, a run or a sweep is made, and a refusal is one line.

Exit codes: 0; 2 for what a user can put right; 1 for a bug of ours; 75 for a sweep that put runs
off, since their minutes were spent (the same command goes on); 130 after Ctrl-C, 143 after SIGTERM,
which ends a run in the same way; 141 where the reader of the output has left (`| head`).
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from harness import errors
from harness.errors import BUG, TRACEBACKS, UNFINISHED, USERS, UnfinishedError, UserError
from harness.files import holding
from harness.model.resources import Resources
from harness.results.record import jsonable
from harness.run import kinds, launcher, runner
from harness.run.all_runs import run_all
from harness.run.compose import compose, load, resolved
from harness.run.sweep import is_sweep, read_plan
from harness.run.words import Command, command_of
from harness.settings.explain import help_text
from harness.settings.kinds import find
from harness.settings.paths import RESULTS
from harness.settings.schema import path_text

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""


def main(argv: Sequence[str], resources: Resources | None = None, draw: Draw | None = None) -> int:
    """Run a command line as a shell would; returns the exit code.

    resources: shared by its runs, for a caller that starts several. draw: makes the figures of a
    results folder once a sweep has run, and returns their paths.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # any name can be shown, `\\xfc` for `ü`
            stream.reconfigure(errors="backslashreplace")
    jobs = Jobs([], resources or Resources(), draw)
    try:
        with jobs.told():
            command = command_of(argv)
            jobs.given = command.jobs
            _do(jobs, command)
    except KeyboardInterrupt as stop:
        print(errors.INTERRUPTED, file=sys.stderr)
        jobs.exit_code = errors.code_of_stop(stop)
        jobs.draws = False  # whoever stops a process may kill it soon
    with jobs.told():
        jobs.report()
    return jobs.exit_code


def _do(jobs: Jobs, command: Command) -> None:
    given = command.jobs[0]
    if command.prints == "help":
        print(help_text(compose(given).method.name))
    elif command.prints == "settings":
        method = load(given).method
        composed = resolved(compose({**given, "sweep": None}))
        composed["method"] |= {field.name: getattr(method, field.name) for field in fields(method)}
        print(yaml.safe_dump(jsonable(composed), sort_keys=False), end="")
    elif command.of_launcher:
        results_dir = path_text(given.get("results_dir", RESULTS), "results_dir")
        launcher.start(jobs.run_apart, len(jobs.given), command.of_launcher, results_dir)
    else:
        jobs.run_all()


@dataclass
class Jobs:
    """The jobs of a command: one, or with `-m` several, each a run or a sweep. One that
    fails does not stop the others.

    given: the settings of each. resources: shared by them. draw: makes the figures of a results
    folder. paths: records of the finished runs. gaps: what a sweep left out, in lines. exit_code: a
    bug's, else the last failure's, else 0. draws: a sweep ran, so draw its figures.
    """

    given: Sequence[Mapping[str, Any]]
    resources: Resources = field(default_factory=Resources)
    draw: Draw | None = None
    paths: list[Path] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    exit_code: int = 0
    draws: bool = False

    def run_all(self) -> None:
        """Do all jobs here, one after another; the error of each is printed. Raises UserError
        before the first for an unknown name in any."""
        for given in self.given:
            compose(given)
        # They most often ask for the same prompts.
        self.resources.shares_prompts |= len(self.given) > 1
        for number in range(len(self.given)):
            with self.told(self.words_of(number)):
                self.run(number)

    def run_apart(self, config: DictConfig) -> None:
        """Do job number `config.job` in a process that a launcher started, in a copy of this, which
        writes its tables. Raises its error, in a form that can be sent back."""
        with errors.launchers_stop():
            try:
                self.run(config.job)
            except Exception as error:
                self.fail(error, self.words_of(config.job))
                raise errors.sendable(error) from error
            finally:
                self.report()

    def run(self, number: int) -> None:
        """Do one job. Raises as its run, or as the first of its runs that failed."""
        given = self.given[number]
        config = compose(given)
        if is_sweep(config):
            # It takes seconds.
            begins = f"experiment={given['experiment']}: composing its runs"
            print(begins, file=sys.stderr, flush=True)
            plan = read_plan(given)
            self.draws = True
            self.gaps += plan.gaps()
            print(*plan.gaps(), sep="\n", end="\n" if plan.left_out else "")
            for path in run_all(plan.runs, plan.minutes, self.resources):
                self.paths.append(path)
        else:
            for name in given:
                if name.startswith("sweep."):
                    raise UserError(f"{name}={given[name]}: needs an experiment that is many runs")
            self._run_one(given)

    def _run_one(self, given: Mapping[str, Any]) -> None:
        config = load(given)
        runner.require_devices([config])
        if find(config.kind).keeps_record:
            self.paths.append(runner.run(runner.Run.of(config), self.resources))
            return
        with runner.users_faults(config):
            kinds.measure(config, self.resources)

    def words_of(self, number: int) -> str:
        """What tells a job from the others."""
        words = []
        for name, value in self.given[number].items():
            if any(name not in other or other[name] != value for other in self.given):
                words.append(f"{name}={value}")
        return " ".join(words)

    @contextmanager
    def told(self, job: str = "") -> Iterator[None]:
        """An error in the block is said in one line, unless nobody reads on. job: as of `fail`."""
        try:
            yield
        except BrokenPipeError:
            raise
        except SystemExit as end:  # as of a user's task, which is imported before its run begins
            called = f"sys.exit({end.code!r}) was called by a task or a method"
            self.fail(UserError(called), job)
        except Exception as error:
            self.fail(error, job)

    def fail(self, error: BaseException, job: str = "") -> None:
        """Say in one line on stderr what went wrong. job: what tells it from the others."""
        is_users, unfinished = errors.is_users(error), isinstance(error, UnfinishedError)
        if self.exit_code != BUG:  # of another job
            self.exit_code = UNFINISHED if unfinished else USERS if is_users else BUG
        if os.environ.get(TRACEBACKS, "0") not in ("", "0"):
            traceback.print_exception(error)
        said = errors.describe(error)
        where = f"{job}: " if job and job not in said else ""
        how = "unfinished" if unfinished else "error"
        hint = "" if is_users else f"; {TRACEBACKS}=1 shows where"
        print(f"{how}: {errors.printable(where + said)}{hint}", file=sys.stderr)

    def report(self) -> None:
        """Write the tables of what has run, print its table, and name the figures and what was left
        out."""
        if self.paths:
            print(runner.report(self.paths), *runner.tables_of(self.paths), sep="\n")
        if self.paths and self.draws and self.draw is not None:
            results = self.paths[0].parents[3]
            with holding(results / "tables", wait=True):  # another process may write them
                figures = self.draw(results)
            names = [path.name for path in figures if path.suffix == ".png"]
            if names:
                print(f"figures are in {figures[0].parent}: {', '.join(names)}")
        for line in self.gaps:
            print(line)
