"""Whole layers and columns of them as one strided copy each, against a loop over rows; a stand-in for `cuda.bindings`
moves the bytes here, and the real one on a GPU."""

import ctypes
import sys
from enum import Enum, IntEnum
from itertools import combinations, product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from living import make_store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.offload import store as copies
from harness.offload.memory import DEFAULT_TUNING, RUNTIME, PinnedSlab, cuda_runtime
from harness.offload.store import copy_heads

BATCH, KV_HEADS, CAPACITY, SLOT_BYTES = 2, 2, 7, 8
HEADS = BATCH * KV_HEADS
STREAM = 1234


class Call(NamedTuple):
    target_pitch: int
    source_pitch: int
    width: int
    height: int
    kind: Enum
    stream: int


class Runtime:
    """`cuda.bindings.runtime`, of which a copy happens at once, and only as its documentation allows."""

    cudaMemcpyKind = Enum("cudaMemcpyKind", ["cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"])  # noqa: N815
    cudaError_t = IntEnum("cudaError_t", {"cudaSuccess": 0, "cudaErrorInvalidPitchValue": 12})  # noqa: N815

    def __init__(self):
        self.calls = []

    def cudaMemcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):  # noqa: N802
        self.calls.append(Call(target_pitch, source_pitch, width, height, kind, stream))
        if not 0 < width <= min(target_pitch, source_pitch):
            return (self.cudaError_t.cudaErrorInvalidPitchValue,)
        for line in range(height):
            ctypes.memmove(target + line * target_pitch, source + line * source_pitch, width)
        return (self.cudaError_t.cudaSuccess,)


@pytest.fixture
def runtime(monkeypatch):
    """Every rectangle is copied as between a device and the host."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(copies, "copy_rectangle", lambda source, target: copies._memcpy_2d(runtime, source, target))
    return runtime


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


COLUMNS = [slice(begin, end) for begin, end in combinations(range(CAPACITY + 1), 2)]


def buffer_rows(columns: slice) -> torch.Tensor:
    """Rows of a buffer with room for one more behind each head's."""
    return random_bytes(BATCH, KV_HEADS, columns.stop - columns.start + 1, SLOT_BYTES)


def test_columns_are_read_by_one_copy_that_is_a_loop_over_their_rows(runtime):
    slots = random_bytes(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES)
    for columns in COLUMNS:
        runtime.calls.clear()
        rows = buffer_rows(columns)
        expected, count = rows.clone(), columns.stop - columns.start
        for batch, head, row in product(range(BATCH), range(KV_HEADS), range(count)):
            expected[batch, head, row] = slots[batch, head, columns.start + row]
        copy_heads(slots[:, :, columns], rows[:, :, :count])
        assert torch.equal(rows, expected), columns
        (call,) = runtime.calls
        width = count * SLOT_BYTES
        assert call[:4] == (width + SLOT_BYTES, CAPACITY * SLOT_BYTES, width, HEADS)


def test_no_columns_are_no_copy(monkeypatch):
    monkeypatch.setattr(copies, "cuda_runtime", lambda: pytest.fail("CUDA is asked for nothing"))
    slots = torch.empty(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES, dtype=torch.uint8)
    copy_heads(slots[:, :, :0], slots[:, :, :0].to("meta"))


@pytest.mark.parametrize("count", [1, 3, CAPACITY])
def test_columns_are_written_by_one_copy(runtime, count):
    slots, rows = (random_bytes(BATCH, KV_HEADS, each, SLOT_BYTES) for each in (CAPACITY, count))
    expected = slots.clone()
    at = CAPACITY - count
    expected[:, :, at:] = rows
    copy_heads(rows, slots[:, :, at:])
    assert torch.equal(slots, expected)
    (call,) = runtime.calls
    width = count * SLOT_BYTES
    assert call == (CAPACITY * SLOT_BYTES, width, width, HEADS, Runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, STREAM)


def test_what_cuda_refuses_is_raised_by_its_name(monkeypatch):
    refused = Runtime.cudaError_t.cudaErrorInvalidPitchValue
    runtime = Runtime()
    monkeypatch.setattr(runtime, "cudaMemcpy2DAsync", lambda *_: (refused,))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    lines = random_bytes(3, 4)
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync of 3 x 4 bytes: cudaErrorInvalidPitchValue"):
        copies._memcpy_2d(runtime, lines, lines.clone())


class Copies(TorchDispatchMode):
    """Names of the operations that copy, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._opname in ("copy_", "_to_copy"):
            self.names.append(operation._opname)
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def without_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, RUNTIME, None)


def test_without_the_bindings_lines_are_copied_one_by_one(without_bindings):
    assert cuda_runtime() is None
    slots, rows = (torch.empty(BATCH, KV_HEADS, each, SLOT_BYTES, dtype=torch.uint8) for each in (CAPACITY, 3))
    with Copies() as seen:
        copy_heads(rows, slots[:, :, 1:4].to("meta"))
    assert seen.names[1:] == ["copy_"] * HEADS, "after that of `to`"


def test_a_pageable_stores_own_row_crosses_once_and_the_host_deals_it_out():
    assert DEFAULT_TUNING.min_copy_bytes > CAPACITY * 16
    with FakeTensorMode(), Copies() as seen:
        shape = {"batch": BATCH, "num_kv_heads": KV_HEADS, "capacity": CAPACITY}
        store = make_store(4, "fp16", dtype=torch.float16, device=torch.device("cuda"), **shape)
        store.write(torch.empty(BATCH, KV_HEADS, 1, 16, dtype=torch.uint8, device="cuda"), at=3)
    assert seen.names == ["_to_copy", "copy_"]


# On a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("bindings", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_columns_cross_as_they_are(pinned, bindings, request):
    if not bindings:
        request.getfixturevalue("without_bindings")
    slots = random_bytes(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES)
    slab = PinnedSlab(slots.numel()) if pinned else None
    home = slots.clone() if slab is None else slab.take(slots.shape).copy_(slots)
    for columns in COLUMNS[::7]:
        rows, count = buffer_rows(columns).cuda(), columns.stop - columns.start
        copy_heads(home[:, :, columns], rows[:, :, :count])
        assert torch.equal(rows[:, :, :count].cpu(), slots[:, :, columns]), columns
    rows = random_bytes(BATCH, KV_HEADS, 3, SLOT_BYTES)
    copy_heads(rows.cuda(), home[:, :, 2:5])
    torch.cuda.synchronize()
    slots[:, :, 2:5] = rows
    assert torch.equal(home, slots)
    del home
    if slab is not None:
        slab.close()
