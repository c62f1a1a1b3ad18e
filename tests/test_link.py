"""The emulated link: rows and order, pace, overlap and its absence, faults, no leak; the real one under CUDA.

Times are bounded from below exactly and from above loosely, since other processes share the cores.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from living import make_store as store_of
from living import prefetch

from harness.errors import UserError
from harness.offload.links import EmulatedLink, open_link
from harness.offload.memory import PinnedSlab, aligned
from harness.offload.store import chosen as chosen_of

BATCH, HEADS, CAPACITY, HEAD_DIM = 2, 3, 64, 16
CPU = torch.device("cpu")
FAST = 1e12  # bytes/s: the copy's own time decides
ROW_BYTES = 2 * HEAD_DIM * 4
ALL_BYTES = BATCH * HEADS * CAPACITY * ROW_BYTES  # 49,152


def make_store(codec="fp32", device=CPU, **overrides):
    shape = {"batch": BATCH, "num_kv_heads": HEADS, "capacity": CAPACITY}
    return store_of(HEAD_DIM, codec, device=device, **shape, **overrides)


def filled_store(codec="fp32"):
    store = make_store(codec)
    keys, values = torch.randn(2, BATCH, HEADS, CAPACITY, HEAD_DIM).unbind()
    store.write(store.format.pack(keys, values), at=0)
    return store, keys, values


def link_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kv-link"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not link_threads()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_rows_arrive_and_reads_see_earlier_writes(codec, overlap):
    store, keys, values = filled_store(codec)
    new_keys, new_values = torch.randn(2, BATCH, HEADS, 1, HEAD_DIM).unbind()
    index = torch.tensor([[[5, 63, -1, 0]] * HEADS] * BATCH)
    with EmulatedLink(FAST, overlap=overlap) as link:
        link.write_back(store, store.format.pack(new_keys, new_values), at=5)
        chosen = prefetch(link, store, index)
        first = prefetch(link, store, 7)
        chosen, first = store.format.unpack(chosen.wait()), store.format.unpack(first.wait())
    keys[:, :, 5:6], values[:, :, 5:6] = new_keys, new_values
    keys, values = store.codec.roundtrip(keys), store.codec.roundtrip(values)
    assert torch.equal(first.keys, keys[:, :, :7]) and torch.equal(first.values, values[:, :, :7])
    assert torch.equal(chosen.keys[:, :, [0, 1, 3]], keys[:, :, [5, 63, 0]])
    assert not chosen.keys[:, :, 2].any()


@settings(max_examples=30, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["read", "gather", "write"]), st.integers(1, 20)), max_size=15),
    overlap=st.booleans(),
)
def test_transfers_are_serial_at_the_given_rate_with_exact_bytes(moves, overlap):
    rate = 2e9
    store, _, _ = filled_store()
    already = store.d2h_bytes
    with EmulatedLink(rate, overlap=overlap) as link:
        link.take_transfers()  # starts the recording
        for kind, num_rows in moves:
            if kind == "write":
                rows = store.rows_in(store.new_buffer(num_rows), num_rows)[:, :, :num_rows]
                link.write_back(store, rows, at=3)
                continue
            index = torch.arange(num_rows).expand(BATCH, HEADS, -1)
            prefetch(link, store, num_rows if kind == "read" else index).wait()
        transfers = link.take_transfers()
        assert link.take_transfers() == []
    sizes = [BATCH * HEADS * num_rows * ROW_BYTES for _, num_rows in moves]
    assert [transfer.num_bytes for transfer in transfers] == sizes
    assert [transfer.direction for transfer in transfers] == ["d2h" if kind == "write" else "h2d" for kind, _ in moves]
    assert store.h2d_bytes == sum(transfer.num_bytes for transfer in transfers if transfer.direction == "h2d")
    assert store.d2h_bytes - already == sum(t.num_bytes for t in transfers if t.direction == "d2h")
    for earlier, later in zip(transfers, transfers[1:], strict=False):
        assert later.start_s >= earlier.end_s
    for transfer in transfers:
        assert transfer.end_s - transfer.start_s >= transfer.num_bytes / rate - 1e-9


def test_transfers_are_kept_only_once_somebody_measures():
    store, _, _ = filled_store()
    with EmulatedLink(FAST) as link:
        for _ in range(2):
            prefetch(link, store, 7).wait()
        assert link.take_transfers() == []
        prefetch(link, store, 5).wait()
        assert [transfer.num_bytes for transfer in link.take_transfers()] == [BATCH * HEADS * 5 * ROW_BYTES]


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_transfer_takes_its_bytes_over_the_rate():
    store, _, _ = filled_store()
    with EmulatedLink(ALL_BYTES / 0.05) as link:  # 50 ms a transfer
        began = time.perf_counter()
        tickets = [prefetch(link, store, CAPACITY) for _ in range(3)]
        assert time.perf_counter() - began < 0.1  # starting waits for nothing
        for ticket in tickets:
            ticket.wait()
        elapsed = time.perf_counter() - began
    assert 0.15 <= elapsed < 0.4


@pytest.mark.parametrize("overlap", [True, False])
def test_a_plain_tensor_crosses_at_the_rate_of_the_link_and_in_its_turn(overlap):
    store, _, _ = filled_store()
    source, target = torch.randint(256, (ALL_BYTES,), dtype=torch.uint8), torch.zeros(ALL_BYTES, dtype=torch.uint8)
    with EmulatedLink(ALL_BYTES / 0.02, overlap=overlap) as link:
        link.take_transfers()
        rows, copied = prefetch(link, store, CAPACITY), link.copy(source, target)
        rows.wait()
        copied.wait()
        assert torch.equal(source, target)
        transfers = link.take_transfers()
    assert [(each.direction, each.num_bytes) for each in transfers] == 2 * [("h2d", ALL_BYTES)]
    assert transfers[1].start_s >= transfers[0].end_s and transfers[1].end_s - transfers[1].start_s >= 0.0199
    assert store.h2d_bytes == ALL_BYTES, "of the rows alone"


def test_computing_hides_a_prefetch_and_hides_nothing_without_overlap():
    store, _, _ = filled_store()
    exposed = {}
    for overlap in (True, False):
        with EmulatedLink(ALL_BYTES / 0.05, overlap=overlap) as link:
            ticket = prefetch(link, store, CAPACITY)
            time.sleep(0.08)  # stands for the layer that computes meanwhile
            exposed[overlap] = seconds_of(ticket.wait)
            assert seconds_of(ticket.wait) < 0.04, "waiting again costs nothing"
    assert exposed[True] < 0.04
    assert exposed[False] >= 0.05


def test_a_waiting_thread_leaves_its_core_alone():
    store, _, _ = filled_store()
    with EmulatedLink(ALL_BYTES / 0.3) as link:
        began = time.process_time()
        prefetch(link, store, CAPACITY).wait()
        assert time.process_time() - began < 0.1


def test_a_write_back_is_awaited_at_once_without_overlap():
    store, keys, values = filled_store()
    rows = store.format.pack(keys, values)
    with EmulatedLink(ALL_BYTES / 0.02, overlap=False) as link:
        assert seconds_of(lambda: link.write_back(store, rows, at=0)) >= 0.02
    with EmulatedLink(ALL_BYTES / 0.02) as link:
        link.write_back(store, rows, at=0)
        assert seconds_of(link.drain) > 0.01


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_copy_ends_in_its_error_everywhere(overlap):
    store, _, _ = filled_store()
    beyond = torch.full((BATCH, HEADS, 1), CAPACITY)
    began = time.perf_counter()
    with EmulatedLink(FAST, overlap=overlap) as link:
        failing = prefetch(link, store, beyond)
        with pytest.raises(IndexError, match="slot index 64"):
            failing.wait()
        with pytest.raises(IndexError, match="slot index 64"):
            prefetch(link, store, 1).wait()
        with pytest.raises(IndexError, match="slot index 64"):
            link.copy(torch.zeros(1), torch.zeros(1)).wait()
        with pytest.raises(IndexError, match="slot index 64"):
            link.write_back(store, store.rows_in(store.new_buffer(1), 1)[:, :, :1], at=0)
        with pytest.raises(IndexError, match="slot index 64"):
            link.drain()
    assert time.perf_counter() - began < 5


def test_transfers_behind_a_failed_one_end_in_its_error_too():
    store, _, _ = filled_store()
    gate = threading.Event()
    with EmulatedLink(FAST) as link:
        link.start("h2d", lambda: gate.wait() and 0, [])
        prefetch(link, store, torch.full((BATCH, HEADS, 1), CAPACITY))
        behind = prefetch(link, store, 1)
        gate.set()
        began = time.perf_counter()
        with pytest.raises(IndexError, match="slot index 64"):
            behind.wait()
    assert time.perf_counter() - began < 5


def test_a_worker_that_dies_raises_instead_of_hanging():
    store, _, _ = filled_store()

    def die():
        raise SystemExit("killed")

    with EmulatedLink(FAST) as link:
        link.start("h2d", die, [])
        with pytest.raises(SystemExit, match="killed"):
            link.drain()
        with pytest.raises(SystemExit, match="killed"):
            prefetch(link, store, 1)


def test_a_closed_link_takes_no_more():
    store, _, _ = filled_store()
    link = EmulatedLink(FAST)
    link.close()
    link.close()
    with pytest.raises(RuntimeError, match="the link is closed"):
        prefetch(link, store, 1)


def test_an_error_while_transferring_leaves_no_thread():
    store, _, _ = filled_store()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), EmulatedLink(ALL_BYTES / 20) as link:  # 20 s a transfer
        prefetch(link, store, CAPACITY)
        raise KeyboardInterrupt
    assert time.perf_counter() - began < 5


def test_an_interrupt_ends_a_wait_and_the_link(monkeypatch):
    """While ten minutes are waited for, and as a command line has it: a shell's background jobs ignore SIGINT."""
    store, _, _ = filled_store()
    before, waits = signal.signal(signal.SIGINT, signal.default_int_handler), []

    def interrupted(seconds: float) -> None:
        waits.append(seconds)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(time, "sleep", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), EmulatedLink(ALL_BYTES / 600) as link:
            prefetch(link, store, CAPACITY).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(waits) == 1 and 0 < waits[0] <= 600 and not link_threads()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sequences_one_after_another_leave_memory_and_threads_where_they_were():
    def sequence():
        store = store_of(64, batch=4, num_kv_heads=4, capacity=256)
        rows = store.rows_in(store.new_buffer(256), 256)[:, :, :256]  # 2 MiB, as much as the store
        with EmulatedLink(FAST) as link:
            link.write_back(store, rows, at=0)
            prefetch(link, store, 256).wait()

    for _ in range(20):
        sequence()
    gc.collect()
    before, threads = resident_bytes(), threading.active_count()
    for _ in range(200):
        sequence()
    gc.collect()
    assert threading.active_count() == threads
    assert resident_bytes() < before * 1.02


def test_the_worker_takes_no_compute_threads():
    before = torch.get_num_threads()
    with EmulatedLink(FAST) as link:
        inside = []
        link.start("h2d", lambda: inside.append(torch.get_num_threads()) or 0, [])
        link.drain()
    assert inside == [1] and torch.get_num_threads() == before


def test_a_link_has_the_rate_that_was_asked_for():
    with open_link(CPU, bytes_per_s=5e9) as link:
        assert link.bytes_per_s == 5e9


@pytest.mark.parametrize("rate", [0.0, -1e9, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(UserError, match=r"link_gbps=.* must be positive"):
        open_link(CPU, bytes_per_s=rate)


def test_a_rate_under_cuda_is_refused():
    with pytest.raises(UserError, match=r"link_gbps=12\.4 sets the emulated link of a CPU"):
        open_link(torch.device("cuda"), bytes_per_s=12.4e9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize(("overlap", "pinned"), [(True, True), (False, True), (False, False)])
def test_cuda_link_moves_the_same_rows_without_a_sync(codec, overlap, pinned):
    device = torch.device("cuda")
    reference = make_store(codec)
    slab = PinnedSlab(aligned(reference.nbytes)) if pinned else None
    store = make_store(codec, device, slab=slab)
    keys, values = torch.randn(2, BATCH, HEADS, CAPACITY, HEAD_DIM).unbind()
    index = torch.tensor([[[5, 63, -1, 0]] * HEADS] * BATCH)
    reference.write(reference.format.pack(keys, values), at=0)
    on_device = [tensor.to(device) for tensor in (keys, values, index)]
    with open_link(device, overlap=overlap) as link:
        assert link.take_transfers() == []  # starts the recording
        if pinned:
            torch.cuda.set_sync_debug_mode("error")
        try:
            link.write_back(store, store.format.pack(*on_device[:2]), at=0)
            link.write_back(store, store.format.pack(on_device[0][:, :, :1], on_device[1][:, :, :1]), at=0)
            chosen = prefetch(link, store, on_device[2])
            first = prefetch(link, store, 7)
            got = [store.format.unpack(chosen.wait()), store.format.unpack(first.wait())]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        transfers = link.take_transfers()
    wanted = [torch.zeros(BATCH, HEADS, count, reference.slot_bytes, dtype=torch.uint8) for count in (4, 7)]
    for request, rows in zip((index, 7), wanted, strict=True):
        reference.load(request if isinstance(request, int) else chosen_of(request), rows)
    for got_pair, want_pair in zip(got, map(reference.format.unpack, wanted), strict=True):
        torch.testing.assert_close(got_pair.keys.cpu(), want_pair.keys)
        torch.testing.assert_close(got_pair.values.cpu(), want_pair.values)
    row_bytes = BATCH * HEADS * store.slot_bytes
    assert [transfer.num_bytes for transfer in transfers] == [row_bytes * count for count in (CAPACITY, 1, 3, 7)]
    assert (store.h2d_bytes, store.d2h_bytes) == (rows * 10, rows * (CAPACITY + 1))
    if slab is not None:
        slab.close()
