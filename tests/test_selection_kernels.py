"""The selection kernels against the torch code, bit for bit: in the interpreter, or on a GPU where there is one."""

import math

import pytest
import torch
from cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from living import PROMPTS, attached_with_link, live

from methods import selection
from methods.base import EMPTY, Geometry, Rows
from methods.oracle import Oracle

pytest.importorskip("triton", reason="the kernels need triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {DEVICE.type}

shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "num_kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "rows": st.integers(1, 3),
        "slots": st.integers(1, 40),
        "per_head": st.booleans(),
        "ties": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)
methods = st.builds(
    Oracle,
    alpha=st.sampled_from([0.0, 0.3, 1.5, math.inf]),
    max_fetch_frac=st.sampled_from([0.01, 0.2, 0.29, 1.0]),
    cap_of=st.sampled_from(["cached", "final"]),
    fixed_fetch=st.sampled_from([None, None, 1, 5]),
    covers=st.sampled_from(["kv_head", "layer"]),
)


def make(case) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    """Random scores, rows whose slots lie in any order, some empty, and T."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv, group, rows, slots = (case[name] for name in ("batch", "num_kv_heads", "group", "rows", "slots"))
    scores = 3 * torch.randn(batch, kv, group, rows, slots, generator=generator)
    if case["ties"]:
        scores = scores.round()  # zeros of both signs among them
    tokens = torch.rand(batch, kv if case["per_head"] else 1, slots + 3, generator=generator).argsort(-1).int()
    tokens = tokens.masked_fill(tokens % 5 == 4, EMPTY)[..., :slots]  # rows of a longer buffer
    positions = torch.randint(0, slots + 4, (batch, rows), generator=generator).int()
    query = torch.empty(batch, kv * group, rows, 0)
    return scores, Rows(query, positions, positions >= 0, tokens, tokens[..., :1], lambda: scores), positions.amax(1) + 9


def on_device(rows: Rows) -> Rows:
    tensors = {name: value.to(DEVICE) for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    return Rows(**{**vars(rows), **tensors})


@pytest.fixture
def compiled(monkeypatch):
    """Kernels for the tensors of these tests, in tiles that do not hold a row."""
    from methods.kernels import selection as kernels

    monkeypatch.setattr(kernels, "ELEMENTS", 16)
    monkeypatch.setattr(selection, "COMPILED", KINDS)


@settings(max_examples=150, deadline=None)
@given(case=shapes, method=methods, elements=st.sampled_from([16, 64, 256]))
def test_selections_are_those_of_the_torch_code(case, method, elements):
    from methods.kernels import selection as kernels

    scores, rows, final = make(case)
    geometry = Geometry(1, scores.shape[1] * scores.shape[2], scores.shape[1], 8, 1.0, "opt")
    if method.covers == "layer" and case["per_head"]:
        rows.slot_positions = rows.slot_positions[:, :1]
    expected = method.select(scores.clone(), rows, final, geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "COMPILED", KINDS)
        patch.setattr(kernels, "ELEMENTS", elements)
        got = method.select(scores.to(DEVICE), on_device(rows), final.to(DEVICE), geometry)
    assert torch.equal(got.mask.cpu(), expected.mask)
    assert torch.equal(got.num_read.cpu(), expected.num_read)
