"""Child processes that do not what they should; importable by name, as a spawned process needs."""

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from harness.launch import child


def die(runs: Any, since: Any, results: Any) -> None:
    """What `harness.launch.child` runs in its child: end without a word."""
    os._exit(3)


def linger(runs: Any, since: float, results: Connection) -> None:
    """The same, with a run that tells its process and the signals that it heeds not, and goes on for an hour."""

    def stay(*_: Any, **__: Any) -> None:
        results.send((os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        time.sleep(3600)

    child.run = stay
    child._work(runs, since, results)
