"""What live decoding needs of the host's and the device's memory, and whether it fits: asked before it is made.

Counted before a prompt runs: the slots of all layers; under host placement the buffers for fetched rows; and what a
layer of the prompt's dense pass holds at its peak, which is more than a decode step does. What a method keeps beside
the rows (partial keys, which token lies where) its state alone knows: its first layer shows it, and then as much is
asked for in all others. Not counted: the weights and a calibration, which lie there already, and what a method needs
only while it takes in a layer's prompt (its scores).
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.files import available_memory
from harness.model.attach import Attached
from harness.model.room import available_bytes
from methods.base import State

OWN = 1
"""Behind the fetched rows of a head a buffer has room for the step's own one."""


LOWER = "lower batch_size, prompt_len or gen_len, or choose a codec of fewer bits"
"""What to do where a cache does not fit."""


class LayerSlots(NamedTuple):
    """The slots of a layer's store: so many of each head of the batch."""

    heads: int
    capacity: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the slots."""
        return self.bytes_of(self.capacity)

    def bytes_of(self, rows: int) -> int:
        """Of so many rows of each head."""
        return self.heads * rows * self.slot_bytes


class SessionBytes(NamedTuple):
    """What a session needs, beside the weights. managed: of memory that lies in either (`harness.offload.managed`)."""

    host: int
    device: int
    managed: int = 0


def session_bytes(
    layers: Sequence[LayerSlots], placement: str, *, ahead: int, selected: int, reuse: bool, activations: int
) -> SessionBytes:
    """ahead, selected, reuse: of the `Fetcher`. activations: `prompt_bytes`, 0 where no prompt is run."""
    cache = sum(aligned(layer.num_bytes) for layer in layers)
    if placement == "host":
        return SessionBytes(cache, buffer_bytes(layers, ahead=ahead, selected=selected, reuse=reuse) + activations)
    if placement == "managed":
        return SessionBytes(0, activations, cache)
    return SessionBytes(0, cache + activations)


def buffer_bytes(layers: Sequence[LayerSlots], *, ahead: int, selected: int, reuse: bool) -> int:
    """Of the buffers that a `Fetcher` of these layers has: one of each of the first `ahead` layers, two that the others
    take turns in, and under reuse one for `selected` rows of each of those."""
    others = layers[ahead:]
    largest = max(others, key=lambda layer: layer.num_bytes)
    in_turn = largest.bytes_of((min(selected, largest.capacity) if ahead else largest.capacity) + OWN)
    kept = sum(layer.bytes_of(selected + OWN) for layer in others) if reuse else 0
    return sum(layer.bytes_of(layer.capacity + OWN) for layer in layers[:ahead]) + 2 * in_turn + kept


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """At most what a layer of a dense pass over `num_tokens` tokens, all prompts', holds at once.

    Of a token that is its hidden state and three more of the kind, its rotation, and either what the FFN makes of it,
    or query, key, value and output, the query once more, and the packed row and a copy.
    """
    geometry, hidden = attached.geometry, attached.model.config.hidden_size
    of_attention = _weights(attached.attentions[0])
    of_layer = _weights(attached.adapter.layers(attached.model)[0])
    packed = geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    made = sum(weight.numel() for weight in of_attention.values()) // hidden + packed
    ffn = _ffn_elements([weight for name, weight in of_layer.items() if name not in of_attention], hidden)
    return num_tokens * (4 * hidden + 4 * geometry.head_dim + max(made, ffn)) * attached.dtype.itemsize


def _ffn_elements(weights: Sequence[Tensor], hidden: int) -> int:
    """A token's activations in an FFN: one for each matrix, and another where two matrices are one, whose product
    stays as long as its halves are used."""
    fused = max(weight.shape[0] for weight in weights) - max(weight.shape[1] for weight in weights)
    return sum(weight.numel() for weight in weights) // hidden + fused


def _weights(module: nn.Module) -> dict[int, Tensor]:
    """The matrices of a module, by identity."""
    return {id(weight): weight for weight in module.parameters() if weight.dim() == 2}


def require_session(needed: SessionBytes, device: torch.device) -> None:
    """Refuse a session whose host and device memory, one and the same on a CPU, is too small; raises UserError."""
    if device.type == "cpu":
        require_memory(sum(needed), device, "live decoding")
    else:
        require_memory(needed.host, torch.device("cpu"), "live decoding")
        require_memory(needed.device, device, "live decoding")


def require_memory(num_bytes: int, home: torch.device, what: str = "the KV cache") -> None:
    """Refuses what does not fit into the memory of device `home`.

    Raises UserError with the bytes needed and available and the settings to lower.
    """
    available = available_bytes(home)
    if num_bytes > available:
        raise UserError(
            f"{what} needs {num_bytes / 2**30:.1f} GiB of {home.type} memory and "
            f"{available / 2**30:.1f} GiB are available; {LOWER}"
        )


def layer_bytes(state: State, layer: int) -> int:
    """Of what a state declares to keep by layer, those of one."""
    declared = (getattr(state, name) for name in (*state.sequence_tensors, *state.slot_tensors))
    return sum(tensor_bytes(kept[layer]) for kept in declared if isinstance(kept, dict) and layer in kept)


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a mapping or tuple of them; 0 for anything else."""
    if isinstance(value, Mapping | tuple):
        return sum(map(tensor_bytes, value.values() if isinstance(value, Mapping) else value))
    return value.nbytes if isinstance(value, Tensor) else 0


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


MOST = 1.5
"""Managed bytes over free device memory, at most: beyond it nearly every page of a step faults, and a cell takes hours
to say so again."""
GIB = 2**30


def require_managed(num_bytes: int, device: torch.device) -> None:
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


def managed_empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
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


RUNTIME = "cuda.bindings.runtime"


def cuda_runtime() -> ModuleType | None:
    """The module, imported where it is needed first; None where it is not installed."""
    try:
        return import_module(RUNTIME)
    except ImportError:
        return None
