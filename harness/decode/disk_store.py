"""The slots of a layer in a file on a disk (`placement=disk`).

Each sequence and KV head has a line, with the rows of all tokens one after another. A line begins
at a block. A request reads whole blocks, each once, however many of its rows are wanted. What a
block brings beside the wanted rows is the amplification: bytes read / bytes of the rows.

Blocks that a write touches in part stay in memory until a write does not touch them: a step's own
rows reach the disk once a block, and a row that replaces another one costs a read and a write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from harness.decode.disk import BLOCK_BYTES, Blocks, DiskFile
from harness.decode.memory import PinnedSlab
from harness.decode.store import Chosen, KVStore, RowFormat, SlotRequest

GAP_BLOCKS = 4
"""A request reads over so many unwanted blocks rather than asking twice. A gap of 4 blocks reads a
layer's scattered rows in 2.0 ms, one of 0 in 3.4."""

Bytes = NDArray[np.int64]
"""Byte offsets."""


class Listed(NamedTuple):
    """Chosen slots one by one. heads: of each, counted over the batch; slots; targets: the buffer
    row of each in its head. All int64 [n]."""

    heads: Bytes
    slots: Bytes
    targets: Bytes


class DiskStore(KVStore):
    """Slots in a file, a line for each sequence and KV head.

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
        self._first_block = 0

    def allocate(self, home: PinnedSlab | DiskFile | None = None) -> KVStore:
        """Use the next blocks of a file."""
        assert isinstance(home, DiskFile), "the slots lie in a file"
        self.file = home
        self._first_block = home.take(self.num_blocks)
        return self

    def free(self) -> None:
        self.open_blocks, self.opened = self.open_blocks[:0], self.opened[:0]

    def clear(self) -> None:
        """Nothing: blocks that were never written are zeros."""

    # Load

    def load(self, request: SlotRequest, rows: Tensor) -> int:
        """As `KVStore.load`; returns the bytes read from the disk."""
        disk = self.file.disk
        before = disk.bytes_read
        if isinstance(request, Chosen):
            self._load_chosen(_listed(request), rows)
        else:
            part = request if isinstance(request, slice) else slice(0, request)
            self._load_columns(part.start or 0, self._checked(part.stop), rows)
        return disk.bytes_read - before

    def _load_columns(self, begin: int, end: int, rows: Tensor) -> None:
        first_byte = begin * self.slot_bytes
        end_byte = end * self.slot_bytes
        first, last = first_byte // BLOCK_BYTES, -(-end_byte // BLOCK_BYTES)
        blocks = self._blocks_of_lines(first, last)
        self._bring(blocks, np.arange(len(blocks)))
        rows.copy_(self._columns(len(blocks), end - begin, first_byte - first * BLOCK_BYTES))

    def _load_chosen(self, chosen: Listed, rows: Tensor) -> None:
        if not len(chosen.slots):
            return
        offsets = self._offsets(chosen)
        blocks = self._joined(self._touched(offsets))
        self._bring(blocks, np.arange(len(blocks)))
        rows.numpy()[self._places(chosen)] = self._rows_from(blocks)[_starts(blocks, offsets)]

    # Write

    def write(self, rows: Tensor, at: int | Chosen) -> int:
        """As `KVStore.write`; returns the bytes written to the disk."""
        disk = self.file.disk
        before = disk.bytes_written
        if isinstance(at, int):
            self._write_columns(rows, at)
        else:
            self._write_chosen(rows, _listed(at))
        return disk.bytes_written - before

    def _write_columns(self, rows: Tensor, at: int) -> None:
        num_columns = rows.shape[2]
        first_byte = at * self.slot_bytes
        end_byte = self._checked(at + num_columns) * self.slot_bytes
        first, last = first_byte // BLOCK_BYTES, -(-end_byte // BLOCK_BYTES)
        of_line = np.arange(first, last) * BLOCK_BYTES
        is_whole = (of_line >= first_byte) & (of_line + BLOCK_BYTES <= end_byte)
        blocks = self._blocks_of_lines(first, last)
        whole = np.tile(is_whole, self.heads)
        self.file.disk.reserve(len(blocks))
        self._bring(blocks[~whole], np.flatnonzero(~whole))
        self._columns(len(blocks), num_columns, first_byte - first * BLOCK_BYTES).copy_(rows)
        self._keep(blocks, whole)

    def _write_chosen(self, rows: Tensor, chosen: Listed) -> None:
        if not len(chosen.slots):
            return
        offsets = self._offsets(chosen)
        blocks = self._touched(offsets)
        self._bring(blocks, np.arange(len(blocks)))
        self._rows_from(blocks)[_starts(blocks, offsets)] = rows.numpy()[self._places(chosen)]
        self._keep(blocks, np.zeros(len(blocks), bool))

    def _keep(self, blocks: Blocks, is_whole: NDArray[np.bool_]) -> None:
        """Take over the buffer's blocks: whole ones go to the disk, others stay in memory. Those
        that stayed before and are not among them go to the disk too."""
        disk, file = self.file.disk, self.file
        in_part = blocks[~is_whole]
        opened = disk.buffer[: len(blocks)][~is_whole]
        file.write(blocks[is_whole] + self._first_block, np.flatnonzero(is_whole))
        self.is_stored[blocks[is_whole]] = True
        leaves = ~np.isin(self.open_blocks, blocks)
        leaving = self.open_blocks[leaves]
        if len(leaving):
            disk.reserve(len(leaving))
            disk.buffer[: len(leaving)] = self.opened[leaves]
            file.write(leaving + self._first_block, np.arange(len(leaving)))
            self.is_stored[leaving] = True
        self.is_stored[in_part] = False
        self.open_blocks, self.opened = in_part, opened

    # Blocks

    def _bring(self, blocks: Blocks, places: Blocks) -> None:
        """Let the disk's buffer hold `blocks` at `places`."""
        disk = self.file.disk
        if len(places):
            disk.reserve(int(places[-1]) + 1)
        is_stored = self.is_stored[blocks]
        self.file.read(blocks[is_stored] + self._first_block, places[is_stored])
        if is_stored.all():
            return
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

    def _blocks_of_lines(self, first: int, end: int) -> Blocks:
        """Blocks from `first` to `end` of every line."""
        begins = np.arange(self.heads) * self.line_blocks
        return (begins[:, None] + np.arange(first, end)).reshape(-1)

    def _columns(self, num_blocks: int, num_columns: int, begin: int) -> Tensor:
        """Rows [batch, num_kv_heads, num_columns, slot_bytes] in the first blocks of the disk's
        buffer, which are parts of lines: a view from byte `begin` of each."""
        lines = torch.from_numpy(self.file.disk.buffer[:num_blocks]).view(self.heads, -1)
        rows = lines[:, begin : begin + num_columns * self.slot_bytes]
        return rows.view(self.batch, self.num_kv_heads, num_columns, self.slot_bytes)

    def _offsets(self, chosen: Listed) -> Bytes:
        """The first byte of each row."""
        highest = int(chosen.slots.max())
        if highest >= self.capacity:
            raise IndexError(f"slot {highest} is beyond the capacity of {self.capacity} slots")
        return chosen.heads * self.line_blocks * BLOCK_BYTES + chosen.slots * self.slot_bytes

    def _places(self, chosen: Listed) -> tuple[Bytes, Bytes, Bytes]:
        """Batch, KV head and row of a buffer, of each."""
        return *np.divmod(chosen.heads, self.num_kv_heads), chosen.targets

    def _rows_from(self, blocks: Blocks) -> NDArray[np.uint8]:
        """The row that begins at each byte of the disk's buffer, which holds `blocks`: a view,
        uint8 [bytes, slot_bytes]."""
        held = self.file.disk.buffer[: len(blocks)].reshape(-1)
        return sliding_window_view(held, self.slot_bytes, writeable=True)


def _listed(chosen: Chosen) -> Listed:
    slots = chosen.slots.flatten(0, 1).numpy()
    heads, places = np.nonzero(slots >= 0)
    targets = places
    if chosen.targets is not None:
        targets = chosen.targets.flatten(0, 1).numpy()[heads, places]
    return Listed(heads, slots[heads, places], targets)


def _starts(blocks: Blocks, offsets: Bytes) -> Bytes:
    """The first byte of each row in the disk's buffer, which holds `blocks`."""
    return np.searchsorted(blocks, offsets // BLOCK_BYTES) * BLOCK_BYTES + offsets % BLOCK_BYTES
