"""What a child process does in place of runs; importable by name, as a spawned process needs."""

import os
import time
from typing import Any

from harness.run import all_runs

child = all_runs._child


def die(pipe: Any) -> None:
    """End without a word."""
    os._exit(3)


def linger(pipe: Any) -> None:
    """Tell of each run the process; with one that is long, go on for an hour."""

    def run(todo: Any, resources: Any, **_: Any) -> Any:
        if todo == "long":
            time.sleep(3600)
        return os.getpid()

    all_runs.runner.run = run
    child(pipe)
