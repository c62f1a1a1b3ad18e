"""Step 5 of the design as it is written: a pool per layer and KV head, a Python dict from a token to its use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import reference as plain

from methods.infinigen import InfiniGen

SATURATED = 255


@dataclass
class Use:
    """How often, and in which row last, a token was fetched."""

    count: int
    last: int


class Pool:
    """The tokens of one KV head. Victims come from the lowest positions present."""

    def __init__(self, capacity: int, policy: str, protect_recent: float) -> None:
        self.capacity = capacity
        self.policy = policy
        self.num_unprotected = max(1, math.floor((1 - protect_recent) * capacity))
        self.tokens: dict[int, Use] = {}

    def enter(self, token: int) -> None:
        """A token comes in, for which another one goes if the pool is full."""
        if len(self.tokens) == self.capacity:
            unprotected = sorted(self.tokens)[: self.num_unprotected]
            del self.tokens[min(unprotected, key=self._worth)]
        self.tokens[token] = Use(0, token)

    def fetch(self, tokens: Iterable[int], row: int) -> None:
        """Count a fetch of each of `tokens` by `row`."""
        for token in tokens:
            self.tokens[token].count += 1
            self.tokens[token].last = row
        if any(use.count >= SATURATED for use in self.tokens.values()):
            for use in self.tokens.values():
                use.count //= 2

    def _worth(self, token: int) -> tuple[int, int]:
        use = self.tokens[token]
        return {"fifo": 0, "lru": use.last, "counter": use.count}[self.policy], token


class ArtifactPool:
    """One KV head under the artifact's rule: candidates for eviction are all tokens of the first half, evicted or not.

    A policy's numbers go on from the dense prompt, whose rows fetched every token up to their own.
    """

    def __init__(self, prompt: int, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.policy = policy
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
            self.victims.append(self._victim(t))
            self.gone.add(self.victims[-1])
        return chosen

    def _victim(self, t: int) -> int:
        if self.policy == "fifo":
            return t - self.capacity
        numbers = {"lru": self.last, "counter": self.count}[self.policy]
        return min(range(t // 2), key=lambda token: (numbers[token], token))


def capacity(method: InfiniGen, final_length: int) -> int:
    """Rows a pool holds."""
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
