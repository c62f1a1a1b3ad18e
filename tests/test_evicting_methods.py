"""The methods that evict against plain rules of their own, a token at a time; budgets, limit cases, refusals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import CASES, Case
from hypothesis import given
from hypothesis import strategies as st
from living import PROMPTS, STEPS, attached_with_link, calibration, force, live, open_live, replay
from replaying import LENGTH, MODELS, PROMPT, assert_close, run_ragged
from test_field import BATCHES, Sequence, every_batch, every_model, replayed, softmax

from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.records import inputs
from harness.sizes import expected_size
from methods.base import EMPTY, Geometry, Lengths, Method, PromptRows, Row
from methods.h2o import H2O
from methods.prompt_evicting import ExpectedAttention, KeyDiff, Knorm, PromptEvicting, SnapKV, adaptive, pyramid
from methods.rkv import RKV
from methods.streaming import DuoAttention
from methods.tova import TOVA
from tests.composed import load

GEOMETRY = Geometry(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, family="llama")
Kept = list[list[set[int]]]
"""By KV head and decode row, the tokens read."""


def check(model, method: Method, batch: str, monkeypatch, rule, **options) -> None:
    """Every row of every head of every layer, by `rule(method, geometry, layer, sequence, prompt)`."""
    geometry, found = replayed(model, Case(method), batch, monkeypatch, **options)
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCHES[batch], sequences, strict=True):
            wanted = rule(method, geometry, layer, sequence, prompt)
            assert sequence.read == wanted, f"layer {layer}, prompt of {prompt}"
            means = [np.mean([len(rows[row]) for rows in wanted]) for row in range(length - prompt)]
            assert sequence.num_read == pytest.approx(means)


def rope(geometry: Geometry, states: np.ndarray, position: int) -> np.ndarray:
    """Llama's rotation of states [..., head_dim], base 10000; OPT has none."""
    if geometry.family == "opt":
        return states
    half = geometry.head_dim // 2
    angle = position / 10000 ** (np.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    )


# Once, after the prompt


def pyramid_shares(mean: int, competing: int, num_layers: int) -> list[int]:
    """The line of PyramidKV, its running sum rounded down."""
    high = Fraction(min(2 * mean - mean // 20, competing))
    if num_layers == 1:
        return [mean]
    line = [high - layer * 2 * (high - mean) / (num_layers - 1) for layer in range(num_layers)]
    until = [math.floor(sum(line[:count], Fraction())) for count in range(num_layers + 1)]
    return [until[layer + 1] - until[layer] for layer in range(num_layers)]


def kept_once(method: PromptEvicting, geometry: Geometry, layer: int, worth: np.ndarray, prompt: int) -> list[set[int]]:
    """Of each KV head, by the worth [num_kv_heads, prompt] of its tokens."""
    size = math.floor(method.kept_frac * prompt) if method.kept_tokens is None else method.kept_tokens
    if size >= prompt:
        return [set(range(prompt)) for _ in worth]
    tokens = range(method.num_sinks, prompt - method.window)
    share, selecting = size - method.num_sinks - method.window, geometry.num_layers - method.num_exempt_layers
    if method.layers == "pyramid":
        share = pyramid_shares(share, len(tokens), selecting)[layer - method.num_exempt_layers]
    shares = [share] * len(worth)
    if method.heads == "adaptive":
        pairs = sorted((-worth[head, token], head) for head in range(len(worth)) for token in tokens)
        wins = [sum(head == h for _, head in pairs[: share * len(worth)]) for h in range(len(worth))]
        blend = [Fraction(4, 5) * won + Fraction(share, 5) for won in wins]
        until = [math.floor(sum(blend[:count], Fraction())) for count in range(len(worth) + 1)]
        shares = [until[head + 1] - until[head] for head in range(len(worth))]
    safe = {*range(method.num_sinks), *range(prompt - method.window, prompt)}
    best = [sorted(tokens, key=lambda token: (-row[token], -token)) for row in worth]
    return [safe | set(order[:count]) for order, count in zip(best, shares, strict=True)]


def once(worth_of):
    """A rule from `worth_of(method, geometry, sequence, prompt)`, [num_kv_heads, prompt]."""

    def rule(method: PromptEvicting, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Kept:
        worth = worth_of(method, geometry, sequence, prompt)
        length = sequence.key.shape[1]
        heads = kept_once(method, geometry, layer, worth, prompt)
        return [[kept | set(range(prompt, t)) for t in range(prompt, length)] for kept in heads]

    return rule


def snapkv_worth(method: SnapKV, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    worth = np.zeros((geometry.num_kv_heads, prompt))
    before = max(0, prompt - method.window)
    for head, query in enumerate(sequence.query):
        kv = head // geometry.group
        for row in range(before, prompt):
            probs = softmax(sequence.key[kv, : row + 1] @ query[row] * geometry.scale)
            worth[kv, :before] += probs[:before]
    half = method.kernel // 2
    smoothed = worth.copy()
    for token in range(before):
        around = worth[:, max(0, token - half) : min(before, token + half + 1)]
        smoothed[:, token] = around.max(1) if method.pooling == "max" else around.sum(1) / method.kernel
    return smoothed


def knorm_worth(method: Knorm, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    return np.array([[-math.sqrt(sum(x * x for x in key)) for key in keys[:prompt]] for keys in sequence.key])


def keydiff_worth(method: KeyDiff, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    directions = np.array([[key / np.linalg.norm(key) for key in keys[:prompt]] for keys in sequence.key])
    anchors = directions.mean(1)
    return np.array(
        [
            [-(direction @ anchor) / np.linalg.norm(anchor) for direction in rows]
            for rows, anchor in zip(directions, anchors, strict=True)
        ]
    )


def expected_worth(method: ExpectedAttention, geometry: Geometry, sequence: Sequence, prompt: int) -> np.ndarray:
    worth = np.zeros((geometry.num_kv_heads, prompt))
    past = range(method.num_sinks, prompt)
    units = np.eye(geometry.head_dim)
    ahead = sum(rope(geometry, units, position) for position in range(prompt, prompt + 512)) / 512  # of e_i in row i
    for head, query in enumerate(sequence.query):
        kv = head // geometry.group
        plain = np.array([rope(geometry, query[token], -token) for token in past])
        mean = plain.mean(0) @ ahead
        cov = ahead.T @ np.cov(plain.T, bias=True) @ ahead
        keys = sequence.key[kv, method.num_sinks : prompt] * geometry.scale
        probs = softmax(np.array([key @ mean + key @ cov @ key / 2 for key in keys]))
        worth[kv, method.num_sinks :] += probs / geometry.group
    return (worth + method.epsilon) * np.linalg.norm(sequence.value[:, :prompt], axis=-1)


ONCE = {
    "pyramid": (SnapKV(kept_tokens=10, num_sinks=1, window=2, layers="pyramid", num_exempt_layers=1), snapkv_worth),
    "pyramid-steep": (SnapKV(kept_frac=0.4, window=1, kernel=1, layers="pyramid", num_exempt_layers=0), snapkv_worth),
    "adaptive": (SnapKV(kept_frac=0.5, window=3, heads="adaptive"), snapkv_worth),
    "both": (SnapKV(kept_tokens=9, window=2, pooling="avg", layers="pyramid", heads="adaptive"), snapkv_worth),
    "num_sinks": (SnapKV(kept_tokens=8, num_sinks=3, window=2), snapkv_worth),
    "knorm": (Knorm(kept_frac=0.4), knorm_worth),
    "knorm-both": (Knorm(kept_tokens=7, window=1, layers="pyramid", heads="adaptive"), knorm_worth),
    "keydiff": (KeyDiff(kept_frac=0.4), keydiff_worth),
    "keydiff-sinks": (KeyDiff(kept_tokens=6, num_sinks=2, window=1, num_exempt_layers=0), keydiff_worth),
    "expected": (ExpectedAttention(kept_frac=0.5), expected_worth),
    "expected-adaptive": (
        ExpectedAttention(kept_tokens=8, num_sinks=1, epsilon=0.02, heads="adaptive", num_exempt_layers=1),
        expected_worth,
    ),
}


@every_batch
@every_model
@pytest.mark.parametrize("name", ONCE)
def test_what_evicts_once_reads_what_the_plain_rule_reads(model, name, batch, monkeypatch):
    method, worth_of = ONCE[name]
    check(model, method, batch, monkeypatch, once(worth_of))


# While decoding


def tova_rule(method: TOVA, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Kept:
    length = sequence.key.shape[1]
    budget = method.kept_tokens or max(1, math.floor(method.kept_frac * length))

    def attention(row: int, tokens: list[int]) -> np.ndarray:
        return sum(
            softmax(sequence.key[head // geometry.group, tokens] @ query[row] * geometry.scale)
            for head, query in enumerate(sequence.query)
        )

    def evict(row: int, tokens: list[int]) -> set[int]:
        worth = dict(zip(tokens, attention(row, tokens), strict=True))
        may_leave = [token for token in tokens if not method.protect_last or token < row]
        leaving = sorted(may_leave, key=lambda token: worth[token])[: max(0, len(tokens) - budget)]
        return set(tokens) - set(leaving)

    kept, read = evict(prompt - 1, list(range(prompt))), []
    for t in range(prompt, length):
        read.append(kept)
        kept = evict(t, sorted(kept | {t}))
    return [read] * geometry.num_kv_heads


def rkv_rule(method: RKV, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Kept:
    length = sequence.key.shape[1]
    budget = method.kept_tokens or math.floor(method.kept_frac * length)

    def compress(head: int, tokens: list[int]) -> set[int]:
        if len(tokens) <= budget:
            return set(tokens)
        keys = sequence.key[head, tokens]
        before, last = len(tokens) - method.window, tokens[-1]
        group = sequence.query[head * geometry.group : (head + 1) * geometry.group] * geometry.scale
        rows = [softmax((group[:, row] @ keys[:before].T).max(0)) for row in range(last + 1 - method.window, last + 1)]
        attention, half = np.mean(rows, 0), method.kernel // 2
        smooth = [attention[max(0, i - half) : i + half + 1].max() for i in range(before)]
        cosine = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in keys] for a in keys])
        for i, row in enumerate(cosine):
            row[i] = 0
            alike = [j for j, value in enumerate(row) if value > 0.5]
            if alike:
                row[alike[-1]] = 0
        similar = softmax(cosine.mean(0))
        worth = [method.mix_lambda * smooth[i] - (1 - method.mix_lambda) * similar[i] for i in range(before)]
        best = sorted(range(before), key=lambda i: -worth[i])[: budget - method.window]
        return {tokens[i] for i in best} | set(tokens[before:])

    def read(head: int) -> list[set[int]]:
        kept, rows = compress(head, list(range(prompt))), []
        for t in range(prompt, length):
            rows.append(kept)
            kept = kept | {t}
            if (t + 1 - prompt) % method.divide_length == 0:
                kept = compress(head, sorted(kept))
        return rows

    return [read(head) for head in range(geometry.num_kv_heads)]


def duo_rule(method: DuoAttention, geometry: Geometry, layer: int, sequence: Sequence, prompt: int) -> Kept:
    gates = calibration(geometry.num_kv_heads, geometry.head_dim)["gates"].tolist()
    heads = [(gate, i, head) for i, row in enumerate(gates) for head, gate in enumerate(row)]
    selecting = sorted(each for each in heads if each[1] >= method.num_exempt_layers)
    streaming = {(i, head) for _, i, head in selecting[: round(method.sparsity * len(selecting))]}

    def read(head: int, t: int) -> set[int]:
        recent = range(max(0, t - method.num_recent), t)
        return {*range(min(t, method.num_sinks)), *recent} if (layer, head) in streaming else set(range(t))

    rows = range(prompt, sequence.key.shape[1])
    return [[read(head, t) for t in rows] for head in range(geometry.num_kv_heads)]


WHILE = {
    "tova": (TOVA(kept_frac=0.3), tova_rule),
    "tova-last": (TOVA(kept_tokens=6, protect_last=True, num_exempt_layers=0), tova_rule),
    "tova-one": (TOVA(kept_tokens=1), tova_rule),
    "tova-fills": (TOVA(kept_tokens=24), tova_rule),
    "rkv": (RKV(kept_tokens=8, divide_length=3, window=2, kernel=3), rkv_rule),
    "rkv-share": (RKV(kept_frac=0.3, divide_length=5, window=1, mix_lambda=0.7, num_exempt_layers=0), rkv_rule),
    "rkv-each": (RKV(kept_tokens=6, divide_length=1, window=4, num_exempt_layers=1), rkv_rule),
    "rkv-attention": (RKV(kept_tokens=9, divide_length=2, window=3, mix_lambda=1.0, kernel=1), rkv_rule),
    "rkv-fills": (RKV(kept_tokens=25, divide_length=4), rkv_rule),
    "duo": (DuoAttention(num_sinks=2, num_recent=4), duo_rule),
    "duo-most": (DuoAttention(sparsity=0.8, num_sinks=0, num_recent=3, num_exempt_layers=0), duo_rule),
}
CALLED = [("even", ()), ("padded", ()), ("padded", (1, 2, 9, 20))]
"""Batches, and the calls that replay's rows are cut into: what that does is the same without padding, but simpler."""


@pytest.mark.parametrize(("batch", "calls"), CALLED, ids=["even", "padded", "padded, in calls"])
@every_model
@pytest.mark.parametrize("name", WHILE)
def test_what_evicts_while_decoding_reads_what_the_plain_rule_reads(model, name, batch, calls, monkeypatch):
    method, rule = WHILE[name]
    check(model, method, batch, monkeypatch, rule, calls=calls)


def test_a_long_prompts_similarity_comes_in_chunks(monkeypatch):
    monkeypatch.setattr("methods.rkv.PROMPT_CHUNK", 5)
    method, rule = WHILE["rkv"]
    check(MODELS["gqa"], method, "padded", monkeypatch, rule)


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_gqa"])
def test_duos_gates_are_early_attention_at_the_mean(fixture, request, monkeypatch):
    text = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    seen = []
    measure = DuoAttention.calibrate

    def note(method, query, key, geometry):
        seen.append((query.double().numpy(), key.double().numpy()))
        return measure(method, query, key, geometry)

    monkeypatch.setattr(DuoAttention, "calibrate", note)
    with attach(request.getfixturevalue(fixture)) as attached:
        gates = calibrate(attached, DuoAttention(), text)["gates"]
        geometry = attached.geometry
    assert gates.shape == (geometry.num_layers, geometry.num_kv_heads)
    for layer, states in enumerate(seen):
        queries, keys = (
            [np.mean([rope(geometry, row, -t) for t, row in enumerate(head)], 0) for head in heads] for heads in states
        )
        for kv, key in enumerate(keys):
            turned = np.array([rope(geometry, key, t) for t in range(500)])
            group = queries[kv * geometry.group : (kv + 1) * geometry.group]
            probs = [softmax(turned @ rope(geometry, query, 499) * geometry.scale) for query in group]
            wanted = np.mean([np.cumsum(each).mean() for each in probs])
            assert float(gates[layer, kv]) == pytest.approx(wanted, abs=1e-4)
    assert len(set(gates.flatten().tolist())) == gates.numel()


# Budgets


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_a_pyramid_falls_and_its_mean_is_the_budget(mean, more, num_layers):
    competing = mean + more
    method = SnapKV(kept_tokens=mean + 2, window=1, layers="pyramid")
    shares = method.shares(competing + 1, num_layers)
    assert sum(shares) == num_layers * method.shares(competing + 1, 1)[0]
    assert max(shares) <= competing and min(shares) >= 0
    assert all(after <= before + 1 for before, after in zip(shares, shares[1:], strict=False))
    row = Row(competing + 1, competing + 1, competing + 9)
    assert max(shares) + 1 <= method.tokens_kept(row, 3)


def test_pyramids_by_hand():
    assert pyramid(100, 195, 5) == [195, 147, 100, 53, 5]
    assert pyramid(10, 20, 3) == [20, 10, 0]
    assert pyramid(10, 15, 1) == [10]
    assert SnapKV(kept_tokens=108, window=8, layers="pyramid").shares(1000, 3) == [195, 100, 5]
    assert SnapKV(kept_tokens=108, window=8, layers="pyramid").shares(128, 3) == [120, 100, 80], (
        "no more than there are"
    )


@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 30), st.integers(0, 10))
def test_heads_share_a_layers_budget_to_the_token(num_heads, competing, share, seed):
    share = min(share, competing)
    worth = torch.rand(2, num_heads, competing, generator=torch.Generator().manual_seed(seed)) ** 4
    worth[1, 0] += 1  # a head that would take all
    counts = adaptive(worth, torch.tensor([[share], [share]]))
    assert counts.sum(-1).tolist() == [num_heads * share] * 2
    assert int(counts.min()) >= share // 5 and int(counts.max()) <= -(-(4 * competing + share) // 5)
    method = Knorm(kept_tokens=max(1, share), heads="adaptive")
    assert int(counts.max()) <= method.tokens_kept(Row(competing, competing, competing + 1), 2)


SIZED = [name for name, case in CASES.items() if case.codec is None and name.startswith(("snapkv", "k", "expected"))]
SIZED += ["tova", "tova-last", "rkv", "rkv-share", "rkv-each", "duo", "duo-most", "h2o", "streaming"]


@pytest.mark.parametrize("padding", PROMPTS)
@pytest.mark.parametrize("name", SIZED)
def test_replay_and_live_report_the_closed_form(name, padding):
    case, prompts = CASES[name], PROMPTS[padding]
    with attached_with_link("gqa") as (attached, link):
        rows = {}
        for prompt in prompts:  # each sequence has a T of its own
            rows |= {Row(prompt + step, prompt, prompt + STEPS): 1 for step in range(STEPS)}
        wanted = expected_size(case.method, rows, attached.geometry.num_layers)
        assert replay(attached, case, prompts).size == pytest.approx(wanted, abs=1e-9)
        assert live(attached, case, prompts, placement="host", link=link).size == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", ["snapkv-pyramid", "snapkv-adaptive", "snapkv-both", "rkv", "duo"])
def test_a_slot_that_holds_nothing_does_not_cross_the_link(name):
    case = CASES[name]
    with attached_with_link("gqa") as (attached, link):
        session = open_live(attached, case, placement="host", link=link)
        force(session, (24,))
        geometry, exempt = attached.geometry, case.method.num_exempt_layers
        rows = [Row(24 + step, 24, 24 + STEPS) for step in range(STEPS)]
        read = sum(case.method.tokens_read(row, layer) for row in rows for layer in range(exempt, 4))
        held = sum(case.method.tokens_kept(row, layer) for row in rows for layer in range(exempt, 4))
        tokens = exempt * sum(row.cached for row in rows) + read
        assert session.h2d_bytes == tokens * geometry.num_kv_heads * 2 * geometry.head_dim * 4
        session.close()
    assert read < held


@given(st.integers(0, 400), st.integers(0, 300), st.integers(1, 130), st.integers(2, 300))
def test_rkvs_sizes_are_those_of_its_schedule(prompt, generated, divide_length, budget):
    method = RKV(kept_tokens=budget + 8, divide_length=divide_length)
    held = min(prompt, budget + 8)
    for step in range(generated):
        held += 1
        if (step + 1) % divide_length == 0:
            held = min(held, budget + 8)
    row = Row(prompt + generated, prompt, prompt + 300)
    assert method.tokens_read(row, 2) == held <= method.tokens_kept(row, 2) <= row.cached


# Limit cases

LIMITS = {
    "tova": TOVA(kept_frac=1.0),
    "rkv": RKV(kept_frac=1.0, divide_length=3),
    "rkv-late": RKV(kept_tokens=PROMPT, divide_length=LENGTH),
    "duo-window": DuoAttention(),
    "duo-none": DuoAttention(sparsity=0.0, num_sinks=0, num_recent=1),
    "knorm": Knorm(kept_frac=1.0),
    "keydiff": KeyDiff(kept_frac=1.0, layers="pyramid", heads="adaptive"),
    "expected": ExpectedAttention(kept_frac=1.0, heads="adaptive"),
    "pyramid": SnapKV(kept_frac=1.0, layers="pyramid"),
}


@every_model
@pytest.mark.parametrize("name", LIMITS)
def test_limit_cases_are_the_full_cache(model, name):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case(LIMITS[name]))
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.size == 1


# Refusals


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Knorm, {"kept_frac": 0.0}, r"method\.kept_frac=0\.0: .*\(0, 1\]"),
        (Knorm, {"kept_tokens": 0}, r"method\.kept_tokens=0: .*above window=0, or null"),
        (KeyDiff, {"num_sinks": -1}, r"method\.num_sinks=-1: .*>= 0"),
        (KeyDiff, {"window": -1}, r"method\.window=-1: .*>= 0"),
        (ExpectedAttention, {"kept_tokens": 4}, r"method\.kept_tokens=4: .*above num_sinks \+ window=4, or null"),
        (ExpectedAttention, {"epsilon": -0.1}, r"method\.epsilon=-0\.1: .*>= 0"),
        (SnapKV, {"layers": "cone"}, r"method\.layers=cone: .*uniform, pyramid"),
        (SnapKV, {"heads": "all"}, r"method\.heads=all: .*uniform, adaptive"),
        (TOVA, {"kept_frac": 1.1}, r"method\.kept_frac=1\.1: .*\(0, 1\]"),
        (TOVA, {"kept_tokens": 0}, r"method\.kept_tokens=0: .*>= 1 or null"),
        (RKV, {"kept_tokens": 8}, r"method\.kept_tokens=8: .*above window=8, or null"),
        (RKV, {"window": 0}, r"method\.window=0: .*>= 1"),
        (RKV, {"divide_length": 0}, r"method\.divide_length=0: .*>= 1"),
        (RKV, {"mix_lambda": 1.5}, r"method\.mix_lambda=1\.5: .*\[0, 1\]"),
        (RKV, {"kernel": 2}, r"method\.kernel=2: .*odd"),
        (DuoAttention, {"sparsity": -0.1}, r"method\.sparsity=-0\.1: .*\[0, 1\]"),
        (DuoAttention, {"num_sinks": -1}, r"method\.num_sinks=-1: .*>= 0"),
        (DuoAttention, {"num_recent": 0}, r"method\.num_recent=0: .*>= 1"),
        (DuoAttention, {"pattern": "nowhere.tsv"}, r"method\.pattern=nowhere\.tsv: .*a file that exists, or null"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(method, settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        method(**settings)
    assert "\n" not in str(refusal.value)


LENGTHS = Lengths(torch.tensor([40, 20]), torch.tensor([50, 30]))


def test_what_cannot_work_at_these_lengths_is_refused_with_the_least_that_can():
    with pytest.raises(ValueError, match=r"kept_frac=0\.2: must be at least 0\.25 .*20 tokens.*num_sinks \+ window=4"):
        ExpectedAttention().new_state(GEOMETRY, LENGTHS)
    with pytest.raises(ValueError, match=r"kept_frac=0\.2: must be more: it keeps 6 of 30 .*window=8"):
        RKV().new_state(GEOMETRY, LENGTHS)
    with pytest.raises(ValueError, match=r"method\.window=8: must be below 8, the shortest sequence"):
        RKV().min_size(Row(7, 5, 8))
    with pytest.raises(ValueError, match=r"num_sinks \+ method\.window=4: must be below 3, the shortest prompt"):
        ExpectedAttention().min_size(Row(7, 3, 8))
    row = Row(40, 30, 50)
    assert RKV().with_size(RKV().min_size(row)).budget(50) == 9
    assert ExpectedAttention().with_size(ExpectedAttention().min_size(row)).budget(30) == 5


@pytest.mark.parametrize("method", [TOVA(), RKV(), DuoAttention()], ids=lambda method: method.title)
def test_what_learns_nothing_of_a_prompt_takes_none(method):
    assert not method.needs_prompt
    lengths = Lengths(torch.tensor([0, 0]), torch.tensor([60, 60]))
    state = method.new_state(GEOMETRY, lengths, {"gates": torch.rand(4, 2)})
    query, key = torch.randn(2, 4, 0, 16), torch.randn(2, 2, 0, 16)
    state.prompt(2, query, key, key, PromptRows(torch.ones(2, 0, dtype=torch.bool), 60))
    assert (state.tokens[2] == EMPTY).all()


def test_duos_gates_come_from_a_file_or_a_calibration(tmp_path):
    pattern = tmp_path / "gates.tsv"
    pattern.write_text("0\t1\n1\t0\n0.3\t0.9\n0.4\t0.1\n")
    method = DuoAttention(pattern=str(pattern))
    assert not method.needs_calibration and DuoAttention().needs_calibration
    assert method.file == str(pattern) and DuoAttention().file is None and H2O().file is None
    heads = method.new_state(GEOMETRY, LENGTHS).heads.tolist()
    assert heads == [[False, False], [False, False], [True, False], [False, True]]
    three = DuoAttention(pattern=str(pattern), sparsity=0.65).new_state(GEOMETRY, LENGTHS).heads.tolist()
    assert three == [[False, False], [False, False], [True, False], [True, True]]
    pattern.write_text("0\t1\n")
    with pytest.raises(ValueError, match=r"method\.pattern=.*: must be 4 lines of 2 finite numbers"):
        method.new_state(GEOMETRY, LENGTHS)
    pattern.write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"method\.pattern=.*: must be numbers separated by tabs"):
        method.new_state(GEOMETRY, LENGTHS)
    with pytest.raises(ValueError, match="method DuoAttention: needs a calibration; calibrate first"):
        DuoAttention().new_state(GEOMETRY, LENGTHS)
    with pytest.raises(ValueError, match=r"method\.pattern=None: must be a file: llama has no rotary positions"):
        DuoAttention().new_state(GEOMETRY, LENGTHS, {"gates": torch.ones(4, 2)})


def test_the_contents_of_duos_file_are_an_input_of_the_run(tmp_path):
    pattern = tmp_path / "gates.tsv"
    pattern.write_text("0\t1\n")
    config = load(["method=duo", f"method.pattern={pattern}"])
    first = inputs.digests(config)["method"]
    pattern.write_text("1\t0\n")
    assert inputs.digests(config)["method"] != first
    assert "method" not in inputs.digests(load(["method=duo"]))


def test_duo_grows_with_its_size():
    row = Row(1000, 900, 1024)
    sizes = [DuoAttention().with_size(frac).tokens_read(row, 2) for frac in (2**-24, 0.25, 0.5, 1.0)]
    assert sizes == pytest.approx([320, 490, 660, 1000], abs=1e-3)


def test_shared_budgets_have_names_of_their_own():
    labels = [
        SnapKV(layers=layers, heads=heads).label
        for layers in ("uniform", "pyramid")
        for heads in ("uniform", "adaptive")
    ]
    assert labels == ["SnapKV", "Ada-KV", "PyramidKV", "Ada-PyramidKV"]
