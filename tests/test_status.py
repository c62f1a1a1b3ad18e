"""`status=true`: what of a grid, or of a results folder, is done, and what is not."""

from contextlib import suppress
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.launch import runner, status
from harness.launch.cli import main
from harness.launch.runner import Run, run
from harness.records import record as records
from harness.resources import Resources
from tests.composed import load
from tests.runs import outcome


def started(runs, method: str, ends) -> Run:
    """A run that ended so."""
    runs.measure = ends
    todo = Run.of(load([f"method={method}"]))
    with suppress(UserError, KeyboardInterrupt):
        run(todo, Resources())
    return todo


def fail(config):
    raise UserError("not well")


def interrupt(config):
    raise KeyboardInterrupt


@pytest.fixture
def some(runs) -> list[Run]:
    """Runs that are done (in 90 s), failed, interrupted and, where its lock is held, running."""
    ends = {"full": outcome, "h2o": fail, "int4": interrupt, "int8": interrupt}
    found = [started(runs, method, end) for method, end in ends.items()]
    records.write_record(found[0].path, records.read_record(found[0].path) | {"seconds": 90.0})
    return found


def row(text: str, name: str = "perplexity") -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return line.split()[1:]


def test_every_state_is_counted_and_named(some):
    missing = Run.of(load(["method=oracle"]))
    with runner.holding(some[3].path, wait=False):
        text = status.render(status.of_runs([*some, missing]))
    assert text.splitlines()[0].split() == ["experiment", *status.STATES, "time", "left"]
    assert row(text)[:-1] == ["1", "1", "1", "1", "1"]
    hours, minutes, seconds = map(int, row(text)[-1].split(":"))
    assert 3 * 90 < 3600 * hours + 60 * minutes + seconds <= 4 * 90, "of four cells, one of which has begun"
    named = text.split("\n\n")[1].splitlines()
    assert named[0].startswith("running for 0:00:") and named[0].endswith(": perplexity INT8")
    assert named[1:] == ["failed: perplexity H2O: UserError: not well", "interrupted: perplexity INT4"]


def test_a_folder_is_shown_without_its_grid(some, capsys):
    assert main(["status=true"]) == 0
    printed = capsys.readouterr()
    assert row(printed.out) == ["1", "0", "1", "2", "0", "0:04:30"] and printed.err == ""
    assert main(["status=true", "results_dir=elsewhere"]) == 0
    assert capsys.readouterr().out == "nothing was started yet\n" and not Path("elsewhere").exists()
