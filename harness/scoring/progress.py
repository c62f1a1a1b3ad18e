"""Progress on stderr: bars in a terminal and in a notebook, lines in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from tqdm import tqdm

LINES_EVERY_S = 30.0
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


class _Lines(tqdm):
    """A bar as lines, which a log file can hold: how far it is, and how long it will take."""

    def __init__(self, items: Iterable[Any] | None = None, **settings: Any) -> None:
        self._done: tuple[float, float] = (0, 0.0)  # items, and the seconds they took
        super().__init__(items, miniters=1, **settings)
        self.sp = None  # of what a terminal clears in the end

    def clear(self, nolock: bool = False) -> None:
        """A line stays where it is."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print a line."""
        left, elapsed = "?", self.format_dict["elapsed"]
        if self.n != self._done[0]:
            self._done = self.n, elapsed
        if self.total is not None and self.n:
            of_others = (self.total - self.n) * self._done[1] / self.n
            left = self.format_interval(max(0, of_others - (elapsed - self._done[1])))
        what = self.desc.removesuffix(": ") or f"{self.unit}s"
        print(
            f"{what}: {self.n}/{self.total or '?'} {self.unit}s, {left} left",
            file=self.fp,
            flush=True,
        )


def bar(
    items: Iterable[Any] | None = None, *, lines_every_s: float = LINES_EVERY_S, **settings: Any
) -> tqdm:
    """A tqdm bar that vanishes at its end; where there is no terminal, a line now and then.

    lines_every_s: between lines, and before the first. settings: tqdm's, such as total, desc, unit,
    file.
    """
    stream = settings.get("file") or sys.stderr
    in_notebook = "ipykernel" in sys.modules  # whose stderr is no terminal
    if _quiet.get():
        return tqdm(items, disable=True)
    if in_notebook or stream.isatty():
        return tqdm(items, leave=False, **settings)
    return _Lines(items, mininterval=lines_every_s, delay=lines_every_s, **settings)


def pass_over(progress: tqdm, seconds: float) -> None:
    """Leave seconds that are over out of what the time left is estimated from."""
    if not progress.disable:
        progress.start_t += seconds
        progress.last_print_t += seconds


def say(line: str, file: TextIO | None = None) -> None:
    """Write a line to stderr, or `file`, above a bar, unless it is to be quiet. The runs of a
    process, such as a sweep's, say the same line once."""
    if not _quiet.get() and line not in _said:
        _said.add(line)
        tqdm.write(line, file=file or sys.stderr)
