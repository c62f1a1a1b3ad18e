"""Files and memory: replacing a file in one step, locks, digests, the cache folder, what is free.
Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from harness.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
SETTLED_S = 2.0
"""A file changed less than so long ago may change once more within one tick of its file system's
clock."""
ABANDONED_S = 3600.0
"""A scratch file that nobody has written to for so long was left by a killed process."""
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
CGROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}
"""Of cgroups version 2 ("") and 1: the folder of the groups, and the names of limit, use and
droppable caches."""
POLL_S = 0.5
"""How often a process that waits for a lock asks for it."""


class HeldError(Exception):
    """Another process holds the lock."""


def cache_dir() -> Path:
    """Where copies and digests lie: KV_HARNESS_CACHE, else kv-harness in XDG_CACHE_HOME or
    ~/.cache."""
    chosen = os.environ.get("KV_HARNESS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kv-harness"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place in one step, if the block ends without an
    error.

    A reader sees the old file or the new one. Scratch files of killed processes are removed. Raises
    OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratches = re.compile(re.escape(f".{path.name}.") + r"\w{8}")
    for other in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another process removes it as well
            if (
                scratches.fullmatch(other.name)
                and time.time() - other.stat().st_mtime > ABANDONED_S
            ):
                other.unlink()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    scratch = Path(name)
    try:
        yield scratch
        with scratch.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(scratch, 0o644)  # mkstemp makes it readable by its owner only
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()  # there only if something failed


def write_atomic(path: Path, text: str) -> None:
    """Replace `path`, a file of results, by `text` in one step. Raises UserError if the folder
    cannot be written."""
    try:
        with replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"results_dir: {path} cannot be written ({error.strerror or error})"
        ) from error


@contextlib.contextmanager
def holding(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder of results, which ends with the process; yields False if the file
    system has no locks.

    Raises:
        HeldError: another process holds it, and wait is False.
        UserError: the folder cannot be written.
    """
    import filelock  # takes a tenth of a second, and a finished run needs no lock

    path = folder / ".lock"
    lock = filelock.FileLock(path, fallback_to_soft=False)
    has_locks = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait, poll_interval=POLL_S)
    except filelock.Timeout:
        raise HeldError(path) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"results_dir: {folder} cannot be written ({error.strerror or error})"
            ) from error
        has_locks = False
    try:
        yield has_locks
    finally:
        if has_locks:
            path.unlink(missing_ok=True)  # while it is held, so that none is taken that has no name
            lock.release()


def until_settled(folder: Path, pattern: str, derive: Callable[[], T]) -> T:
    """Do `derive`, which reads the files matching `pattern` under `folder`, until none of them has
    changed meanwhile.

    If several processes write the same table or figure, the last to write has then read the results
    of all.
    """
    while True:
        before = _stamps(folder, pattern)
        derived = derive()
        if _stamps(folder, pattern) == before:
            return derived


def _stamps(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    """Inode and time of change: every atomic write makes a new inode."""
    found = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_mtime_ns)
    return found


def text_sha256(*texts: str) -> str:
    """sha256 of the UTF-8 bytes of texts, a line each: 64 hex digits."""
    return hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes. A file that was not written since last time is not read again.

    Raises OSError if the file cannot be read. A cache that cannot be written only makes it slower.
    """
    path = Path(os.path.realpath(path))
    stamp = _written(path)
    note = cache_dir() / "digests" / f"{text_sha256(str(path))[:32]}.json"
    try:
        known = json.loads(note.read_text())
        if known["stamp"] == stamp and re.fullmatch("[0-9a-f]{64}", known["sha256"]):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # no usable note: read the file
    begun = time.time()
    digest = content_sha256(path)
    # A file system's clock ticks in steps: a later write within the same step leaves the same
    # stamp.
    if stamp == _written(path) and begun - path.stat().st_ctime > SETTLED_S:
        with contextlib.suppress(OSError), replacing(note) as scratch:
            scratch.write_text(json.dumps({"stamp": stamp, "sha256": digest}))
    return digest


def _written(path: Path) -> list[int]:
    """Changes when a file is written: unlike its modification time, its change time cannot be
    set."""
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def content_sha256(path: Path) -> str:
    """sha256 of a file's bytes, always read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_sha256(files: Iterable[Path]) -> str:
    """One digest of the names and contents of files."""
    return text_sha256(*(f"{file.name} {file_sha256(file)}" for file in sorted(files)))


def available_memory() -> int:
    """Bytes of main memory that a new allocation may use, droppable caches included, within a
    container's limit."""
    return min(
        [
            psutil.virtual_memory().available,
            *(max(0, limit - used) for limit, used in memory_limits()),
        ]
    )


def available_bytes(home: torch.device) -> int:
    """Bytes that a new allocation in the memory of device `home` may take, droppable caches
    included."""
    if home.type != "cuda":
        return available_memory()
    import torch

    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused


def total_memory() -> int:
    """Bytes of main memory, or a container's limit where that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])


def memory_limits(system: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes, without droppable caches, of each control group around this process
    that has a limit.

    Containers and schedulers set them, and psutil does not see them. system: the folder of /proc
    and /sys.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers in CGROUPS:
            folder, limit, used, droppable = CGROUPS[controllers]
            root = system / folder
            group = root / own.strip("/")
            for each in (group, *group.parents[: len(group.relative_to(root).parts)]):
                with contextlib.suppress(
                    OSError, ValueError
                ):  # "max", or of the host, which a container cannot see
                    stat = dict(
                        line.split() for line in (each / "memory.stat").read_text().splitlines()
                    )
                    use = int((each / used).read_text()) - int(stat[droppable])
                    yield int((each / limit).read_text()), use
