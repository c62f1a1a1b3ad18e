"""PQCache and ShadowKV against plain rules of their own, a token at a time; their limit cases, what they refuse."""

from __future__ import annotations

import math
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import CASES, Case
from living import PROMPTS, attached_with_link, force, largest_difference, live, open_live
from replaying import PROMPT, assert_close, run_one, run_ragged
from test_field import BATCHES, check, every_batch, every_model, replayed, softmax

from harness import replay as passes
from harness.model.attach import attach
from harness.model.prompt import PromptPass
from methods.base import Geometry, Lengths, Row
from methods.pqcache import PQCache, kmeans
from methods.quest import Quest
from methods.shadowkv import ShadowKV
from tests.composed import load

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
        clustered = part[min(method.num_sinks, prompt - 1) : prompt]
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
        recent = int(method.recent_frac * max(0, size - method.num_sinks))
        rank = {token: (-probs[token], token) for token in range(t)}
        rank |= {token: (-np.inf, token) for token in (*range(min(t, method.num_sinks)), *range(t - recent, t))}
        return set(sorted(range(t), key=rank.__getitem__)[:size])

    return rule


PQCACHES = {
    "pqcache": PQCache(read_frac=0.5, num_sinks=2, recent_frac=0.3, bits=3, iterations=4),
    "pqcache-no-iteration": PQCache(read_frac=0.4, num_sinks=0, recent_frac=0.0, bits=2, iterations=0),
    "pqcache-exempts-none": PQCache(read_frac=0.3, num_sinks=1, sub_vectors=4, bits=2, num_exempt_layers=0),
    "pqcache-fewer-tokens-than-centroids": PQCache(read_frac=0.4, num_sinks=3, sub_vectors=1, bits=6),
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
    method = PQCache(read_frac=0.4, num_sinks=0, recent_frac=0.0, bits=8)
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
    state = PQCache(num_sinks=0).new_state(GEOMETRY, lengths)
    assert state.index_read(2, torch.tensor([[100]])).item() == (100 * 12 + 64 * 16 * 16) / (32 * 16)


@every_model
def test_pqcache_that_reads_all_is_the_full_cache(model):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case(PQCache(read_frac=1.0)), measure_recall=True)
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.size == 1
    assert limit.reads.attention_recall == pytest.approx(1, abs=1e-6)


# FreeKV


def test_freekv_is_quest_by_the_query_of_the_step_before():
    method = load(["method=freekv"]).method
    assert isinstance(method, Quest) and method.when == "previous_step"
    assert load(["experiment=perplexity", "method=freekv"]).label == "FreeKV"
    assert method.tokens_read(Row(1024, 512, 2048), 2) == 5 * 32  # six pages, the unfinished one among them


# ShadowKV


def selectable(method: ShadowKV, key: np.ndarray, prompt: int) -> dict[int, np.ndarray]:
    """Landmarks of the chunks that do not stay on the device."""
    size = method.page_size
    landmarks, alike = {}, {}
    for chunk in range(max(0, prompt // size - method.local_chunks)):
        keys = key[chunk * size : (chunk + 1) * size]
        mean = landmarks[chunk] = keys.mean(0)
        alike[chunk] = min(each @ mean / np.linalg.norm(each) / np.linalg.norm(mean) for each in keys)
    stay = sorted(alike, key=alike.__getitem__)[: math.ceil(method.outlier_frac * len(alike))]
    return {chunk: mean for chunk, mean in landmarks.items() if chunk not in stay}


def shadowkv_rule(method: ShadowKV):
    """The chunks whose landmark is the most probable for any head of the group."""
    size = method.page_size

    def rule(group: np.ndarray, key: np.ndarray, prompt: int, t: int) -> set[int]:
        landmarks = selectable(method, key, prompt)
        scores = np.array([list(landmarks.values()) @ query for query in group[:, t]])
        probs = dict(zip(landmarks, np.max([softmax(each) for each in scores], axis=0), strict=True))
        budget = int(method.read_frac * t) if method.read_tokens is None else min(method.read_tokens, t)
        best = sorted(landmarks, key=lambda chunk: -probs[chunk])[: max(1, budget // size)]
        return {token for token in range(prompt) if token // size in best}

    return rule


SHADOWKVS = {
    "shadowkv": ShadowKV(read_frac=0.3, page_size=2, local_chunks=1, outlier_frac=0.2),
    "shadowkv-no-outliers": ShadowKV(read_frac=0.4, page_size=3, local_chunks=0, outlier_frac=0.0, num_exempt_layers=0),
    "shadowkv-tokens": ShadowKV(read_tokens=5, page_size=2, local_chunks=2, outlier_frac=0.3, num_exempt_layers=1),
    "shadowkv-more-than-there-is": ShadowKV(read_frac=1.0, page_size=2, local_chunks=1, outlier_frac=0.5),
}


@every_batch
@every_model
@pytest.mark.parametrize("name", SHADOWKVS)
def test_shadowkv_fetches_what_the_plain_rule_fetches(model, name, batch, monkeypatch):
    geometry, found = replayed(model, Case(SHADOWKVS[name]), batch, monkeypatch)
    check(geometry, found, batch, shadowkv_rule(SHADOWKVS[name]))


class Layer(NamedTuple):
    """What attention was given in a layer and what it gave, of one sequence: [heads, tokens, head_dim]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray


def attended(model, case: Case, layer: int, monkeypatch) -> Layer:
    """A replay of one sequence, seen from `layer`."""
    seen = []

    def noting(attention):
        def note(handler, at, query, key, value):
            output = attention(handler, at, query, key, value)
            if at == layer:
                seen.append((query[0], key[0], value[0], output[0].transpose(0, 1)))
            return output

        return note

    for handler in (PromptPass, passes.DecodePass):
        monkeypatch.setattr(handler, "attention", noting(handler.attention))
    run_one(model, case)
    return Layer(*(torch.cat(parts, 1).double().numpy() for parts in zip(*seen, strict=True)))


def rebuilt(geometry: Geometry, method: ShadowKV, key: np.ndarray) -> np.ndarray:
    """The prompt's keys [num_kv_heads, prompt, head_dim] at the rank of the method."""
    heads, prompt, head_dim = key.shape
    positions = torch.arange(prompt)[None]
    bare = geometry.rotate(torch.tensor(key).float()[None], positions, inverse=True)[0].double().numpy()
    left, scale, right = np.linalg.svd(bare.transpose(1, 0, 2).reshape(prompt, -1), full_matrices=False)
    rank = min(prompt, math.ceil(method.rank_frac * heads * head_dim))
    low = ((left * scale)[:, :rank] @ right[:rank]).reshape(prompt, heads, head_dim).transpose(1, 0, 2)
    return geometry.rotate(torch.tensor(low).float()[None], positions)[0].double().numpy()


@every_model
def test_shadowkv_attends_to_rebuilt_keys_and_to_exact_ones_that_stay(model, monkeypatch):
    method = ShadowKV(read_frac=0.3, page_size=2, local_chunks=1, outlier_frac=0.2, rank_frac=0.2)
    layer = attended(model, Case(method), 3, monkeypatch)
    with attach(model) as attached:
        geometry = attached.geometry
        low = rebuilt(geometry, method, layer.key[:, :PROMPT])
    rule = shadowkv_rule(method)
    assert np.abs(low - layer.key[:, :PROMPT]).max() > 0.1
    for head, query in enumerate(layer.query * geometry.scale):
        kv = head // geometry.group
        group = layer.query[kv * geometry.group : (kv + 1) * geometry.group] * geometry.scale
        chunks = selectable(method, layer.key[kv], PROMPT)
        for t in range(PROMPT, query.shape[0]):
            fetched = rule(group, layer.key[kv], PROMPT, t)
            read = [token for token in range(t + 1) if token in fetched or token // method.page_size not in chunks]
            keys = np.array([low[kv, token] if token in fetched else layer.key[kv, token] for token in read])
            expected = softmax(keys @ query[t]) @ layer.value[kv, read]
            assert np.abs(layer.output[head, t] - expected).max() < 1e-4


@every_model
def test_shadowkv_at_full_rank_that_fetches_all_is_the_full_cache(model):
    full = run_ragged(model, CASES["full"]).logits
    limit = run_ragged(model, Case(ShadowKV(read_frac=1.0, rank_frac=1.0, page_size=2, local_chunks=0)))
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_prompt_without_a_chunk_to_fetch_stays_whole(placement):
    """No row of the layers that select crosses the link."""
    with attached_with_link("gqa") as (attached, link):
        method = ShadowKV()
        assert method.max_tokens_read(Row(30, 24, 34), 2) == 0
        got = live(attached, Case(method), PROMPTS["padded"], placement=placement, link=link)
        expected = live(attached, CASES["full"], PROMPTS["padded"])
    assert largest_difference(got.logits, expected.logits) < 1e-5
    assert got.size == pytest.approx(2 / 4)


def test_shadowkv_moves_values_only_and_counts_them_half():
    method = ShadowKV(read_frac=0.5, page_size=2, local_chunks=1, outlier_frac=0.0, rank_frac=0.25)
    with (
        attached_with_link("gqa") as (attached, link),
        closing(open_live(attached, Case(method), steps=2, placement="host", link=link)) as session,
    ):
        force(session, (24,), steps=1)
        heads, head_dim, fetched, rank = 2, 16, 12, 8
        whole, value = 2 * head_dim * 4, head_dim * 4
        assert session.h2d_bytes == 2 * heads * (24 * whole + fetched * value)
        assert session.reads.size == pytest.approx((2 + 2 * 0.5 * fetched / 24) / 4)
        landmarks, left, right, stays = 11 / 2, fetched * rank / (2 * head_dim), rank / 2, 2
        assert session.reads.device_frac - session.reads.size == pytest.approx(
            2 * (landmarks + left + right + stays) / 24 / 4
        )


# Refusals


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (PQCache, {"page_size": 2}, r"method\.page_size=2: must be 1"),
        (PQCache, {"sub_vectors": 0}, r"method\.sub_vectors=0: .*>= 1"),
        (PQCache, {"bits": 0}, r"method\.bits=0: .*from 1 to 8"),
        (PQCache, {"bits": 9}, r"method\.bits=9: .*from 1 to 8"),
        (PQCache, {"iterations": -1}, r"method\.iterations=-1: .*>= 0"),
        (ShadowKV, {"covers": "layer"}, r"method\.covers=layer: must be one of kv_head"),
        (ShadowKV, {"rank_frac": 0.0}, r"method\.rank_frac=0\.0: .*\(0, 1\]"),
        (ShadowKV, {"local_chunks": -1}, r"method\.local_chunks=-1: .*>= 0"),
        (ShadowKV, {"outlier_frac": 1.1}, r"method\.outlier_frac=1\.1: .*\[0, 1\]"),
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
        (PQCache(read_frac=0.3), r"method\.num_sinks=32: must be below 27, what is read of a prompt of 90 tokens"),
    ],
)
def test_what_the_model_or_the_prompt_does_not_allow_is_refused(method, message):
    lengths = Lengths(torch.tensor([90]), torch.tensor([120]))
    with pytest.raises(ValueError, match=message):
        method.new_state(GEOMETRY, lengths)
