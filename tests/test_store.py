"""KV stores: random reads and writes against a plain dict, exact byte counts, limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from living import loaded
from living import make_store as store_of

from harness.errors import UserError
from harness.offload.fetch import Fetcher
from harness.offload.store import chosen
from methods.codec import CODEC_NAMES, Codec

BATCH, HEADS, CAPACITY = 2, 3, 12
CPU = torch.device("cpu")


def make_store(codec="fp32", placement="host", head_dim=8, **overrides):
    settings = {"batch": BATCH, "num_kv_heads": HEADS, "capacity": CAPACITY, **overrides}
    return store_of(head_dim, codec, placement=placement, **settings)


def key_value(num_rows, generator, head_dim=8):
    shape = (2, BATCH, HEADS, num_rows, head_dim)
    return torch.randn(shape, generator=generator).unbind()


def distinct_slots(num_rows, generator, *, ragged):
    index = torch.rand(BATCH, HEADS, CAPACITY, generator=generator).argsort(-1)[..., :num_rows]
    dropped = torch.rand(index.shape, generator=generator) < 0.3
    return index.masked_fill(dropped, -1) if ragged else index


class Reference:
    """{(batch, head, slot): (k, v)} with rows as the codec gives them back, and rows counted one by one."""

    def __init__(self, codec):
        self.codec, self.content, self.loaded, self.written = codec, {}, 0, 0

    def write(self, keys, values, index):
        keys, values = self.codec.roundtrip(keys), self.codec.roundtrip(values)
        for batch, head, row in (index >= 0).nonzero().tolist():
            slot = int(index[batch, head, row])
            self.content[batch, head, slot] = (keys[batch, head, row], values[batch, head, row])
            self.written += 1

    def check(self, loaded, index, *, untouched):
        for batch, head, row in torch.ones_like(index).nonzero().tolist():
            slot = int(index[batch, head, row])
            want_key, want_value = self.content[batch, head, slot] if slot >= 0 else (untouched, untouched)
            self.loaded += slot >= 0
            assert torch.equal(loaded.keys[batch, head, row], want_key), (batch, head, slot)
            assert torch.equal(loaded.values[batch, head, row], want_value), (batch, head, slot)


operations = st.lists(
    st.tuples(st.sampled_from(["append", "write", "read", "gather"]), st.integers(1, 5), st.booleans()),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    operations=operations,
    codec=st.sampled_from(CODEC_NAMES),
    placement=st.sampled_from(["device", "host"]),
    seed=st.integers(0, 2**31),
)
def test_random_operations_agree_with_a_dict(operations, codec, placement, seed):
    generator = torch.Generator().manual_seed(seed)
    store, reference, filled = make_store(codec, placement), Reference(Codec(codec)), 0
    buffer = store.new_buffer(CAPACITY)
    for operation, num_rows, ragged in [("append", 4, False), *operations]:
        if operation == "append" and filled + num_rows <= CAPACITY:
            keys, values = key_value(num_rows, generator)
            store.write(store.format.pack(keys, values), at=filled)
            columns = torch.arange(filled, filled + num_rows).expand(BATCH, HEADS, -1)
            reference.write(keys, values, columns)
            filled += num_rows
        elif operation == "write":  # freed slots used again, each head its own
            keys, values = key_value(num_rows, generator)
            index = distinct_slots(CAPACITY, generator, ragged=ragged)
            index = index.masked_fill(index >= filled, -1)[..., :num_rows]
            store.write(store.format.pack(keys, values), at=index)
            reference.write(keys, values, index)
        elif operation == "read":
            every = torch.arange(min(filled, num_rows)).expand(BATCH, HEADS, -1)
            reference.check(loaded(store, every.shape[-1], buffer), every, untouched=None)
        elif operation == "gather":
            index = distinct_slots(CAPACITY, generator, ragged=ragged)
            index = index.masked_fill(index >= filled, -1)[..., :num_rows]
            zero = Codec(codec).decode(torch.zeros(Codec(codec).row_bytes(8), dtype=torch.uint8), 8, torch.float32)
            reference.check(loaded(store, index), index, untouched=zero)
    crossed = placement == "host"
    assert store.h2d_bytes == reference.loaded * store.slot_bytes * crossed
    assert store.d2h_bytes == reference.written * store.slot_bytes * crossed


@pytest.mark.parametrize(
    ("codec", "head_dim", "h2d", "d2h"),
    [  # 2 x 3 heads: 10 rows appended, 1 written; 5 read whole, 4 gathered of which 1 negative
        ("fp32", 64, 6 * 8 * 2 * 64 * 4, 6 * 11 * 2 * 64 * 4),
        ("fp16", 128, 6 * 8 * 2 * 128 * 2, 6 * 11 * 2 * 128 * 2),
        ("int4", 64, 6 * 8 * 2 * (32 + 4), 6 * 11 * 2 * (32 + 4)),
        ("int2", 128, 6 * 8 * 2 * (32 + 8), 6 * 11 * 2 * (32 + 8)),
    ],
)
def test_bytes_by_hand(codec, head_dim, h2d, d2h):
    generator = torch.Generator().manual_seed(0)
    store = make_store(codec, head_dim=head_dim)
    store.write(store.format.pack(*key_value(10, generator, head_dim)), at=0)
    store.write(store.format.pack(*key_value(1, generator, head_dim)), at=torch.full((BATCH, HEADS, 1), 3))
    loaded(store, 5)
    loaded(store, torch.tensor([0, 9, -1, 4]).expand(BATCH, HEADS, 4))
    assert (store.h2d_bytes, store.d2h_bytes) == (h2d, d2h)


def test_load_and_write_return_the_bytes_they_moved():
    store = make_store()
    keys, values = key_value(3, torch.Generator().manual_seed(0))
    rows = store.format.pack(keys, values)
    assert store.write(rows, at=0) == BATCH * HEADS * 3 * 64
    assert store.load(chosen(torch.tensor([2, -1, 0]).expand(BATCH, HEADS, 3)), rows) == BATCH * HEADS * 2 * 64


def test_a_buffer_row_of_negative_index_keeps_what_it_holds():
    """What lets a method fetch only the rows that are not on the device already."""
    store = make_store()
    keys, values = key_value(4, torch.Generator().manual_seed(0))
    store.write(store.format.pack(keys, values), at=0)
    buffer = store.new_buffer(2)
    loaded(store, torch.tensor([0, 1]).expand(BATCH, HEADS, 2), buffer)
    kept = loaded(store, torch.tensor([-1, 3]).expand(BATCH, HEADS, 2), buffer)
    assert torch.equal(kept.keys, keys[:, :, [0, 3]]) and torch.equal(kept.values, values[:, :, [0, 3]])


def test_the_first_slots_on_the_device_are_read_in_place():
    store = make_store(placement="device")
    fetcher = Fetcher(None, reuse=False)
    fetcher.plan({0: store}, selected=4)
    fetcher.open()
    fetcher.request_all(0, 4)
    keys = store.format.unpack(fetcher.take(0).rows).keys
    assert keys.untyped_storage().data_ptr() == store.slots.untyped_storage().data_ptr()


def test_free_gives_the_slots_back():
    store = make_store()
    assert store.nbytes == BATCH * HEADS * CAPACITY * 64
    store.free()
    assert store.slots.nbytes == 0


def test_slots_beyond_the_capacity_are_refused():
    store = make_store()
    rows = store.format.pack(*key_value(2, torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="column 13 is beyond the capacity of 12"):
        store.write(rows, at=CAPACITY - 1)
    with pytest.raises(ValueError, match="column 13 is beyond the capacity of 12"):
        loaded(store, CAPACITY + 1)
    with pytest.raises(IndexError, match="slot index 12"):
        loaded(store, torch.full((BATCH, HEADS, 1), CAPACITY))


def test_bad_settings_are_refused(monkeypatch):
    with pytest.raises(UserError, match="placement='disk' is unknown; allowed: device, host, managed"):
        make_store(placement="disk")
    monkeypatch.setattr("harness.offload.memory.available_bytes", lambda home: 2**30)
    with pytest.raises(UserError, match=r"needs 100\.0 GiB of cpu memory and 1\.0 GiB are available; lower batch_size"):
        make_store("fp16", head_dim=25, batch=1024, num_kv_heads=1024, capacity=1024)
