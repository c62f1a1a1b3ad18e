"""Jobs of a sweep that a launcher of Hydra starts: in processes of this machine, or on a cluster.

Each job runs in a copy of `Jobs`, which writes its tables and brings its error back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from harness import errors
from harness.errors import TRACEBACKS, BugError, UserError, is_users, one_line
from harness.run.jobs import Jobs
from harness.settings.paths import CONF_DIR, PROGRAM, RESULTS
from harness.settings.schema import path_text

SHOWN = 400
"""Letters that are shown of what a launcher says."""


@dataclass
class Job:
    """Called with the number of a job, in a process that a launcher started."""

    jobs: Jobs

    def __call__(self, config: DictConfig) -> None:
        with errors.launchers_stop():
            try:
                self.jobs.run(config.job)
            except Exception as error:
                self.jobs.fail(error, self.jobs.words_of(config.job))
                raise error if is_users(error) else BugError(errors.describe(error)) from error
            finally:
                self.jobs.report()


def run(jobs: Jobs, of_launcher: Sequence[str]) -> None:
    """Have a launcher start all jobs, and wait for them. Raises the first error of a job, and
    UserError for whatever Hydra refuses."""
    results_dir = path_text(jobs.given[0].get("results_dir", RESULTS), "results_dir")
    folder = QuotedString(str(Path(results_dir, "runs", ".sweep")), Quote.single).with_quotes()
    words = [
        "-m",
        *of_launcher,
        f"++job=range(0,{len(jobs.given)})",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
        "hydra/hydra_logging=default",  # says which jobs begin, and where their logs are
    ]
    command = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    before, full = sys.argv, os.environ.get(TRACEBACKS)
    sys.argv = [PROGRAM, *words]
    os.environ[TRACEBACKS] = "1"  # else Hydra prints errors in place of raising them
    try:
        command(Job(jobs))()
    except Exception as error:
        if is_users(error) or isinstance(error, BugError):
            raise
        said = errors.shortened(one_line(error), SHOWN)
        if type(error).__name__ == "UncompletedJobError":  # submitit's
            raise UserError(f"a job has ended without a result: {said}") from error
        raise UserError(f"{' '.join(of_launcher)}: Hydra refuses it ({said})") from error
    finally:
        sys.argv = before
        del os.environ[TRACEBACKS]
        if full is not None:
            os.environ[TRACEBACKS] = full
