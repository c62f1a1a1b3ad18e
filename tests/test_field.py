"""Quest and SnapKV against plain rules of their own, a token at a time; their limit cases, and what they refuse."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import CASES, Case
from replaying import LENGTH, MODELS, PROMPT, assert_close, open_session, pad, run_ragged, token_ids

from harness import replay as passes
from harness.model.attach import attach
from harness.model.prompt import PromptPass
from methods.base import EMPTY, Geometry, Lengths, Row
from methods.prompt_evicting import SnapKV
from methods.quest import Quest

BATCHES = {"even": ((PROMPT, LENGTH),), "padded": ((PROMPT, LENGTH), (11, 40), (14, 33))}
"""(prompt, length) of the sequences of a batch."""
every_batch = pytest.mark.parametrize("batch", BATCHES)
every_model = pytest.mark.parametrize("model", [MODELS["gqa"], MODELS["opt"]], ids=["gqa", "opt"])


class Sequence(NamedTuple):
    """One sequence in one layer, its padding left out.

    query: [heads, tokens, head_dim]; key, value: [num_kv_heads, tokens, head_dim]; read[KV head][decode row]: tokens.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    read: list[list[set[int]]]
    num_read: list[float]


def replayed(model, case: Case, batch: str, monkeypatch, calls=()) -> tuple[Geometry, dict[int, list[Sequence]]]:
    """By layer, what the layer's attention was given of each sequence, and what the method made it read."""
    seen: dict[int, list[tuple]] = {}
    selected: dict[int, list[tuple]] = {}

    def note(attention):
        def noting(handler, layer, query, key, value):
            seen.setdefault(layer, []).append((query.double(), key.double(), value.double()))
            return attention(handler, layer, query, key, value)

        return noting

    def select(block, exact):
        selection = original(block, exact)
        kv_heads = block.key.shape[1]
        tokens, real = block.tokens[:, : block.stop], block.real[:, block.rows]
        selected.setdefault(block.layer, []).append(
            (selection.mask.clone().expand(-1, kv_heads, -1, -1), tokens, real, selection.num_read)
        )
        return selection

    for handler in (PromptPass, passes.DecodePass):
        monkeypatch.setattr(handler, "attention", note(handler.attention))
    original = passes._Block._select
    monkeypatch.setattr(passes._Block, "_select", select)

    shapes = BATCHES[batch]
    sequences = [token_ids(length, seed) for seed, (_, length) in enumerate(shapes)]
    first, valid = pad([ids[:prompt] for ids, (prompt, _) in zip(sequences, shapes, strict=True)], left=True)
    rest, real = pad([ids[prompt:] for ids, (prompt, _) in zip(sequences, shapes, strict=True)], left=False)
    with attach(model) as attached:
        columns = first.shape[1] + rest.shape[1]
        session = open_session(attached, case, [length for _, length in shapes], columns)
        session.prefill(first, valid)
        edges = [0, *calls, rest.shape[1]]
        for begin, stop in zip(edges, edges[1:], strict=False):
            session.decode(rest[:, begin:stop], real[:, begin:stop])
        geometry = attached.geometry
    is_token = torch.cat([valid, real], 1)
    found: dict[int, list[Sequence]] = {}
    for layer, blocks in selected.items():
        query, key, value = (torch.cat(parts, 2) for parts in zip(*seen[layer], strict=True))
        for b in range(len(shapes)):
            read: list[list[set[int]]] = [[] for _ in range(key.shape[1])]
            num_read: list[float] = []
            for masks, tokens, rows, counts in blocks:
                for row in rows[b].nonzero().flatten().tolist():
                    num_read.append(float(counts[b, row]))
                    for head, mask in enumerate(masks[b, :, row]):
                        read[head].append(set(tokens[b][mask].tolist()))
            own = (part[b][:, is_token[b]].numpy() for part in (query, key, value))
            found.setdefault(layer, []).append(Sequence(*own, read, num_read))
    assert sorted(found) == list(range(case.method.num_exempt_layers, 4))
    return geometry, found


def check(geometry: Geometry, found: dict[int, list[Sequence]], batch: str, rule) -> None:
    """Every row of every head, by `rule(query of the group, key, prompt, t)`."""
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCHES[batch], sequences, strict=True):
            assert sequence.key.shape[1] == length
            for g, rows in enumerate(sequence.read):
                group = sequence.query[g * geometry.group : (g + 1) * geometry.group] * geometry.scale
                wanted = [rule(group, sequence.key[g], prompt, t) for t in range(prompt, length)]
                assert rows == wanted, f"layer {layer}, KV head {g}"
                assert sequence.num_read == [len(each) for each in wanted]
                assert all(EMPTY not in each and max(each) < prompt + row for row, each in enumerate(wanted))


# Quest


def quest_rule(method: Quest):
    """Bounds of each full page from its keys; the best pages, and the unfinished one."""
    page = method.page_size

    def rule(group: np.ndarray, key: np.ndarray, prompt: int, t: int) -> set[int]:
        full = t // page
        bounds = np.empty((len(group), full))
        for number in range(full):
            keys = key[number * page : (number + 1) * page]
            low, high = keys.min(0), keys.max(0)
            for head, query in enumerate(group[:, t]):
                bounds[head, number] = sum(
                    max(q * least, q * most) for q, least, most in zip(query, low, high, strict=True)
                )
        budget = max(3, math.floor(method.read_frac * t / page))
        others = full if method.read_frac == 1 else min(full, budget - 1)
        relative = (bounds - bounds.max(1, keepdims=True)).max(0) if full else np.empty(0)
        best = sorted(range(full), key=lambda number: (-relative[number], number))[:others]
        return {token for token in range(t) if token // page in best or token // page == full}

    return rule


QUESTS = {
    "quest": Quest(read_frac=0.4, page_size=3),
    "quest-token": Quest(read_frac=0.3, page_size=1, num_exempt_layers=0),
    "quest-least": Quest(read_frac=0.05, page_size=2, num_exempt_layers=1),
    "quest-large": Quest(read_frac=0.6, page_size=7),
    "quest-one-page": Quest(read_frac=0.3, page_size=64),
    "quest-all": Quest(read_frac=1.0, page_size=4),
}


@every_batch
@every_model
@pytest.mark.parametrize("name", QUESTS)
def test_quest_reads_what_the_plain_rule_reads(model, name, batch, monkeypatch):
    geometry, found = replayed(model, Case(QUESTS[name]), batch, monkeypatch)
    check(geometry, found, batch, quest_rule(QUESTS[name]))


@every_batch
@every_model
def test_quest_pages_grow_from_call_to_call(model, batch, monkeypatch):
    """Calls that end inside a page."""
    method = QUESTS["quest"]
    geometry, found = replayed(model, Case(method), batch, monkeypatch, calls=(1, 2, 9, 20))
    check(geometry, found, batch, quest_rule(method))


def test_quest_chooses_by_more_than_position(monkeypatch):
    """Otherwise the rule above would agree with a window."""
    _, found = replayed(MODELS["gqa"], Case(QUESTS["quest"]), "even", monkeypatch)
    (sequence,) = found[2]
    assert len({frozenset(token // 3 for token in read) for read in sequence.read[0]}) > 12
    assert sequence.read[0] != sequence.read[1]


def test_quests_bounds_hold_for_every_key(monkeypatch):
    """No key of a page scores above its bound, and with pages of one token the bound is the score."""
    _, found = replayed(MODELS["opt"], Case(QUESTS["quest-token"]), "even", monkeypatch)
    (sequence,) = found[3]
    key, query = sequence.key[0], sequence.query[0]
    for page in (1, 3):
        for begin in range(0, 30, page):
            keys = key[begin : begin + page]
            bound = np.maximum(query[40] * keys.min(0), query[40] * keys.max(0)).sum()
            assert (keys @ query[40]).max() <= bound + 1e-12
            assert page > 1 or bound == pytest.approx(float(keys[0] @ query[40]))


# SnapKV


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def snapkv_rule(method: SnapKV):
    """What the prompt's last rows attended to, smoothed; these rows; and all that was generated."""

    def kept(group: np.ndarray, key: np.ndarray, prompt: int) -> set[int]:
        size = math.floor(method.kept_frac * prompt) if method.kept_tokens is None else method.kept_tokens
        if size >= prompt:
            return set(range(prompt))
        before = prompt - method.window
        received = [0.0] * before
        for row in range(before, prompt):
            for query in group[:, row]:
                probs = softmax(key[: row + 1] @ query)
                for token in range(before):
                    received[token] += probs[token]
        half = method.kernel // 2
        smoothed = []
        for token in range(before):
            around = received[max(0, token - half) : token + half + 1]
            smoothed.append(max(around) if method.pooling == "max" else sum(around) / method.kernel)
        best = sorted(range(before), key=lambda token: (-smoothed[token], -token))[: size - method.window]
        return {*best, *range(before, prompt)}

    def rule(group: np.ndarray, key: np.ndarray, prompt: int, t: int) -> set[int]:
        return kept(group, key, prompt) | set(range(prompt, t))

    return rule


SNAPKVS = {
    "snapkv": SnapKV(kept_frac=0.5, window=4, kernel=3),
    "snapkv-avg": SnapKV(kept_tokens=9, window=2, kernel=5, pooling="avg", num_exempt_layers=0),
    "snapkv-no-smoothing": SnapKV(kept_frac=0.4, window=3, kernel=1, num_exempt_layers=1),
    "snapkv-wide": SnapKV(kept_frac=0.6, window=1, kernel=7),
    "snapkv-shorter-prompts": SnapKV(kept_tokens=12, window=5, kernel=3),  # one of 11 tokens is kept whole
    "snapkv-all": SnapKV(kept_frac=1.0),
}


@every_batch
@every_model
@pytest.mark.parametrize("name", SNAPKVS)
def test_snapkv_reads_what_the_plain_rule_reads(model, name, batch, monkeypatch):
    geometry, found = replayed(model, Case(SNAPKVS[name]), batch, monkeypatch)
    check(geometry, found, batch, snapkv_rule(SNAPKVS[name]))


def test_snapkvs_smoothing_and_its_kind_change_what_is_kept(monkeypatch):
    kept = set()
    for settings in ({"kernel": 1}, {"kernel": 5}, {"kernel": 5, "pooling": "avg"}):
        with monkeypatch.context() as patch:
            method = SnapKV(kept_frac=0.5, window=2, **settings)
            _, found = replayed(MODELS["gqa"], Case(method), "even", patch)
        kept.add(tuple(frozenset(rows[0]) for layer in (2, 3) for rows in found[layer][0].read))
    assert len(kept) == 3


# Limit cases


@every_model
@pytest.mark.parametrize("name", ["quest-all", "quest-one-page", "snapkv-all"])
def test_limit_cases_are_the_full_cache(model, name):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case((QUESTS | SNAPKVS)[name]), measure_recall=True)
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.size == limit.reads.size_artifact == 1
    assert limit.reads.attention_recall == pytest.approx(1, abs=1e-6)


def test_sizes_by_hand():
    """Of 100 cached tokens in pages of 16, six of them full: floor(0.6 * 100 / 16) = 3 pages, the last among them."""
    row = Row(100, 80, 120)
    assert Quest(read_frac=0.6).tokens_read(row, 2) == Quest(read_frac=0.01).tokens_read(row, 2) == 2 * 16 + 4
    assert Quest(read_frac=0.8).tokens_read(row, 2) == 4 * 16 + 4
    assert Quest(read_frac=1.0).tokens_read(row, 2) == 100
    assert Quest(read_frac=0.01).tokens_read(Row(33, 30, 120), 2) == 33, "three pages are all"
    assert SnapKV(kept_frac=0.5).tokens_read(row, 2) == 40 + 20
    assert SnapKV(kept_tokens=50).tokens_read(row, 2) == 50 + 20
    assert SnapKV(kept_tokens=90).tokens_read(row, 2) == 100
    assert SnapKV(kept_tokens=50).with_size(0.5).tokens_kept(row, 2) == 40 + 20


# Refusals


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Quest, {"read_frac": 0.0}, r"method\.read_frac=0\.0: .*\(0, 1\]"),
        (Quest, {"read_frac": 1.1}, r"method\.read_frac=1\.1: .*\(0, 1\]"),
        (Quest, {"read_frac": math.nan}, r"method\.read_frac=nan: .*\(0, 1\]"),
        (Quest, {"page_size": 0}, r"method\.page_size=0: .*>= 1"),
        (Quest, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
        (SnapKV, {"kept_frac": 0.0}, r"method\.kept_frac=0\.0: .*\(0, 1\]"),
        (SnapKV, {"kept_frac": 1.5}, r"method\.kept_frac=1\.5: .*\(0, 1\]"),
        (SnapKV, {"kept_tokens": 32}, r"method\.kept_tokens=32: .*above window=32, or null"),
        (SnapKV, {"window": 0}, r"method\.window=0: .*>= 1"),
        (SnapKV, {"kernel": 4}, r"method\.kernel=4: .*odd"),
        (SnapKV, {"kernel": -1}, r"method\.kernel=-1: .*odd"),
        (SnapKV, {"pooling": "mean"}, r"method\.pooling=mean: .*max, avg"),
        (SnapKV, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(method, settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        method(**settings)
    assert "\n" not in str(refusal.value)


def test_a_share_of_a_prompt_that_is_within_the_window_is_refused():
    geometry = Geometry(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, family="llama")
    lengths = Lengths(torch.tensor([40, 20]), torch.tensor([50, 30]))
    message = r"method\.kept_frac=0\.2: must be at least 0\.25 for a prompt of 20 tokens.*window=4"
    with pytest.raises(ValueError, match=message) as refusal:
        SnapKV(kept_frac=0.2, window=4).new_state(geometry, lengths)
    assert "\n" not in str(refusal.value)
    SnapKV(kept_frac=0.25, window=4).new_state(geometry, lengths)
    SnapKV(kept_frac=1.0, window=32).new_state(geometry, lengths)  # all of it is kept
    with pytest.raises(ValueError, match=r"method\.window=32: must be below 20, the shortest prompt"):
        SnapKV().min_size(Row(25, 20, 30))


def test_a_replayed_prompt_that_is_too_short_is_refused_where_its_length_is_known(tiny_gqa):
    with attach(tiny_gqa) as attached:
        session = open_session(attached, CASES["snapkv"], [20], 20)
        with pytest.raises(ValueError, match=r"method\.kept_frac=0\.5: must be at least 1 for a prompt of 5 tokens"):
            session.prefill(*pad([token_ids(5)], left=True))
