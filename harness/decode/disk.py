"""A local disk as the second memory: files without a name, read and written in blocks past the page
cache, and in each the slots of a layer (`DiskStore`).

    with closing(Disk("outputs")) as disk, closing(DiskFile(disk, num_blocks)) as file:
        file.write(blocks, places)     # block blocks[i] is disk.buffer[places[i]]
        file.read(blocks, places)

O_DIRECT takes whole blocks at block boundaries, in memory as on the disk, so everything passes the
disk's buffer, which begins at a page. Neighbouring blocks move in one piece, and pieces on several
threads at once, since a disk answers many requests as fast as one.

A file has a name at no time (O_TMPFILE), or only until it is open: the system frees it with the
process, however that ends. Its space is taken when it is made, so that a full disk is found before
the first step.

Each sequence and KV head has a line, with the rows of all tokens one after another. A line begins
at a block. A request reads whole blocks, each once, however many of its rows are wanted. What a
block brings beside the wanted rows is the amplification: bytes read / bytes of the rows.

Blocks that a write touches in part stay in memory until a write does not touch them: a step's own
rows reach the disk once a block, and a row that replaces another one costs a read and a write.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from harness.decode.memory import GIB, MEMORY_HINTS
from harness.decode.store import Chosen, KVStore, RowFormat, SlotRequest, listed
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
GAP_BLOCKS = 4
"""A request reads over so many unwanted blocks rather than asking twice. A gap of 4 blocks reads a
layer's scattered rows in 2.0 ms, one of 0 in 3.4."""

Blocks = NDArray[np.int64]
"""Numbers of blocks of a file, ascending, each once: int64 [n]."""


class Disk:
    """A folder on a local disk, for the files of one process.

    buffer: uint8 [blocks, BLOCK_BYTES], through which everything passes. Raises UserError for a
    folder that does not exist, where no file can be made, in memory, or without O_DIRECT.
    """

    def __init__(self, folder: str | Path) -> None:
        if sys.platform != "linux":
            raise UserError(f"placement=disk: needs Linux, and this is {sys.platform}")
        self.folder = Path(folder).absolute()
        self.buffer = np.empty((0, BLOCK_BYTES), np.uint8)
        self.bytes_read = 0
        self.bytes_written = 0
        kind = file_system(self.folder)
        if kind in IN_MEMORY:
            raise self.refusal(f"is a {kind}, which lies in memory; give a folder on a local disk")
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-disk")
        file = DiskFile(self, 1)
        self.reserve(1)
        file.read(np.zeros(1, np.int64), np.zeros(1, np.int64))
        file.close()

    def reserve(self, num_blocks: int) -> None:
        """Let the buffer have room for so many blocks; what it holds is lost where it grows."""
        if num_blocks > len(self.buffer):
            pages = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
            self.buffer = np.frombuffer(pages, np.uint8).reshape(num_blocks, BLOCK_BYTES)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.pool.shutdown()

    def refusal(self, why: str) -> UserError:
        """Why the folder cannot be used, in a line that names the setting."""
        return UserError(f"platform.disk_dir={self.folder}: {why}")


class DiskFile:
    """A file of `num_blocks` blocks, whose space is taken. Blocks that were never written are
    zeros. Raises UserError where it does not fit."""

    def __init__(self, disk: Disk, num_blocks: int) -> None:
        self.disk = disk
        # A codec may leave all of a short text exact, but no file system reserves nothing.
        num_bytes = max(1, num_blocks) * BLOCK_BYTES
        try:
            space = os.statvfs(disk.folder)
            free = space.f_bavail * space.f_frsize
            if free < num_bytes:
                beside = f"does not fit into the {free / GIB:.1f} GiB that are free there"
                raise disk.refusal(f"the KV cache {beside}; {MEMORY_HINTS}")
            self._file = _direct_file(disk.folder, num_bytes)
        except OSError as error:
            raise self._refused(error) from error

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
        self._file.close()

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], blocks: Blocks, places: Blocks
    ) -> None:
        """Let the system's `call(file, memory, offset)` move each piece of neighbouring blocks, on
        several threads.

        places: of each block in the disk's buffer; ascending, and neighbouring where blocks are.
        Raises the first error, once all threads have ended.
        """
        file = self._file.fileno()
        pieces = _pieces(blocks, places)
        memory = self.disk.buffer.reshape(-1).data

        def move(share: list[tuple[int, int, int]]) -> None:
            for piece in share:
                begin, offset, num_bytes = (number * BLOCK_BYTES for number in piece)
                moved = call(file, [memory[begin : begin + num_bytes]], offset)
                if moved != num_bytes:
                    what = f"{moved} of {num_bytes} bytes moved at byte {offset}"
                    raise OSError(errno.EIO, what)

        num_threads = min(NUM_THREADS, len(pieces) // PIECES_OF_A_THREAD)
        try:
            if num_threads < 2:
                move(pieces)
                return
            shares = [pieces[number::num_threads] for number in range(num_threads)]
            running = [self.disk.pool.submit(move, share) for share in shares]
            wait(running)
            for thread in running:
                thread.result()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UserError:
        if error.errno == errno.EINVAL:
            kind = file_system(self.disk.folder)
            refused = "refuses O_DIRECT, without which memory would be measured"
            return self.disk.refusal(f"its file system ({kind}) {refused}")
        return self.disk.refusal(f"no file can be used there ({reason(error)})")


def _direct_file(folder: Path, num_bytes: int) -> IO[bytes]:
    """A file without a name, whose space is taken, under O_DIRECT."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - its owner closes it
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        file.close()
        raise
    return file


def file_system(folder: Path) -> str:
    """The type of the file system of a folder, such as ext4; "unknown" where the system does not
    say."""
    where, kind, longest = folder.resolve(), "unknown", 0
    for mount in psutil.disk_partitions(all=True):  # a later one hides an earlier one
        if where.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= longest:
            kind, longest = mount.fstype, len(mount.mountpoint)
    return kind


def _pieces(blocks: Blocks, places: Blocks) -> list[tuple[int, int, int]]:
    """Neighbouring blocks in pieces of at most `PIECE_BLOCKS`: of each the place of the first block
    in the buffer, its number, and how many they are."""
    if not len(blocks):
        return []
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) > 1)
    counts = np.diff(begins, append=len(blocks))
    pieces = []
    for run in np.stack([places[begins], blocks[begins], counts], 1).tolist():
        place, block, count = run
        for done in range(0, count, PIECE_BLOCKS):
            pieces.append((place + done, block + done, min(PIECE_BLOCKS, count - done)))
    return pieces


# The slots of a layer

Bytes = NDArray[np.int64]
"""Byte offsets."""


class DiskStore(KVStore):
    """Slots in a file of their own, a line for each sequence and KV head.

    line_blocks: blocks of a line; num_blocks: of all.

    Set by the writes: is_stored: bool [num_blocks], True where the file has the latest bytes.
    open_blocks: blocks that the last write touched in part, ascending; opened: what they hold,
    uint8 [n, BLOCK_BYTES].
    """

    file: DiskFile
    """Where the slots lie, from `allocate` on."""

    def __init__(self, row_format: RowFormat, **shape: Any) -> None:
        super().__init__(row_format, placement="disk", **shape)
        self.line_blocks = -(-self.capacity * self.slot_bytes // BLOCK_BYTES)
        self.num_blocks = self.heads * self.line_blocks
        self.nbytes = self.num_blocks * BLOCK_BYTES
        self.is_stored = np.zeros(self.num_blocks, bool)
        self.open_blocks: Blocks = np.empty(0, np.int64)
        self.opened = np.empty((0, BLOCK_BYTES), np.uint8)

    def allocate(self, home: object = None) -> KVStore:
        """Make the file."""
        assert isinstance(home, Disk), "the slots lie on a disk"
        self.file = DiskFile(home, self.num_blocks)
        return self

    def free(self) -> None:
        self.file.close()
        self.open_blocks, self.opened = self.open_blocks[:0], self.opened[:0]

    # Load

    def load(self, request: SlotRequest, rows: Tensor) -> int:
        """As `KVStore.load`; returns the bytes read from the disk."""
        disk = self.file.disk
        before = disk.bytes_read
        if isinstance(request, Chosen):
            self._load_chosen(request, rows)
        else:
            part = request if isinstance(request, slice) else slice(0, request)
            self._load_columns(part.start or 0, self._checked(part.stop), rows)
        return disk.bytes_read - before

    def _load_columns(self, begin: int, end: int, rows: Tensor) -> None:
        blocks, first_byte, _ = self._blocks_of(begin, end)
        self._bring(blocks, np.arange(len(blocks)))
        rows.copy_(self._columns(len(blocks), end - begin, first_byte))

    def _load_chosen(self, chosen: Chosen, rows: Tensor) -> None:
        offsets, targets = self._listed(chosen)
        if not len(offsets):
            return
        blocks = self._joined(self._touched(offsets))
        self._bring(blocks, np.arange(len(blocks)))
        rows.numpy()[targets] = self._rows_of(blocks)[_starts(blocks, offsets)]

    # Write

    def write(self, rows: Tensor, at: int | Chosen) -> int:
        """As `KVStore.write`; returns the bytes written to the disk."""
        disk = self.file.disk
        before = disk.bytes_written
        if isinstance(at, int):
            self._write_columns(rows, at)
        else:
            self._write_chosen(rows, at)
        return disk.bytes_written - before

    def _write_columns(self, rows: Tensor, at: int) -> None:
        num_columns = rows.shape[2]
        blocks, first_byte, is_whole = self._blocks_of(at, self._checked(at + num_columns))
        self.file.disk.reserve(len(blocks))
        self._bring(blocks[~is_whole], np.flatnonzero(~is_whole))
        self._columns(len(blocks), num_columns, first_byte).copy_(rows)
        self._keep(blocks, is_whole)

    def _write_chosen(self, rows: Tensor, chosen: Chosen) -> None:
        offsets, sources = self._listed(chosen)
        if not len(offsets):
            return
        blocks = self._touched(offsets)
        self._bring(blocks, np.arange(len(blocks)))
        self._rows_of(blocks)[_starts(blocks, offsets)] = rows.numpy()[sources]
        self._keep(blocks, np.zeros(len(blocks), bool))

    def _keep(self, blocks: Blocks, is_whole: NDArray[np.bool_]) -> None:
        """Take over the buffer's blocks: whole ones go to the disk, others stay in memory. Those
        that stayed before and are not among them go to the disk too."""
        disk = self.file.disk
        opened = disk.buffer[: len(blocks)][~is_whole]
        self._store(blocks[is_whole], np.flatnonzero(is_whole))
        leaves = ~np.isin(self.open_blocks, blocks)
        leaving = self.open_blocks[leaves]
        disk.reserve(len(leaving))
        disk.buffer[: len(leaving)] = self.opened[leaves]
        self._store(leaving, np.arange(len(leaving)))
        self.open_blocks, self.opened = blocks[~is_whole], opened
        self.is_stored[self.open_blocks] = False

    def _store(self, blocks: Blocks, places: Blocks) -> None:
        self.file.write(blocks, places)
        self.is_stored[blocks] = True

    # Blocks

    def _bring(self, blocks: Blocks, places: Blocks) -> None:
        """Let the disk's buffer hold `blocks` at `places`."""
        disk = self.file.disk
        if len(places):
            disk.reserve(int(places[-1]) + 1)
        is_stored = self.is_stored[blocks]
        self.file.read(blocks[is_stored], places[is_stored])
        others, their_places = blocks[~is_stored], places[~is_stored]
        disk.buffer[their_places] = 0
        is_open = np.isin(others, self.open_blocks)
        of_opened = np.searchsorted(self.open_blocks, others[is_open])
        disk.buffer[their_places[is_open]] = self.opened[of_opened]

    def _touched(self, offsets: Bytes) -> Blocks:
        """The blocks in which rows lie, each once."""
        mask = np.zeros(self.num_blocks, bool)
        first = offsets // BLOCK_BYTES
        last = (offsets + self.slot_bytes - 1) // BLOCK_BYTES
        mask[last] = True
        for number in range(-(-self.slot_bytes // BLOCK_BYTES)):
            mask[np.minimum(first + number, last)] = True
        return np.flatnonzero(mask)

    def _joined(self, blocks: Blocks) -> Blocks:
        """`blocks`, and those in gaps of up to `GAP_BLOCKS` between two of them."""
        is_wide = np.diff(blocks) > GAP_BLOCKS + 1
        begins = blocks[np.append(True, is_wide)]
        ends = blocks[np.append(is_wide, True)]
        change = np.zeros(self.num_blocks + 1, np.int8)
        change[begins] += 1
        change[ends + 1] -= 1
        return np.flatnonzero(change.cumsum())

    def _blocks_of(self, begin: int, end: int) -> tuple[Blocks, int, NDArray[np.bool_]]:
        """The blocks of the columns from `begin` to `end` in every line, the byte at which they
        begin there, and which blocks have no other column."""
        first_byte, end_byte = begin * self.slot_bytes, end * self.slot_bytes
        first = first_byte // BLOCK_BYTES
        of_line = np.arange(first, -(-end_byte // BLOCK_BYTES))
        begins_there = of_line * BLOCK_BYTES >= first_byte
        ends_there = (of_line + 1) * BLOCK_BYTES <= end_byte
        lines = np.arange(self.heads) * self.line_blocks
        blocks = (lines[:, None] + of_line).reshape(-1)
        is_whole = np.tile(begins_there & ends_there, self.heads)
        return blocks, first_byte - first * BLOCK_BYTES, is_whole

    def _columns(self, num_blocks: int, num_columns: int, begin: int) -> Tensor:
        """Rows [batch, num_kv_heads, num_columns, slot_bytes] in the first blocks of the disk's
        buffer, which are parts of lines: a view from byte `begin` of each."""
        lines = torch.from_numpy(self.file.disk.buffer[:num_blocks]).view(self.heads, -1)
        rows = lines[:, begin : begin + num_columns * self.slot_bytes]
        return rows.view(self.batch, self.num_kv_heads, num_columns, self.slot_bytes)

    def _listed(self, chosen: Chosen) -> tuple[Bytes, tuple[Bytes, Bytes, Bytes]]:
        """The first byte of each row, and its sequence, KV head and row of a buffer."""
        batch, head, row, slot = listed(chosen.slots, self.capacity)
        if chosen.targets is not None:
            row = chosen.targets.numpy()[batch, head, row]
        line = batch * self.num_kv_heads + head
        offsets = line * self.line_blocks * BLOCK_BYTES + slot * self.slot_bytes
        return offsets, (batch, head, row)

    def _rows_of(self, blocks: Blocks) -> NDArray[np.uint8]:
        """The row that begins at each byte of the disk's buffer, which holds `blocks`: a view,
        uint8 [bytes, slot_bytes]."""
        held = self.file.disk.buffer[: len(blocks)].reshape(-1)
        return sliding_window_view(held, self.slot_bytes, writeable=True)


def _starts(blocks: Blocks, offsets: Bytes) -> Bytes:
    """The first byte of each row in the disk's buffer, which holds `blocks`."""
    return np.searchsorted(blocks, offsets // BLOCK_BYTES) * BLOCK_BYTES + offsets % BLOCK_BYTES
