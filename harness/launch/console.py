"""The standard streams of a command, whatever they are connected to: nothing, a pipe that closes, an ASCII terminal."""

import contextlib
import io
import os
import sys

BROKEN_PIPE = 141
"""Exit code of a command whose reader has left (`| head`): 128 + SIGPIPE, as a shell has it."""


def open_streams() -> None:
    """Have stdout and stderr take any text: nowhere where they are closed, `\\xfc` where they cannot hold an `ü`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def mute() -> None:
    """From here on what is printed goes nowhere, the rest of a buffer at the end of the process included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            stream.flush()
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
