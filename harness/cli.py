"""The command line: Hydra in front, one line for whatever the user got wrong behind.

Exit codes: 0; 2 for what a user can put right; 1 for a defect of ours; 130 after Ctrl-C.
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness import grid, runner
from harness.config import CONF_DIR, parse
from harness.errors import UserError, nearest

TRACEBACKS = "HYDRA_FULL_ERROR"


@dataclass
class Jobs:
    """What Hydra calls, once, or for each job of a sweep (`-m`); a job that fails does not stop the others.

    tracebacks: show them. paths: records of the finished runs. exit_code: the last failure's, else 0.
    draws: a grid ran, so draw its figures. process: where failures and tables are gathered.
    """

    tracebacks: bool
    paths: list[Path] = field(default_factory=list)
    exit_code: int = 0
    draws: bool = False
    process: int = field(default_factory=os.getpid)

    def __call__(self, config: DictConfig) -> None:
        try:
            self._execute(config)
        except Exception as error:
            if os.getpid() != self.process:
                raise  # a launcher with processes of its own brings it back
            self.fail(error)
        if os.getpid() != self.process:
            self.report()

    def _execute(self, config: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        if "grid" not in config:
            checked = parse(config, overrides)
            if checked.kind == "generate":
                runner.generate(checked)
            else:
                self.paths.append(runner.run(checked))
            return
        self.draws = True
        for path in grid.run_cells(grid.cells(config.grid, overrides)):
            self.paths.append(path)

    def fail(self, error: Exception) -> None:
        """Say in one line on stderr what went wrong."""
        users_fault = isinstance(error, UserError | HydraException | OmegaConfBaseException | OSError)
        self.exit_code = 2 if users_fault else 1
        if self.tracebacks:
            traceback.print_exception(error)
        hint = "" if users_fault else f" ({type(error).__name__}, a defect; {TRACEBACKS}=1 shows where)"
        print(f"error: {one_line(error)}{hint}", file=sys.stderr)

    def report(self) -> None:
        """Write the tables of what has run, print its table, and name the figures."""
        if not self.paths:
            return
        print(runner.report(self.paths))
        if self.draws:
            from plots import main as draw

            for figure in draw(self.paths[0].parents[3]):
                print(figure)


def main(argv: Sequence[str]) -> int:
    """Run a command line as a shell would; returns the exit code and raises nothing."""
    jobs = Jobs(tracebacks=os.environ.get(TRACEBACKS, "0") not in ("0", ""))
    command = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(jobs)
    try:
        with _as_command_line(argv):
            command()
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        jobs.exit_code = 130
    except SystemExit as end:  # of --help, or of an unknown flag
        jobs.exit_code = end.code if isinstance(end.code, int) else 0
    except Exception as error:
        jobs.fail(error)
    try:
        jobs.report()
    except Exception as error:
        jobs.fail(error)
    return jobs.exit_code


def one_line(error: BaseException) -> str:
    """What went wrong, with the nearest names where a name was unknown."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: {nearest(choice, error.options)}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key not in ("hydra", "_target_")]
        if known and str(cause.key) not in known:
            return f"unknown setting {cause.full_key}: {nearest(cause.key, known)}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


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
