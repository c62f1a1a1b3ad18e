"""Page-locked host memory, of which a session has exactly as much as its stores take.

PyTorch rounds page-locked allocations up to powers of two, and keeps them locked when they are freed: 31 GiB of slots
would lock 40, for good. A slab is mapped, its pages touched by all threads at once, locked by `cudaHostRegister`, and
given back to the machine when it is closed.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from harness.errors import UserError

ALIGNMENT = 256
"""Bytes on whose multiples every piece begins, as those of a device's own allocations do."""


def aligned(num_bytes: int) -> int:
    """Bytes that a piece of `num_bytes` takes of a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PinnedSlab:
    """`num_bytes` of page-locked memory, handed out in pieces. Raises UserError where so much cannot be locked."""

    def __init__(self, num_bytes: int) -> None:
        self.nbytes = num_bytes
        self._used = 0
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are never huge
        except OSError as error:
            raise _refusal(num_bytes, str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._memory[:: mmap.PAGESIZE].zero_()  # on all threads; locking alone would do it on one
        address = self._memory.data_ptr()
        _lock(address, num_bytes)
        self._unlock = weakref.finalize(self, _unlock, address)
        self._unlock.atexit = False

    def take(self, shape: Sequence[int]) -> Tensor:
        """The next piece, uint8 of this shape, all bytes 0; not to be touched after `close`."""
        begin, size = self._used, math.prod(shape)
        assert begin + size <= self.nbytes, "a slab is as large as its pieces"
        self._used = begin + aligned(size)
        return self._memory[begin : begin + size].view(*shape)

    def close(self) -> None:
        """Unlock the memory, which is the machine's again once no piece is held any more. Idempotent; waits for the
        device, that may still be reading."""
        self._unlock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0


def _lock(address: int, num_bytes: int) -> None:
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, num_bytes, 0))  # mapped and portable, as any unified address
    if error:
        _forget_error()
        raise _refusal(num_bytes, runtime.cudaGetErrorString(runtime.cudaError(error)))


def _unlock(address: int) -> None:
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostUnregister(address))
    if error:
        raise RuntimeError(f"cudaHostUnregister: {runtime.cudaGetErrorString(runtime.cudaError(error))}")


def _forget_error() -> None:
    """CUDA keeps a refusal as the last error, which the next kernel's check would report as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _refusal(num_bytes: int, reason: str) -> UserError:
    return UserError(
        f"platform.pinned=true: {num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked ({reason}); lower "
        "batch_size, prompt_len or gen_len, or set platform.pinned=false"
    )
