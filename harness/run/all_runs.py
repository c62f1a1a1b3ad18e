"""The runs of a sweep, one after another; those that are timed, in a process of their own.

A run that fails does not stop the others; one that is finished is not run again. Processes that run
the same sweep share its runs: one that another process does is left to it, and waited for in the
end.

Timed runs go in a child process, so that memory and threads start clean. The runs of one shape
share a child, with its model and the prefill of the shape. A run whose process dies has failed,
and those after it run in another, as after a bug. This process ends the child, and where this
process is killed, the child ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from harness.errors import UserError, describe, is_users
from harness.files import HeldError, holding
from harness.model.load import Resources
from harness.run import runner
from harness.run.runner import Run, relabel, require_devices
from harness.scoring.progress import bar
from harness.settings.config import RunConfig

T = TypeVar("T")

STOP_S = 5.0
"""How long a child that has died may take to end."""


def counted(experiments: Iterable[str]) -> str:
    """How many runs there are of each experiment, in words. experiments: of each run."""
    counts = [f"{name} ({number})" for name, number in Counter(experiments).items()]
    return f"runs of {', '.join(counts)}"


def groups(runs: Sequence[T], config_of: Callable[[T], RunConfig]) -> list[list[T]]:
    """The runs that share a process of their own, in the order of the first of each; any other
    run is alone."""
    found: dict[Any, list[T]] = {}
    for index, run in enumerate(runs):
        process = runner.process(config_of(run))
        found.setdefault(index if process is None else process, []).append(run)
    return list(found.values())


def run_all(configs: Sequence[RunConfig], resources: Resources | None = None) -> Iterator[Path]:
    """Do the runs one after another; yields the path of each finished record, those finished
    before first.

    Raises:
        UserError: at the end, where runs failed: how many, and the first error. The others have
            run. At the start, where nothing can run here.
    """
    require_devices(configs)
    resources = resources or Resources()
    resources.shares_prompts |= len(configs) > 1
    todo: list[Run] = []
    for config in bar(configs, desc="looking at runs", unit="run"):
        run = Run.of(config)
        if run.is_finished():
            relabel(run)
            yield run.path
        else:
            todo.append(run)
    for run in todo:
        why = run.why_again()
        if why:
            tqdm.write(why)
    num_finished = len(configs) - len(todo)
    if num_finished:
        tqdm.write(f"{num_finished} of {len(configs)} runs were finished before, skipped")

    failures: list[str] = []
    with bar(total=len(todo), unit="run", dynamic_ncols=True) as progress:
        while todo:
            held: list[Run] = []
            for group in groups(todo, lambda run: run.config):
                outcomes: Iterator[Path | Exception]
                if runner.process(group[0].config) is None:
                    outcomes = (_outcome(run, resources) for run in group)
                else:
                    outcomes = run_apart(group, resources)
                for run in group:
                    progress.set_description(run.title, refresh=sys.stderr.isatty())
                    outcome = next(outcomes)
                    if isinstance(outcome, HeldError):
                        held.append(run)
                        continue
                    progress.update()
                    if isinstance(outcome, Path):
                        yield outcome
                    else:
                        failures.append(f"{run.title}: {describe(outcome)}")
                        tqdm.write(f"failed: {failures[-1]}")
            if held:
                progress.set_description(f"waiting for another process: {held[0].title}")
                with holding(held[0].path.parent, wait=True):
                    pass
            todo = held

    if failures:
        num_failed = f"{len(failures)} of {len(configs)} runs failed"
        raise UserError(f"{num_failed}; the first, {failures[0]}")


def _outcome(run: Run, resources: Resources) -> Path | Exception:
    """A run's record, or its error; a bug shows its traceback."""
    try:
        return runner.run(run, resources, waits=False, tell=str)  # tells nothing
    except Exception as error:
        if not is_users(error) and not isinstance(error, HeldError):
            traceback.print_exc()
        return error


# The child process of timed runs


def run_apart(runs: Sequence[Run], resources: Resources) -> Iterator[Path | Exception]:
    """Do `runs` in a child process; yields the record of each, or why there is none, in their
    order.

    resources: learns what the child's loading took. Raises what ends the loop, KeyboardInterrupt
    among them; the child has ended then.
    """
    todo = list(runs)
    context = multiprocessing.get_context("spawn")
    while todo:
        pipe, its_end = context.Pipe()
        child = context.Process(target=_child, args=(its_end,))
        try:
            child.start()
            its_end.close()
            while todo and child.exitcode is None:
                run = todo.pop(0)
                try:
                    pipe.send(run)
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    child.join(STOP_S)
                    lower = runner.to_lower(run.config)  # its memory may have run out
                    why = f"its process ended (exit code {child.exitcode}); lower {lower}"
                    outcome = UserError(why)
                yield outcome
                if isinstance(outcome, RuntimeError):  # a bug of CUDA spoils its process
                    break
        finally:
            if child.pid is not None:
                child.kill()
                child.join()
            pipe.close()


def _child(pipe: Connection) -> None:
    """Do each run that comes through the pipe, and send back its record or its error, until this is
    killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resources = Resources()
    while True:
        run = pipe.recv()
        outcome = _outcome(run, resources)
        if isinstance(outcome, Exception) and not isinstance(outcome, UserError | HeldError):
            # Of the same words: not every error can be sent to another process.
            is_ours = not is_users(outcome)
            outcome = (RuntimeError if is_ours else UserError)(describe(outcome))
        pipe.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
