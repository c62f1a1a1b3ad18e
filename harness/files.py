"""Files and memory: replacing a file in one step, locks, digests, the cache folder, free bytes.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from harness.errors import UserError, one_line

if TYPE_CHECKING:
    import torch

SETTLED_S = 2.0
"""A file that changed so recently may change again within a tick of its file system's clock."""


class HeldError(Exception):
    """Another process holds the lock."""


def cache_dir() -> Path:
    """The folder of copies and digests: KV_HARNESS_CACHE, else kv-harness in XDG_CACHE_HOME or
    ~/.cache."""
    own = os.environ.get("KV_HARNESS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kv-harness"


@contextlib.contextmanager
def writing_cache() -> Iterator[None]:
    """Raise UserError where the `with` block cannot write to `cache_dir()`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the cache {cache_dir()} cannot be written ({one_line(error)}); set KV_HARNESS_CACHE "
            "to a folder with room"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place in one step, if the block ends well.

    A reader sees the old file or the new one. Raises OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Readable by whom the user's umask says; tempfile's are the owner's alone.
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield scratch
        with scratch.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()  # there only if something failed


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path`, a file of results, by `content` in one step. Text is written as UTF-8.

    Raises UserError if the folder cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with replacing(path) as scratch:
            scratch.write_bytes(data)
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"results_dir: {path} cannot be written ({error.strerror or error})")


@contextlib.contextmanager
def holding(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder of results, which ends with the process.

    Raises:
        HeldError: another process holds it, and wait is False.
        UserError: the folder cannot be written.
    """
    import filelock  # takes a tenth of a second, and a finished run needs no lock

    path = folder / ".lock"
    lock = filelock.FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=wait)
    except filelock.Timeout:
        raise HeldError(path) from None
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that none is taken that has no name
        lock.release()


def text_sha256(*texts: str) -> str:
    """sha256 of the UTF-8 bytes of texts, a line each: 64 hex digits."""
    return hashlib.sha256("\n".join(texts).encode("utf-8")).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes. A file that was not written since last time is not read again.

    Raises OSError if the file cannot be read. A cache that cannot be written only makes it slower.
    """
    path = Path(os.path.realpath(path))
    stamp = _written(path)
    note = cache_dir() / "digests" / text_sha256(str(path), stamp)
    with contextlib.suppress(OSError):
        return note.read_text()
    begun = time.time()
    digest = content_sha256(path)
    # A file system's clock ticks: a later write within the same tick leaves the same stamp.
    if stamp == _written(path) and begun - path.stat().st_ctime > SETTLED_S:
        with contextlib.suppress(OSError), replacing(note) as scratch:
            scratch.write_text(digest)
    return digest


def _written(path: Path) -> str:
    """Numbers that change when a file is written; a file's change time cannot be set."""
    stat = path.stat()
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def content_sha256(path: Path) -> str:
    """sha256 of a file's bytes, always read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_sha256(files: Iterable[Path]) -> str:
    """One digest of the names and contents of files."""
    return text_sha256(*(f"{file.name} {file_sha256(file)}" for file in sorted(files)))


HOST_HINT = "set platform.host_gib where the host has more than it shows"
"""What a refusal for want of host memory ends with."""
_stated: list[int] = []
"""Bytes of main memory that the settings say there are; the last ones count."""


@contextlib.contextmanager
def stated_memory(gib: float | None) -> Iterator[None]:
    """Inside the block there are `gib` GiB of main memory, whatever the system shows and a
    container's limit is: some machines show more only as it is used. None says nothing."""
    if gib is None:
        yield
        return
    _stated.append(int(gib * 2**30))
    try:
        yield
    finally:
        _stated.pop()


def available_memory() -> int:
    """Bytes of main memory that a new allocation may use, within a container's limit, or of the
    memory that is stated.

    Droppable caches are included.
    """
    found = psutil.virtual_memory()
    limits_and_uses = [(found.total, found.total - found.available), *memory_limits()]
    if _stated:
        used = min(used for _, used in limits_and_uses)  # of the innermost group
        return max(0, _stated[-1] - used)
    return max(0, min(limit - used for limit, used in limits_and_uses))


def available_bytes(home: torch.device) -> int:
    """Bytes that a new allocation on device `home` may take, droppable caches included."""
    if home.type != "cuda":
        return available_memory()
    import torch

    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused


def total_memory() -> int:
    """Bytes of main memory, or a container's limit where that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])


def memory_limits(system: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes, without droppable caches, of each control group (version 2) around
    this process that has a limit: containers and schedulers set them, and psutil does not see them.

    system: the folder of /proc and /sys.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers:
            continue  # of version 1
        root = system / "sys/fs/cgroup"
        group = root / own.strip("/")
        depth = len(group.relative_to(root).parts)
        for folder in (group, *group.parents[:depth]):
            # No number where the limit is "max".
            with contextlib.suppress(OSError, ValueError):
                limit, used = (
                    int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
                )
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                yield limit, used - int(stat["inactive_file"])
