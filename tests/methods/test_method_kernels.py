"""The kernels of methods against the torch code, bit for bit, interpreted where there is no GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from methods import compiled as switch
from methods.base import EMPTY, Geometry, Lengths, QueryRows
from methods.codecs.integers import IntegerCodec
from methods.h2o import H2O
from methods.infinigen2 import coded_distances, coded_product
from methods.infinigen_pool import InfiniGenPool
from methods.oracle import Oracle, OracleSampled
from methods.projection import room_for_keys
from methods.sampling import random_numbers
from methods.selection import largest
from tests.cases import CASES, shipped
from tests.living import attached_with_link, live

pytest.importorskip("triton")
from methods import kernels
from methods.kernels import coded as coded_kernels
from methods.kernels import eigen as eigen_kernels
from methods.kernels import selection as selection_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = settings(max_examples=10, phases=(Phase.explicit, Phase.generate))  # the interpreter is too slow to shrink in


@contextmanager
def compiled(elements: int, parts: int = 1) -> Iterator[None]:
    """The kernels serve the tensors of these tests, in tiles of so many elements, and rows in so many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "COMPILED", {DEVICE.type})
        patch.setattr(coded_kernels, "ELEMENTS", elements)
        patch.setattr(selection_kernels, "parts_of", lambda *_: parts)
        yield


PARTS = st.sampled_from([1, 2, 5])
"""Some parts of a short row have no slot."""


# Selections

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
    budget=st.sampled_from([0.01, 0.2, 0.29, 1.0]),
    cap_of=st.sampled_from(["cached", "final"]),
    fixed_fetch=st.sampled_from([None, None, 1, 5]),
)


def make(case) -> tuple[torch.Tensor, QueryRows, torch.Tensor]:
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
    seen = QueryRows(query, positions, positions >= 0, tokens, tokens[..., :1], lambda: scores)
    return scores, seen, positions.amax(1) + 9


def rows_on_device(rows: QueryRows) -> QueryRows:
    held = {name: each.to(DEVICE) for name, each in vars(rows).items() if isinstance(each, torch.Tensor)}
    return QueryRows(**{**vars(rows), **held})


@QUICK
@given(case=shapes, method=methods, elements=st.sampled_from([16, 64]), parts=PARTS)
def test_selections_are_those_of_the_torch_code(case, method, elements, parts):
    scores, rows, final = make(case)
    geometry = Geometry(1, case["num_kv_heads"] * case["group"], case["num_kv_heads"], 8, 1.0, "opt")
    expected = method.choose(scores.clone(), rows, final, geometry)
    with compiled(elements, parts):
        got = method.choose(scores.to(DEVICE), rows_on_device(rows), final.to(DEVICE), geometry)
    assert torch.equal(got.mask.cpu(), expected.mask)
    assert torch.equal(got.num_read.cpu(), expected.num_read)


SPECIAL = (math.inf, 3e38, 1e-40, 0.0, -0.0, -1e-40, -2.0, -torch.finfo(torch.float32).max, -math.inf)
"""Forced tokens, numbers below the normal ones, both zeros, what is hidden."""


@pytest.mark.parametrize("by", ["kernel", "partition", "sort"])
@settings(QUICK, max_examples=12)
@given(st.integers(0, 2**31), st.integers(1, 24), st.integers(1, 3), st.integers(1, len(SPECIAL)), PARTS)
def test_the_largest_are_a_sort_with_ties_to_the_lowest_slot(by, seed, slots, rows, kinds, parts):
    """Of two sequences, whose counts differ."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor(SPECIAL)[torch.randperm(len(SPECIAL), generator=generator)[:kinds]]
    values = drawn[torch.randint(0, kinds, (2, 2, rows, slots), generator=generator)]
    count = torch.randint(0, slots + 3, (2, rows), generator=generator)
    if by == "kernel":
        with compiled(16, parts):
            spread = values.to(DEVICE).repeat_interleave(2, -1)[..., ::2]  # no piece of memory
            mask = largest(spread, count.to(DEVICE))
    else:  # doubles are sorted, as numbers that numpy does not partition
        mask = largest(values.double() if by == "sort" else values, count)
    for sequence, head, row in itertools.product(range(2), range(2), range(rows)):
        own = values[sequence, head, row].tolist()
        ranked = sorted((slot for slot in range(slots) if own[slot] > -math.inf), key=lambda slot: -own[slot])
        expected = sorted(ranked[: int(count[sequence, row])])
        assert mask[sequence, head, row].nonzero().flatten().tolist() == expected


@QUICK
@given(case=shapes, elements=st.sampled_from([16, 64]), far=st.booleans(), parts=PARTS)
def test_samples_are_those_of_the_torch_code(case, elements, far, parts):
    """A token whose score / number is that of another up to rounding may be drawn in its place."""
    scores, rows, final = make({**case, "ties": False})
    method = OracleSampled(budget=0.3, seed=case["seed"])
    codes = torch.randint(0, 256, (*scores.shape[:2], scores.shape[-1] + 1), dtype=torch.uint8)[..., :-1]
    distances = codes if far else None
    expected = method.draw(5, scores.clone(), rows, final, distances)
    with compiled(elements, parts):
        on_gpu = rows_on_device(rows)
        distances = codes.to(DEVICE) if far else None
        got = method.draw(5, scores.to(DEVICE), on_gpu, final.to(DEVICE), distances)
    assert torch.equal(got.num_read.cpu(), expected.num_read)
    assert torch.equal(got.mask.cpu(), expected.mask)
    torch.testing.assert_close(got.bias.cpu(), expected.bias, rtol=1e-4, atol=1e-4)


@QUICK
@given(
    case=shapes,
    bits=st.sampled_from([1, 2, 4, 8]),
    columns=st.sampled_from([1, 7, 32, 65, 130]),
    behind=st.booleans(),
    elements=st.sampled_from([16, 64]),
)
def test_scores_on_coded_keys_are_those_of_decoded_ones(case, bits, columns, behind, elements):
    """`behind`: the keys lie as a state keeps them, else a key in one piece."""
    generator, codec = torch.Generator().manual_seed(case["seed"]), IntegerCodec(f"int{bits}")
    batch, heads, rows, slots = (case[name] for name in ("batch", "num_kv_heads", "rows", "slots"))
    packed = codec.encode(torch.randn(batch, heads, slots, columns, generator=generator) + 3)
    query = torch.randn(batch, heads, rows, columns, generator=generator).to(DEVICE)
    room = room_for_keys(packed, slots + 2) if behind else packed.new_empty(batch, heads, slots + 2, packed.shape[-1])
    keys = room.to(DEVICE)
    keys[:, :, :slots] = packed.to(DEVICE)
    expected = query @ codec.decode(packed.to(DEVICE), columns, torch.float32).mT
    with compiled(elements):
        by_kernel = kernels.coded_scores(query, keys[:, :, :slots], bits, codec.group_size)
    torch.testing.assert_close(by_kernel, expected, atol=3e-5, rtol=1e-5)


@QUICK
@given(
    case=shapes,
    bits=st.sampled_from([2, 4, 8]),
    columns=st.sampled_from([1, 7, 20]),
    group_size=st.sampled_from([8, 64]),
    elements=st.sampled_from([16, 64]),
)
def test_sums_over_unread_tokens_are_those_of_decoded_keys(case, bits, columns, group_size, elements):
    generator, codec = torch.Generator().manual_seed(case["seed"]), IntegerCodec(f"int{bits}", group_size)
    scores, rows, _ = make(case)
    batch, heads, group, num_rows, slots = scores.shape
    rows.query = torch.randn(batch, heads * group, num_rows, 12, generator=generator)
    unscored = torch.randn(batch, heads, 1, 12, generator=generator)
    packed = codec.encode(torch.randn(batch, heads, slots, columns, generator=generator) + 1)
    keys = room_for_keys(packed, slots + 2).to(DEVICE)
    keys[:, :, :slots] = packed.to(DEVICE)
    read = torch.rand(batch, heads, num_rows, slots, generator=generator) < 0.3
    lacking = (rows.query.unflatten(1, (heads, group)) * unscored.unsqueeze(2)).sum(-1, keepdim=True)
    is_rest = (rows.visible() & ~read).unsqueeze(2)
    whole = (scores + 0.3 * lacking).masked_fill(~is_rest, -math.inf)
    weights = whole.softmax(-1).nan_to_num(0.0)  # where nothing is left
    expected = weights.flatten(2, 3) @ codec.decode(packed, columns, torch.float32)
    with compiled(elements):
        log_mass, mean = kernels.index_of_rest(
            scores.to(DEVICE),
            unscored.to(DEVICE),
            read.to(DEVICE),
            rows_on_device(rows),
            keys[:, :, :slots],
            columns=columns,
            bits=bits,
            group_size=group_size,
            scale=0.3,
        )
    torch.testing.assert_close(log_mass.cpu(), whole.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mean.cpu().flatten(2, 3), expected, atol=1e-4, rtol=1e-4)


@QUICK
@given(case=shapes, seed=st.sampled_from([0, 7, 2**40]), sample=st.sampled_from([0, 1]))
def test_random_numbers_are_those_of_the_torch_code(case, seed, sample):
    _, rows, _ = make(case)
    sets = case["num_kv_heads"]
    expected = random_numbers(seed, 5, rows, sets, sample)
    with compiled(16):
        assert torch.equal(random_numbers(seed, 5, rows_on_device(rows), sets, sample).cpu(), expected)


def test_distances_are_coded_as_by_the_torch_code():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 3, 20, generator=generator).transpose(1, 2) * torch.logspace(-9, 9, 5)[:, None]
    means = torch.randn(2, 3, 1, 20, generator=generator)
    expected = coded_distances((values - means).norm(dim=-1)).int()
    codes = torch.zeros(2, 3, 9, dtype=torch.uint8, device=DEVICE)
    with compiled(64):
        kernels.code_distances(values.to(DEVICE), means.to(DEVICE), codes[:, :, 2:7])
    assert int((codes[:, :, 2:7].cpu().int() - expected).abs().max()) <= 1  # a rounding on the border of two steps
    assert not codes[:, :, :2].any() and not codes[:, :, 7:].any()


@pytest.mark.parametrize("size", [1, 7, 12])
def test_eigenvectors_are_those_of_the_matrices(size, monkeypatch):
    """Two eigenvalues are one in the middle, so that any turn of their vectors will do."""
    monkeypatch.setattr(eigen_kernels, "ELEMENTS", 32)
    generator = torch.Generator().manual_seed(size)
    values = torch.logspace(-4, 3, size, dtype=torch.float64)
    values[size // 2] = values[max(0, size // 2 - 1)]
    basis = torch.linalg.qr(torch.randn(2, 1, size, size, generator=generator, dtype=torch.float64)).Q
    matrices = basis * values @ basis.mT
    found = kernels.eigenvectors(matrices.to(DEVICE)).cpu()
    identity = torch.eye(size, dtype=torch.float64).expand_as(matrices)
    torch.testing.assert_close(found.mT @ found, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mT @ matrices @ found, identity * values, rtol=1e-9, atol=1e-9)


# Evictions

GEOMETRY = Geometry(1, 4, 2, 8, 1.0, "opt")
LAYER = 0

cases = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "slots": st.integers(2, 24),
        "tile": st.sampled_from([8, 64]),
        "padded": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


class Drawn:
    """Slots of two KV heads that hold tokens of different numbers, in any order; values from `generator`."""

    def __init__(self, case) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(case["seed"])
        self.batch, self.slots = case["batch"], case["slots"]
        tokens = torch.rand(self.batch, 2, self.slots + 1, generator=self.generator).argsort(-1).int()
        self.tokens = tokens.masked_fill(tokens >= self.integers(1, self.slots + 2, (self.batch, 1, 1)), EMPTY)
        self.tokens[..., -1] = EMPTY  # the dump
        self.position = self.integers(1, self.slots + 9, (self.batch,)).int()

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def like_tokens(self, high: int, dtype: torch.dtype, width: tuple[int, ...] = ()) -> Tensor:
        """Of few values, so that many are equal."""
        return self.integers(0, high, (*self.tokens.shape, *width)).to(dtype)


def on_device(state):
    for name, held in list(vars(state).items()):
        if isinstance(held, dict):
            setattr(state, name, {layer: each.to(DEVICE) for layer, each in held.items()})
        elif isinstance(held, Tensor):
            setattr(state, name, held.to(DEVICE))
    return state


def assert_alike(state, case, step: Callable, real: slice = slice(None)) -> None:
    """`step` changes a state by the kernels as by torch, of the `real` sequences all of it, and returns the same."""
    by_kernel = on_device(deepcopy(state))
    expected = step(state, torch.device("cpu"))
    with compiled(case["tile"]):
        got = step(by_kernel, DEVICE)
    assert expected is None or torch.equal(got.cpu(), expected)
    for name in state.slot_tensors:
        for layer, data in getattr(state, name).items():  # all but the dump
            of = slice(None) if name == "tokens" else real
            assert torch.equal(getattr(by_kernel, name)[layer][of, :, :-1].cpu(), data[of, :, :-1]), name


@QUICK
@given(case=cases, own_stays=st.booleans())
def test_the_current_token_takes_the_first_free_slot(case, own_stays):
    drawn = Drawn(case)
    final, own = drawn.position.long() + 5, drawn.slots - 1
    state = InfiniGenPool(skew=False, pool_frac=0.5).new_state(GEOMETRY, Lengths(final, final))
    drawn.tokens[..., own] = drawn.slots + 50 if own_stays else EMPTY
    state.tokens[LAYER] = drawn.tokens
    state.fetches[LAYER], state.last_fetch[LAYER] = (drawn.like_tokens(99, torch.int32) for _ in range(2))
    state.partial_keys = {LAYER: drawn.like_tokens(99, torch.float16, (5,))}
    assert_alike(state, case, lambda state, device: state.place_own(LAYER, own))


@QUICK
@given(case=cases, recent=st.sampled_from([0.0, 0.1, 0.9]), scores=st.sampled_from([1, 3, 1000]))
def test_the_lowest_score_leaves(case, recent, scores):
    drawn = Drawn(case)
    lengths = Lengths(drawn.position.long(), drawn.position.long())
    state = H2O(heavy_frac=0.1, recent_frac=recent).new_state(GEOMETRY, lengths)
    state.tokens[LAYER], state.score[LAYER] = drawn.tokens, drawn.like_tokens(scores, torch.float32)
    state.limits[LAYER] = torch.stack((state.budget(LAYER), state.recent), -1).double()
    scores = torch.zeros(drawn.batch, 2, 2, 1, drawn.slots)
    real = torch.arange(drawn.batch)[:, None] >= case["padded"]

    def step(state, device: torch.device) -> Tensor:
        own = torch.full((drawn.batch, 1, 1), drawn.slots - 1, device=device)
        at, slots = drawn.position[:, None].to(device), state.tokens[LAYER][..., :-1]
        row = QueryRows(None, at, real.to(device), slots, own, lambda: scores.to(device), case["padded"])
        return state.select(LAYER, row).mask

    assert_alike(state, case, step, slice(int(case["padded"]), None))


# In a session


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs the session on the CPU")
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("h2o", "place_own"),
        ("infinigen-coded", "coded_scores"),
        ("infinigen2", "summed_probs"),
        ("infinigen2-sampled", "code_distances"),
        ("infinigen2-linear", "index_of_rest"),
    ],
)
def test_live_decoding_by_the_kernels_is_that_by_torch(name, function, monkeypatch):
    case = CASES[name] if name in CASES else shipped(name)
    case = case._replace(method=replace(case.method, dense_layers=2))  # of three layers
    served, kernel = [], getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *args, **named: served.append(1) or kernel(*args, **named))
    with attached_with_link("few") as (attached, link):
        options = {"placement": "host", "link": link, "steps": 2}
        expected = live(attached, case, (6, 4), **options)
        assert not served
        with compiled(64):
            got = live(attached, case, (6, 4), **options)
    assert served
    rounds = function in ("code_distances", "index_of_rest")
    rounding = 1e-4 if rounds else 0.0  # logarithms differ in their last digit
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=rounding)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("bits", "head_dim", "columns"), [(4, 64, 28), (4, 20, 7), (8, 16, 5), (2, 128, 56), (1, 16, 3)]
)
def test_products_with_coded_projections_are_those_of_the_torch_code(bits, head_dim, columns, rows):
    """The torch code multiplies codes, not what they decode to. Sides lie beside one another in memory."""
    generator = torch.Generator().manual_seed(bits)
    codec = IntegerCodec(f"int{bits}", columns)
    sides = codec.encode(torch.randn(2, 2, 3, head_dim, columns, generator=generator))
    states = torch.randn(2, rows, 3, head_dim, generator=generator).transpose(1, 2)
    for side in sides.unbind(1):
        decoded = codec.decode(side, columns, torch.float32)
        plain = coded_product(states, side, codec)
        torch.testing.assert_close(plain, states @ decoded, rtol=1e-5, atol=1e-4)
        with compiled(64):
            found = coded_product(states.to(DEVICE), side.to(DEVICE), codec)
        torch.testing.assert_close(found.cpu(), plain, rtol=1e-5, atol=1e-4)
