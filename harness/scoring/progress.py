"""Progress on stderr: bars and lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from tqdm import tqdm

WRITTEN_EVERY_S = 30.0
"""Between the states of a bar in a log file, and before the first."""
_quiet = ContextVar("quiet", default=False)
_said: set[str] = set()


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Show no bars and say nothing inside the block, unless `quiet` is False."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


def bar(items: Iterable[Any] | None = None, **settings: Any) -> tqdm:
    """A tqdm bar that vanishes at its end; in a log file it is written now and then.

    settings: tqdm's, such as total, desc, unit, file.
    """
    stream = settings.get("file") or sys.stderr
    in_notebook = "ipykernel" in sys.modules  # whose stderr is no terminal
    if not in_notebook and not stream.isatty():
        settings |= {"mininterval": WRITTEN_EVERY_S, "delay": WRITTEN_EVERY_S}
    return tqdm(items, leave=False, disable=_quiet.get(), **settings)


def say(line: str, file: TextIO | None = None) -> None:
    """Write a line to stderr, or `file`, above a bar, unless it is to be quiet. The runs of a
    process, such as a sweep's, say the same line once."""
    if not _quiet.get() and line not in _said:
        _said.add(line)
        tqdm.write(line, file=file or sys.stderr)
