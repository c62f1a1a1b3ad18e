"""The pool limit: replay against the plain reference, and the artifact's rule against a plain one."""

import math
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import NamedTuple

import pytest
import reference as plain
import torch
from cases import Case
from living import TOLERANCE, attached_with_link, calibration, largest_difference, open_live, tiny, token_batch
from living import replay as replay_case

from harness.errors import UserError
from harness.model.attach import attach
from methods import infinigen as pool_rules
from methods.base import EMPTY, Geometry, Lengths, PromptRows, Rows
from methods.infinigen import InfiniGen

# The plain rules: a pool per layer and KV head, a Python dict from a token to its use


class Pool:
    """The tokens of one KV head, each with its number of fetches and the row of the last. Victims come from the lowest
    positions present."""

    def __init__(self, capacity: int, policy: str, protect_recent: float) -> None:
        self.capacity, self.policy = capacity, policy
        self.num_unprotected = max(1, math.floor((1 - protect_recent) * capacity))
        self.tokens: dict[int, tuple[int, int]] = {}

    def enter(self, token: int) -> None:
        if len(self.tokens) == self.capacity:
            unprotected = sorted(self.tokens)[: self.num_unprotected]
            del self.tokens[min(unprotected, key=self._worth)]
        self.tokens[token] = (0, token)

    def fetch(self, tokens: Iterable[int], row: int) -> None:
        self.tokens |= {token: (self.tokens[token][0] + 1, row) for token in tokens}
        if any(count >= pool_rules.SATURATED for count, _ in self.tokens.values()):
            self.tokens = {token: (count // 2, last) for token, (count, last) in self.tokens.items()}

    def _worth(self, token: int) -> tuple[int, int]:
        count, last = self.tokens[token]
        return {"fifo": 0, "lru": last, "counter": count}[self.policy], token


class ArtifactPool:
    """One KV head under the artifact's rule: candidates for eviction are all tokens of the first half, evicted or not.

    A policy's numbers go on from the dense prompt, whose rows fetched every token up to their own.
    """

    def __init__(self, prompt: int, capacity: int, policy: str) -> None:
        self.capacity, self.policy = capacity, policy
        self.count = {token: prompt - token for token in range(prompt)}
        self.last = dict.fromkeys(range(prompt), prompt - 1)
        self.gone = set(range(prompt - capacity)) if policy == "fifo" else set()
        self.victims: list[int] = []

    def row(self, t: int, scores: list[list[float]], count: int) -> set[int]:
        """What row t reads by the `scores` [group][token]; its own token enters, and one is evicted."""
        present = [token for token in range(t) if token not in self.gone]
        best = [max(head[token] for token in present) for head in scores]
        worth = {token: max(head[token] - top for head, top in zip(scores, best, strict=True)) for token in present}
        chosen = set(sorted(present, key=lambda token: (-worth[token], token))[:count])
        for token in chosen:
            self.count[token] += 1
            self.last[token] = t
        self.count[t], self.last[t] = 0, t
        if t >= self.capacity:
            numbers = {"lru": self.last, "counter": self.count}.get(self.policy)
            oldest = t - self.capacity
            victim = min(range(t // 2), key=lambda token: (numbers[token], token)) if numbers else oldest
            self.victims.append(victim)
            self.gone.add(victim)
        return chosen


def capacity(method: InfiniGen, final_length: int) -> int:
    return method.pool_tokens or math.floor(method.pool_frac * final_length)


class PooledReference(plain.Reference):
    """InfiniGen with a pool limit, one sequence at a time."""

    def _finish_prompt(self) -> None:
        super()._finish_prompt()
        method = self.method
        size = capacity(method, self.final_length)
        self.pools = [[Pool(size, method.pool_policy, method.protect_recent) for _ in heads] for heads in self.heads]
        for pools in self.pools:
            for pool in pools:
                for token in range(self.prefill_len):
                    pool.enter(token)

    def _select(self, layer, position, rehearsed, queries) -> list[set[int]]:
        relative = []
        for g, (head, pool) in enumerate(zip(self.heads[layer], self.pools[layer], strict=True)):
            best = dict.fromkeys(sorted(pool.tokens), -math.inf)
            for query in rehearsed[g * self.family.group : (g + 1) * self.family.group]:
                scores = {j: self.family.scale * (query @ head.columns) @ (head.keys[j] @ head.columns) for j in best}
                highest = max(scores.values())
                best = {j: max(best[j], score - highest) for j, score in scores.items()}
            relative.append(best)
        count = self._count(relative, len(relative[0]))
        selected = [self._largest(scores, count) for scores in relative]
        for pool, chosen in zip(self.pools[layer], selected, strict=True):
            pool.fetch(chosen, position)
            pool.enter(position)
        return selected


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
    "saturates": InfiniGen(fixed_fetch=4, pool_tokens=12, protect_recent=0.3),
}


@pytest.mark.parametrize(("name", "family"), [*((name, "gqa") for name in LIMITED), ("lru", "opt"), ("counter", "opt")])
def test_replay_is_the_reference(name, family, monkeypatch):
    method = LIMITED[name]
    assert pool_rules.SATURATED == 255
    if name == "saturates":
        monkeypatch.setattr(pool_rules, "SATURATED", 3)
    ids, _ = token_batch(PROMPT)
    with attach(tiny(family)) as attached:
        got = replay_case(attached, Case(method), PROMPT)
        geometry = attached.geometry
    with torch.inference_mode():
        rotation = calibration(geometry.num_kv_heads, geometry.head_dim)["rotation"]
        reference = PooledReference(
            tiny(family), method, final_length=ids.shape[1], prefill_len=PROMPT[0], rotation=rotation
        )
        expected = reference.run(ids[0].tolist())
    assert capacity(method, ids.shape[1]) < ids.shape[1], "nothing is evicted"
    assert expected.margin > 1e-6, "these ids make a choice that rounding decides"
    assert largest_difference(got.logits[0, 1:], expected.logits) <= TOLERANCE


# The artifact's simulation

BATCH = ((16, 100), (7, 91))
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
        alpha=inf, max_fetch_frac=0.15, skew=False, partial_weight_ratio=1.0, pool_tokens=pool_tokens,
        pool_policy=policy, eviction="artifact",
    )  # fmt: skip
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
        is_real, own_query = torch.ones_like(positions, dtype=torch.bool), query[:, :, begin:stop]
        rows = Rows(own_query, positions, is_real, tokens[:, None, :stop], own.expand(2, 1, -1), None)
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


@pytest.mark.parametrize(
    ("policy", "calls", "capacity"),
    [("fifo", 1, 60), ("lru", 3, 60), ("counter", 1, 60), ("counter", 3, 9), ("lru", 1, 9), ("counter", 1, 300)],
)
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
