"""The jobs of a command: each a run, a sweep, or what is asked in place of one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import errors
from harness.errors import (
    BUG,
    TRACEBACKS,
    UNFINISHED,
    USERS,
    BugError,
    UnfinishedError,
    UserError,
    is_users,
)
from harness.files import holding
from harness.model.resources import Resources
from harness.results import archive
from harness.run import runner
from harness.run.all_runs import run_all
from harness.run.compose import compose, load
from harness.run.kinds import measurement_of
from harness.run.sweep import is_sweep, read_plan
from harness.settings.kinds import find
from harness.settings.schema import path_text

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""


@dataclass
class Jobs:
    """The jobs of a command: one, or with `-m` several. One that fails does not stop the others.

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

    def run(self, number: int) -> None:
        """Do one job. Raises as its run, or as the first of its runs that failed."""
        given = self.given[number]
        config = compose(given)
        if given.get("export") is not None:
            print(_export(given, config.results_dir))
        elif is_sweep(config):
            self._run_sweep(given)
        else:
            for name in given:
                if name.startswith("sweep."):
                    raise UserError(f"{name}={given[name]}: needs an experiment that is many runs")
            self._run_one(given)

    def _run_sweep(self, given: Mapping[str, Any]) -> None:
        # It takes seconds.
        print(f"experiment={given['experiment']}: composing its runs", file=sys.stderr, flush=True)
        plan = read_plan(given)
        self.draws = True
        self.gaps += plan.gaps()
        for line in plan.gaps():
            print(line)
        for path in run_all(plan.runs, plan.minutes, self.resources):
            self.paths.append(path)

    def _run_one(self, given: Mapping[str, Any]) -> None:
        config = load(given)
        runner.require_devices([config])
        if not find(config.kind).keeps_record:
            with runner.users_faults(config):
                measurement_of(config.kind).run(config, self.resources)
            return
        run = runner.Run.of(config)
        self.paths.append(runner.run(run, self.resources))

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
        unfinished = isinstance(error, UnfinishedError)
        if self.exit_code != BUG:  # of another job
            self.exit_code = UNFINISHED if unfinished else USERS if is_users(error) else BUG
        if os.environ.get(TRACEBACKS, "0") not in ("", "0"):
            traceback.print_exception(error)
        hint = ""
        if not is_users(error):
            bug = "" if isinstance(error, BugError) else f"{type(error).__name__}, a bug; "
            hint = f" ({bug}{TRACEBACKS}=1 shows where)"
        said = errors.one_line(error)
        where = f"{job}: " if job and job not in said else ""
        how = "unfinished" if unfinished else "error"
        print(f"{how}: {errors.printable(where + said)}{hint}", file=sys.stderr)

    def report(self) -> None:
        """Write the tables of what has run, print its table, and name the figures and what was left
        out."""
        if self.paths:
            print(runner.report(self.paths))
            for line in runner.tables_of(self.paths):
                print(line)
        draw = self.draw
        if self.paths and self.draws and draw is not None:
            results = self.paths[0].parents[3]
            with holding(results / "tables", wait=True):  # another process may write them
                figures = draw(results)
            names = [path.name for path in figures if path.suffix == ".png"]
            if names:
                print(f"figures are in {figures[0].parent}: {', '.join(names)}")
        for line in self.gaps:
            print(line)


def _export(given: Mapping[str, Any], results_dir: Any) -> str:
    export = given["export"]
    for name, value in given.items():
        if name not in ("export", "results_dir"):
            allowed = "beside it only results_dir= is allowed"
            raise UserError(f"{name}={value}: export={export} runs nothing; {allowed}")
    return archive.export(Path(path_text(results_dir, "results_dir")), export)
