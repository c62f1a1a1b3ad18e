"""Ctrl-C and SIGTERM end a command alike: one line, what is finished in the tables, no traceback.

Imports nothing that takes time, so that a command is covered from its first moment on.
"""

import signal
import sys
from collections.abc import Callable
from types import FrameType

SAID = "interrupted; the same command repeats only what is not finished"
STOPS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever Ctrl-C ends, ends."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """As a shell tells a process that a signal ended: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def interruptible(command: Callable[[], int]) -> int:
    """Run the command of this process, with SIGTERM raising `Terminated`; returns its exit code.

    An interruption that the command leaves, as it was importing or writing its last tables, is one line. What is left
    to do after it, any further signal ends at once.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return command()
    except KeyboardInterrupt as stop:
        print(SAID, file=sys.stderr)
        return exit_code(stop)
    finally:
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
