"""The selection kernels against the torch code, bit for bit, interpreted where there is no GPU; the machine code of all
kernels of methods."""

import math

import pytest
import torch
from aot import compile_launches
from cases import CASES
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from launches import launch_methods
from living import PROMPTS, attached_with_link, live

from methods import kernels as compiled
from methods import selection
from methods.base import EMPTY, Geometry, Rows
from methods.infinigen import Oracle

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = settings(max_examples=15, phases=(Phase.explicit, Phase.generate))  # the interpreter is too slow to shrink in

shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "num_kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "rows": st.integers(1, 2),
        "slots": st.integers(1, 40),
        "of_heads": st.booleans(),
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


@pytest.fixture
def kernels(monkeypatch):
    """The module of kernels, which now serve the tensors of these tests."""
    from methods.kernels import selection as kernels

    monkeypatch.setattr(compiled, "COMPILED", {DEVICE.type})
    monkeypatch.setattr(kernels, "ELEMENTS", 64)
    return kernels


def make(case) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    """Random scores, rows that see some of the slots, which hold their tokens in any order or none; and T."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv, group, rows, slots = (case[name] for name in ("batch", "num_kv_heads", "group", "rows", "slots"))
    scores = 3 * torch.randn(batch, kv, group, rows, slots, generator=generator)
    scores = scores.round() if case["ties"] else scores
    heads = kv if case["of_heads"] else 1
    tokens = torch.rand(batch, heads, slots + 3, generator=generator).argsort(-1).int()
    tokens = tokens.masked_fill(tokens % 5 == 4, EMPTY)[..., :slots]  # of a longer buffer
    positions = torch.randint(0, slots + 4, (batch, rows), generator=generator).int()
    query = torch.empty(batch, kv * group, rows, 0)
    seen = Rows(query, positions, positions >= 0, tokens, tokens[..., :1], lambda: scores)
    return scores, seen, positions.amax(1) + 9


def on_device(rows: Rows) -> Rows:
    held = {name: each.to(DEVICE) for name, each in vars(rows).items() if isinstance(each, torch.Tensor)}
    return Rows(**{**vars(rows), **held})


@QUICK
@given(case=shapes, method=methods, elements=st.sampled_from([16, 64]))
def test_selections_are_those_of_the_torch_code(case, method, elements):
    from methods.kernels import selection as kernels

    scores, rows, final = make({**case, "of_heads": case["of_heads"] and method.covers == "kv_head"})
    geometry = Geometry(1, case["num_kv_heads"] * case["group"], case["num_kv_heads"], 8, 1.0, "opt")
    expected = method.select(scores.clone(), rows, final, geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "COMPILED", {DEVICE.type})
        patch.setattr(kernels, "ELEMENTS", elements)
        got = method.select(scores.to(DEVICE), on_device(rows), final.to(DEVICE), geometry)
    assert torch.equal(got.mask.cpu(), expected.mask)
    assert torch.equal(got.num_read.cpu(), expected.num_read)


SPECIAL = (math.inf, 3e38, 1e-40, 0.0, -0.0, -1e-40, -2.0, -torch.finfo(torch.float32).max, -math.inf)
"""Forced tokens, numbers below the normal ones, both zeros, what is hidden."""


@QUICK
@given(
    values=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40),
    count=st.integers(0, 42),
)
def test_the_largest_of_any_numbers(values, count):
    from methods.kernels import selection as kernels

    ranked = sorted((slot for slot, each in enumerate(values) if each > -math.inf), key=lambda slot: -values[slot])
    counts = torch.tensor([[count]], device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "COMPILED", {DEVICE.type})
        patch.setattr(kernels, "ELEMENTS", 16)
        spread = torch.tensor(values, device=DEVICE).repeat_interleave(2)[None, None, None, ::2]  # no piece of memory
        mask = selection.largest(spread, counts)
    assert mask.flatten().nonzero().flatten().tolist() == sorted(ranked[:count])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs the session on the CPU")
@pytest.mark.parametrize("name", ["infinigen", "pool-tokens"])
def test_live_decoding_by_the_kernels_is_that_by_torch(name, kernels, monkeypatch):
    served = []
    largest = kernels.largest
    monkeypatch.setattr(kernels, "largest", lambda *args, **named: served.append(1) or largest(*args, **named))
    with attached_with_link() as (attached, link):
        options = {"placement": "host", "link": link}
        got = live(attached, CASES[name], PROMPTS["padded"], **options)
        monkeypatch.setattr(compiled, "COMPILED", set())
        expected = live(attached, CASES[name], PROMPTS["padded"], **options)
    assert served
    assert torch.equal(got.logits, expected.logits)


# Machine code


def test_the_kernels_fit_registers_and_are_compiled_once_for_all_numbers_of_slots():
    binaries = compile_launches({launch_methods: (90,)})[launch_methods]
    kinds = {(binary.kernel, binary.digest) for binary in binaries}
    assert len(binaries) == 2 * len(kinds) == 14
    for binary in binaries:
        assert binary.registers <= 64 and binary.spill_bytes == 0, binary
