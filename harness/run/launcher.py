"""Jobs of a sweep that a launcher of Hydra starts, in processes of this machine or on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.types import Quote, QuotedString

from harness import errors
from harness.errors import TRACEBACKS, BugError, UserError, is_users, one_line
from harness.settings.paths import CONF_DIR, PROGRAM

SHOWN = 400
"""Letters that are shown of what a launcher says."""


def start(
    job: Callable[[Any], None], number: int, of_launcher: Sequence[str], results_dir: str
) -> None:
    """Have a launcher call `job` in a process for each of `number` jobs, with a config whose `job`
    is 0, 1, ..., and wait for them.

    of_launcher: words that choose and set the launcher. Raises the first error of a job, and
    UserError for whatever Hydra refuses.
    """
    folder = QuotedString(str(Path(results_dir, "runs", ".sweep")), Quote.single).with_quotes()
    words = [
        "-m",
        *of_launcher,
        f"++job=range(0,{number})",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
        "hydra/hydra_logging=default",  # says which jobs begin, and where their logs are
    ]
    command = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    before, full = sys.argv, os.environ.get(TRACEBACKS)
    sys.argv = [PROGRAM, *words]
    os.environ[TRACEBACKS] = "1"  # else Hydra prints errors in place of raising them
    try:
        command(job)()
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
