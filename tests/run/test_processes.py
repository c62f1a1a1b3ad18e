"""Processes that share a results folder, that are interrupted, killed, or find the disk full: nothing finished is lost,
nothing is computed twice, and the same command ends with the same tables."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from harness import errors
from harness.errors import UserError
from harness.model.resources import Resources
from harness.model.tiny import tiny_model
from harness.results import record as records
from harness.run import all_runs, runner
from harness.run.compose import load
from harness.run.runner import Run, run
from tests.dying import linger
from tests.runs import letters, outcome
from tests.tokens import byte_tokenizer

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


def test_a_file_system_without_locks_is_named(runs, configs, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(whole_grid(configs)) == len(configs)
    assert caplog.text.count("outputs: its file system has no locks; start one process at a time") == 1


ONCE = """from dataclasses import dataclass
import os, signal
from pathlib import Path
from methods.prompt_evicting import PromptEvicting, PromptEvictingState

class State(PromptEvictingState):
    def prompt_score(self, layer, query, key, value, rows):
        if not Path("began").exists():
            Path("began").touch()
            os.kill(os.getpid(), signal.SIGUSR2)
        return value.float().norm(dim=-1)

@dataclass(frozen=True)
class Once(PromptEvicting):
    budget: float = 0.5
    title = "Once"
    state = State
"""
"""Sends submitit's signal that the job's time is over, in the first job alone."""


def test_a_job_whose_time_is_over_begins_again(tmp_path, monkeypatch):
    """Of a sweep whose jobs a launcher of Hydra starts, beside one that is refused, which it does not notice."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "once.py").write_text(ONCE)
    tiny_model("llama", num_key_value_heads=2).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = letters(tmp_path, monkeypatch, 1000)
    words = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "method=./once.py"]
    words += ["method.dense_layers=1,-1", f"model.path={tmp_path / 'model'}", "seq_len=200", "prefill_len=100"]
    words += ["num_windows=1", f"corpus.path={text}", f"calibration.path={text}", "calibration.num_tokens=80"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = "".join(log.read_text() for log in tmp_path.glob("outputs/runs/.sweep/.submitit/*/*_log.out"))
    assert said.count("Requeued job") == 1 and "perplexity Once: interrupted before, run again" in said
    found = records.read_records(tmp_path / "outputs", "perplexity")
    statuses = {record["config"]["method"]["dense_layers"]: record["status"] for record in found}
    assert statuses == {1: "finished"}
    assert done.returncode == 2 and "must be an integer >= 0" in done.stderr.splitlines()[-1], done.stderr


def test_a_launchers_signal_ends_a_run_before_its_handler_is_called():
    events = []

    def again(number, frame):
        events.append("handler")
        sys.exit(144)

    def over(number, frame):
        raise RuntimeError("too many times")

    before = signal.signal(signal.SIGUSR2, again)
    try:
        with pytest.raises(SystemExit), errors.launchers_stop():
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
            except errors.Terminated:
                events.append("run ended")
                raise
        assert events == ["run ended", "handler"] and signal.getsignal(signal.SIGUSR2) is again
        signal.signal(signal.SIGUSR2, over)
        said = r"job's time is over \(too many times\); the same command"
        with pytest.raises(errors.UnfinishedError, match=said), errors.launchers_stop():
            os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(errors.Terminated), errors.launchers_stop():
            raise errors.Terminated  # of SIGTERM
    finally:
        signal.signal(signal.SIGUSR2, before)


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


def test_a_child_heeds_no_signal_and_ends_with_its_parent(monkeypatch, tmp_path):
    monkeypatch.setattr(all_runs, "_child", linger)
    receiving, sending = os.pipe()

    def act():
        for pid, blocked in all_runs.run_apart(["short", "long"], Resources()):
            os.write(sending, f"{pid} {sorted(blocked)}\n".encode())

    parent = forked(act)
    os.close(sending)
    with os.fdopen(receiving) as lines:
        pid, _, blocked = lines.readline().partition(" ")
    assert blocked.strip() == str(sorted(errors.STOPS))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    status = Path(f"/proc/{pid}/stat")
    until = time.monotonic() + 30
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it goes on without its parent"
        time.sleep(0.1)


def test_a_process_that_memory_ended_is_said_so():
    timed = Run.of(load(["experiment=latency"]))
    said = str(all_runs.why_it_died(timed, -signal.SIGKILL))
    assert said.startswith("its process was killed (exit code -9, SIGKILL, as systems do where memory runs out)")
    assert "lower batch_size" in said
    assert "SIGSEGV)" in str(all_runs.why_it_died(timed, -signal.SIGSEGV))
