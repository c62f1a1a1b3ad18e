"""CriticalKV, DefensiveKV and CapKV against plain readings of their rules, a token at a time; their sizes by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.tiny import tiny_model
from methods.base import Geometry, TokenCounts
from methods.capkv import CapKV
from methods.criticalkv import CriticalKV
from methods.defensivekv import DefensiveKV
from methods.prompt_evicting import PromptEvicting
from tests.cases import Case
from tests.living import tiny
from tests.methods.test_kvzip import attention_of, prompts, states_of
from tests.methods.test_rules import rope
from tests.reference import softmax
from tests.replaying import PROMPT, open_session, pad

METHODS = {
    "critical": CriticalKV(budget=0.7, window=3, kernel=3),
    "critical-avg": CriticalKV(kept_tokens=8, window=2, pooling="avg", first_share=0.3, epsilon=0.1, dense_layers=0),
    "critical-sinks": CriticalKV(kept_tokens=9, num_sinks=1, window=3, kernel=5, first_share=0.0),
    "critical-one": CriticalKV(kept_tokens=4, window=3, kernel=3),
    "critical-ada": CriticalKV(kept_tokens=8, window=2, kernel=3, heads="adaptive"),
    "defensive": DefensiveKV(budget=0.7, window=3, kernel=3, first_mass=0.4),
    "defensive-mass": DefensiveKV(kept_tokens=7, window=3, dense_layers=0),
    "defensive-uniform": DefensiveKV(kept_tokens=7, window=3, kernel=3, heads="uniform", first_mass=0.3),
    "defensive-value": DefensiveKV(kept_tokens=6, num_sinks=1, window=2, kernel=1, first_mass=0.0),
    "cap": CapKV(budget=0.6),
    "cap-flat": CapKV(kept_tokens=6, num_sinks=2, tau=0.0, dense_layers=0),
    "cap-ada": CapKV(kept_tokens=7, num_sinks=1, tau=3.0, window=1, heads="adaptive"),
}


class Prompt:
    """One layer of one sequence in float64: query [heads, tokens, head_dim], key and value of the KV heads, and what
    each query head's part of the output projection makes of a value: matrix [heads, head_dim, hidden]."""

    def __init__(self, geometry: Geometry, states: list[torch.Tensor], weight: torch.Tensor) -> None:
        self.geometry = geometry
        self.query, self.key, self.value = (part.numpy() for part in states)
        self.matrix = weight.double().T.unflatten(0, (geometry.num_heads, -1)).numpy()
        self.length = self.key.shape[1]
        self.kv_heads = range(geometry.num_kv_heads)

    def group(self, kv: int) -> range:
        return range(kv * self.geometry.group, (kv + 1) * self.geometry.group)

    def attention(self, head: int, row: int) -> np.ndarray:
        """Of a row to all tokens, 0 for those behind it."""
        keys = self.key[head // self.geometry.group, : row + 1]
        probs = np.zeros(self.length)
        probs[: row + 1] = softmax(keys @ self.query[head, row] * self.geometry.scale)
        return probs

    def norms(self, kv: int) -> np.ndarray:
        """|W_O v|_1 of each token, mean over the group."""
        return np.mean([np.abs(self.value[kv] @ self.matrix[head]).sum(1) for head in self.group(kv)], 0)


def around(numbers: np.ndarray, token: int, width: int) -> np.ndarray:
    return numbers[max(0, token - width // 2) : token + width // 2 + 1]


def shared_counts(score: list[np.ndarray], tokens: range, share: int) -> list[int]:
    """Ada-KV: four fifths of a head's places by the layer's best tokens, a fifth for certain."""
    pairs = sorted((-score[kv][token], kv) for kv in range(len(score)) for token in tokens)
    wins = [sum(kv == head for _, head in pairs[: share * len(score)]) for kv in range(len(score))]
    blend = [Fraction(4, 5) * won + Fraction(share, 5) for won in wins]
    until = [math.floor(sum(blend[:count], Fraction())) for count in range(len(score) + 1)]
    return [after - before for before, after in zip(until, until[1:], strict=False)]


def best(score: np.ndarray, second: np.ndarray, tokens, count: int) -> list[int]:
    return sorted(tokens, key=lambda token: (-score[token], -second[token], -token))[:count]


def critical(method: CriticalKV, prompt: Prompt, tokens: range, share: int) -> list[set[int]]:
    before = prompt.length - method.window
    smoothed, plain = [], []
    for kv in prompt.kv_heads:
        rows = [prompt.attention(head, row) for head in prompt.group(kv) for row in range(before, prompt.length)]
        mean = np.mean(rows, 0)[:before]
        wide = [around(mean, token, method.kernel) for token in range(before)]
        pooled = [part.max() if method.pooling == "max" else part.sum() / method.kernel for part in wide]
        smoothed.append(np.array(pooled))
        plain.append(mean)
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
            wide = np.array([around(row, token, method.kernel).sum() / method.kernel for token in range(before)])
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


def plain_kept(method: PromptEvicting, prompt: Prompt) -> list[set[int]]:
    """The tokens that each KV head keeps of a prompt."""
    budget = method.kept_tokens or math.floor(method.budget * prompt.length)
    tokens = range(method.num_sinks, prompt.length - method.window)
    share = budget - method.num_sinks - method.window
    assert 0 < share < len(tokens), "something is chosen, and something evicted"
    always = set(range(prompt.length)) - set(tokens)
    return [always | chosen for chosen in RULES[type(method)](method, prompt, tokens, share)]


@pytest.mark.parametrize("family", ["gqa", "opt"])
@pytest.mark.parametrize("name", METHODS)
def test_what_stays_is_the_plain_rules_for_each_sequence_of_a_padded_batch(name, family):
    method, model = METHODS[name], tiny(family)
    with attach(model) as attached:
        geometry = attached.geometry
        session = open_session(attached, Case(method), [len(ids) + 1 for ids in prompts()], PROMPT + 1)
        session.prefill(*pad(prompts(), left=True))
        (state,) = session.states.values()
        alone = [states_of(attached, ids)[0] for ids in prompts()]
    uneven = False
    for at, layers in enumerate(alone):
        for layer in range(method.dense_layers, geometry.num_layers):
            module = attention_of(model, layer)
            output = module.o_proj if hasattr(module, "o_proj") else module.out_proj
            prompt = Prompt(geometry, layers[layer], output.weight.detach())
            kept = plain_kept(method, prompt)
            for kv, wanted in enumerate(kept):
                held = state.tokens[layer][at, kv].tolist()
                assert {token for token in held if 0 <= token < prompt.length} == wanted, (at, layer, kv)
            uneven |= len({len(tokens) for tokens in kept}) > 1
    assert uneven == (method.heads == "adaptive"), "heads that share a budget keep unequal numbers"


def test_the_second_half_and_the_largest_of_rows_change_what_stays():
    """Else the test above could not tell the rules from SnapKV's, or one setting from another."""
    model, kept = tiny("gqa"), {}
    first = METHODS["critical"]
    with attach(model) as attached:
        geometry, states = attached.geometry, states_of(attached, prompts()[0])[0]
    layers = [
        Prompt(geometry, of_layer, attention_of(model, layer).o_proj.weight.detach())
        for layer, of_layer in enumerate(states)
    ]
    largest = METHODS["defensive-uniform"]
    others = (replace(first, first_share=1.0), replace(first, first_share=0.0), replace(largest, first_mass=0.0))
    for method in (first, largest, *others):
        kept[repr(method)] = str([plain_kept(method, prompt) for prompt in layers])
    assert len(set(kept.values())) == len(kept)


def test_sizes_by_hand():
    row = TokenCounts(cached=110, prompt=100, final=120)
    critical = CriticalKV(budget=0.5)
    assert critical.tokens_read(row, 2) == critical.tokens_kept(row, 2) == 50 + 10
    shared = replace(critical, heads="adaptive")  # 18 compete for a place: a fifth of 18 and four fifths of all 68
    assert (
        shared.tokens_read(row, 2) == 50 + 10 and shared.tokens_kept(row, 2) == 32 + math.ceil((18 + 4 * 68) / 5) + 10
    )
    defensive = DefensiveKV(budget=0.5)  # a head may keep the whole prompt
    assert defensive.tokens_read(row, 2) == 50 + 10 and defensive.tokens_kept(row, 2) == 100 + 10
    assert replace(defensive, heads="uniform").tokens_kept(row, 2) == 50 + 10
    assert CapKV(kept_tokens=7).tokens_read(row, 2) == CapKV(kept_tokens=7).tokens_kept(row, 2) == 7 + 10
    for method in (critical, defensive, CapKV()):
        assert method.with_budget(0.4).tokens_read(row, 2) == 40 + 10


def test_shared_budgets_have_names_of_their_own():
    assert CriticalKV().title == "CriticalKV" and CriticalKV(heads="adaptive").title == "Ada-CriticalKV"
    assert CriticalKV(layers="pyramid", heads="adaptive").title == "Ada-Pyramid-CriticalKV"


def test_a_model_whose_output_projection_is_not_known_is_refused_in_one_line():
    shape = {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 4, "num_experts": 0}
    method = CriticalKV(budget=0.7, window=3)
    with attach(tiny_model("qwen3_next", **shape)) as attached:
        session = open_session(attached, Case(method), [PROMPT + 1], PROMPT + 1)
        with pytest.raises(UserError, match="'qwen3_next' is not supported: .* such as a gate, of which this method"):
            session.prefill(*pad(prompts()[:1], left=True))
    with pytest.raises(ValueError, match="the output projections are not known without the model's weights"):
        Geometry(4, 4, 2, 16, 0.25, "llama").output_matrix(0)
