"""Timed cells run in a child process, so that memory and threads start clean.

The cells of one shape share a child, with its model and the prefill of the shape. Each writes its own record. A cell
whose process dies has failed, and those after it run in another. The child ignores Ctrl-C and SIGTERM: this process
ends it, and where this process is killed, the child ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.errors import STOPS, BugError, UserError, is_users, told
from harness.files import HeldError
from harness.launch.runner import Run, fail, run
from harness.resources import Resources
from harness.settings.config import RunConfig
from harness.settings.experiment import find

STOP_S = 5.0
"""How long a child that has died may take to end."""


def process_of(config: RunConfig) -> Any:
    """What cells must have in common to share a process; None for a run that needs none of its own."""
    return find(config.kind).process(config)


def run_apart(runs: Sequence[Run], since: float) -> Iterator[Path | Exception]:
    """Do `runs` in a child process; yields the record of each, or why there is none, in their order.

    since: as `run` takes it. Raises what ends the loop, KeyboardInterrupt among them; the child has ended then.
    """
    todo = list(runs)
    while todo:
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
        children: list[BaseProcess] = []
        try:
            while todo:
                each = todo.pop(0)
                work = _submit(pool, each, since)
                children = children or [*set(multiprocessing.active_children()) - others]
                try:
                    outcome = work.result()
                except BrokenProcessPool:
                    children[0].join(STOP_S)
                    outcome = _why_it_died(each, children[0].exitcode)
                    fail(each, outcome)
                    yield outcome
                    break
                yield outcome
        finally:
            for child in children:
                child.kill()
            pool.shutdown()


def _submit(pool: ProcessPoolExecutor, each: Run, since: float) -> Future[Path | Exception]:
    """Hand a run to the child, which inherits signals blocked where this starts it."""
    resource_tracker.ensure_running()  # it would be started with the child, and take the block away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return pool.submit(_work, each, since)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _why_it_died(run: Run, code: int | None) -> UserError:
    lower = " or ".join(find(run.config.kind).memory_hints(run.config))
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", as systems do where memory runs out" if -code == signal.SIGKILL else ""
        return UserError(f"its process was killed (exit code {code}, {name}{memory}); lower {lower}")
    return UserError(f"its process ended (exit code {code}); where memory ran out, lower {lower}")


@cache
def _resources() -> Resources:
    """The child's own."""
    return Resources()


def _work(each: Run, since: float) -> Path | Exception:
    """One run in the child."""
    try:
        return run(each, _resources(), since=since)
    except HeldError as error:
        return error
    except Exception as error:
        return (UserError if is_users(error) else BugError)(told(error))


def _end_with_parent() -> None:
    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
