"""A cache in CUDA's managed memory, whose pages the driver moves between host and device on access: the paper's UVM.

A kernel reads and writes the pages where they are mapped. One that lies in host memory faults, stalls and comes over;
where the device is full, another leaves for it. Nothing is advised or asked for ahead, so this is what the driver does
by itself. `smaller_card` takes device memory away, so that a large card pages as a smaller one does.

    with smaller_card(device, gib=48):
        slots = empty((batch, num_kv_heads, capacity, slot_bytes), device)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.files import available_memory
from harness.offload.memory import LOWER, available_bytes
from harness.offload.runtime import cuda_runtime

MOST = 1.5
"""Managed bytes over free device memory, at most: beyond it nearly every page of a step faults, and a cell takes hours
to say so again."""
GIB = 2**30


def require_memory(num_bytes: int, device: torch.device) -> None:
    """Refuse managed memory that `device` has not, or of which so many bytes are no use.

    Raises UserError: no CUDA device, one without concurrent managed access, less host memory than num_bytes, or less
    device memory than num_bytes / `MOST`.
    """
    _require_device(device)
    cache, host, free = (size / GIB for size in (num_bytes, available_memory(), available_bytes(device)))
    if cache > host:
        raise UserError(
            f"placement=managed: the KV cache needs {cache:.1f} GiB of host memory, where its pages go, and "
            f"{host:.1f} GiB are available; {LOWER}"
        )
    if cache > MOST * free:
        raise UserError(
            f"placement=managed: the KV cache of {cache:.1f} GiB may be at most {MOST} times the {free:.1f} GiB of "
            f"device memory that are free; {LOWER}"
        )


def empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Managed memory without content, uint8 [*shape] on `device`; freed with the last tensor that views it.

    Raises UserError for a device without it, RuntimeError for an error of CUDA's.
    """
    _require_device(device)
    return _as_tensor(_Block(math.prod(shape), device), device).view(shape)


@contextmanager
def smaller_card(device: torch.device, gib: float | None) -> Iterator[None]:
    """Leave `gib` GiB of device memory to this process's tensors, those that are there included, until the block ends.

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
    _select(device)
    pointer = _call("cudaMalloc", whole - int(gib * GIB))
    try:
        yield
    finally:
        _call("cudaFree", pointer)


class _Block:
    """num_bytes of managed memory, told to torch by the interface that CUDA libraries share; freed with this object."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        _select(device)
        self.pointer = int(_call("cudaMallocManaged", num_bytes, _runtime().cudaMemAttachGlobal))
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 2,
        }  # fmt: skip
        weakref.finalize(self, _free, self.pointer, device).atexit = False  # a process that ends gives all back


def _as_tensor(block: _Block, device: torch.device) -> Tensor:
    """`block` as a flat uint8 tensor, which keeps it."""
    tensor = torch.as_tensor(block, device=device)
    assert tensor.data_ptr() == block.pointer, "a copy would be device memory"
    return tensor


def _free(pointer: int, device: torch.device) -> None:
    _select(device)
    _call("cudaDeviceSynchronize")  # torch knows nothing of this memory, so kernels that read it may be under way
    _call("cudaFree", pointer)


def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"placement=managed: needs platform=cuda; allowed on {device.type}: device, host")
    attribute = _runtime().cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess
    if not _call("cudaDeviceGetAttribute", attribute, device.index or 0):
        raise UserError("placement=managed: this GPU has no concurrent managed access; allowed on it: device, host")


def _select(device: torch.device) -> None:
    _call("cudaSetDevice", device.index or 0)


def _call(name: str, *arguments: Any) -> Any:
    """The result of a function of CUDA's runtime; RuntimeError in CUDA's words where it fails."""
    runtime = _runtime()
    error, *results = getattr(runtime, name)(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error)[1].decode()}")
    return results[0] if results else None


def _runtime() -> Any:
    """CUDA's runtime, which a machine without CUDA lacks."""
    if (runtime := cuda_runtime()) is None:
        raise UserError("placement=managed: needs the package cuda-bindings, which torch's CUDA build brings")
    return runtime
