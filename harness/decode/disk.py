"""A local disk as the second memory: a file without a name, read and written in blocks past the
page cache.

    with Disk("outputs") as disk, disk.new_file(num_blocks) as file:
        file.write(blocks, places)     # block blocks[i] is disk.buffer[places[i]]
        file.read(blocks, places)

O_DIRECT takes whole blocks at block boundaries, in memory as on the disk, so everything passes the
disk's buffer, which begins at a page. Neighbouring blocks move in one piece, and pieces on several
threads at once, since a disk answers many requests as fast as one.

A file has a name at no time (O_TMPFILE), or only until it is open: the system frees it with the
process, however that ends. Its space is taken when it is made, so that a full disk is found before
the first step.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError, reason

if sys.platform != "win32":
    import fcntl

BLOCK_BYTES = 4096
"""What a disk reads and writes at least. Disks of 512 bytes a sector take these blocks too."""
PIECE_BLOCKS = 64
"""Most blocks that one call moves: 256 KiB, from where on larger pieces are no faster."""
NUM_THREADS = 32
PIECES_OF_A_THREAD = 2
"""A thread that starts for fewer pieces costs more than it saves."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems that are no disk. Newer kernels accept O_DIRECT there."""
GIB = 2**30
SETTING = "platform.disk_dir"

Blocks = NDArray[np.int64]
"""Numbers of blocks of a file, ascending, each once: int64 [n]."""


class Disk(AbstractContextManager["Disk"]):
    """A folder on a local disk, for the files of one process.

    Raises UserError for a folder that does not exist, where no file can be made, in memory, or
    without O_DIRECT.
    """

    def __init__(self, folder: str | Path) -> None:
        if sys.platform != "linux":
            raise UserError(f"placement=disk: needs Linux, and this is {sys.platform}")
        self.folder = Path(folder).absolute()
        self.buffer = _aligned(0)
        self.bytes_read = 0
        self.bytes_written = 0
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-disk")
        self._require_direct()

    def new_file(self, num_blocks: int) -> DiskFile:
        """A file of so many blocks, whose space is taken. Raises UserError where it does not
        fit."""
        return DiskFile(self, num_blocks)

    def reserve(self, num_blocks: int) -> None:
        """Let the buffer have room for so many blocks; what it holds is lost where it grows."""
        if num_blocks > len(self.buffer):
            self.buffer = _aligned(num_blocks)

    def close(self) -> None:
        """End the threads and free the buffer. Idempotent."""
        self.pool.shutdown()
        self.buffer = _aligned(0)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_direct(self) -> None:
        kind = file_system(self.folder)
        if kind in IN_MEMORY:
            raise UserError(
                f"{SETTING}={self.folder}: is a {kind}, which lies in memory; give a folder on a "
                "local disk"
            )
        with self.new_file(1) as file:
            self.reserve(1)
            file.read(np.zeros(1, np.int64), np.zeros(1, np.int64))


class DiskFile(AbstractContextManager["DiskFile"]):
    """A file of `num_blocks` blocks. Blocks that were never written are zeros."""

    def __init__(self, disk: Disk, num_blocks: int) -> None:
        self.disk = disk
        self.num_blocks = num_blocks
        self._used = 0
        self._file: IO[bytes] | None = None
        try:
            _require_space(disk.folder, self.nbytes)
            self._file = tempfile.TemporaryFile(dir=disk.folder, buffering=0)  # noqa: SIM115 - `close` ends it
            # A codec may leave all of a short text exact, but no file system reserves nothing.
            os.posix_fallocate(self._file.fileno(), 0, max(self.nbytes, BLOCK_BYTES))
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            self.close()
            raise self._refused(error) from error

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self.num_blocks * BLOCK_BYTES

    def take(self, num_blocks: int) -> int:
        """The first of the next `num_blocks` blocks, which are handed out once."""
        self._used += num_blocks
        return self._used - num_blocks

    def read(self, blocks: Blocks, places: Blocks) -> None:
        """Read blocks to their places in the disk's buffer, as `_move` takes them."""
        self._move(os.preadv, blocks, places)
        self.disk.bytes_read += len(blocks) * BLOCK_BYTES

    def write(self, blocks: Blocks, places: Blocks) -> None:
        """Write blocks from their places in the disk's buffer."""
        self._move(os.pwritev, blocks, places)
        self.disk.bytes_written += len(blocks) * BLOCK_BYTES

    def close(self) -> None:
        """Free the file and its space. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], blocks: Blocks, places: Blocks
    ) -> None:
        """Let the system's `call(file, memory, offset)` move each piece of neighbouring blocks, on
        several threads.

        places: of each block in the disk's buffer; ascending, and neighbouring where blocks are.
        Raises the first error, once all threads have ended.
        """
        if self._file is None:
            raise RuntimeError("the file is closed")
        file = self._file.fileno()
        pieces = _pieces(blocks, places)
        memory = self.disk.buffer.reshape(-1).data

        def move(share: list[Piece]) -> None:
            for piece in share:
                begin, offset = piece.place * BLOCK_BYTES, piece.first * BLOCK_BYTES
                num_bytes = piece.num_blocks * BLOCK_BYTES
                moved = call(file, [memory[begin : begin + num_bytes]], offset)
                if moved != num_bytes:
                    what = f"{moved} of {num_bytes} bytes moved at byte {offset}"
                    raise OSError(errno.EIO, what)

        num_threads = min(NUM_THREADS, len(pieces) // PIECES_OF_A_THREAD)
        try:
            if num_threads < 2:
                move(pieces)
                return
            running = []
            for number in range(num_threads):
                running.append(self.disk.pool.submit(move, pieces[number::num_threads]))
            wait(running)
            for thread in running:
                thread.result()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UserError:
        where = f"{SETTING}={self.disk.folder}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _too_small(self.disk.folder, self.nbytes)
        if error.errno == errno.EFBIG:
            size = f"{self.nbytes / GIB:.1f} GiB"
            return UserError(f"{where}: a file may not have {size} here; raise `ulimit -f`")
        if error.errno == errno.EINVAL:
            kind = file_system(self.disk.folder)
            refused = "refuses O_DIRECT, without which memory would be measured"
            return UserError(f"{where}: its file system ({kind}) {refused}")
        return UserError(f"{where}: no file can be used there ({reason(error)})")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system of a folder, such as ext4; "unknown" where Linux does not say.

    Of an overlay, as containers have it, that of the layer which takes what is written, where this
    process sees it.
    """
    best, kind, options = "", "unknown", ""
    with suppress(OSError):
        where = str(folder.resolve())
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, mount, of_mount, its_options = line.split(" ")[:4]
            is_inside = where == mount or where.startswith(mount.rstrip("/") + "/")
            if is_inside and len(mount) >= len(best):
                best, kind, options = mount, of_mount, its_options
    written = re.search(r"(?:^|,)upperdir=([^,]+)", options)
    if kind == "overlay" and written is not None and Path(written[1]).is_dir():
        below = file_system(Path(written[1]), mounts)
        return below if below in IN_MEMORY else kind
    return kind


class Piece(NamedTuple):
    """Neighbouring blocks. place: of the first one in the buffer; first: its number."""

    place: int
    first: int
    num_blocks: int


def _pieces(blocks: Blocks, places: Blocks) -> list[Piece]:
    """Neighbouring blocks in pieces of at most `PIECE_BLOCKS`."""
    if not len(blocks):
        return []
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) > 1)
    counts = np.diff(begins, append=len(blocks))
    pieces = []
    for run in np.stack([places[begins], blocks[begins], counts], 1).tolist():
        place, block, count = run
        for done in range(0, count, PIECE_BLOCKS):
            pieces.append(Piece(place + done, block + done, min(PIECE_BLOCKS, count - done)))
    return pieces


def _aligned(num_blocks: int) -> NDArray[np.uint8]:
    """Memory uint8 [num_blocks, BLOCK_BYTES] that begins at a page."""
    if not num_blocks:
        return np.empty((0, BLOCK_BYTES), np.uint8)
    pages = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
    return np.frombuffer(pages, np.uint8).reshape(num_blocks, BLOCK_BYTES)


def _require_space(folder: Path, num_bytes: int) -> None:
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < num_bytes:
        raise _too_small(folder, num_bytes)


def _too_small(folder: Path, num_bytes: int) -> UserError:
    free = os.statvfs(folder)
    free_gib = free.f_bavail * free.f_frsize / GIB
    return UserError(
        f"{SETTING}={folder}: the KV cache needs {num_bytes / GIB:.1f} GiB and {free_gib:.1f} GiB "
        "are free there; lower batch_size, prompt_len or gen_len, or choose a codec of fewer bits"
    )
