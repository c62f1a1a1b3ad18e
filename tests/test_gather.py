"""Row gather and scatter by index, on the CPU and as the Triton kernel, against a loop."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.offload import store as gather
from harness.offload.memory import Tuning
from harness.offload.store import Chosen, chosen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

cases = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "num_kv_heads": st.integers(1, 3),
        "capacity": st.integers(1, 40),
        "num_rows": st.integers(0, 40),
        "head_dim": st.sampled_from([2, 4, 10, 16, 20, 64]),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        "seed": st.integers(0, 2**31),
    }
)


def kernels():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install --no-deps triton): its kernel is not covered here")
    from harness.offload.kernels import rows as kernels

    return kernels


def make(case, *, ragged):
    """Random slots (pinned under CUDA), distinct indices a head, rows; ragged: a count per head, then -1."""
    generator = torch.Generator().manual_seed(case["seed"])
    heads, capacity = (case["batch"], case["num_kv_heads"]), case["capacity"]
    num_rows = min(case["num_rows"], capacity)  # scatter needs distinct slots

    def rows(count):
        values = torch.randn(*heads, count, 2 * case["head_dim"], generator=generator)
        return values.to(case["dtype"]).view(torch.uint8)

    index = torch.rand(*heads, capacity, generator=generator).argsort(-1)[..., :num_rows]
    if ragged:
        counts = torch.randint(0, num_rows + 1, (*heads, 1), generator=generator)
        index = index.masked_fill(torch.arange(num_rows) >= counts, -1)
    slots = rows(capacity)
    slots = slots.pin_memory() if DEVICE.type == "cuda" else slots
    return slots, index, rows(num_rows)


def expected_gather(slots, index, rows, places=None):
    out = rows.clone()
    for batch, head, row in (index >= 0).nonzero().tolist():
        place = row if places is None else places[batch, head, row]
        out[batch, head, place] = slots[batch, head, index[batch, head, row]]
    return out


def expected_scatter(slots, index, rows):
    out = slots.clone()
    for batch, head, row in (index >= 0).nonzero().tolist():
        out[batch, head, index[batch, head, row]] = rows[batch, head, row]
    return out


tunings = st.builds(Tuning, num_programs=st.sampled_from([1, 2, 64]), bytes_in_flight=st.sampled_from([64, 512, 2**18]))


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@settings(max_examples=40, deadline=None)
@given(case=cases, ragged=st.booleans(), placed=st.booleans(), spare=st.integers(0, 2), tuning=tunings)
def test_gather_and_scatter_against_a_loop(backend, case, ragged, placed, spare, tuning):
    module, device = (gather, torch.device("cpu")) if backend == "cpu" else (kernels(), DEVICE)
    slots, index, rows = make(case, ragged=ragged)
    places = torch.rand(index.shape).argsort(-1) if placed else None
    there = torch.nn.functional.pad(rows, (0, 0, 0, spare), value=7).to(device)
    gathered = there[:, :, : rows.shape[2]]
    module.gather_rows(slots, index.to(device), gathered, None if places is None else places.to(device), tuning)
    assert (there[:, :, rows.shape[2] :] == 7).all(), "what lies behind a head's rows has changed"
    torch.testing.assert_close(gathered.cpu(), expected_gather(slots, index, rows, places), rtol=0, atol=0)

    after = expected_scatter(slots, index, rows)
    module.scatter_rows(slots, index.to(device), rows.to(device), tuning)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(slots, after, rtol=0, atol=0)


@pytest.mark.parametrize("slot_bytes", [20, 72, 144])
def test_the_kernel_covers_more_tiles_than_programs(slot_bytes):
    slots = torch.randint(256, (2, 3, 30, slot_bytes), dtype=torch.uint8)
    slots = slots.pin_memory() if DEVICE.type == "cuda" else slots
    index = torch.rand(2, 3, 30).argsort(-1)[..., :17]
    rows = torch.zeros(2, 3, 17, slot_bytes, dtype=torch.uint8)
    gathered = rows.clone().to(DEVICE)
    kernels().gather_rows(slots, index.to(DEVICE), gathered, None, Tuning(num_programs=2, bytes_in_flight=1024))
    assert torch.equal(gathered.cpu(), expected_gather(slots, index, rows))


def test_rows_moved_are_counted():
    index = torch.tensor([[[4, 0, -1], [2, -1, -1]]])
    assert chosen(index).num_rows == 3
    assert chosen(index.masked_fill(index >= 0, -1)).num_rows == 0


def test_the_slot_of_each_place():
    index, places = torch.tensor([[[4, 0, -1], [2, -1, -1]]]), torch.tensor([[[2, 0, 9], [1, 1, 1]]])
    assert torch.equal(Chosen(index, 3, places).by_target(), torch.tensor([[[0, -1, 4], [-1, 2, -1]]]))
    assert torch.equal(Chosen(index, 3).by_target(), index)


def test_an_index_beyond_the_capacity_does_not_read_the_next_head():
    slots, rows = torch.zeros(1, 2, 5, 8, dtype=torch.uint8), torch.zeros(1, 2, 1, 8, dtype=torch.uint8)
    index = torch.tensor([[[5], [0]]])
    with pytest.raises(IndexError, match="slot index 5 is beyond the capacity of 5"):
        gather.gather_rows(slots, index, rows)
    with pytest.raises(IndexError, match="slot index 5 is beyond the capacity of 5"):
        gather.scatter_rows(slots, index, rows)
