"""Calls a function in a process of its own.

After a CUDA error a process can use CUDA no more, and a kernel that does not end never lets go of its process. So each
run has its own: whichever way one ends, the next begins clean.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from harness.errors import UserError, reason

CONTEXT = multiprocessing.get_context("forkserver")
"""A server imports the code once and makes no CUDA call. Each process is a fork of it, which takes milliseconds."""
PRELOADED = ["benchmarks.gpu_parts.equal", "benchmarks.gpu_parts.trace", "pandas"]
"""All that takes time to import. The command's own module is run anew in each process, as the interpreter does."""
GRACE_S = 10.0
"""For a process to end by itself, before it is killed."""


def call_apart(act: Callable[[], object], limit_s: float) -> None:
    """Call `act`, which can be pickled, in a process of its own.

    The process prints the traceback of an exception. After `limit_s` seconds it prints the stacks of all its threads,
    and ends.

    Raises:
        TimeoutError: the call took longer.
        UserError: it raised an exception, or its process died; the message says which.
    """
    CONTEXT.set_forkserver_preload(PRELOADED)
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_call, args=(act, limit_s, sender), daemon=True)
    began = time.perf_counter()
    process.start()
    sender.close()
    receiver.poll(limit_s + GRACE_S)  # for its word, or its end
    took_s = time.perf_counter() - began
    process.join(GRACE_S)
    process.kill()
    process.join(GRACE_S)  # until then it holds memory of the device
    try:
        failure = receiver.recv()
    except EOFError as error:  # it died without a word
        if took_s >= limit_s:
            raise TimeoutError(f"took more than {limit_s:g} s") from error
        raise UserError(f"its process ended with {_end_of(process.exitcode)}") from error
    if failure is not None:
        raise UserError(failure)


def _call(act: Callable[[], object], limit_s: float, sender: Connection) -> None:
    """In the process: call, and send None or in one line what failed."""
    sys.stdout.reconfigure(line_buffering=True)  # a process that dies has said all that it printed
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)  # of a thread of its own, which CUDA does not hold up
    try:
        act()
    except Exception as error:
        traceback.print_exc()
        sender.send(str(error) if isinstance(error, UserError) else reason(error))
    else:
        sender.send(None)


def _end_of(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    memory = ", as systems do where memory runs out" if exit_code == -signal.SIGKILL else ""
    return signal.Signals(-exit_code).name + memory
