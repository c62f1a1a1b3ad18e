"""The pool limit: replay against the plain reference, the policies on worked examples, and random operations."""

from dataclasses import replace
from math import inf

import pytest
import torch
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from living import FAMILIES, TOLERANCE, calibration, largest_difference, tiny, token_batch
from living import replay as replay_case
from pool_reference import PooledReference, capacity

from harness.model.attach import attach
from methods.base import EMPTY, Geometry, PromptRows, Rows
from methods.infinigen import InfiniGen
from methods.pool import SATURATED

PROMPT = (24,)
LIMITED = {
    "fifo": InfiniGen(alpha=inf, max_fetch_frac=0.3, pool_frac=0.6, pool_policy="fifo"),
    "lru": InfiniGen(alpha=inf, max_fetch_frac=0.3, pool_frac=0.6, pool_policy="lru", protect_recent=0.2),
    "counter": InfiniGen(alpha=inf, max_fetch_frac=0.3, pool_frac=0.6, protect_recent=0.2),
    "counter-alpha": InfiniGen(alpha=0.5, max_fetch_frac=0.6, pool_tokens=14, protect_recent=0.0),
    "fixed": InfiniGen(fixed_fetch=5, pool_tokens=11, pool_policy="lru", protect_recent=0.3),
    "fills": InfiniGen(alpha=inf, max_fetch_frac=0.3, pool_frac=0.85),
    "tie": InfiniGen(alpha=inf, max_fetch_frac=0.2, pool_tokens=4, protect_recent=0.0),
    "one": InfiniGen(pool_tokens=1),
}
ONE_HEAD = Geometry(num_layers=2, num_heads=1, num_kv_heads=1, head_dim=512, scale=1.0, family="llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LIMITED)
def test_replay_is_the_reference(name, family):
    method = LIMITED[name]
    ids, _ = token_batch(PROMPT)
    with attach(tiny(family)) as attached:
        got = replay_case(attached, Case(method), PROMPT)
        geometry = attached.geometry
    with torch.inference_mode():
        expected = PooledReference(
            tiny(family),
            method,
            final_length=ids.shape[1],
            prefill_len=PROMPT[0],
            rotation=calibration(geometry.num_kv_heads, geometry.head_dim).rotation,
        ).run(ids[0].tolist())
    assert capacity(method, ids.shape[1]) < ids.shape[1], "nothing is evicted"
    assert expected.margin > 1e-6, "these ids make a choice that rounding decides"
    assert largest_difference(got.logits[0, 1:], expected.logits) <= TOLERANCE


def test_the_artifacts_eviction_is_none():
    """Its victim stays selectable, so the limit changes nothing."""
    limited = LIMITED["counter"]
    with attach(tiny("gqa")) as attached:
        nothing = replay_case(attached, Case(replace(limited, pool_frac=None)), PROMPT)
        artifact = replay_case(attached, Case(replace(limited, eviction="artifact")), PROMPT)
        corrected = replay_case(attached, Case(limited), PROMPT)
    assert torch.equal(artifact.logits, nothing.logits)
    assert artifact.kv_frac == nothing.kv_frac
    assert largest_difference(corrected.logits, nothing.logits) > 10 * TOLERANCE


# Worked examples: token j's key is the j-th unit vector, so that a query picks the tokens it names


class Live:
    """The pool of one layer of one head as live decoding drives it, a row at a time."""

    def __init__(self, prompt: int, **settings) -> None:
        method = InfiniGen(num_exempt_layers=1, skew=False, partial_weight_ratio=1.0, **settings)
        self.state = method.new_state(ONE_HEAD, torch.tensor([ONE_HEAD.head_dim]))
        keys = torch.eye(ONE_HEAD.head_dim)[None, None]
        real = torch.ones(1, prompt, dtype=torch.bool)
        self.state.prompt(1, keys[:, :, :prompt], keys[:, :, :prompt], PromptRows(real, prompt))
        self.state.compact(1)
        self.keys, self.position = keys, prompt

    def step(self, *wanted: int) -> list[int]:
        """One row that fetches `wanted` (fixed_fetch of them); returns the tokens present after it."""
        query = self.keys[:, :, list(wanted)].sum(2, keepdim=True)
        own = min(self.position, self.state.capacity)
        slots = self.state.tokens[1][..., : own + 1]
        position = torch.tensor([[self.position]], dtype=torch.int32)
        rows = Rows(query, position, torch.ones(1, 1, dtype=torch.bool), slots, torch.full((1, 1, 1), own), None)
        before = slots.clone()
        mask = self.state.select(1, rows).mask[0, 0, 0]
        assert set(before[0, 0][mask].tolist()) == set(wanted)
        self.state.append(1, self.keys[:, :, self.position : self.position + 1], slice(own, own + 1))
        self.state.place_own(1, own)
        self.position += 1
        return self.tokens()

    def tokens(self) -> list[int]:
        tokens = self.state.tokens[1][0, 0]
        return sorted(tokens[tokens != EMPTY].tolist())

    def count(self, token: int) -> int:
        return int(self.state.fetches[1][0, 0][self.state.tokens[1][0, 0] == token])


def test_counter_evicts_the_smallest_count_and_of_equal_ones_the_lowest_position():
    pool = Live(4, fixed_fetch=1, pool_tokens=4, protect_recent=0.25)  # victims are among the 3 lowest positions
    assert pool.step(0) == [0, 2, 3, 4]  # counts 1 0 0 [0]: 1 and 2 tie
    assert pool.step(2) == [0, 2, 4, 5]  # counts 1 1 0 [0]
    assert pool.step(4) == [2, 4, 5, 6]  # counts 1 1 1 [0]: all tie
    assert pool.step(2) == [2, 4, 6, 7]  # counts 2 1 0 [0]
    assert [pool.count(token) for token in (2, 4, 6, 7)] == [2, 1, 0, 0]


def test_lru_evicts_the_oldest_last_fetch():
    pool = Live(4, fixed_fetch=1, pool_tokens=4, pool_policy="lru", protect_recent=0.25)
    assert pool.step(0) == [0, 2, 3, 4]  # last fetches 4 1 2 [3]
    assert pool.step(2) == [0, 2, 4, 5]  # 4 5 3 [4]
    assert pool.step(0) == [0, 2, 5, 6]  # 6 5 4 [5]
    assert pool.step(6) == [0, 5, 6, 7]  # 6 5 5 [7]: 2 and 5 tie


def test_fifo_evicts_the_lowest_position_whatever_was_fetched():
    pool = Live(4, fixed_fetch=1, pool_tokens=4, pool_policy="fifo", protect_recent=0.0)
    assert [pool.step(token) for token in (0, 1, 2)] == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


@pytest.mark.parametrize(("protect_recent", "victim"), [(0.0, 4), (0.25, 2), (0.5, 1), (0.75, 0), (1.0, 0)])
def test_protect_recent_keeps_the_highest_positions(protect_recent, victim):
    """Counts fall with the position, so the victim is the highest position that is not protected."""
    pool = Live(4, fixed_fetch=1, pool_tokens=5, protect_recent=protect_recent)
    pool.step(0)  # 4 enters: the pool is full
    pool.state.fetches[1][0, 0, :5] = torch.tensor([5, 4, 3, 2, 1])
    assert pool.step(0) == sorted(set(range(6)) - {victim})


def test_a_counter_that_saturates_halves_its_head():
    pool = Live(4, fixed_fetch=1, pool_tokens=5, protect_recent=0.4)  # room for a token, then 3 are unprotected
    for token in (0, 2, 2, 2):
        pool.step(token)
    while pool.count(0) < SATURATED - 1:
        pool.step(0)
    assert (pool.count(0), pool.count(2)) == (254, 3)
    pool.step(0)
    assert (pool.count(0), pool.count(2)) == (127, 1)


# Random operations


@st.composite
def batches(draw):
    """Prompt lengths, steps, and a limited method."""
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    steps = draw(st.integers(1, 12))
    limit = draw(
        st.one_of(
            st.builds(dict, pool_tokens=st.integers(1, 12)),
            st.builds(dict, pool_frac=st.sampled_from([0.5, 0.75, 1.0])),
        )
    )
    method = InfiniGen(
        num_exempt_layers=1,
        skew=False,
        alpha=draw(st.sampled_from([0.5, inf])),
        max_fetch_frac=draw(st.sampled_from([0.2, 0.5, 1.0])),
        pool_policy=draw(st.sampled_from(["fifo", "lru", "counter"])),
        protect_recent=draw(st.sampled_from([0.0, 0.5, 1.0])),
        **limit,
    )
    return prompts, steps, method, draw(st.integers(0, 99))


@settings(max_examples=60)
@given(batches())
def test_the_pool_never_exceeds_its_limit_nor_gives_back_what_it_evicted(batch):
    prompts, steps, method, seed = batch
    geometry = Geometry(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.4, family="llama")
    torch.manual_seed(seed)
    lengths = torch.tensor(prompts)
    longest = max(prompts)
    final = lengths + steps
    state = method.new_state(geometry, final)
    real = torch.arange(longest) >= longest - lengths[:, None]
    key = torch.randn(len(prompts), 2, longest, 8)
    state.prompt(1, torch.randn(len(prompts), 4, longest, 8), key, PromptRows(real, longest))
    state.compact(1)
    sizes = [capacity(method, length) for length in final.tolist()]
    present = tokens_in(state)
    for b, prompt in enumerate(prompts):
        assert all(kept == set(range(max(0, prompt - sizes[b]), prompt)) for kept in present[b])
    for step in range(steps):
        position = (lengths + step).int()[:, None]
        own = min(longest + step, state.capacity)
        slots = state.tokens[1][..., : own + 1].clone()
        rows = Rows(
            torch.randn(len(prompts), 4, 1, 8),
            position,
            torch.ones_like(position, dtype=torch.bool),
            slots,
            torch.full((len(prompts), 1, 1), own),
            None,
        )
        selection = state.select(1, rows)
        state.append(1, torch.randn(len(prompts), 2, 1, 8), slice(own, own + 1))
        placed = state.place_own(1, own)
        after = tokens_in(state)
        for b, size in enumerate(sizes):
            t = prompts[b] + step
            for h in range(2):
                read = set(slots[b, h][selection.mask[b, h, 0]].tolist())
                assert read <= present[b][h], "a token that was evicted was read"
                assert 1 <= len(read) == selection.num_read[b, 0]
                assert t in after[b][h] and after[b][h] <= present[b][h] | {t}
                assert len(after[b][h]) == min(t + 1, size)
                assert state.tokens[1][b, h, placed[b, h, 0]] == t
        present = after


def tokens_in(state) -> list[list[set[int]]]:
    """Tokens present by sequence and KV head; each of them once, and none in the dump."""
    tokens = state.tokens[1]
    assert bool((tokens[..., -1] == EMPTY).all())
    found = [[[t for t in head if t != EMPTY] for head in heads] for heads in tokens.tolist()]
    assert all(len(set(head)) == len(head) for heads in found for head in heads)
    return [[set(head) for head in heads] for heads in found]
