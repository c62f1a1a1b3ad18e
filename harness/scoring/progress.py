"""Progress bars on stderr, in a terminal and in a notebook. A log file gets none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

_quiet = ContextVar("quiet", default=False)


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Show no bars inside the block, unless `quiet` is False."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


def bar(items: Iterable[Any] | None = None, **settings: Any) -> tqdm:
    """A tqdm bar that vanishes at its end. settings: tqdm's, such as total, desc, unit, file."""
    in_notebook = "ipykernel" in sys.modules  # whose stderr is no terminal
    disable = (
        True if _quiet.get() else False if in_notebook else None
    )  # None: unless it is a terminal
    return tqdm(items, leave=False, disable=disable, **settings)
