"""The pool limit: replay against the plain reference, and the artifact's rule against a plain one."""

import math
from collections.abc import Iterable
from math import inf

import pytest
import torch

from harness.model.attach import attach
from methods import infinigen_pool as pool_rules
from methods.infinigen import InfiniGen
from methods.infinigen_pool import InfiniGenPool
from tests import reference as plain
from tests.cases import Case
from tests.living import TOLERANCE, calibration_of, largest_difference, tiny, token_batch
from tests.living import replay as replay_case

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
            del self.tokens[min(unprotected, key=self._score)]
        self.tokens[token] = (0, token)

    def fetch(self, tokens: Iterable[int], row: int) -> None:
        self.tokens |= {token: (self.tokens[token][0] + 1, row) for token in tokens}
        if any(count >= pool_rules.SATURATED for count, _ in self.tokens.values()):
            self.tokens = {token: (count // 2, last) for token, (count, last) in self.tokens.items()}

    def _score(self, token: int) -> tuple[int, int]:
        count, last = self.tokens[token]
        return {"fifo": 0, "lru": last, "counter": count}[self.policy], token


class ArtifactPool:
    """One KV head under the artifact's rule: candidates for eviction are all tokens of the first half, evicted or not.

    A policy's numbers go on from the dense prompt, whose rows fetched every token up to their own.
    """

    def __init__(self, capacity: int, policy: str, prompt: int) -> None:
        self.capacity, self.policy = capacity, policy
        self.count = {token: prompt - token for token in range(prompt)}
        self.last = dict.fromkeys(range(prompt), prompt - 1)
        self.tokens = set(range(max(0, prompt - capacity) if policy == "fifo" else 0, prompt))

    def fetch(self, tokens: Iterable[int], row: int) -> None:
        for token in tokens:
            self.count[token] += 1
            self.last[token] = row

    def enter(self, token: int) -> None:
        self.count[token], self.last[token] = 0, token
        self.tokens.add(token)
        if token >= self.capacity:
            numbers = {"lru": self.last, "counter": self.count}.get(self.policy)
            oldest = token - self.capacity
            victim = min(range(token // 2), key=lambda each: (numbers[each], each)) if numbers else oldest
            self.tokens.discard(victim)


def capacity(method: InfiniGen, final_length: int) -> int:
    return method.pool_tokens or math.floor(method.pool_frac * final_length)


class PooledReference(plain.Reference):
    """InfiniGen with a pool limit, one sequence at a time."""

    def _finish_prompt(self) -> None:
        super()._finish_prompt()
        method = self.method
        size = capacity(method, self.final_length)
        self.pools = [[self._pool(size, method.pool_policy) for _ in heads] for heads in self.heads]

    def _pool(self, size: int, policy: str) -> Pool | ArtifactPool:
        if self.method.eviction == "artifact":
            return ArtifactPool(size, policy, self.prefill_len)
        pool = Pool(size, policy, self.method.protect_recent)
        for token in range(self.prefill_len):
            pool.enter(token)
        return pool

    def _select(self, layer, position, predicted, queries) -> list[set[int]]:
        relative = []
        for g, (head, pool) in enumerate(zip(self.heads[layer], self.pools[layer], strict=True)):
            best = dict.fromkeys(sorted(pool.tokens), -math.inf)
            for query in predicted[g * self.family.group : (g + 1) * self.family.group]:
                scores = {j: self.family.scale * (query @ head.columns) @ (head.keys[j] @ head.columns) for j in best}
                highest = max(scores.values())
                best = {j: max(best[j], score - highest) for j, score in scores.items()}
            relative.append(best)
        count = self._count(relative, position if self.method.eviction == "artifact" else len(relative[0]))
        selected = [self._largest(scores, count) for scores in relative]
        for pool, chosen in zip(self.pools[layer], selected, strict=True):
            pool.fetch(chosen, position)
            pool.enter(position)
        return selected


LIMITED = {
    "fifo": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="fifo"),
    "lru": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="lru", protect_recent=0.2),
    "counter": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, protect_recent=0.2),
    "counter-alpha": InfiniGenPool(alpha=0.5, budget=0.6, pool_tokens=14, protect_recent=0.0),
    "fixed": InfiniGenPool(fixed_fetch=5, pool_tokens=11, pool_policy="lru", protect_recent=0.3),
    "fills": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.85),
    "tie": InfiniGenPool(alpha=inf, budget=0.2, pool_tokens=4, protect_recent=0.0),
    "one": InfiniGenPool(pool_tokens=1),
    "saturates": InfiniGenPool(fixed_fetch=4, pool_tokens=12, protect_recent=0.3),
}
ARTIFACT = {"alpha": inf, "budget": 0.3, "eviction": "artifact"}
SIMULATED = {
    "artifact-fifo": InfiniGenPool(pool_tokens=14, pool_policy="fifo", **ARTIFACT),
    "artifact-lru": InfiniGenPool(pool_frac=0.6, pool_policy="lru", **ARTIFACT),
    "artifact-counter": InfiniGenPool(pool_tokens=9, **ARTIFACT),
}
RUNS = [*((name, "gqa") for name in (*LIMITED, *SIMULATED)), ("lru", "opt"), ("counter", "opt")]


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_replay_is_the_reference(name, family, monkeypatch):
    """Of every sequence of a batch."""
    method = (LIMITED | SIMULATED)[name]
    assert pool_rules.SATURATED == 255
    if name == "saturates":
        monkeypatch.setattr(pool_rules, "SATURATED", 3)
    prompts, steps = ((10, 5), 60) if name in SIMULATED else ((24,), 10)
    ids, _ = token_batch(prompts, steps)
    with attach(tiny(family)) as attached:
        got = replay_case(attached, Case(method), prompts, steps=steps)
        rotation = calibration_of(attached)["rotation"]
    traces = []
    for logits, row, prompt in zip(got.logits, ids.tolist(), prompts, strict=True):
        final = prompt + steps
        assert capacity(method, final) < final, "nothing is evicted"
        with torch.inference_mode():
            model = PooledReference(tiny(family), method, final_length=final, prefill_len=prompt, rotation=rotation)
            traces.append(model.run(row[-final:]))
        assert traces[-1].margin > 1e-6, "these ids make a choice that rounding decides"
        assert largest_difference(logits[1:], traces[-1].logits) <= TOLERANCE
    assert got.budget == pytest.approx(plain.budget(traces))
