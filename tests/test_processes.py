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

from harness import errors
from harness.errors import BugError, UserError, interruptible
from harness.launch import cells, runner
from harness.launch.cli import main
from harness.launch.runner import Run, run
from harness.records import record as records
from harness.resources import Resources
from tests.composed import load
from tests.dying import linger
from tests.runs import outcome

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("full", "h2o", "int4")


@pytest.fixture(scope="module")
def configs():
    return [load([f"method={method}"]) for method in METHODS]


def tables(folder: Path = Path("results")) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("tables/[!.]*")}


def whole_grid(configs) -> list[Path]:
    """A grid as the command line runs and reports it."""
    paths = list(cells.run_cells(configs))
    runner.report(paths)
    return paths


# one process at a time computes a record


def test_a_run_waits_for_another_process_and_takes_its_record(runs, configs):
    todo = Run.of(configs[0])
    begun, ends = threading.Event(), threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
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
    assert run(todo, Resources(), say=say) == todo.path
    first.join()
    assert len(runs.configs) == 1
    assert "another process is at it; waiting" in said[0] and "finished before, skipped" in said[-1]


def test_a_failure_of_another_process_is_not_repeated_by_the_same_grid(runs, configs):
    todo = Run.of(configs[0])

    def fail(config):
        raise UserError("not well")

    runs.measure = fail
    with pytest.raises(UserError, match="^not well"):
        run(todo, Resources())
    failed = todo.path.stat().st_mtime
    with pytest.raises(UserError, match="failed in another process: UserError: not well"):
        run(todo, Resources(), since=failed - 1)
    runner.fail(todo, KeyError("a"))
    with pytest.raises(BugError, match=r"failed in another process: KeyError: 'a' \(a bug\)"):
        run(todo, Resources(), since=failed - 1)
    assert len(runs.configs) == 1
    runs.measure = outcome
    assert run(todo, Resources(), since=failed + 1) == todo.path and len(runs.configs) == 2


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
    assert Counter(config.method_name for config in runs.configs) == Counter(METHODS), "each cell once"
    assert [sorted(paths) for paths in found] == 3 * [sorted(alone)] and tables() == expected


def test_a_file_system_without_locks_is_named(runs, configs, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(whole_grid(configs)) == len(configs)
    assert caplog.text.count("results: its file system has no locks; start one process at a time") == 1


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


def in_a_process(act) -> int:
    """The same, waited for; returns its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(act), 0)[1])


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
"""Of two cells: a record as it begins and as it ends, and the two files of the table."""


@pytest.mark.parametrize("after", [False, True])
def test_a_grid_killed_at_any_write_ends_with_the_same_tables(after, runs, configs):
    pair = configs[:2]
    paths = whole_grid(pair)
    expected = tables()
    for number in range(WRITES):
        for path in paths:
            path.unlink()

        def act(number=number):
            at_write(number, after, lambda: os.kill(os.getpid(), signal.SIGKILL))
            whole_grid(pair)

        assert in_a_process(act) == -signal.SIGKILL
        finished = sum(Run.of(config).is_finished() for config in pair)
        runs.configs.clear()
        assert set(whole_grid(pair)) == set(paths)
        assert len(runs.configs) == len(pair) - finished, "what was finished is kept"
        assert tables() == expected


def test_a_disk_that_is_full_at_any_write_is_one_line_and_loses_nothing(runs, configs, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    pair = configs[:2]
    paths = whole_grid(pair)
    expected = tables()
    for number in range(WRITES):
        for path in paths:
            path.unlink()
        with monkeypatch.context() as patch, pytest.raises(UserError) as refusal:
            patch.setattr(os, "replace", os.replace)  # puts it back
            at_write(number, False, full)
            whole_grid(pair)
        assert "results_dir: " in str(refusal.value) and str(refusal.value).endswith("(No space left on device)")
        assert not list(Path("results").rglob(".*")), "neither a scratch file nor a lock is left"
        assert set(whole_grid(pair)) == set(paths) and tables() == expected


# signals


@pytest.fixture
def handlers():
    before = {each: signal.getsignal(each) for each in errors.STOPS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_tables_and_an_interrupted_record(number, code, runs, handlers, capsys):
    def interrupt(config):
        if config.method_name == "h2o":
            os.kill(os.getpid(), number)
            time.sleep(60)
        return outcome(config)

    runs.measure = interrupt
    assert interruptible(lambda: main(["-m", "method=full,h2o,int4"])) == code
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [errors.INTERRUPTED] and "Full cache" in printed.out
    assert "Full cache" in tables()["perplexity.md"] and "H2O" not in tables()["perplexity.md"]
    statuses = Counter(record["status"] for record in records.read_records("results", "perplexity"))
    assert statuses == {"finished": 1, "interrupted": 1}


# the child of timed cells


def test_a_child_heeds_no_signal_and_ends_with_its_parent(monkeypatch, tmp_path):
    monkeypatch.setattr(cells, "_child", linger)
    receiving, sending = os.pipe()

    def act():
        for pid, blocked in cells.run_apart(["short", "long"], time.time()):
            os.write(sending, f"{pid} {sorted(blocked)}\n".encode())

    parent = forked(act)
    os.close(sending)
    with os.fdopen(receiving) as lines:
        pid, _, blocked = lines.readline().partition(" ")
    assert blocked.strip() == str(sorted(errors.STOPS))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert ends(int(pid))


def ends(pid: int) -> bool:
    """Whether a process that is no child of ours is gone, or a zombie, within half a minute."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_process_that_memory_ended_is_said_so():
    timed = Run.of(load(["experiment=latency"]))
    said = str(cells.why_it_died(timed, -signal.SIGKILL))
    assert said.startswith("its process was killed (exit code -9, SIGKILL, as systems do where memory runs out)")
    assert "lower batch_size" in said
    assert "SIGSEGV)" in str(cells.why_it_died(timed, -signal.SIGSEGV))
