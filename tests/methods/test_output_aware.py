"""CriticalKV, DefensiveKV and CapKV against plain readings of their rules, a token at a time; their sizes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.model.attach import attach
from methods.base import Geometry
from methods.capkv import CapKV
from methods.criticalkv import CriticalKV
from methods.defensivekv import DefensiveKV
from methods.prompt_evicting import PromptEvicting
from tests.cases import Case
from tests.living import tiny
from tests.methods.test_rules import Read, Sequence, check_rule, pyramid_shares, rope, shared_counts, snapkv
from tests.reference import softmax
from tests.replaying import PROMPT, attention_of, open_session, token_ids
from tests.tiny_models import tiny_model

METHODS = {
    "critical": CriticalKV(budget=0.7, window=3, kernel=3),
    "critical-avg": CriticalKV(kept_tokens=8, window=2, pooling="avg", first_share=0.3, epsilon=0.1, dense_layers=0),
    "critical-sinks": CriticalKV(kept_tokens=9, num_sinks=1, window=3, kernel=5, first_share=0.0),
    "critical-one": CriticalKV(kept_tokens=4, window=3, kernel=3),
    "critical-ada": CriticalKV(kept_tokens=8, window=2, kernel=3, heads="adaptive"),
    "critical-ada-few": CriticalKV(kept_tokens=4, window=3, kernel=3, heads="adaptive"),
    "critical-pyramid": CriticalKV(kept_tokens=4, window=3, kernel=3, layers="pyramid", dense_layers=0),
    "defensive": DefensiveKV(budget=0.7, window=3, kernel=3, first_mass=0.4),
    "defensive-mass": DefensiveKV(kept_tokens=7, window=3, dense_layers=0),
    "defensive-uniform": DefensiveKV(kept_tokens=7, window=3, kernel=3, heads="uniform", first_mass=0.3),
    "defensive-value": DefensiveKV(kept_tokens=6, num_sinks=1, window=2, kernel=1, first_mass=0.0),
    "cap": CapKV(budget=0.6),
    "cap-flat": CapKV(kept_tokens=6, num_sinks=2, tau=0.0, dense_layers=0),
    "cap-ada": CapKV(kept_tokens=7, num_sinks=1, tau=3.0, window=1, heads="adaptive"),
}


class Prompt:
    """The prompt of one sequence in one layer: query [heads, tokens, head_dim], scaled, key and value of the KV heads,
    and what each query head's part of the output projection makes of a value: matrix [heads, head_dim, hidden]."""

    def __init__(self, geometry: Geometry, sequence: Sequence, length: int, weight: torch.Tensor) -> None:
        self.geometry, self.sequence, self.length = geometry, sequence, length
        self.query, self.key, self.value = (part[:, :length] for part in sequence[:3])
        self.matrix = weight.detach().double().T.unflatten(0, (geometry.num_heads, -1)).numpy()
        self.kv_heads = range(geometry.num_kv_heads)

    def group(self, kv: int) -> range:
        return range(kv * self.geometry.group, (kv + 1) * self.geometry.group)

    def attention(self, head: int, row: int) -> np.ndarray:
        """Of a row to all tokens, 0 for those behind it."""
        keys = self.key[head // self.geometry.group, : row + 1]
        probs = np.zeros(self.length)
        probs[: row + 1] = softmax(keys @ self.query[head, row])
        return probs

    def norms(self, kv: int) -> np.ndarray:
        """|W_O v|_1 of each token, mean over the group."""
        return np.mean([np.abs(self.value[kv] @ self.matrix[head]).sum(1) for head in self.group(kv)], 0)


def best(score: np.ndarray, second: np.ndarray, tokens, count: int) -> list[int]:
    return sorted(tokens, key=lambda token: (-score[token], -second[token], -token))[:count]


def critical(method: CriticalKV, prompt: Prompt, tokens: range, share: int) -> list[set[int]]:
    before = prompt.length - method.window
    sums = snapkv(method, prompt.geometry, prompt.sequence, prompt.length)
    smoothed, plain = (each[:, :before] / (prompt.geometry.group * method.window) for each in sums)
    counts = [share] * len(smoothed)
    if method.heads == "adaptive":
        counts = shared_counts(smoothed, tokens, share)
    kept = []
    for kv, count in enumerate(counts):
        first = max(1, math.floor(method.first_share * count)) if method.first_share else 0
        chosen = best(smoothed[kv], plain[kv], tokens, min(first, count))
        weighted = (smoothed[kv] + method.epsilon) * prompt.norms(kv)[:before]
        others = [token for token in tokens if token not in chosen]
        kept.append({*chosen, *best(weighted, plain[kv], others, count - len(chosen))})
    return kept


def defensive(method: DefensiveKV, prompt: Prompt, tokens: range, share: int) -> list[set[int]]:
    before, window = prompt.length - method.window, method.window
    rows = {
        kv: [prompt.attention(head, row)[:before] for head in prompt.group(kv) for row in range(before, prompt.length)]
        for kv in prompt.kv_heads
    }
    near = np.mean([row[-window:].sum() for of_head in rows.values() for row in of_head])
    total_norm = np.sum([prompt.norms(kv) for kv in prompt.kv_heads], 0)
    score = []
    for kv in prompt.kv_heads:
        risk = np.zeros(before)
        for row in rows[kv]:
            wide = np.convolve(row, np.ones(method.kernel) / method.kernel, "same")
            risk = np.maximum(risk, wide * row.sum() / wide.sum())
        risk = np.maximum(risk, risk.mean())
        of_head = risk * (prompt.norms(kv) / total_norm)[:before]
        mean, mass = np.mean(rows[kv], 0), 0.0
        for number, token in enumerate(sorted(range(before), key=lambda token: -mean[token])):
            mass += mean[token] / mean.sum()
            if mass >= method.first_mass - near or number >= share:
                break
            of_head[token] = math.inf
        score.append(of_head)
    none = np.zeros(before)
    if method.heads == "uniform":
        return [set(best(of_head, none, tokens, share)) for of_head in score]
    pairs = sorted((-score[kv][token], kv, token) for kv in prompt.kv_heads for token in tokens)
    kept: list[set[int]] = [set() for _ in prompt.kv_heads]
    for _, kv, token in pairs[: share * len(score)]:
        kept[kv].add(token)
    return kept


def cap(method: CapKV, prompt: Prompt, tokens: range, share: int) -> list[set[int]]:
    geometry, sinks = prompt.geometry, method.num_sinks
    ahead = range(prompt.length, prompt.length + 512)
    rotation = sum(rope(geometry, np.eye(geometry.head_dim), position) for position in ahead) / 512
    score = []
    for kv in prompt.kv_heads:
        total = np.zeros(prompt.length)
        for head in prompt.group(kv):
            bare = [rope(geometry, prompt.query[head, token], -token) for token in range(sinks, prompt.length)]
            anchor = np.mean(bare, 0) @ rotation
            keys, values = prompt.key[kv, sinks:], prompt.value[kv, sinks:]
            cosines = keys @ anchor / np.linalg.norm(keys, axis=1) / np.linalg.norm(anchor)
            weights = np.exp(method.tau * (cosines - cosines.max()))
            capacity = np.eye(values.shape[1]) + (values * (weights + 1e-6)[:, None]).T @ values
            inverse = np.linalg.inv(capacity)
            for at, value in enumerate(values):
                total[sinks + at] += weights[at] * value @ inverse @ value / geometry.group
        score.append(total)
    counts = [share] * len(score)
    if method.heads == "adaptive":
        counts = shared_counts(score, tokens, share)
    none = np.zeros(prompt.length)
    return [set(best(score[kv], none, tokens, count)) for kv, count in enumerate(counts)]


RULES = {CriticalKV: critical, DefensiveKV: defensive, CapKV: cap}


def plain_kept(method: PromptEvicting, prompt: Prompt, layer: int) -> list[set[int]]:
    """The tokens that each KV head keeps of a prompt in a layer."""
    budget = method.kept_tokens or math.floor(method.budget * prompt.length)
    tokens = range(method.num_sinks, prompt.length - method.window)
    share = budget - method.num_sinks - method.window
    assert 0 < share < len(tokens), "something is chosen, and something evicted"
    if method.layers == "pyramid":
        selecting = prompt.geometry.num_layers - method.dense_layers
        share = pyramid_shares(share, len(tokens), selecting)[layer - method.dense_layers]
    always = set(range(prompt.length)) - set(tokens)
    return [always | chosen for chosen in RULES[type(method)](method, prompt, tokens, share)]


@pytest.mark.parametrize("family", ["gqa", "opt"])
@pytest.mark.parametrize("name", METHODS)
def test_what_stays_is_the_plain_rules_for_each_sequence_of_a_padded_batch(name, family):
    model, uneven = tiny(family), []

    def rule(method: PromptEvicting, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Read:
        module = attention_of(model, layer)
        output = module.o_proj if hasattr(module, "o_proj") else module.out_proj
        kept = plain_kept(method, Prompt(geometry, sequence, prompt, output.weight), layer)
        uneven.append(len({len(tokens) for tokens in kept}) > 1)
        return [[tokens | {*range(prompt, t)} for t in range(prompt, sequence.key.shape[1])] for tokens in kept]

    check_rule(METHODS[name], model, rule)
    assert any(uneven) == (METHODS[name].heads == "adaptive"), "heads that share a budget keep unequal numbers"


def test_a_model_whose_output_projection_is_not_known_is_refused_in_one_line():
    shape = {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 4, "num_experts": 0}
    method = CriticalKV(budget=0.7, window=3)
    with attach(tiny_model("qwen3_next", **shape)) as attached:
        session = open_session(attached, Case(method), [PROMPT + 1], PROMPT + 1)
        with pytest.raises(UserError, match="'qwen3_next' is not supported: .* such as a gate, of which this method"):
            session.prefill(torch.tensor([token_ids(PROMPT)]), torch.ones(1, PROMPT, dtype=torch.bool))
    with pytest.raises(ValueError, match="the output projections are not known without the model's weights"):
        Geometry(4, 4, 2, 16, 0.25, "llama").output_matrix(0)
