"""The command line: settings are composed, a run or a sweep is made, and a refusal is one line.

Exit codes: 0; 2 for what a user can put right; 1 for a bug of ours; 75 for a sweep that put runs
off, since their minutes were spent (the same command goes on); 130 after Ctrl-C, 143 after SIGTERM,
which ends a run in the same way; 141 where the reader of the output has left (`| head`).
HYDRA_FULL_ERROR=1 shows tracebacks.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import fields

import yaml

from harness import errors
from harness.model.resources import Resources
from harness.results.record import jsonable
from harness.run import launcher
from harness.run.compose import compose, load, resolved
from harness.run.jobs import Draw, Jobs
from harness.run.words import Command, command_of
from harness.settings.explain import help_text


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
        launcher.run(jobs, command.of_launcher)
    else:
        jobs.run_all()
