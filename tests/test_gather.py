"""Row gather and scatter by index, on the CPU and as the Triton kernel, against `torch.gather`."""

import importlib.util
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.offload import gather

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined; lets it run on CPU tensors

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


def triton_gather():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install --no-deps triton): its kernel is not covered here")
    from harness.offload import triton_gather

    return triton_gather


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


def expected_gather(slots, index, rows):
    wide = index[..., None].expand(*index.shape, slots.shape[-1])
    return torch.where(wide >= 0, torch.gather(slots, 2, wide.clamp(min=0)), rows)


def expected_scatter(slots, index, rows):
    out = slots.clone()
    for batch, head, row in (index >= 0).nonzero().tolist():
        out[batch, head, index[batch, head, row]] = rows[batch, head, row]
    return out


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@settings(max_examples=40, deadline=None)
@given(case=cases, ragged=st.booleans(), spare=st.integers(0, 2))
def test_gather_and_scatter_against_torch(backend, case, ragged, spare):
    module, device = (gather, torch.device("cpu")) if backend == "cpu" else (triton_gather(), DEVICE)
    slots, index, rows = make(case, ragged=ragged)
    places = torch.nn.functional.pad(rows, (0, 0, 0, spare), value=7).to(device)
    gathered = places[:, :, : rows.shape[2]]
    module.gather_rows(slots, index.to(device), gathered)
    torch.testing.assert_close(gathered.cpu(), expected_gather(slots, index, rows), rtol=0, atol=0)
    assert (places[:, :, rows.shape[2] :] == 7).all(), "what lies behind a head's rows has changed"

    after = expected_scatter(slots, index, rows)
    module.scatter_rows(slots, index.to(device), rows.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(slots, after, rtol=0, atol=0)


def test_triton_kernel_covers_more_tiles_than_programs(monkeypatch):
    module = triton_gather()
    monkeypatch.setattr(module, "NUM_PROGRAMS_OVER_LINK", 2)
    case = {"batch": 2, "num_kv_heads": 3, "capacity": 30, "num_rows": 17, "head_dim": 8}
    slots, index, rows = make({**case, "dtype": torch.float32, "seed": 0}, ragged=True)
    gathered = rows.clone().to(DEVICE)
    module.gather_rows(slots, index.to(DEVICE), gathered)
    torch.testing.assert_close(gathered.cpu(), expected_gather(slots, index, rows), rtol=0, atol=0)


def test_rows_moved_are_counted():
    slots, rows = torch.zeros(1, 2, 5, 8, dtype=torch.uint8), torch.zeros(1, 2, 3, 8, dtype=torch.uint8)
    index = torch.tensor([[[4, 0, -1], [2, -1, -1]]])
    assert gather.gather_rows(slots, index, rows) == 3
    assert gather.scatter_rows(slots, index, rows) == 3


def test_an_index_beyond_the_capacity_does_not_read_the_next_head():
    slots, rows = torch.zeros(1, 2, 5, 8, dtype=torch.uint8), torch.zeros(1, 2, 1, 8, dtype=torch.uint8)
    index = torch.tensor([[[5], [0]]])
    with pytest.raises(IndexError, match="slot index 5 is beyond the capacity of 5"):
        gather.gather_rows(slots, index, rows)
    with pytest.raises(IndexError, match="slot index 5 is beyond the capacity of 5"):
        gather.scatter_rows(slots, index, rows)
