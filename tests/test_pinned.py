"""The page-locked slab: exactly as large as it is asked for, locked once, unlocked and given back once."""

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch
from cases import CASES
from living import attached_with_link, open_live

from harness.errors import UserError
from harness.offload import live as session
from harness.offload import memory as pinned
from harness.offload.memory import ALIGNMENT, PinnedSlab, aligned

REFUSED = 2  # cudaErrorMemoryAllocation


class Cudart:
    """`torch.cuda.cudart()`, which locks nothing and remembers what is locked."""

    cudaError = int  # noqa: N815

    def __init__(self):
        self.locked, self.calls, self.error = {}, [], 0

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.calls.append(("register", size, flags))
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unregister", self.locked.pop(address)))
        return 0

    def cudaGetErrorString(self, error):  # noqa: N802
        return {REFUSED: "out of memory"}[error]


@pytest.fixture
def cudart(monkeypatch):
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("synchronize",)))
    monkeypatch.setattr(pinned, "_forget_error", lambda: runtime.calls.append(("forget",)))
    return runtime


def test_pieces_are_aligned_and_lie_in_what_was_locked(cudart):
    shapes = [(2, 3, 5, 36), (1,), (4, 64)]
    slab = PinnedSlab(sum(aligned(torch.Size(shape).numel()) for shape in shapes))
    pieces = [slab.take(shape) for shape in shapes]
    ((address, size),) = cudart.locked.items()
    assert size == slab.nbytes == 1280 + 256 + 256 and address % mmap.PAGESIZE == 0
    end = address
    for piece, shape in zip(pieces, shapes, strict=True):
        assert piece.shape == shape and piece.dtype == torch.uint8 and piece.is_contiguous()
        assert piece.data_ptr() % ALIGNMENT == 0 and piece.data_ptr() >= end
        end = piece.data_ptr() + piece.nbytes
        piece.fill_(7)
    assert end <= address + size
    with pytest.raises(AssertionError, match="as large as its pieces"):
        slab.take((1,))
    slab.close()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs huge pages")
def test_a_slab_is_of_pages_that_may_be_huge(cudart):
    slab = PinnedSlab(1 << 22)
    address = slab.take((1,)).data_ptr()
    fields: dict[str, list[str]] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            inside, permissions = begin <= address < end, values[0]
        elif inside:
            fields[name] = [permissions, *values]
    assert fields["VmFlags:"][0].endswith("p"), (
        "of no other process, whose pages are huge only where the system says so"
    )
    assert "hg" in fields["VmFlags:"]
    slab.close()


def test_a_slab_is_unlocked_once_after_the_device_is_done(cudart):
    slab = PinnedSlab(4096)
    slab.close()
    slab.close()
    assert cudart.calls == [("register", 4096, 0), ("synchronize",), ("unregister", 4096)]
    assert slab.nbytes == 0


def test_a_slab_that_nobody_closes_is_unlocked_when_it_goes(cudart):
    slab = PinnedSlab(4096)
    del slab
    gc.collect()
    assert not cudart.locked


def test_a_slab_gives_its_memory_back(cudart, monkeypatch):
    pages = []
    original = mmap.mmap
    monkeypatch.setattr(
        mmap, "mmap", lambda *args, **kwargs: pages.append(WeakPages(original(*args, **kwargs))) or pages[-1].held()
    )
    slab = PinnedSlab(1 << 20)
    piece = slab.take((1 << 20,))
    slab.close()
    assert pages[0].mapped, "a piece is still held"
    del piece
    gc.collect()
    assert not pages[0].mapped


class WeakPages:
    """A mapping that is not kept alive by being watched."""

    def __init__(self, pages):
        self._held, self._pages = pages, weakref.ref(pages)

    def held(self):
        held, self._held = self._held, None
        return held

    @property
    def mapped(self):
        return self._pages() is not None


def test_memory_that_cannot_be_locked_is_the_users_to_lower(cudart):
    cudart.error = REFUSED
    with pytest.raises(UserError) as refused:
        PinnedSlab(3 << 20)
    assert str(refused.value) == (
        "platform.pinned=true: 0.0 GiB of host memory cannot be page-locked (out of memory); lower batch_size, "
        "prompt_len or gen_len, or set platform.pinned=false"
    )
    assert cudart.calls == [("register", 3 << 20, 0), ("forget",)]


def test_memory_that_cannot_be_mapped_is_refused_alike(cudart):
    with pytest.raises(UserError, match=r"platform.pinned=true: 4194304\.0 GiB of host memory cannot be page-locked"):
        PinnedSlab(1 << 52)
    assert not cudart.calls


@pytest.mark.parametrize("name", ["full", "int4", "infinigen", "h2o"])
def test_a_session_locks_what_its_stores_take_and_no_more(cudart, monkeypatch, name):
    with attached_with_link() as (attached, link):
        live = open_live(attached, CASES[name], placement="host", link=link)
        assert live.pinned_bytes == 0 and not live.pinned, "nothing is locked for a CPU"
        live.pinned = True
        ids = torch.arange(24).expand(2, -1)
        live.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
        assert live.pinned_bytes == sum(aligned(store.nbytes) for store in live.stores) == live.bytes_needed.host
        assert list(cudart.locked.values()) == [live.pinned_bytes]
        live.decode_step(ids[:, 0])
        live.close()
        assert not cudart.locked and live.pinned_bytes == 0


def test_a_session_that_cannot_lock_leaves_nothing_behind(cudart):
    cudart.error = REFUSED
    with attached_with_link() as (attached, link):
        live = open_live(attached, CASES["full"], placement="host", link=link)
        live.pinned = True
        ids = torch.arange(24).expand(2, -1)
        with pytest.raises(UserError, match="cannot be page-locked"):
            live.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
        live.close()
    assert live.caches == [] and live.pinned_bytes == 0


@pytest.mark.parametrize(
    ("device", "placement", "pinned", "expected"),
    [
        ("cuda", "host", True, True),
        ("cuda", "host", False, False),
        ("cuda", "device", True, False),
        ("cpu", "host", True, False),
    ],
)
def test_only_what_a_gpu_reads_over_the_link_is_locked(device, placement, pinned, expected, monkeypatch):
    with attached_with_link() as (attached, link):
        monkeypatch.setattr(attached, "device", torch.device(device))
        monkeypatch.setattr(session, "Timeline", lambda device: None)
        live = open_live(attached, CASES["full"], placement=placement, link=link, pinned=pinned)
        assert live.pinned is expected


# On a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
def test_a_slab_is_page_locked_while_it_is_open():
    slab = PinnedSlab(1 << 20)
    piece = slab.take((1 << 20,))
    assert piece.is_pinned()
    on_device = torch.arange(256, device="cuda").to(torch.uint8).repeat(1 << 12)
    torch.cuda.set_sync_debug_mode("error")
    try:
        piece.copy_(on_device, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(piece, on_device.cpu())
    slab.close()
    assert not piece.is_pinned()


@gpu
def test_what_cannot_be_locked_leaves_the_device_usable():
    lock = pinned._lock
    memory = torch.zeros(4096, dtype=torch.uint8)
    lock(memory.data_ptr(), 4096)
    try:
        with pytest.raises(UserError, match="cannot be page-locked"):
            lock(memory.data_ptr(), 4096)  # a second time
        assert int(torch.ones(3, device="cuda").sum()) == 3
    finally:
        pinned._unlock(memory.data_ptr())
