"""The command line: Hydra reads it, and a refusal is one line.

Exit codes: 0; 2 for what a user can put right; 1 for a bug of ours; 75 for a grid that put cells off, since their
minutes were spent (the same command goes on); 130 after Ctrl-C, 143 after SIGTERM, which ends a run in the same way;
141 where the reader of the output has left (`| head`).
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, Sweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from harness import errors
from harness.errors import BUG, UNFINISHED, USERS, BugError, UnfinishedError, UserError, is_users, nearest, one_line
from harness.files import until_settled
from harness.launch import grid, runner, status, tracking
from harness.launch.cluster import Batch, own_overrides
from harness.launch.grid import Plan, read_plan
from harness.resources import Resources
from harness.settings import schema
from harness.settings.compose import asks_status, parse, read_override
from harness.settings.experiment import find
from harness.settings.schema import is_group, options, path_text, setting_of
from harness.settings.systems import LABELS

Draw = Callable[[Path], Sequence[Path]]
"""Draws the figures of a results folder; returns their paths."""
TRACEBACKS = "HYDRA_FULL_ERROR"
OF_HYDRA = (HydraException, OmegaConfBaseException)
BROKEN_PIPE = 141
"""Exit code of a command whose reader has left: 128 + SIGPIPE, as a shell has it."""
SWEEPS = {"-m", "--multirun"}
FREE_TEXT = ("prompt", "system_instruction", "question_marker")
"""Settings that are any text, which Hydra's grammar would read as lists, sweeps or numbers."""
SHOWN = 200
"""Letters of a command that a refusal repeats at most."""


@dataclass
class Jobs:
    """Called by Hydra once, or for each job of a sweep (`-m`). A job that fails does not stop the others.

    A launcher with processes of its own calls a copy there: each writes the tables and brings its error back.

    tracebacks: show them. paths: records of the finished runs. gaps: what a grid left out, in lines.
    exit_code: a bug's, else the last failure's, else 0. draws: a grid ran, so draw its figures, which `tracker` gets
    as well. has_copies, is_copy: sent to another process. batch: what is to run on a cluster.
    resources: shared by the jobs. draw: makes the figures of a results folder.
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
        except SystemExit as end:  # a user's task is imported before its run begins
            self.fail(UserError(f"sys.exit({end.code!r}) was called by a task or a method"))
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
            print(_export(config.export, config.results_dir, given))
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
        """From here on, gather what is to run on a cluster. Returns the overrides that are not about it."""
        batch = Batch.of(config, Path(HydraConfig.get().runtime.choices.get("grid") or config.experiment).stem)
        name = batch.cluster.name
        if self.is_copy:
            raise UserError(f"cluster={name}: starts processes itself; leave hydra/launcher out")
        if config.grid is not None and config.grid.share is not None:
            raise UserError(f"grid.share={config.grid.share}: cluster={name} deals the cells itself, cluster.jobs=N")
        if self.batch is not None and self.batch.cluster != batch.cluster:
            raise UserError("cluster: its settings are those of all jobs of a sweep, so none of them can vary")
        self.batch, config.cluster = self.batch or batch, None
        return own_overrides(given)

    def start(self, command: Callable[[], None]) -> None:
        """Hand over to Hydra, which calls this for each job. Whatever it raises by itself is a UserError: it knows
        nothing but what the user typed."""
        try:
            command()
        except Exception as error:
            if self.has_copies or _is_users(error):
                raise
            typed = errors.shortened(shlex.join(sys.argv[1:]), SHOWN)
            raise UserError(f"{typed}: Hydra refuses it ({errors.reason(error)})") from error

    def run_batch(self) -> None:
        """Run what was gathered for a cluster, and wait for it."""
        if self.batch is not None and self.batch.jobs:
            code = self.batch.run()
            self.exit_code = self.exit_code or code
            self.paths += self.batch.finished()

    def fail(self, error: Exception) -> None:
        """Say in one line on stderr what went wrong; nothing where nobody reads on."""
        if isinstance(error, BrokenPipeError):
            self.exit_code = BROKEN_PIPE
            _mute()
            return
        users_fault = _is_users(error)
        unfinished = isinstance(error, UnfinishedError)
        if self.exit_code != BUG:  # of another job
            self.exit_code = UNFINISHED if unfinished else USERS if users_fault else BUG
        if self.tracebacks:
            traceback.print_exception(error)
        bug = "" if isinstance(error, BugError) else f"{type(error).__name__}, a bug; "
        hint = "" if users_fault else f" ({bug}{TRACEBACKS}=1 shows where)"
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

    resources: shared by its runs, for a caller that starts several. draw: makes the figures of a results folder once a
    grid has run, and returns their paths.
    """
    _open_streams()
    jobs = Jobs(os.environ.get(TRACEBACKS, "0") not in ("0", ""), resources or Resources(), draw)
    command = hydra.main(version_base="1.3", config_path=str(schema.CONF_DIR), config_name="config")(jobs)
    try:
        with _as_command_line(read_words(argv)):
            jobs.start(command)
            jobs.run_batch()
    except KeyboardInterrupt as stop:
        print(f"interrupted; {stop}" if stop.args else errors.INTERRUPTED, file=sys.stderr)
        jobs.exit_code = errors.code_of_stop(stop)
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
    return BUG


def _plan(config: DictConfig, overrides: Sequence[str]) -> Plan:
    """The cells of the chosen grid, after a line that says that it is being read: that takes seconds."""
    print(f"grid={HydraConfig.get().runtime.choices['grid']}: composing its cells", file=sys.stderr, flush=True)
    return read_plan(config.grid, overrides)


def _status(config: DictConfig, overrides: Sequence[str]) -> str:
    """How far a grid is with these overrides."""
    return status.render(status.of_runs(map(runner.Run.of, _plan(config, overrides).cells)))


# The words of a command line, looked at before Hydra reads them


def read_words(argv: Sequence[str]) -> list[str]:
    """A command line for Hydra, the settings of `FREE_TEXT` quoted.

    Hydra reads `NAME=VALUE` by a grammar of its own, in which quotes, brackets, `~` and letters beyond ASCII need
    quotes inside those of the shell; takes a list where one file of `conf/` is to be chosen; and a comma for a sweep.
    Raises UserError for the first word that Hydra would refuse, or misread, with what to type instead.
    """
    is_sweep = not SWEEPS.isdisjoint(argv)
    return [_checked(word, is_sweep) if "=" in word and not word.startswith("-") else word for word in argv]


def _checked(word: str, is_sweep: bool) -> str:
    name, _, typed = word.partition("=")
    if name in FREE_TEXT and not is_sweep and typed not in ("", "null") and typed[0] not in "'\"":
        word = f"{name}={QuotedString(typed, Quote.double).with_quotes()}"
    override = _read(word)
    name, value = override.key_or_group, override.value()
    if isinstance(value, ChoiceSweep) and not is_sweep:
        raise UserError(f"{word}: is a sweep, which needs -m{_or_quoted(word)}")
    values = [_text(each) for each in value.list] if isinstance(value, ChoiceSweep) else [value]
    chooses = not override.is_delete() and not isinstance(value, Sweep | Glob)
    if is_group(name) and (chooses or isinstance(value, ChoiceSweep)) and not all(isinstance(v, str) for v in values):
        raise UserError(f"{word}: must be one name; {nearest('', options(name))}")
    if name == "label" and isinstance(value, ChoiceSweep) and not {*values} <= {*LABELS}:
        raise UserError(f"{word}: names the same run several times; a sweep takes systems alone: {', '.join(LABELS)}")
    return word


def _read(word: str) -> Override:
    """A word as Hydra reads it. The UserError says what to type instead."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{word}: is not UTF-8 text") from None
    try:
        return read_override(word)
    except HydraException as error:
        how = _or_quoted(word) or f" ({one_line(error)})"
        raise UserError(f"{word}: Hydra cannot read it{how}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise UserError(f"{errors.shortened(word, SHOWN)}: cannot be read ({errors.reason(error)})") from None


def _or_quoted(word: str) -> str:
    """The word that a shell hands over as this very text, where quotes are what it lacks."""
    name, _, value = word.partition("=")
    quoted = f"{name}={QuotedString(value, Quote.double).with_quotes()}"
    try:
        override = read_override(quoted)
    except HydraException:
        return ""
    return f"; as text: {shlex.quote(quoted)}" if override.value() == value else ""


def _text(value: object) -> object:
    return value.text if isinstance(value, QuotedString) else value


# Hydra as it is called, and its errors


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
    if isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        return in_words(error.__context__)  # what a resolver says
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key not in ("hydra", "_target_")]
        if known and str(cause.key) not in known:
            return f"unknown setting {cause.full_key}: {nearest(cause.key, known)}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return one_line(error)


@contextmanager
def _as_command_line(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands errors on instead of printing them only when asked for full ones."""
    before, sys.argv = sys.argv, ["run.py", *argv]
    setting = os.environ.get(TRACEBACKS)
    os.environ[TRACEBACKS] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if setting is None:
            del os.environ[TRACEBACKS]
        else:
            os.environ[TRACEBACKS] = setting


# The standard streams: closed, a pipe whose reader leaves, or an ASCII terminal


def _open_streams() -> None:
    """Have stdout and stderr take any text: nowhere where they are closed, `\\xfc` where they cannot hold an `ü`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _mute() -> None:
    """From here on what is printed goes nowhere, the rest of a buffer at the end of the process included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            stream.flush()
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


# export=FILE.zip, or a folder in which the archive gets the name of the results folder


def _export(setting: object, results_dir: str, overrides: Sequence[str]) -> str:
    """Write `results_dir` as one archive to share; returns what is in it, in a line for the user.

    Raises UserError for a setting that belongs to a run, nothing to export, or an unwritable place.
    """
    from harness.records import archive

    foreign = [override for override in overrides if setting_of(override) not in ("export", "results_dir")]
    if foreign:
        raise UserError(f"{foreign[0]}: export={setting} runs nothing; beside it only results_dir= is allowed")
    results = Path(path_text(results_dir, "results_dir"))
    if not results.is_dir():
        raise UserError(f"results_dir={results}: no such folder")
    if not isinstance(setting, str) or not setting:
        raise UserError(f"export={setting}: must be a folder, or a file whose name ends with .zip")
    path, real = Path(path_text(setting, "export")), Path(os.path.realpath(results))
    target = path if path.suffix == ".zip" and not path.is_dir() else path / f"{real.name}.zip"
    if Path(os.path.realpath(target)).is_relative_to(real):
        raise UserError(f"export={setting}: lies inside results_dir={results}; choose a place outside of it")
    packed = archive.pack(results, target)
    left_out = f" ({packed.left_out} interrupted or damaged left out)" if packed.left_out else ""
    return (
        f"{packed.path}: {packed.num_records} records{left_out}, {packed.num_files} tables, figures and pages, "
        f"{packed.path.stat().st_size / 2**20:.1f} MiB, sha256 {packed.sha256}"
    )
