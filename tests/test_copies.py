"""Whole layers and columns of them as one strided copy each, against a loop over rows."""

from itertools import combinations, product

import pytest
import torch
from fake_cuda import fake_runtime
from living import make_store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.offload import store as copies
from harness.offload.memory import DEFAULT_TUNING, PinnedSlab
from harness.offload.store import copy_heads

BATCH, KV_HEADS, CAPACITY, SLOT_BYTES = 2, 2, 7, 8
HEADS, STREAM = BATCH * KV_HEADS, 1234
TO_HOST = 2
COLUMNS = [slice(begin, end) for begin, end in combinations(range(CAPACITY + 1), 2)]


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def as_between_devices(source, target):
    copies._memcpy_2d(*(each.flatten(2).flatten(0, 1) for each in (source, target)))


def test_columns_cross_by_one_copy_that_is_a_loop_over_their_rows():
    """Into the rows of a buffer with room for one more behind each head's, and back."""
    slots = random_bytes(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES)
    for columns in COLUMNS:
        count = columns.stop - columns.start
        rows = random_bytes(BATCH, KV_HEADS, count + 1, SLOT_BYTES)
        expected, width = rows.clone(), count * SLOT_BYTES
        for batch, head, row in product(range(BATCH), range(KV_HEADS), range(count)):
            expected[batch, head, row] = slots[batch, head, columns.start + row]
        with fake_runtime() as runtime:
            as_between_devices(slots[:, :, columns], rows[:, :, :count])
            assert torch.equal(rows, expected), columns
            written = torch.zeros_like(slots)
            as_between_devices(rows[:, :, :count], written[:, :, columns])
        assert torch.equal(written[:, :, columns], slots[:, :, columns]) and written.sum() == rows[:, :, :count].sum()
        (_, _, pitch, _, slots_pitch, *size, _, stream), (*_, kind, _) = runtime.calls
        assert (pitch, slots_pitch, *size, stream) == (width + SLOT_BYTES, CAPACITY * SLOT_BYTES, width, HEADS, STREAM)
        assert kind == TO_HOST


def test_an_error_of_cudas_is_raised_in_its_words():
    with fake_runtime() as runtime, pytest.raises(RuntimeError, match="^cudaMemcpy2DAsync: out of memory$"):
        runtime.fails = "cudaMemcpy2DAsync"
        copies._memcpy_2d(lines := random_bytes(3, 4), lines.clone())


def test_no_columns_are_no_copy(monkeypatch):
    monkeypatch.setattr(copies, "_memcpy_2d", lambda *_: pytest.fail("CUDA is asked for nothing"))
    slots = torch.empty(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES, dtype=torch.uint8)
    copy_heads(slots[:, :, :0], slots[:, :, :0].to("meta"))


class Copies(TorchDispatchMode):
    """Names of the operations that copy, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._opname in ("copy_", "_to_copy"):
            self.names.append(operation._opname)
        return operation(*args, **(kwargs or {}))


def test_a_pageable_stores_own_row_crosses_once_and_the_host_deals_it_out():
    assert DEFAULT_TUNING.min_copy_bytes > CAPACITY * 16
    with FakeTensorMode(), Copies() as seen:
        shape = {"batch": BATCH, "num_kv_heads": KV_HEADS, "capacity": CAPACITY}
        store = make_store(4, "fp16", dtype=torch.float16, device=torch.device("cuda"), **shape)
        store.write(torch.empty(BATCH, KV_HEADS, 1, 16, dtype=torch.uint8, device="cuda"), at=3)
    assert seen.names == ["_to_copy", "copy_"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
def test_columns_cross_on_a_gpu_as_they_are(pinned):
    slots = random_bytes(BATCH, KV_HEADS, CAPACITY, SLOT_BYTES)
    slab = PinnedSlab(slots.numel()) if pinned else None
    home = slots.clone() if slab is None else slab.take(slots.shape).copy_(slots)
    for columns in COLUMNS[::7]:
        count = columns.stop - columns.start
        rows = random_bytes(BATCH, KV_HEADS, count + 1, SLOT_BYTES).cuda()
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
