"""Host and device memory of live decoding: whether a session fits, page-locked memory, managed
memory.

A session asks for what it allocates itself (`harness.decode.needs`) before it does. What a method
keeps of a prompt shows only then: torch is out of memory where it does not fit.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.files import HOST_HINT, available_bytes
from methods.base import State

GIB = 2**30
ALIGNMENT = 256
"""Every piece of page-locked memory begins at a multiple of this many bytes, as a device's
allocations do."""
MEMORY_HINTS = "lower batch_size, prompt_len or gen_len, or choose a codec of fewer bits"


class NoRoomError(UserError):
    """What is asked for does not fit into a memory. is_host: into that of the host, not of the
    device."""

    def __init__(self, text: str, is_host: bool = False) -> None:
        super().__init__(text)
        self.is_host = is_host


def require_session(host: int, on_device: int, managed: int, device: torch.device) -> None:
    """Raise UserError where host or device memory is too small for the bytes of a session. On a CPU
    both are one memory. managed: lie in either."""
    if managed:
        require_managed(managed, on_device, device)
    if device.type == "cpu":
        require_memory(host + on_device + managed, device, "live decoding")
    else:
        require_memory(host, torch.device("cpu"), "live decoding")
        require_memory(on_device, device, "live decoding")


def require_memory(num_bytes: int, home: torch.device, what: str) -> None:
    """Raise NoRoomError where `num_bytes` do not fit into the memory of device `home`."""
    available = available_bytes(home)
    if num_bytes > available:
        is_host = home.type == "cpu"
        hints = f"{MEMORY_HINTS}; {HOST_HINT}" if is_host else MEMORY_HINTS
        raise NoRoomError(
            f"{what} needs {num_bytes / GIB:.1f} GiB of {home.type} memory "
            f"and {available / GIB:.1f} GiB are available; {hints}",
            is_host,
        )


_emulated: list[tuple[int, int]] = []
"""Bytes of the device that a CPU stands in for now, if any, and those that the weights take."""


def require_emulated(num_bytes: int, device: torch.device) -> None:
    """Raise NoRoomError where a session's `num_bytes` do not fit beside the weights into the memory
    of the emulated device, if one is emulated."""
    if device.type != "cpu" or not _emulated:
        return
    whole, weights = _emulated[-1]
    if weights + num_bytes > whole:
        raise NoRoomError(
            f"platform.device_gib={whole / GIB:.4g}: the weights take {weights / GIB:.3f} GiB and "
            f"live decoding needs {num_bytes / GIB:.3f} GiB beside them; {MEMORY_HINTS}"
        )


@contextmanager
def emulated_device(gib: float, weights: int) -> Iterator[None]:
    """Sessions on the CPU have a device of `gib` GiB inside the block, of which the model takes
    `weights` bytes. Raises UserError where it takes all."""
    whole = int(gib * GIB)
    if weights >= whole:
        raise UserError(
            f"platform.device_gib={gib:g}: must be above {weights / GIB:.3f}, which the weights "
            "take"
        )
    _emulated.append((whole, weights))
    try:
        yield
    finally:
        _emulated.pop()


def layer_bytes(state: State, number: int) -> int:
    """Bytes that a state declares to keep of one layer."""
    total = 0
    for name in (*state.sequence_tensors, *state.slot_tensors):
        kept = getattr(state, name)
        if isinstance(kept, dict) and number in kept:
            total += tensor_bytes(kept[number])
    return total


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a mapping or tuple; 0 for anything else."""
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0


# CUDA's runtime

RUNTIME = "cuda.bindings.runtime"


def cuda_runtime() -> Any:
    """CUDA's runtime, which PyTorch's CUDA build brings along."""
    return import_module(RUNTIME)


def call_cuda(name: str, *arguments: Any) -> Any:
    """Call a function of CUDA's runtime and return its result. Raises RuntimeError in CUDA's words
    where it fails."""
    runtime = cuda_runtime()
    error, *results = getattr(runtime, name)(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # forgets it: the next kernel's check would report it as its own
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error)[1].decode()}")
    return results[0] if results else None


# Page-locked memory


def aligned(num_bytes: int) -> int:
    """Bytes that a piece of `num_bytes` takes of a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PinnedSlab:
    """`num_bytes` of page-locked host memory, handed out in pieces.

    PyTorch rounds page-locked allocations up to powers of two and keeps them locked when they are
    freed: 31 GiB of slots would lock 40 for good. A slab is mapped, touched by all threads at once,
    locked by `cudaHostRegister`, and given back when it is closed. Raises NoRoomError where it
    cannot be locked.
    """

    def __init__(self, num_bytes: int) -> None:
        self.nbytes = num_bytes
        self._used = 0
        try:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages are never huge
            pages = mmap.mmap(-1, num_bytes, flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(pages, dtype=torch.uint8)
            one_of_each_page = self._memory[:: mmap.PAGESIZE]
            one_of_each_page.zero_()  # on all threads; locking alone would do it on one
            address = self._memory.data_ptr()
            flags = 0  # mapped and portable, as any unified address
            call_cuda("cudaHostRegister", address, num_bytes, flags)
        except (OSError, RuntimeError) as error:
            raise NoRoomError(
                f"platform.pinned=true: {num_bytes / GIB:.1f} GiB of host memory cannot be "
                f"page-locked ({error}); lower batch_size, prompt_len or gen_len, "
                "or set platform.pinned=false",
                is_host=True,
            ) from error
        self._unlock = weakref.finalize(self, _unlock, address)
        self._unlock.atexit = False

    def take(self, shape: Sequence[int]) -> Tensor:
        """The next piece: uint8 of this shape, all bytes 0 unless the slab was emptied. Not to be
        touched after `empty` or `close`."""
        begin, size = self._used, math.prod(shape)
        assert begin + size <= self.nbytes, "a slab is as large as its pieces"
        self._used = begin + aligned(size)
        return self._memory[begin : begin + size].view(*shape)

    def empty(self) -> None:
        """Wait for the device and take all pieces back, so that the slab can be handed out anew.
        The memory stays locked, with what it holds."""
        torch.cuda.synchronize()
        self._used = 0

    def close(self) -> None:
        """Wait for the device and unlock the memory; it is freed with the last piece.
        Idempotent."""
        self._unlock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0


def _unlock(address: int) -> None:
    torch.cuda.synchronize()
    call_cuda("cudaHostUnregister", address)


# Managed memory: the driver moves its pages between host and device on access (the paper's UVM). A
# kernel that touches a page in host memory faults and waits for it; where the device is full
# another page leaves. Nothing is advised or prefetched, so this is what the driver does by itself.


def require_managed(managed: int, on_device: int, device: torch.device) -> None:
    """Raise UserError where `device` has no managed memory, or too little is free for the bytes of
    a session.

    Needs a CUDA device with concurrent managed access, and as much free device memory as the
    managed pages and the session's own memory there take together. With more, nearly every page
    faults, which can hang a GPU.
    """
    if device.type != "cuda":
        raise UserError(
            f"placement=managed: needs platform=cuda; allowed on {device.type}: device, host"
        )
    attribute = cuda_runtime().cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess
    if not call_cuda("cudaDeviceGetAttribute", attribute, device.index or 0):
        raise UserError(
            "placement=managed: this GPU has no concurrent managed access; "
            "allowed on it: device, host"
        )
    torch.cuda.empty_cache()  # managed pages cannot lie in memory that torch keeps for tensors
    free, _ = torch.cuda.mem_get_info(device)
    if managed + on_device > free:
        raise UserError(
            f"placement=managed: the KV cache of {managed / GIB:.1f} GiB and "
            f"{on_device / GIB:.1f} GiB beside it may be at most the {free / GIB:.1f} GiB of "
            f"device memory that are free; {MEMORY_HINTS}"
        )


def managed_empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uninitialised managed memory, uint8 [*shape] on `device`; freed with the last tensor that
    views it."""
    return _as_tensor(_ManagedBlock(math.prod(shape), device), device).view(shape)


class _ManagedBlock:
    """Managed memory, shown to torch by the interface that CUDA libraries share; freed with this
    object."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        call_cuda("cudaSetDevice", device.index or 0)
        attach = cuda_runtime().cudaMemAttachGlobal
        self.pointer = int(call_cuda("cudaMallocManaged", num_bytes, attach))
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 2,
        }
        finalizer = weakref.finalize(self, _free, self.pointer, device)
        finalizer.atexit = False  # a process that ends gives all back


def _as_tensor(block: _ManagedBlock, device: torch.device) -> Tensor:
    """`block` as a flat uint8 tensor, which keeps it alive."""
    tensor = torch.as_tensor(block, device=device)
    assert tensor.data_ptr() == block.pointer, "a copy would be device memory"
    return tensor


def _free(pointer: int, device: torch.device) -> None:
    call_cuda("cudaSetDevice", device.index or 0)
    call_cuda("cudaDeviceSynchronize")  # a kernel may still read: torch does not know this memory
    call_cuda("cudaFree", pointer)


@contextmanager
def smaller_card(device: torch.device, gib: float | None) -> Iterator[None]:
    """Leave `gib` GiB of device memory to this process inside the block, tensors that exist
    included, so that a large card pages as a smaller one does. None leaves all. Raises UserError
    for an impossible size."""
    if gib is None:
        yield
        return
    torch.cuda.empty_cache()  # so that what torch holds is tensors
    held = torch.cuda.memory_reserved(device)
    whole = held + torch.cuda.mem_get_info(device)[0]
    if not held < gib * GIB <= whole:
        raise UserError(
            f"platform.device_gib={gib:g}: must be above {held / GIB:.1f}, which the weights take, "
            f"and at most {whole / GIB:.1f}, which they and what is free on this card make"
        )
    call_cuda("cudaSetDevice", device.index or 0)
    pointer = call_cuda("cudaMalloc", whole - int(gib * GIB))
    try:
        yield
    finally:
        call_cuda("cudaFree", pointer)
