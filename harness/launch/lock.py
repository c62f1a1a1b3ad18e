"""One process at a time computes a record: a lock beside it, which ends with the process that holds it.

A file system without locks gives none, and says so once: whoever writes results there starts one process at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.files import HeldError, lock_file

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def holding(record: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a record.

    Raises:
        HeldError: another process holds it, and wait is False.
        UserError: the folder cannot be written.
    """
    lock = _acquired(record, wait=wait)
    try:
        yield
    finally:
        if lock is not None:
            _path(record).unlink(missing_ok=True)  # while it is held, so that none is taken that has no name
            lock.release()


def is_held(record: Path) -> bool:
    """Whether a living process computes the record."""
    if not _path(record).exists():
        return False
    try:
        with holding(record, wait=False):
            return False
    except (HeldError, UserError):  # a lock that cannot be opened is another user's
        return True


def wait_for(record: Path) -> None:
    """Return once no other process computes the record."""
    with holding(record, wait=True):
        pass


def _path(record: Path) -> Path:
    return record.with_name(".lock")


def _acquired(record: Path, *, wait: bool) -> BaseFileLock | None:
    """The lock, held; None where the file system has none."""
    try:
        lock = lock_file(_path(record), wait=wait)
    except OSError as error:
        raise UserError(f"results_dir: {record} cannot be written ({error.strerror or error})") from error
    if lock is None:
        _warn(record.parents[3])
    return lock


@cache
def _warn(results_dir: Path) -> None:
    log.warning("%s: its file system has no locks; start one process at a time", results_dir)
