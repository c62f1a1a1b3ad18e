"""The emulated link: rows and order, pace, overlap and its absence, faults.

Times are bounded from below exactly and from above loosely, since other processes share the cores.
"""

import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decode.links import EmulatedLink
from harness.decode.store import chosen
from tests.living import Crossed, make_store

BATCH, HEADS, CAPACITY, HEAD_DIM = 2, 3, 64, 16
ROW_BYTES = 2 * HEAD_DIM * 4


class TimedLink(EmulatedLink):
    """Records when the link was occupied, in seconds, and by how many bytes."""

    def __init__(self, bytes_per_s, **options):
        self.transfers = []
        super().__init__(bytes_per_s, **options)

    def ends_at(self, start_s, num_bytes):
        end_s = super().ends_at(start_s, num_bytes)
        self.transfers.append((start_s, end_s, num_bytes))
        return end_s


@settings(max_examples=30)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["read", "gather", "write", "copy"]), st.integers(1, 20)), max_size=15),
    overlap=st.booleans(),
)
def test_transfers_are_serial_at_the_given_rate_with_exact_bytes(moves, overlap):
    rate = 2e9
    store = make_store(HEAD_DIM, batch=BATCH, num_kv_heads=HEADS, capacity=CAPACITY)
    buffer = store.rows_in(store.new_buffer(20), 20)
    with TimedLink(rate, overlap=overlap) as link, Crossed() as crossed:
        for kind, num_rows in moves:
            if kind == "write":
                link.write_back(store, buffer[:, :, :num_rows].clone(), at=3)
            elif kind == "copy":
                source = torch.randint(256, (num_rows * BATCH * HEADS * ROW_BYTES,), dtype=torch.uint8)
                link.copy(source, target := torch.zeros_like(source)).wait()
                assert torch.equal(source, target)
            else:
                slots = chosen(torch.arange(num_rows).expand(BATCH, HEADS, -1))
                request = num_rows if kind == "read" else slots
                link.prefetch(store, request, buffer[:, :, :num_rows]).wait()
        link.drain()
    sizes = [BATCH * HEADS * num_rows * ROW_BYTES for _, num_rows in moves]
    assert [num_bytes for _, _, num_bytes in link.transfers] == sizes
    written = sum(size for (kind, _), size in zip(moves, sizes, strict=True) if kind == "write")
    copied = sum(size for (kind, _), size in zip(moves, sizes, strict=True) if kind == "copy")
    assert crossed.written[store] == written
    assert crossed.loaded[store] == sum(sizes) - written - copied, "of rows, not of tensors"
    free_s = 0.0
    for start_s, end_s, num_bytes in link.transfers:
        assert start_s >= free_s
        assert end_s - start_s >= num_bytes / rate - 1e-9
        free_s = end_s


def test_a_thread_that_begins_under_a_link_has_the_cores_of_the_others():
    """Its worker copies on one, and torch gives a new thread the number that was set last."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with EmulatedLink(1e12):
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]
