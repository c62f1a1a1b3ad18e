"""Runs in a process of their own, so that memory and threads start clean: the timed cells of one shape.

The child runs one cell after another in this process's order, and shares among them what the process keeps: the
model, and the shape's prefill. Each writes its own record; a path or an error comes back. A cell whose process dies has
failed, and those after it run in another. The child heeds no Ctrl-C and no SIGTERM: this process ends it, and where
this process is killed, the child ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from harness.errors import STOPS, BugError, UserError, is_users, told
from harness.files import HeldError
from harness.launch.runner import Run, fail, run
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import find

STOP_S = 5.0
"""How long a child that has done its work may take to end."""


def process_of(config: RunConfig) -> Any:
    """What cells must have in common to share a process; None for a run that needs none of its own."""
    return find(config.kind).process(config)


def run_apart(runs: Sequence[Run], since: float) -> Iterator[Path | Exception]:
    """Do `runs` in a child process; yields the record of each, or why there is none, in their order.

    since: as `run` takes it. Raises what ends the loop, KeyboardInterrupt among them; the child has ended then.
    """
    done = 0
    while done < len(runs):
        for outcome in _in_one_process(runs[done:], since):
            done += 1
            yield outcome


def _in_one_process(runs: Sequence[Run], since: float) -> Iterator[Path | Exception]:
    """As `run_apart`, up to the cell with which the process dies."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(runs, since, sending), name="shape", daemon=True)
    _start(child)
    sending.close()  # the child's end alone keeps the pipe open: it closes when the child dies
    try:
        for each in runs:
            try:
                yield receiving.recv()
            except EOFError:
                child.join(STOP_S)
                died = _why_it_died(each, child.exitcode)
                fail(each, died)
                yield died
                return
        child.join(STOP_S)
    finally:
        child.kill()
        child.join()
        receiving.close()


def _start(child: SpawnProcess) -> None:
    """Start a process that inherits signals blocked."""
    resource_tracker.ensure_running()  # it would be started with the child, and take the block away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _why_it_died(run: Run, code: int | None) -> UserError:
    lower = " or ".join(find(run.config.kind).lower(run.config))
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", as systems do where memory runs out" if -code == signal.SIGKILL else ""
        return UserError(f"its process was killed (exit code {code}, {name}{memory}); lower {lower}")
    return UserError(f"its process ended (exit code {code}); where memory ran out, lower {lower}")


def _work(runs: Sequence[Run], since: float, results: Connection) -> None:
    """The child: imports everything anew, and has resources of its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resources = Resources()
    for each in runs:
        try:
            results.send(run(each, resources, since=since))
        except HeldError as error:
            results.send(error)
        except Exception as error:
            results.send((UserError if is_users(error) else BugError)(told(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
