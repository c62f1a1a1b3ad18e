"""PQCache and ShadowKV against plain rules of their own, a token at a time; their limit cases, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CASES, Case
from replaying import assert_close, run_ragged
from test_field import BATCHES, check, every_batch, every_model, replayed, softmax

from harness.settings.compose import load
from methods.base import Geometry, Lengths, Row
from methods.pqcache import PQCache, kmeans
from methods.quest import Quest

GEOMETRY = Geometry(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, family="llama")


# PQCache


def plain_kmeans(points: np.ndarray, count: int, iterations: int) -> np.ndarray:
    """Lloyd's algorithm from evenly spaced points."""
    centroids = np.array([points[number * len(points) // count] for number in range(count)])
    for _ in range(iterations):
        labels = [plain_nearest(point, centroids) for point in points]
        for number in range(count):
            members = [point for point, label in zip(points, labels, strict=True) if label == number]
            if members:
                centroids[number] = np.mean(members, axis=0)
    return centroids


def plain_nearest(point: np.ndarray, centroids: np.ndarray) -> int:
    return min(range(len(centroids)), key=lambda number: ((point - centroids[number]) ** 2).sum())


def coded(method: PQCache, key: np.ndarray, prompt: int) -> np.ndarray:
    """Every key as its centroids have it."""
    parts = []
    for part in np.split(key, method.sub_vectors, axis=1):
        clustered = part[min(method.sinks, prompt - 1) : prompt]
        centroids = plain_kmeans(clustered, 2**method.bits, method.iterations)
        parts.append([centroids[plain_nearest(point, centroids)] for point in part])
    return np.concatenate(parts, axis=1)


def uncoded(method: PQCache, key: np.ndarray, prompt: int) -> np.ndarray:
    return key


def pqcache_rule(method: PQCache, coded=coded):
    """The sinks, the most recent tokens, and those of the largest summed probability of the coded keys."""
    index: dict[tuple, np.ndarray] = {}

    def rule(group: np.ndarray, key: np.ndarray, prompt: int, t: int) -> set[int]:
        name = (key.tobytes(), prompt)
        if name not in index:
            index[name] = coded(method, key, prompt)
        # Rounded: tokens of the same codes tie, and the lowest is read.
        probs = sum(softmax(index[name][:t] @ query) for query in group[:, t]).round(12)
        size = max(1, int(method.read_frac * t))
        recent = int(method.recent_frac * max(0, size - method.sinks))
        rank = {token: (-probs[token], token) for token in range(t)}
        rank |= {token: (-np.inf, token) for token in (*range(min(t, method.sinks)), *range(t - recent, t))}
        return set(sorted(range(t), key=rank.__getitem__)[:size])

    return rule


PQCACHES = {
    "pqcache": PQCache(read_frac=0.5, sinks=2, recent_frac=0.3, bits=3, iterations=4),
    "pqcache-no-iteration": PQCache(read_frac=0.4, sinks=0, recent_frac=0.0, bits=2, iterations=0),
    "pqcache-exempts-none": PQCache(read_frac=0.3, sinks=1, sub_vectors=4, bits=2, num_exempt_layers=0),
    "pqcache-fewer-tokens-than-centroids": PQCache(read_frac=0.4, sinks=3, sub_vectors=1, bits=6),
}


@every_batch
@every_model
@pytest.mark.parametrize("name", PQCACHES)
def test_pqcache_reads_what_the_plain_rule_reads(model, name, batch, monkeypatch):
    geometry, found = replayed(model, Case(PQCACHES[name]), batch, monkeypatch)
    check(geometry, found, batch, pqcache_rule(PQCACHES[name]))


@every_batch
@every_model
def test_with_a_centroid_for_each_token_pqcache_ranks_by_the_keys_themselves(model, batch, monkeypatch):
    """The first row, which sees the prompt alone; a later token gets a centroid of the prompt's."""
    method = PQCache(read_frac=0.4, sinks=0, recent_frac=0.0, bits=8)
    geometry, found = replayed(model, Case(method), batch, monkeypatch)
    rule = pqcache_rule(method, uncoded)
    for sequences in found.values():
        for (prompt, _), sequence in zip(BATCHES[batch], sequences, strict=True):
            for head, rows in enumerate(sequence.read):
                group = sequence.query[head * geometry.group : (head + 1) * geometry.group] * geometry.scale
                assert rows[0] == rule(group, sequence.key[head], prompt, prompt)


def test_kmeans_finds_what_lies_apart_and_leaves_padding_out():
    generator = torch.Generator().manual_seed(0)
    middles = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = middles.repeat_interleave(8, 0) + 0.1 * torch.randn(32, 2, generator=generator)
    padded = torch.cat([torch.full((5, 2), 1000.0), points])
    real = torch.arange(37) >= 5
    found = kmeans(padded[None, None], real[None], 4, 5)[0, 0]
    assert torch.equal(found, kmeans(points[None, None], torch.ones(1, 32, dtype=torch.bool), 4, 5)[0, 0])
    assert torch.allclose(found, middles, atol=0.2)


def test_pqcaches_index_by_hand():
    """Of 100 tokens two codes of 6 bits each, and 64 centroids of 16 elements, of 16 bits; a token is 32 elements."""
    lengths = Lengths(torch.tensor([90]), torch.tensor([120]))
    state = PQCache(sinks=0).new_state(GEOMETRY, lengths)
    assert state.index_read(2, torch.tensor([[100]])).item() == (100 * 12 + 64 * 16 * 16) / (32 * 16)


@every_model
def test_reading_all_is_the_full_cache(model):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case(PQCache(read_frac=1.0)), measure_recall=True)
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.kv_frac == 1
    assert limit.reads.attention_recall == pytest.approx(1, abs=1e-6)


# FreeKV


def test_freekv_is_quest_by_the_query_of_the_step_before():
    method = load(["method=freekv"]).method
    assert isinstance(method, Quest) and method.selects == "previous"
    assert load(["experiment=perplexity", "method=freekv"]).label == "FreeKV"
    assert method.tokens_read(Row(1024, 512, 2048), 2) == 5 * 32  # six pages, the unfinished one among them


# Refusals


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (PQCache, {"page_size": 2}, r"method\.page_size=2: must be 1"),
        (PQCache, {"sub_vectors": 0}, r"method\.sub_vectors=0: .*>= 1"),
        (PQCache, {"bits": 0}, r"method\.bits=0: .*from 1 to 8"),
        (PQCache, {"bits": 9}, r"method\.bits=9: .*from 1 to 8"),
        (PQCache, {"iterations": -1}, r"method\.iterations=-1: .*>= 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(method, settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        method(**settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (PQCache(sub_vectors=3), r"method\.sub_vectors=3: must be a divisor of 16, the elements of a head"),
        (PQCache(read_frac=0.3), r"method\.sinks=32: must be below 27, what is read of a prompt of 90 tokens"),
    ],
)
def test_what_the_model_or_the_prompt_does_not_allow_is_refused(method, message):
    lengths = Lengths(torch.tensor([90]), torch.tensor([120]))
    with pytest.raises(ValueError, match=message):
        method.new_state(GEOMETRY, lengths)
