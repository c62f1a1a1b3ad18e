"""The runs of a sweep, one after another; those that are timed, in a process of their own.

A run that fails does not stop the others; one that is finished is not run again; one whose
experiment has used up its minutes is put off to the next start. Processes that run the same sweep
share its runs: one that another process does is left to it, and waited for in the end.

Timed runs go in a child process, so that memory and threads start clean. The runs of one shape
share a child, with its model and the prefill of the shape. A run whose process dies has failed,
and those after it run in another, as after a bug. The child ignores Ctrl-C and SIGTERM: this
process ends it, and where this process is killed, the child ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from harness.errors import STOPS, BugError, UnfinishedError, UserError, describe, is_users, sendable
from harness.files import HeldError, holding
from harness.model.resources import Resources
from harness.run import kinds, runner
from harness.run.runner import Run, fail, is_held, relabel, require_devices
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
        process = kinds.process(config_of(run))
        found.setdefault(index if process is None else process, []).append(run)
    return list(found.values())


def run_all(
    configs: Sequence[RunConfig],
    minutes: Mapping[str, float | None] | None = None,
    resources: Resources | None = None,
) -> Iterator[Path]:
    """Do the runs one after another; yields the path of each finished record, those finished
    before first.

    Args:
        configs: the runs.
        minutes: by experiment, after which no further run of it begins.
        resources: what the runs of this process share.

    Raises:
        UserError: at the end, where runs failed: how many, and the first error. The others have
            run. At the start, where nothing can run here.
        BugError: likewise at the end, where a bug was among them.
        UnfinishedError: at the end, where none failed and some were put off; each is named.
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
        is_elsewhere = is_held(run.path)
        why = f"{run.title}: another process is at it" if is_elsewhere else run.why_again()
        if why:
            tqdm.write(why)
    num_finished = len(configs) - len(todo)
    if num_finished:
        tqdm.write(f"{num_finished} of {len(configs)} runs were finished before, skipped")

    spent: defaultdict[str, float] = defaultdict(float)  # seconds by experiment
    failures: list[tuple[str, Exception]] = []
    put_off: list[Run] = []
    with bar(total=len(todo), unit="run", dynamic_ncols=True) as progress:
        while todo:
            held: list[Run] = []
            for group in groups(todo, lambda run: run.config):
                begun = []
                for run in group:
                    experiment = run.config.experiment
                    limit = (minutes or {}).get(experiment)
                    has_time = limit is None or spent[experiment] < 60 * limit
                    if has_time or run.is_finished():
                        begun.append(run)
                    else:
                        put_off.append(run)
                        progress.update()
                outcomes = _outcomes(begun, resources)
                for run in begun:
                    progress.set_description(run.title)
                    start = time.perf_counter()
                    outcome = next(outcomes)
                    spent[run.config.experiment] += time.perf_counter() - start
                    if isinstance(outcome, HeldError):
                        held.append(run)
                        continue
                    progress.update()
                    if isinstance(outcome, Path):
                        yield outcome
                    else:
                        failure = f"{run.title}: {describe(outcome)}"
                        failures.append((failure, outcome))
                        tqdm.write(f"failed: {failure}")
            if held:
                progress.set_description(f"waiting for another process: {held[0].title}")
                with holding(held[0].path.parent, wait=True):
                    pass
            todo = held

    for run in put_off:
        tqdm.write(f"put off: {run.title}")
    if len(failures) > 1:
        for failure, _ in failures:
            tqdm.write(f"failed: {failure}")
    later = counted(run.config.experiment for run in put_off)
    later = f"put off, as their minutes are spent: {later}; the same command goes on"
    if failures:
        raise _first_of(failures, len(configs), f"; {later}" if put_off else "")
    if put_off:
        raise UnfinishedError(later)


def _first_of(failures: Sequence[tuple[str, Exception]], num_runs: int, more: str) -> Exception:
    """The error of a sweep with failed runs: it says the first bug, else the first failure."""
    bugs = [failure for failure in failures if not is_users(failure[1])]
    failure, cause = (bugs or failures)[0]
    which = "first bug" if bugs else "first"
    line = f"{len(failures)} of {num_runs} runs failed; the {which}, {failure}{more}"
    error = BugError(line) if bugs else UserError(line)
    error.__cause__ = cause
    return error


def _outcomes(group: Sequence[Run], resources: Resources) -> Iterator[Path | Exception]:
    """The record of each run of a group, or why there is none."""
    if group and kinds.process(group[0].config) is not None:
        yield from run_apart(group, resources)
    else:
        yield from (_outcome(run, resources) for run in group)


def _outcome(run: Run, resources: Resources) -> Path | Exception:
    try:
        return runner.run(run, resources, waits=False)
    except Exception as error:
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
            # Started with the child, the resource tracker would take the block away.
            resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # which the child inherits
            try:
                child.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its_end.close()
            while todo and child.exitcode is None:
                run = todo.pop(0)
                try:
                    pipe.send(run)
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    child.join(STOP_S)
                    outcome = why_it_died(run, child.exitcode)
                    fail(run, outcome)
                yield outcome
                if isinstance(outcome, BugError):  # such as one of CUDA, which spoils its process
                    break
        finally:
            if child.pid is not None:
                child.kill()
                child.join()
            pipe.close()


def why_it_died(run: Run, code: int | None) -> UserError:
    """The error of a run whose process ended with an exit code, negative for a signal."""
    lower = kinds.to_lower(run.config)
    if code is None or code >= 0:
        out = f"where memory ran out, lower {lower}"
        return UserError(f"its process ended (exit code {code}); {out}")
    name = signal.Signals(-code).name
    memory = ", as systems do where memory runs out" if -code == signal.SIGKILL else ""
    return UserError(f"its process was killed (exit code {code}, {name}{memory}); lower {lower}")


def _child(pipe: Connection) -> None:
    """Do each run that comes through the pipe, and send back its record or its error, until this is
    killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resources = Resources()
    while True:
        run = pipe.recv()
        outcome = _outcome(run, resources)
        if isinstance(outcome, Exception) and not isinstance(outcome, HeldError):
            outcome = sendable(outcome)
        pipe.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
