"""Runs in a child process that do not what they should; importable by name, as a spawned process needs."""

import os
import signal
import time
from typing import Any


def die(run: Any, since: float) -> None:
    """End without a word."""
    os._exit(3)


def linger(run: Any, since: float) -> Any:
    """Tell the process and the signals that it ignores; with a run that is one, go on for an hour."""
    if run == "long":
        time.sleep(3600)
    return os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
