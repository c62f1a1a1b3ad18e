"""The command line: Hydra reads it, and a refusal is one line.

Exit codes: 0; 2 for what a user can put right; 1 for a bug of ours; 75 for a sweep that put runs
off, since their minutes were spent (the same command goes on); 130 after Ctrl-C, 143 after SIGTERM,
which ends a run in the same way; 141 where the reader of the output has left (`| head`).
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from harness import errors
from harness.errors import (
    BUG,
    UNFINISHED,
    USERS,
    BugError,
    UnfinishedError,
    UserError,
    is_users,
    nearest,
    one_line,
)
from harness.files import holding
from harness.model.resources import Resources
from harness.results import archive
from harness.run import runner, status
from harness.run.all_runs import run_all
from harness.run.answers import answer
from harness.run.compose import read_override
from harness.run.hints import meant
from harness.run.parse import asks_status, parse
from harness.run.sweep import is_sweep, read_plan
from harness.run.words import LAUNCHER, SHOWN, read_words, swept_settings
from harness.settings import schema
from harness.settings.kinds import find
from harness.settings.paths import PROGRAM
from harness.settings.schema import as_typed, path_text, setting_of

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""
TRACEBACKS = "HYDRA_FULL_ERROR"
OF_HYDRA = (HydraException, OmegaConfBaseException)
BROKEN_PIPE = 141
"""Exit code of a command whose reader has left: 128 + SIGPIPE, as a shell has it."""
SAID_AFTER_S = 10.0
"""A run that takes so long is told on stderr, when it ends."""


@dataclass
class Jobs:
    """Called by Hydra once, or for each job of a sweep (`-m`). A job that fails does not stop the
    others.

    A launcher with processes of its own, on this machine or a cluster, calls a copy there. Each
    copy writes the tables and brings its error back.

    tracebacks: show them. resources: shared by the jobs. draw: makes the figures of a results
    folder. paths: records of the finished runs. gaps: what a sweep left out, in lines. exit_code: a
    bug's, else the last failure's, else 0. draws: a sweep ran, so draw its figures.
    is_copy: in a process that a launcher started. num_jobs: of the sweep.
    seconds: that each new run took without its model's loading. disk_is_full: a job said so.
    swept: settings that differ between the jobs of a sweep.
    """

    tracebacks: bool
    resources: Resources = field(default_factory=Resources)
    draw: Draw | None = None
    paths: list[Path] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    exit_code: int = 0
    draws: bool = False
    is_copy: bool = False
    num_jobs: int = 1
    seconds: list[float] = field(default_factory=list)
    disk_is_full: bool = False
    swept: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"is_copy": True}

    def __call__(self, config: DictConfig) -> None:
        if not self.is_copy:
            self._try(config)
            return
        with errors.launchers_stop():
            try:
                self._try(config)
            finally:
                self.report()

    def _try(self, config: DictConfig) -> None:
        """Do one job. Its error is printed, and a copy raises it for the first process as well."""
        try:
            self._execute(config)
        except KeyboardInterrupt:
            raise
        except SystemExit as end:  # a user's task is imported before its run begins
            called = UserError(f"sys.exit({end.code!r}) was called by a task or a method")
            self.fail(called, self._swept_words())
        except BaseException as error:
            self.fail(error, self._swept_words())
            if self.is_copy:
                raise error if _is_users(error) else BugError(errors.describe(error)) from error

    def _execute(self, config: DictConfig) -> None:
        typed = HydraConfig.get().overrides.task
        given: Any = OmegaConf.to_container(typed, resolve=False)  # `${...}` as typed
        if config.export is not None:
            for word in given:
                if setting_of(word) not in ("export", "results_dir"):
                    allowed = "beside it only results_dir= is allowed"
                    raise UserError(f"{word}: export={config.export} runs nothing; {allowed}")
            print(archive.export(Path(path_text(config.results_dir, "results_dir")), config.export))
            return
        asked = asks_status(config.status)
        if not is_sweep(config.sweep):
            if asked:
                results_dir = path_text(config.results_dir, "results_dir")
                print(status.render(status.of_folder(results_dir)))
            else:
                self._run_one(config, given)
            return
        # It takes seconds.
        experiment = HydraConfig.get().runtime.choices["experiment"]
        print(f"experiment={experiment}: composing its runs", file=sys.stderr, flush=True)
        plan = read_plan(config.sweep, given)
        if asked:
            print(status.render(status.of_runs(map(runner.Run.of, plan.runs))))
            return
        self.draws = True
        self.gaps += plan.gaps()
        for line in plan.gaps():
            print(line)
        for path in run_all(plan.runs, plan.minutes, self.resources):
            self.paths.append(path)

    def _swept_words(self) -> list[str]:
        """What tells this job of a sweep from the others."""
        given: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        return [as_typed(word) for word in given if setting_of(word) in self.swept]

    def _run_one(self, config: DictConfig, overrides: list[str]) -> None:
        for word in overrides:
            if setting_of(word).startswith("sweep."):
                raise UserError(f"{word}: needs an experiment that is many runs")
        # The other jobs of a sweep most often ask for the same prompts.
        self.resources.shares_prompts |= HydraConfig.get().mode == RunMode.MULTIRUN
        checked = parse(config, overrides)
        runner.require_devices([checked])
        if find(checked.kind).keeps_record:
            run = runner.Run.of(checked)
            is_new = not run.is_finished()
            began, loaded_s = time.perf_counter(), self.resources.load_s
            self.paths.append(runner.run(run, self.resources))
            if is_new:
                load_s = self.resources.load_s - loaded_s
                self._say_how_far(run.title, time.perf_counter() - began, load_s)
        else:
            with runner.users_faults(checked):
                answer(checked, self.resources)

    def _say_how_far(self, title: str, seconds: float, load_s: float) -> None:
        """After a run that took long: how long, and of a sweep when it will end, for which no model
        is loaded or converted again."""
        self.seconds.append(seconds - load_s)
        if seconds < SAID_AFTER_S:
            return
        line = f"{title}: took {timedelta(seconds=round(seconds))}"
        if self.num_jobs > 1:
            number = HydraConfig.get().job.num + 1
            left = (self.num_jobs - number) * statistics.fmean(self.seconds)
            line += f"; {number} of {self.num_jobs}, {timedelta(seconds=round(left))} left"
        print(line, file=sys.stderr, flush=True)

    def fail(self, error: BaseException, job: Sequence[str] = ()) -> None:
        """Say in one line on stderr what went wrong; nothing where nobody reads on. job: the words
        that tell a job of a sweep from the others."""
        if _is_unread(error):
            self.exit_code = BROKEN_PIPE
            _mute()
            return
        self.disk_is_full |= _says_disk_is_full(error)
        users_fault = _is_users(error)
        unfinished = isinstance(error, UnfinishedError)
        if self.exit_code != BUG:  # of another job
            self.exit_code = UNFINISHED if unfinished else USERS if users_fault else BUG
        if self.tracebacks:
            traceback.print_exception(error)
        hint = ""
        if not users_fault:
            bug = "" if isinstance(error, BugError) else f"{type(error).__name__}, a bug; "
            hint = f" ({bug}{TRACEBACKS}=1 shows where)"
        how = "unfinished" if unfinished else "error"
        said = in_words(error)
        words = " ".join(word for word in job if word not in said)
        where = f"{words}: " if words else ""
        try:
            print(f"{how}: {errors.printable(where + said)}{hint}", file=sys.stderr)
        except (OSError, ValueError):  # stderr is closed, or on a full disk
            _mute()

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


def main(argv: Sequence[str], resources: Resources | None = None, draw: Draw | None = None) -> int:
    """Run a command line as a shell would; returns the exit code and raises nothing.

    resources: shared by its runs, for a caller that starts several. draw: makes the figures of a
    results folder once a sweep has run, and returns their paths.
    """
    # They may be closed, or of ASCII: any text can be printed, `\\xfc` for `ü`.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    full = os.environ.get(TRACEBACKS)
    jobs = Jobs(full not in (None, "", "0"), resources or Resources(), draw)
    try:
        words = read_words(argv)
        jobs.num_jobs = _number_of_jobs(words)
        jobs.swept = swept_settings(words)
        _run_hydra(jobs, words)
    except KeyboardInterrupt as stop:
        print(errors.INTERRUPTED, file=sys.stderr)
        jobs.exit_code = errors.code_of_stop(stop)
        jobs.draws = False  # whoever stops a process may kill it soon
    except SystemExit as end:  # of --help, or of an unknown flag
        jobs.exit_code = int(end.code or 0)
    except BaseException as error:
        jobs.fail(error)
    try:
        jobs.report()
        if sys.stdout is not None:  # a method may do anything
            sys.stdout.flush()
    except Exception as error:
        if not (jobs.disk_is_full and _says_disk_is_full(error)):  # once is enough
            jobs.fail(error)
    return jobs.exit_code


def _number_of_jobs(words: Sequence[str]) -> int:
    """The jobs of a sweep."""
    number = 1
    for word in words:
        with contextlib.suppress(HydraException, ValueError, TypeError):  # Hydra refuses it
            given = read_override(word)
            if given.is_sweep_override():
                number *= len(list(given.sweep_iterator()))
    return number


def _run_hydra(jobs: Jobs, argv: Sequence[str]) -> None:
    """Hand a command line to Hydra, which calls `jobs`. Whatever Hydra raises by itself is a
    UserError: it knows nothing but what the user typed."""
    typed = errors.shortened(shlex.join(argv), SHOWN)
    if any(word.startswith(f"{LAUNCHER}=") for word in argv):
        # Hydra says which jobs begin, and where their logs are.
        argv = [*argv, "hydra/hydra_logging=default"]
    conf = str(schema.CONF_DIR)
    command = hydra.main(version_base="1.3", config_path=conf, config_name="config")(jobs)
    before, full = sys.argv, os.environ.get(TRACEBACKS)
    sys.argv = [PROGRAM, *argv]
    os.environ[TRACEBACKS] = "1"  # else Hydra prints errors in place of raising them
    try:
        command()
    except Exception as error:
        if _is_users(error) or isinstance(error, BugError):
            raise
        if type(error).__name__ == "UncompletedJobError":  # submitit's
            said = errors.shortened(one_line(error), 2 * SHOWN)
            raise UserError(f"a job has ended without a result: {said}") from error
        raise UserError(f"{typed}: Hydra refuses it ({errors.reason(error)})") from error
    finally:
        sys.argv = before
        del os.environ[TRACEBACKS]
        if full is not None:
            os.environ[TRACEBACKS] = full


def _is_users(error: BaseException) -> bool:
    return is_users(error) or isinstance(error, OF_HYDRA)


def in_words(error: BaseException) -> str:
    """An error in one line, with the nearest names where a name was unknown."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        missing = ""
        if choice.endswith(".yaml"):
            group, _, choice = error.missing_cfg_file.partition("/")
            missing = f"there is no file {choice}; "
        return f"{group}={choice}: {missing}{nearest(choice, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: must be NAME=VALUE"
    if isinstance(error, InterpolationKeyError) and error.full_key:
        named = re.search("'(.*?)'", str(error))
        if named is not None:
            return f"{error.full_key}=${{{named[1]}}}: there is no setting {named[1]}"
    if isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        return in_words(error.__context__)  # what a resolver says
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key not in ("hydra", "_target_")]
        if known and str(cause.key) not in known:
            hint = meant(str(cause.full_key))
            known_ones = f"type {hint}" if hint else nearest(cause.key, known)
            return f"unknown setting {cause.full_key}: {known_ones}"
    return one_line(error)


def _says_disk_is_full(error: BaseException) -> bool:
    """Asked of the words, since a child process sends no more of an error."""
    said = errors.message(error)
    return any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT))


def _is_unread(error: BaseException) -> bool:
    """True if an error says that stdout or stderr takes no more text: its reader has left, or a
    method closed it."""
    streams = (sys.stdout, sys.stderr)
    if type(error) is ValueError:
        return any(stream is None or stream.closed for stream in streams)
    is_about_files = isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EBADF)
    return is_about_files and not all(map(_is_open, streams))


def _is_open(stream: Any) -> bool:
    """True if there is something behind a stream that takes what is written."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return not poll.poll(0)  # which tells of errors alone
    except io.UnsupportedOperation:
        return True  # no file behind it, as in a notebook
    except (OSError, ValueError, AttributeError):
        return False


def _mute() -> None:
    """From here on what is printed goes nowhere, the rest of a buffer at the end of the process
    included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file behind it
            stream.flush()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
