"""InfiniGen by columns, its pool of limited size and Oracle against plain rules, a token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import inf

import numpy as np
import pytest

from methods import infinigen_pool as pool_rules
from methods.base import Geometry
from methods.infinigen import InfiniGen, ScoreSelecting
from methods.infinigen_pool import InfiniGenPool
from methods.oracle import Oracle
from tests.cases import CASES, Case
from tests.living import tiny
from tests.methods.test_rules import BATCH, Of, Read, Sequence, check_output, measured, replayed
from tests.reference import softmax

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


def capacity(method: InfiniGenPool, final: int) -> int:
    return math.floor(method.pool_frac * final)


def plain_pool(method: ScoreSelecting, prompt: int, final: int) -> Pool | ArtifactPool:
    """The tokens of one KV head after the prompt. All of them where nothing limits the pool."""
    if not isinstance(method, InfiniGenPool):
        pool = Pool(final + 1, "fifo", 0.0)
    elif method.eviction == "artifact":
        return ArtifactPool(capacity(method, final), method.pool_policy, prompt)
    else:
        pool = Pool(capacity(method, final), method.pool_policy, method.protect_recent)
    for token in range(prompt):
        pool.enter(token)
    return pool


def columns(method: InfiniGen, of: Of) -> np.ndarray:
    """The columns of A with the largest importance over the prompt, [head_dim, columns]."""
    size = of.geometry.head_dim
    basis = measured("rotation", of) if method.skew else np.eye(size)
    by_query = np.zeros(size)
    for query in of.query[:, : of.prompt].reshape(-1, size):
        by_query += np.abs(query / of.geometry.scale @ basis) / of.geometry.group
    by_key = sum(np.abs(key @ basis) for key in of.key[: of.prompt])
    rounded = {"up": math.ceil, "down": math.floor}[method.round_columns]
    wanted = max(1, rounded(method.partial_weight_ratio * size))
    importances = {"sum": [by_query + by_key], "query": [by_query], "union": [by_query, by_key]}[method.columns]
    return basis[:, sorted({column for each in importances for column in np.argsort(-each)[:wanted]})]


def count_of(method: ScoreSelecting, geometry: Geometry, relative: list[dict[int, float]], cached: int, final: int):
    """Tokens that every KV head reads, by their scores relative to the best one."""
    if method.fixed_fetch is not None:
        return min(method.fixed_fetch, cached)
    alpha = method.alpha
    if alpha is None:
        alpha = 4 if geometry.family == "opt" else 5
    within = [sum(score >= -alpha for score in scores.values()) for scores in relative]
    whole = {"cached": cached, "final": final}[method.cap_of]
    most = min(cached, max(1, math.floor(method.budget * whole)))
    return min(max(math.floor(sum(within) / len(within)), 1), most)


def reduced(method: ScoreSelecting, scores: np.ndarray) -> np.ndarray:
    """One score a token from those of several heads, [heads, tokens]."""
    if method.group == "best":
        return (scores - scores.max(1, keepdims=True)).max(0)
    assert method.group == "max_probs"
    return np.array([softmax(head) for head in scores]).max(0)


def selected(method: ScoreSelecting, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
    """Each row selects of what its head's pool holds, then its own token enters."""
    asking, final = sequence.query, sequence.key.shape[1]
    if method.when == "previous_layer":
        asking = sequence.predicted
    elif method.when == "previous_step":
        asking = np.roll(sequence.query, 1, axis=1)
    heads, pools = [], []
    for head, key in enumerate(sequence.key):
        group, stored = slice(head * geometry.group, (head + 1) * geometry.group), sequence.stored[0][head]
        if isinstance(method, Oracle):
            heads.append((asking[group], stored))
        else:
            basis = columns(method, Of(geometry, layer, head, prompt, sequence.query[group], key, stored))
            heads.append((asking[group] @ basis, key @ basis))
        pools.append(plain_pool(method, prompt, final))
    read: Read = [[] for _ in heads]
    for t in range(prompt, final):
        relative = []
        for (query, key), pool in zip(heads, pools, strict=True):
            tokens = sorted(pool.tokens)
            relative.append(dict(zip(tokens, reduced(method, query[:, t] @ key[tokens].T), strict=True)))
        candidates = t if isinstance(pools[0], ArtifactPool) else len(relative[0])
        count = count_of(method, geometry, relative, candidates, final)
        recent = t - math.floor(method.recent_frac * count)
        for of_head, scores, pool in zip(read, relative, pools, strict=True):
            scores.update({token: inf for token in scores if token < method.num_sinks or token >= recent})
            chosen = sorted(scores, key=lambda token, scores=scores: (-scores[token], token))[:count]
            of_head.append(set(chosen))
            pool.fetch(chosen, t)
            pool.enter(t)
    return read


BY_COLUMNS = (
    "infinigen", "infinigen-query", "infinigen-union", "infinigen-step", "infinigen-own", "infinigen-fixed",
    "infinigen-final", "infinigen+smooth", "oracle", "oracle+smooth",
)  # fmt: skip
LIMITED = {
    "fifo": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="fifo"),
    "lru": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, pool_policy="lru", protect_recent=0.2),
    "counter": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.6, protect_recent=0.2),
    "counter-alpha": InfiniGenPool(alpha=0.5, budget=0.6, pool_frac=0.55, protect_recent=0.0),
    "fixed": InfiniGenPool(fixed_fetch=5, pool_frac=0.45, pool_policy="lru", protect_recent=0.3),
    "fills": InfiniGenPool(alpha=inf, budget=0.3, pool_frac=0.85),
    "tie": InfiniGenPool(alpha=inf, budget=0.2, pool_frac=0.17, protect_recent=0.0),
    "one": InfiniGenPool(pool_frac=0.05),
    "saturates": InfiniGenPool(fixed_fetch=4, pool_frac=0.5, protect_recent=0.3),
}
ARTIFACT = {"alpha": inf, "budget": 0.3, "eviction": "artifact"}
SIMULATED = {
    "artifact-fifo": InfiniGenPool(pool_frac=0.55, pool_policy="fifo", **ARTIFACT),
    "artifact-lru": InfiniGenPool(pool_frac=0.6, pool_policy="lru", **ARTIFACT),
    "artifact-counter": InfiniGenPool(pool_frac=0.35, **ARTIFACT),
}
METHODS = {name: CASES[name] for name in BY_COLUMNS}
METHODS |= {name: Case(method) for name, method in (LIMITED | SIMULATED).items()}
FAMILIES = {
    "opt": ("infinigen", "infinigen-union", "infinigen-step", "oracle", "lru", "counter"),
    "llama": ("infinigen",),
}
RUNS = [(name, "gqa") for name in METHODS] + [(name, family) for family, names in FAMILIES.items() for name in names]


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_each_row_reads_what_the_plain_rule_selects(name, family, monkeypatch):
    """In every sequence of a padded batch."""
    assert pool_rules.SATURATED == 255
    if name == "saturates":
        monkeypatch.setattr(pool_rules, "SATURATED", 3)
    case = METHODS[name]
    geometry, found = replayed(tiny(family), case)
    for layer, sequences in found.items():
        for (prompt, final), sequence in zip(BATCH, sequences, strict=True):
            wanted = selected(case.method, geometry, layer, sequence, prompt)
            assert sequence.read == wanted, f"layer {layer}, prompt of {prompt}"
            assert sequence.num_read == pytest.approx(np.mean([[*map(len, head)] for head in wanted], 0))
            check_output(geometry, sequence, prompt, case.codec)
            assert not isinstance(case.method, InfiniGenPool) or capacity(case.method, final) < final
