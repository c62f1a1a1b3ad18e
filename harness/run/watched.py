"""A command that runs code of the user's own is watched by a process that does nothing else.

A method can end the process that runs it: by `os._exit(0)`, by a segmentation fault in an
extension. Nothing in that process can say so any more, and its exit code may be 0. So such a
command runs in a child. The child tells its parent when it is at its end. A child that ends without
that word was ended by what it ran: the parent says so in one line, and the exit code is never 0.
The run has no result then. `status=true` shows it as interrupted, and it is repeated.

The child is forked before anything is loaded, in the same process group: Ctrl-C reaches it as
before. A signal that is sent to the parent alone is handed on. If the parent is killed, the child
ends as well.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import STOPS, USERS

OWN_CODE = ("method", "codec", "experiment", "include_path")
"""Settings that name code of the user's own, or an experiment that may name such code."""
MARKS = ("/", ".", ":")
"""In the value of a setting, what no name of this project's has."""
ENDED = b"ended"
PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(str(PROJECT / name) for name in ("harness", "methods", "plots", "run.py"))
NOT_OWN = (sys.prefix, sys.base_prefix, *PACKAGES)
"""Where code lies that is not the user's."""


def runs_own_code(words: Sequence[str]) -> bool:
    """True if a command line names a file or module of the user's own."""
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        if name in OWN_CODE and any(mark in value for mark in MARKS):
            return True
    return False


def watched(command: Callable[[], int], words: Sequence[str]) -> int:
    """Run the command of this process, in a child if its `words` name code of the user's own;
    returns the exit code.

    In the child it returns too, so whatever follows runs in both processes. Prints one line if the
    child ends without a word; the code is then `USERS`, or that of the signal which ended it, as a
    shell reports it.
    """
    if not runs_own_code(words):
        return command()
    report, reports = os.pipe()
    parents_life, held_by_parent = os.pipe()
    waited_for = {*STOPS, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # None is lost between the fork and the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if child == 0:
        os.close(report)
        os.close(held_by_parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        threading.Thread(target=_end_with_parent, args=(parents_life,), daemon=True).start()
        faulthandler.enable(file=reports, all_threads=False)
        code = command()
        os.write(reports, ENDED)
        return code
    os.close(reports)
    os.close(parents_life)
    code = _wait(child, waited_for)
    written = _read_all(report)
    if written.endswith(ENDED):
        return code if code >= 0 else 128 - code
    if code >= 0:
        how = f"exit code {code}"
    else:
        how = signal.Signals(-code).name
        if code == -signal.SIGKILL:
            how += ", as systems do where memory runs out"
    line = _own_line(written.decode(errors="replace"))
    ended = f"the process ended in the middle of a run ({how}), which has no result"
    print(f"error: {line}{ended}", file=sys.stderr)
    return USERS if code >= 0 else 128 - code


def _wait(child: int, waited_for: set[signal.Signals]) -> int:
    """Wait until the child ends, and hand signals on; returns its exit code, negative for a
    signal."""
    while True:
        info = signal.sigwaitinfo(waited_for)
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:
            # Sent by a process. Ctrl-C of a terminal reaches the child by itself.
            os.kill(child, info.si_signo)


def _read_all(pipe: int) -> bytes:
    """What was written into a pipe so far. A process of the method's own may hold the other end
    open."""
    os.set_blocking(pipe, False)
    parts = []
    try:
        while part := os.read(pipe, 65536):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def _own_line(report: str) -> str:
    """`file:line: ` of the innermost line of the user's own code in what `faulthandler` wrote;
    empty if it has none."""
    for file, number in re.findall(r'File "(.*?)", line (\d+)', report):
        if not file.startswith(NOT_OWN) and not file.startswith("<"):
            return f"{file}:{number}: "
    return ""


def _end_with_parent(parents_life: int) -> None:
    os.read(parents_life, 1)  # ends when no process holds the other end
    os._exit(1)
