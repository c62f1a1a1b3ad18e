"""The pool limit: replay against the plain reference, the policies on worked examples, and random operations."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

import pytest
import torch
from cases import Case
from living import (
    TOLERANCE,
    attached_with_link,
    calibration,
    largest_difference,
    open_live,
    tiny,
    token_batch,
)
from living import replay as replay_case
from pool_reference import ArtifactPool, PooledReference, capacity

from harness.errors import UserError
from harness.model.attach import attach
from methods import pool as pool_rules
from methods.base import EMPTY, Geometry, Lengths, PromptRows, Row, Rows
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


@pytest.mark.parametrize("family", ["gqa", "opt"])
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
            rotation=calibration(geometry.num_kv_heads, geometry.head_dim)["rotation"],
        ).run(ids[0].tolist())
    assert capacity(method, ids.shape[1]) < ids.shape[1], "nothing is evicted"
    assert expected.margin > 1e-6, "these ids make a choice that rounding decides"
    assert largest_difference(got.logits[0, 1:], expected.logits) <= TOLERANCE


def test_a_limit_changes_what_is_read():
    limited = LIMITED["counter"]
    with attach(tiny("gqa")) as attached:
        nothing = replay_case(attached, Case(replace(limited, pool_frac=None)), PROMPT)
        corrected = replay_case(attached, Case(limited), PROMPT)
    assert largest_difference(corrected.logits, nothing.logits) > 10 * TOLERANCE


# The artifact's simulation

BATCH = ((16, 260), (7, 251))
"""(prompt, length) of two sequences, decoded side by side."""
GEOMETRY = Geometry(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, scale=0.5, family="llama")


class Simulated(NamedTuple):
    """chosen[sequence][KV head]: the tokens each row read; victims alike, of the rows that evict."""

    chosen: list[list[list[set[int]]]]
    victims: list[list[list[int]]]
    num_read: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


def simulate(policy: str, monkeypatch, calls: int = 1, seed: int = 0, pool_tokens: int = 60) -> Simulated:
    """A state of random queries and keys, as replay drives it: left-padded prompts, then all rows."""
    method = InfiniGen(
        alpha=inf,
        max_fetch_frac=0.15,
        skew=False,
        partial_weight_ratio=1.0,
        pool_tokens=pool_tokens,
        pool_policy=policy,
        eviction="artifact",
    )
    generator = torch.Generator().manual_seed(seed)
    prompts, finals = torch.tensor(BATCH).T
    prompt, steps = int(prompts.max()), int((finals - prompts)[0])
    columns = prompt + steps
    real = torch.arange(prompt) >= prompt - prompts[:, None]
    # Few digits, of which fp32 rounds none: the plain rule must choose alike, ties included.
    query, key = (torch.randn(2, heads, columns, 8, generator=generator).mul(64).round() / 64 for heads in (8, 4))
    tokens = (torch.arange(columns) - (prompt - prompts)[:, None]).int()
    tokens = tokens.masked_fill(tokens < 0, EMPTY)
    victims = []
    find = pool_rules.artifact_victim

    def spy(positions, policy, worth, capacities, position):
        slots = find(positions, policy, worth, capacities, position)
        victims.append(positions.gather(-1, slots)[..., 0].masked_fill(position[..., 0] < capacities[:, None], -1))
        return slots

    monkeypatch.setattr(pool_rules, "artifact_victim", spy)
    state = method.new_state(GEOMETRY, Lengths(prompts, finals))
    state.prompt(1, query[:, :, :prompt], key[:, :, :prompt], key[:, :, :prompt], PromptRows(real, columns))
    masks, counts = [], []
    for begin in range(prompt, columns, -(-steps // calls)):
        stop = min(begin + -(-steps // calls), columns)
        own = torch.arange(begin, stop)
        positions = tokens[:, begin:stop]
        state.append(1, key[:, :, begin:stop], key[:, :, begin:stop], positions, slice(begin, stop))
        rows = Rows(
            query[:, :, begin:stop],
            positions,
            torch.ones_like(positions, dtype=torch.bool),
            tokens[:, None, :stop],
            own.expand(2, 1, -1),
            lambda: pytest.fail("it selects by its rehearsal"),
        )
        selection = state.select(1, rows)
        masks.append(torch.nn.functional.pad(selection.mask, (0, columns - stop)))
        counts.append(selection.num_read)
    chosen = [
        [[set(tokens[b][row].tolist()) for row in head] for head in heads]
        for b, heads in enumerate(torch.cat(masks, 2))
    ]
    evicted = [
        [[token for token in head if token >= 0] for head in heads] for heads in torch.stack(victims, -1).tolist()
    ]
    return Simulated(chosen, evicted, torch.cat(counts, 1), query, key)


@pytest.mark.parametrize("policy", ["lru", "counter"])
def test_the_artifact_evicts_the_same_token_again_and_again(policy, monkeypatch):
    """Which is no eviction to speak of: what it gave up is never fetched again, and so stays the worst."""
    victims = [head for heads in simulate(policy, monkeypatch).victims for head in heads]
    distinct = [len(set(head)) for head in victims]
    assert min(map(len, victims)) > 180
    assert sum(distinct) / len(distinct) < 1.5


@pytest.mark.parametrize("policy", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("capacity", [60, 9, 300])
def test_the_artifacts_rule_is_the_plain_one(policy, calls, capacity, monkeypatch):
    found = simulate(policy, monkeypatch, calls, seed=capacity, pool_tokens=capacity)
    columns = found.key.shape[2]
    for b, (prompt, length) in enumerate(BATCH):
        first = columns - length
        for g in range(4):
            key = found.key[b, g, first:].double()
            group = found.query[b, 2 * g : 2 * g + 2, first:].double()
            scores = (GEOMETRY.scale * group @ key.T).tolist()
            plain = ArtifactPool(prompt, min(capacity, length), policy)
            for t, read in zip(range(prompt, length), found.chosen[b][g], strict=True):
                assert read == plain.row(t, [head[t] for head in scores], max(1, int(0.15 * t)))
            assert found.victims[b][g] == plain.victims
            assert bool(plain.victims) == (capacity < length)
        sizes = torch.tensor([[len(read) for read in head] for head in found.chosen[b]], dtype=torch.float64)
        assert torch.equal(found.num_read[b], sizes.mean(0))


def test_the_artifacts_eviction_is_not_decoded_live():
    case = Case(replace(LIMITED["counter"], eviction="artifact"))
    message = r"method\.eviction=artifact: frees no slot, .*\(replay\), not decoded live"
    with attached_with_link() as (attached, _), pytest.raises(UserError, match=message) as refusal:
        open_live(attached, case)
    assert "\n" not in str(refusal.value)
    assert replace(LIMITED["counter"], pool_frac=None, eviction="artifact").replay_only is None, "nothing is evicted"


# Worked examples: token j's key is the j-th unit vector, so that a query picks the tokens it names


class Live:
    """The pool of one layer of one head as live decoding drives it, a row at a time."""

    def __init__(self, prompt: int, **settings) -> None:
        method = InfiniGen(num_exempt_layers=1, skew=False, partial_weight_ratio=1.0, **settings)
        lengths = Lengths(torch.tensor([prompt]), torch.tensor([ONE_HEAD.head_dim]))
        self.state = method.new_state(ONE_HEAD, lengths)
        self.capacity = method.tokens_kept(Row(ONE_HEAD.head_dim, prompt, ONE_HEAD.head_dim), 1)
        keys = torch.eye(ONE_HEAD.head_dim)[None, None]
        real = torch.ones(1, prompt, dtype=torch.bool)
        self.state.prompt(1, *[keys[:, :, :prompt]] * 3, PromptRows(real, prompt))
        self.state.compact(1, self.capacity)
        self.keys, self.position = keys, prompt

    def step(self, *wanted: int) -> list[int]:
        """One row that fetches `wanted` (fixed_fetch of them); returns the tokens present after it."""
        query = self.keys[:, :, list(wanted)].sum(2, keepdim=True)
        own = min(self.position, self.capacity)
        slots = self.state.tokens[1][..., : own + 1]
        position = torch.tensor([[self.position]], dtype=torch.int32)
        rows = Rows(query, position, torch.ones(1, 1, dtype=torch.bool), slots, torch.full((1, 1, 1), own), None)
        before = slots.clone()
        mask = self.state.select(1, rows).mask[0, 0, 0]
        assert set(before[0, 0][mask].tolist()) == set(wanted)
        entering = self.keys[:, :, self.position : self.position + 1]
        self.state.append(1, entering, entering, position, slice(own, own + 1))
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
