"""Processes that share a results folder, that are interrupted, killed, or find the disk full: nothing finished is lost,
nothing is computed twice, and the same command ends with the same tables."""

import errno
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.model.load import Resources
from harness.run import all_runs, runner
from harness.run.compose import load
from harness.run.runner import Run, run
from tests.dying import linger
from tests.runs import outcome

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("full", "h2o", "int4")


@pytest.fixture(scope="module")
def configs():
    return [load([f"method={method}"]) for method in METHODS]


def tables() -> dict[str, str]:
    return {path.name: path.read_text() for path in Path("outputs").glob("tables/[!.]*")}


def whole_grid(configs) -> list[Path]:
    """A sweep as the command line runs and reports it."""
    paths = list(all_runs.run_all(configs))
    runner.report(paths)
    return paths


# one process at a time computes a record


def test_a_run_waits_for_another_process_and_takes_its_record(runs, configs):
    todo = Run.of(configs[0])
    begun, ends = threading.Event(), threading.Event()
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        ends.set()

    def slow(config):
        begun.set()
        assert ends.wait(60)
        return outcome(config)

    runs.measure = slow
    first = threading.Thread(target=run, args=(todo, Resources()))
    first.start()
    assert begun.wait(60)
    assert run(todo, Resources(), tell=tell) == todo.path
    first.join()
    assert len(runs.configs) == 1
    assert "waiting, if another process is at it" in said[0] and "finished before, skipped" in said[-1]


def test_processes_on_one_grid_end_with_the_tables_of_one(runs, configs):
    alone = whole_grid(configs)
    expected = tables()
    for path in alone:
        path.unlink()
    runs.configs.clear()
    runs.measure = lambda config: time.sleep(0.02) or outcome(config)
    found: list[list[Path]] = []
    together = [threading.Thread(target=lambda: found.append(whole_grid(configs))) for _ in range(3)]
    for each in together:
        each.start()
    for each in together:
        each.join()
    assert Counter(config.method_name for config in runs.configs) == Counter(METHODS), "each run once"
    assert [sorted(paths) for paths in found] == 3 * [sorted(alone)] and tables() == expected


# killed, or out of disk, at every write


def forked(act) -> int:
    """What `act` does to this process, begun in a copy of it; returns its number."""
    copy = os.fork()
    if not copy:
        try:
            act()
        finally:
            os._exit(0)
    return copy


def at_write(number: int, after: bool, happens) -> None:
    """Let `happens` come before or after the `number`-th file is put in its place."""
    replace, count = os.replace, iter(range(1000))

    def counting(*paths):
        strikes = next(count) == number
        if strikes and not after:
            happens()
        replace(*paths)
        if strikes:
            happens()

    os.replace = counting


WRITES = 2 * 2 + 2
"""Of two runs: of each a record as it begins and as it ends, and the two files of the table."""


@pytest.mark.parametrize("strike", ["full disk", "kill before", "kill after"])
def test_a_grid_that_ends_at_any_write_goes_on_to_the_same_tables(strike, runs, configs, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    def killed(number):
        at_write(number, strike == "kill after", lambda: os.kill(os.getpid(), signal.SIGKILL))
        whole_grid(pair)

    pair = configs[:2]
    paths = whole_grid(pair)
    expected = tables()
    for number in range(WRITES):
        for path in paths:
            path.unlink()
        if strike == "full disk":
            with monkeypatch.context() as patch, pytest.raises(UserError) as refusal:
                patch.setattr(os, "replace", os.replace)  # puts it back
                at_write(number, False, full)
                whole_grid(pair)
            said = str(refusal.value)
            assert "results_dir: " in said and said.endswith("(No space left on device)")
            assert not list(Path("outputs").rglob(".*")), "neither a scratch file nor a lock is left"
        else:
            copy = forked(lambda number=number: killed(number))
            assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == -signal.SIGKILL
        finished = sum(Run.of(config).is_finished() for config in pair)
        runs.configs.clear()
        assert set(whole_grid(pair)) == set(paths) and tables() == expected
        assert len(runs.configs) == len(pair) - finished, "what was finished is kept"


# the child of timed runs


def test_a_child_ends_with_its_parent(monkeypatch, tmp_path):
    monkeypatch.setattr(all_runs, "_child", linger)
    receiving, sending = os.pipe()

    def act():
        for pid in all_runs.run_apart(["short", "long"], Resources()):
            os.write(sending, f"{pid}\n".encode())

    parent = forked(act)
    os.close(sending)
    with os.fdopen(receiving) as lines:
        pid = lines.readline().strip()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    status = Path(f"/proc/{pid}/stat")
    until = time.monotonic() + 30
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it goes on without its parent"
        time.sleep(0.1)
