"""The host's and the device's memory in live decoding: whether a session fits, page-locked and managed memory.

What fits is asked before it is made. Counted before a prompt runs: the slots of all layers, under host placement the
buffers for fetched rows, windows of local layers, and what a layer of the prompt's dense pass holds at its peak, which
is more than a decode step does. What a method keeps beside the rows (partial keys, the token of each slot) its state
alone knows: its first layer shows it, and then as much is asked for in all others. Not counted: the weights and a
calibration, which lie there already, and what a method needs only while it takes in a layer's prompt (its scores).
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.errors import UserError
from harness.files import available_bytes, available_memory
from methods.base import State

GIB = 2**30
ALIGNMENT = 256
"""Every piece of page-locked memory begins at a multiple of so many bytes, as a device's own allocations do."""
OWN = 1
"""Behind the fetched rows of a head a buffer has room for the step's own one."""
MOST_MANAGED = 1.5
"""Managed bytes over free device memory, at most: beyond it nearly every page of a step faults, and a cell takes hours
to say so again."""
LOWER = "lower batch_size, prompt_len or gen_len, or choose a codec of fewer bits"


@dataclass(frozen=True)
class Tuning:
    """How rows cross the link of one device fastest (measured in `harness.speed.link_rate`).

    Rows chosen one by one are moved by a kernel, which needs enough bytes under way at any time to cover the link's
    latency, and only so many multiprocessors; long pieces are faster by a copy engine. num_programs: of the kernel.
    bytes_in_flight: under way in all of them together. min_copy_bytes: of a contiguous piece, from which on a copy
    engine is faster. The defaults cover the latency of PCIe 5 (some 1.5 us at 55 GB/s are 80 KiB) three times over.
    """

    num_programs: int = 64
    bytes_in_flight: int = 256 * 1024
    min_copy_bytes: int = 28 * 1024

    @property
    def tile_bytes(self) -> int:
        """Under way in one program."""
        return self.bytes_in_flight // self.num_programs


DEFAULT_TUNING = Tuning()


class LayerSlots(NamedTuple):
    """The slots of a layer's store: so many of each head of the batch."""

    heads: int
    capacity: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.bytes_of(self.capacity)

    def bytes_of(self, rows: int) -> int:
        """Of so many rows of each head."""
        return self.heads * rows * self.slot_bytes


class SessionBytes(NamedTuple):
    """What a session needs beside the weights. managed: memory that lies in either."""

    host: int
    device: int
    managed: int = 0


def session_bytes(
    layers: Sequence[LayerSlots], placement: str, *, ahead: int, selected: int, reuse: bool, activations: int
) -> SessionBytes:
    """Of the slots, and under host placement of a `Fetcher`'s buffers: one for each of the first `ahead` layers, two
    that the others share, and with reuse one for `selected` rows of each of those. activations: `prompt_bytes`,
    0 where no prompt is run."""
    cache = sum(aligned(layer.num_bytes) for layer in layers)
    if placement == "managed":
        return SessionBytes(0, activations, cache)
    if placement == "device":
        return SessionBytes(0, cache + activations)
    others = layers[ahead:]
    largest = max(others, key=lambda layer: layer.num_bytes)
    buffers = 2 * largest.bytes_of((min(selected, largest.capacity) if ahead else largest.capacity) + OWN)
    buffers += sum(layer.bytes_of(layer.capacity + OWN) for layer in layers[:ahead])
    buffers += sum(layer.bytes_of(selected + OWN) for layer in others) if reuse else 0
    return SessionBytes(cache, buffers + activations)


def require_session(needed: SessionBytes, device: torch.device) -> None:
    """Raise UserError for a session whose host or device memory, one and the same on a CPU, is too small."""
    if device.type == "cpu":
        require_memory(sum(needed), device, "live decoding")
    else:
        require_memory(needed.host, torch.device("cpu"), "live decoding")
        require_memory(needed.device, device, "live decoding")


def require_memory(num_bytes: int, home: torch.device, what: str = "the KV cache") -> None:
    """Raise UserError for what does not fit into the memory of device `home`, with the bytes needed and available and
    the settings to lower."""
    available = available_bytes(home)
    if num_bytes > available:
        raise UserError(
            f"{what} needs {num_bytes / GIB:.1f} GiB of {home.type} memory and {available / GIB:.1f} GiB are "
            f"available; {LOWER}"
        )


def layer_bytes(state: State, number: int) -> int:
    """Bytes of what a state declares to keep by layer, in one layer."""
    declared = (getattr(state, name) for name in (*state.sequence_tensors, *state.slot_tensors))
    return sum(tensor_bytes(kept[number]) for kept in declared if isinstance(kept, dict) and number in kept)


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a mapping or tuple of them; 0 for anything else."""
    if isinstance(value, Mapping | tuple):
        return sum(map(tensor_bytes, value.values() if isinstance(value, Mapping) else value))
    return value.nbytes if isinstance(value, Tensor) else 0


# Page-locked memory


def aligned(num_bytes: int) -> int:
    """Bytes that a piece of `num_bytes` takes of a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PinnedSlab:
    """`num_bytes` of page-locked host memory, handed out in pieces: exactly as much as a session's stores take.

    PyTorch rounds page-locked allocations up to powers of two, and keeps them locked when they are freed: 31 GiB of
    slots would lock 40, for good. A slab is mapped, its pages touched by all threads at once, locked by
    `cudaHostRegister`, and given back to the machine when it is closed. Raises UserError where it cannot be locked.
    """

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
        f"platform.pinned=true: {num_bytes / GIB:.1f} GiB of host memory cannot be page-locked ({reason}); lower "
        "batch_size, prompt_len or gen_len, or set platform.pinned=false"
    )


# Managed memory: its pages move between host and device on access, the paper's UVM. A kernel reads and writes a page
# where it is mapped; one that lies in host memory faults, stalls and comes over, and where the device is full another
# leaves for it. Nothing is advised or asked for ahead, so this is what the driver does by itself.


def require_managed(num_bytes: int, device: torch.device) -> None:
    """Raise UserError for managed memory that `device` cannot have, or that would be of no use: no CUDA device, one
    without concurrent managed access, less host memory than num_bytes, or less device memory than num_bytes /
    `MOST_MANAGED`."""
    _require_managed_access(device)
    cache, host, free = (size / GIB for size in (num_bytes, available_memory(), available_bytes(device)))
    if cache > host:
        raise UserError(
            f"placement=managed: the KV cache needs {cache:.1f} GiB of host memory, where its pages go, and "
            f"{host:.1f} GiB are available; {LOWER}"
        )
    if cache > MOST_MANAGED * free:
        raise UserError(
            f"placement=managed: the KV cache of {cache:.1f} GiB may be at most {MOST_MANAGED} times the {free:.1f} "
            f"GiB of device memory that are free; {LOWER}"
        )


def managed_empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Managed memory without content, uint8 [*shape] on `device`; freed with the last tensor that views it.

    Raises UserError for a device without it, RuntimeError for an error of CUDA's.
    """
    _require_managed_access(device)
    return _as_tensor(_ManagedBlock(math.prod(shape), device), device).view(shape)


@contextmanager
def smaller_card(device: torch.device, gib: float | None) -> Iterator[None]:
    """Leave `gib` GiB of device memory to this process's tensors, those that are there included, until the block ends,
    so that a large card pages as a smaller one does.

    None leaves all. Raises UserError for more than there is, and for less than the tensors take.
    """
    if gib is None:
        yield
        return
    torch.cuda.empty_cache()  # so that what torch holds is tensors
    held = torch.cuda.memory_reserved(device)
    whole = held + available_bytes(device)
    if not held < gib * GIB <= whole:
        raise UserError(
            f"platform.device_gib={gib:g}: must be above {held / GIB:.1f}, which the weights take, and at most "
            f"{whole / GIB:.1f}, which they and what is free on this card make"
        )
    _call("cudaSetDevice", device.index or 0)
    pointer = _call("cudaMalloc", whole - int(gib * GIB))
    try:
        yield
    finally:
        _call("cudaFree", pointer)


class _ManagedBlock:
    """num_bytes of managed memory, told to torch by the interface that CUDA libraries share; freed with this object."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        _call("cudaSetDevice", device.index or 0)
        self.pointer = int(_call("cudaMallocManaged", num_bytes, _runtime().cudaMemAttachGlobal))
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 2,
        }  # fmt: skip
        weakref.finalize(self, _free, self.pointer, device).atexit = False  # a process that ends gives all back


def _as_tensor(block: _ManagedBlock, device: torch.device) -> Tensor:
    """`block` as a flat uint8 tensor, which keeps it."""
    tensor = torch.as_tensor(block, device=device)
    assert tensor.data_ptr() == block.pointer, "a copy would be device memory"
    return tensor


def _free(pointer: int, device: torch.device) -> None:
    _call("cudaSetDevice", device.index or 0)
    _call("cudaDeviceSynchronize")  # torch knows nothing of this memory, so kernels that read it may be under way
    _call("cudaFree", pointer)


def _require_managed_access(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"placement=managed: needs platform=cuda; allowed on {device.type}: device, host")
    attribute = _runtime().cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess
    if not _call("cudaDeviceGetAttribute", attribute, device.index or 0):
        raise UserError("placement=managed: this GPU has no concurrent managed access; allowed on it: device, host")


def _call(name: str, *arguments: Any) -> Any:
    """The result of a function of CUDA's runtime; RuntimeError in CUDA's words where it fails."""
    runtime = _runtime()
    error, *results = getattr(runtime, name)(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error)[1].decode()}")
    return results[0] if results else None


RUNTIME = "cuda.bindings.runtime"


def cuda_runtime() -> ModuleType | None:
    """CUDA's runtime, which PyTorch's CUDA build brings along; None where it is not installed."""
    try:
        return import_module(RUNTIME)
    except ImportError:
        return None


def _runtime() -> Any:
    if (runtime := cuda_runtime()) is None:
        raise UserError("placement=managed: needs the package cuda-bindings, which torch's CUDA build brings")
    return runtime
