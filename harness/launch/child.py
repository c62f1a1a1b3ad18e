"""Runs in a process of their own, so that memory and threads start clean: the timed cells of one shape.

The child runs one cell after another in this process's order, and shares among them what the process keeps: the
model, and the shape's prefill. Each writes its own record; a path or an error comes back.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.launch.runner import Run, run
from harness.resources import Resources
from harness.settings.experiment import find
from harness.settings.run import RunConfig

STOP_S = 5.0
"""How long an interrupted child may take to end its record."""


def process_of(config: RunConfig) -> Any:
    """What cells must have in common to share a process; None for a run that needs none of its own."""
    return find(config.kind).process(config)


def run_apart(runs: Sequence[Run]) -> Iterator[Path | Exception]:
    """Do `runs` in one child process; yields the record of each, or why there is none, in their order.

    Raises what ends the loop, KeyboardInterrupt among them; the child has ended then.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(runs, sending), name="shape")
    child.start()
    sending.close()  # the child's end alone keeps the pipe open: it closes when the child dies
    try:
        for done in range(len(runs)):
            try:
                yield receiving.recv()
            except EOFError:
                child.join(STOP_S)
                lower = " or ".join(find(runs[0].config.kind).lower(runs[0].config))
                died = UserError(f"its process ended (exit code {child.exitcode}); where memory ran out, lower {lower}")
                yield from [died] * (len(runs) - done)
                return
    finally:
        child.join(STOP_S)
        if child.is_alive():
            child.terminate()
            child.join()
        receiving.close()


def _work(runs: Sequence[Run], results: Connection) -> None:
    """The child: imports everything anew, and has resources of its own."""
    resources = Resources()
    for each in runs:
        try:
            results.send(run(each, resources, _silent))
        except KeyboardInterrupt:
            return  # the record says so
        except Exception as error:
            said = str(error) or type(error).__name__
            results.send(UserError(said) if isinstance(error, UserError) else RuntimeError(said))


def _silent(line: str) -> None:
    """The parent says enough."""
