"""What is estimated of unread tokens, RetroInfer's clusters and a linear fit, against plain rules: clusters token by
token, a fit in numpy, and the attention of each head of each row in one sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.special import softmax

from harness.model.attention import with_rest
from methods.attention import Softmax
from methods.base import Geometry, Lengths, PromptRows, QueryRows, Rest, TokenCounts
from methods.infinigen2 import balanced, moments
from methods.linear_rest import RIDGE, InfiniGen2Linear, OracleLinear
from methods.retroinfer import RetroInfer
from tests.cases import Case
from tests.living import attached_with_link, live, replay, tiny
from tests.methods.test_rules import BATCH, balanced_product, replayed

# Clusters

SMALL = {"num_sinks": 1, "recent_frac": 0.15, "cluster_size": 2, "update_frac": 0.25}
METHODS = {
    "clusters": RetroInfer(retrieval_frac=0.3, estimation_frac=0.4, **SMALL),
    "one": RetroInfer(estimation_frac=0.5, iterations=3, dense_layers=0, **SMALL),
    "none-estimated": RetroInfer(retrieval_frac=0.4, estimation_frac=0.0, **SMALL | {"num_sinks": 0}),
    "share": RetroInfer(budget=0.5, estimation_frac=0.3, **SMALL | {"cluster_size": 4, "update_frac": 0.35}),
    "segments": RetroInfer(budget=0.6, **SMALL | {"segment": 4, "recent_frac": 0.0}),
    "no-update": RetroInfer(budget=0.4, estimation_frac=1.0, **SMALL | {"update_frac": 1.0}),
}


class Cluster(NamedTuple):
    centroid: np.ndarray
    tokens: list[int]
    value_sum: np.ndarray


def plain_clusters(key, value, tokens: range, count: int, segments: int, iterations: int) -> list[Cluster]:
    mean = key[list(tokens)].mean(0)
    points = [key[token] - mean for token in tokens]
    number = len(points)
    centroids = [points[int((i + 0.5) * number / count)] for i in range(count)]
    length, of_segment = number // segments, count // segments
    for segment in range(segments):
        mine = range(segment * of_segment, (segment + 1) * of_segment)
        for _ in range(iterations - 1):
            members = {i: [] for i in mine}
            for point in points[segment * length : (segment + 1) * length]:
                members[max(mine, key=lambda i: centroids[i] @ point)].append(point)
            for i, own in members.items():
                total = np.sum(own, 0) if own else None
                centroids[i] = 0.999 * centroids[i] if total is None else total / np.linalg.norm(total)
    of_all = [[] for _ in range(count)]
    for token, point in zip(tokens, points, strict=True):
        of_all[int(np.argmax([centroid @ point for centroid in centroids]))].append(token)
    return [
        Cluster(key[own].mean(0) if own else centroid + mean, own, value[own].sum(0))
        for centroid, own in zip(centroids, of_all, strict=True)
    ]


def clusters_at(method: RetroInfer, clusters_of: Callable, prompt: int, t: int) -> tuple[list[Cluster], list[int]]:
    """The clusters that a row with `t` cached tokens sees, and the tokens that are in none."""
    recent = max(1, math.floor(method.recent_frac * prompt))
    update = max(method.cluster_size, math.floor(method.update_frac * prompt))
    first = prompt - recent
    middle = range(method.num_sinks, first)
    segments = max(1, len(middle) // method.segment)
    count = segments * max(1, len(middle) // segments // method.cluster_size)
    found = [*clusters_of(middle, count, segments, method.iterations)]
    while t - first >= recent + update:
        oldest = range(first, first + update)
        found += clusters_of(oldest, update // method.cluster_size, 1, method.iterations)
        first += update
    return found, [*range(method.num_sinks), *range(first, t)]


def plain_row(method: RetroInfer, query, key, value, clusters: list[Cluster], read: list[int], t: int):
    """Attention of a row's heads, query [group, head_dim] scaled; the tokens read, and the clusters estimated. read:
    tokens that are in no cluster."""
    held = [cluster for cluster in clusters if cluster.tokens]
    products = np.array([[np.exp(own @ cluster.centroid) for cluster in held] for own in query])
    score = (products / products.sum(1, keepdims=True)).sum(0)
    ranked = [held[i] for i in sorted(range(len(held)), key=lambda i: -score[i])]
    estimate = math.floor(method.estimation_frac * len(clusters))
    estimated: list[tuple[int, Cluster]] = []
    if method.budget is None:
        best = max(1, math.floor(method.retrieval_frac * len(clusters)))
        stop = math.floor((method.retrieval_frac + method.estimation_frac) * len(clusters))
        read = read + [token for cluster in ranked[:best] for token in cluster.tokens]
        estimated = [(len(cluster.tokens), cluster) for cluster in ranked[best : max(best, stop)]]
    else:
        free = max(1, math.floor(method.budget * t) - len(read))
        reached = 0
        for number, cluster in enumerate(ranked):
            taken = cluster.tokens[:free]
            reached += bool(taken)
            read, free = read + taken, free - len(taken)
            left = len(cluster.tokens) - len(taken)
            if left and number < reached + estimate:
                estimated.append((left, cluster))
    outputs = []
    for own in query:
        mass, total = np.exp(key[[*read, t]] @ own), np.exp(key[[*read, t]] @ own) @ value[[*read, t]]
        whole = mass.sum()
        for left, cluster in estimated:
            weight = np.exp(own @ cluster.centroid)
            whole += left * weight
            total = total + left / len(cluster.tokens) * weight * cluster.value_sum
        outputs.append(total / whole)
    return outputs, set(read), len(estimated)


@pytest.mark.parametrize(
    ("name", "model"), [*((name, "gqa") for name in METHODS), ("clusters", "opt"), ("share", "opt")]
)
def test_every_row_of_a_padded_batch_attends_as_the_plain_rule(name, model):
    method = METHODS[name]
    geometry, found = replayed(tiny(model), Case(method))
    estimates = set()
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCH, sequences, strict=True):
            read, sides = np.zeros(length - prompt), np.zeros(length - prompt)
            for kv, (keys, values) in enumerate(zip(sequence.key, sequence.value, strict=True)):
                clusters_of = cache(partial(plain_clusters, keys, values))  # rows see the same ones
                heads = slice(kv * geometry.group, (kv + 1) * geometry.group)
                for t in range(prompt, length):
                    queries = sequence.query[heads, t]
                    clusters, exact = clusters_at(method, clusters_of, prompt, t)
                    wanted, tokens, estimated = plain_row(method, queries, keys, values, clusters, exact, t)
                    difference = np.abs(sequence.output[heads, t] - wanted).max()
                    assert difference < 1e-5, f"layer {layer}, prompt {prompt}, row {t}"
                    index = len(clusters) * (geometry.head_dim + 32 / 16) + estimated * geometry.head_dim
                    read[t - prompt] += len(tokens) / geometry.num_kv_heads
                    sides[t - prompt] += index / (2 * geometry.head_dim) / geometry.num_kv_heads
                    estimates.add(estimated)
            assert sequence.num_read == pytest.approx(read)
            assert sequence.side == pytest.approx(sides)
            for t, mean in enumerate(read, prompt):
                row = TokenCounts(t, prompt, length)
                assert mean <= method.max_tokens_read(row, layer) <= t
                assert method.tokens_read(row, layer) in (None, pytest.approx(mean))
    assert len(estimates) > 1 or name == "none-estimated"


def test_rows_beside_a_sink_and_a_softcap_share_the_softmax_with_what_is_estimated():
    """The sink's weight goes to no token, and is part of the whole."""
    generator = torch.Generator().manual_seed(0)
    softmax = Softmax(0.5, softcap=3.0, sinks=torch.tensor([0.3, -1.0]))
    scores, values = torch.randn(1, 1, 2, 1, 5, generator=generator), torch.randn(5, 8, generator=generator)
    mass, value = torch.tensor([[[[0.7], [-torch.inf]]]]), torch.randn(1, 1, 2, 1, 8, generator=generator)
    rest = Rest(None, value, mass).beside(softmax.log_total(scores))
    found = with_rest(softmax.weights(scores.clone()) @ values, rest)
    for head in range(2):
        weights, of_rest = scores[0, 0, head, 0].exp(), float(mass[0, 0, head, 0].exp())
        whole = weights.sum() + of_rest + softmax.sinks[head].exp()
        wanted = (weights @ values + of_rest * value[0, 0, head, 0]) / whole
        assert torch.allclose(found[0, 0, head, 0], wanted, atol=1e-6)


def test_a_long_answer_is_clustered_live_as_in_replay():
    """More than two updates, which end inside and between the calls of replay."""
    method = RetroInfer(retrieval_frac=0.3, dense_layers=1, **SMALL | {"update_frac": 0.4, "cluster_size": 3})
    with attached_with_link() as (attached, link):
        expected = replay(attached, Case(method), (20, 13), steps=40)
        found = live(attached, Case(method), (20, 13), steps=40, placement="host", link=link)
    assert (found.logits - expected.logits).abs().max() < 1e-4
    assert found[1:] == pytest.approx(expected[1:], abs=1e-9)


# A linear fit

FLOATS = {"statistics": "prompt", "index_bits": None, "projection_bits": None}
TOKENS, PROMPT, HEAD_DIM = 60, 48, 8


def plain_fit(partial: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """M and b of one head's prompt: ridge regression as least squares over more rows."""
    inputs, outputs = partial - partial.mean(0), value - value.mean(0)
    ridge = math.sqrt(RIDGE * np.square(inputs).sum() / inputs.shape[1])
    inputs = np.concatenate([inputs, ridge * np.eye(inputs.shape[1])])
    outputs = np.concatenate([outputs, np.zeros((len(inputs) - len(outputs), outputs.shape[1]))])
    slope = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    return slope, value.mean(0) - partial.mean(0) @ slope


@pytest.mark.parametrize(
    ("model", "kind"), [("gqa", InfiniGen2Linear), ("opt", InfiniGen2Linear), ("gqa", OracleLinear)]
)
def test_every_row_attends_to_what_it_reads_and_to_a_fitted_rest(model, kind):
    method = kind(budget=0.3, **FLOATS)
    geometry, found = replayed(tiny(model), Case(method))
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCH, sequences, strict=True):
            for kv, (key, value) in enumerate(zip(sequence.key, sequence.value, strict=True)):
                heads = slice(kv * geometry.group, (kv + 1) * geometry.group)
                query = sequence.query[heads]
                rows = query[:, :prompt].reshape(-1, geometry.head_dim) / geometry.scale
                of_key = np.cov(key[:prompt].T, bias=True)
                rank = method.num_columns(geometry.head_dim)
                product = balanced_product(rows.T @ rows / len(rows), of_key, rank)
                # The ridge depends on the basis of the index: this is the method's own.
                known = moments(
                    torch.from_numpy(query[None, :, :prompt] / geometry.scale),
                    torch.from_numpy(key[None, None, :prompt]),
                    torch.ones(1, prompt, dtype=torch.bool),
                )
                partial = key @ balanced([known], rank)[0, 1, 0].numpy()
                slope, intercept = plain_fit(partial[:prompt], value[:prompt])
                centred, mean = key - key[:prompt].mean(0), key[:prompt].mean(0)
                for t in range(prompt, length):
                    read = sequence.read[kv][t - prompt]
                    if kind is OracleLinear:
                        likely = softmax(query[:, t] @ key[:t].T, axis=-1).sum(0)
                        assert {*np.argsort(-likely)[: len(read)]} == {*read} and len(read) < t
                    for head, own in enumerate(query[:, t]):
                        total, whole = np.zeros(value.shape[1]), 0.0
                        for token in range(t + 1):
                            if token in read or token == t:
                                weight, of_token = np.exp(own @ key[token]), value[token]
                            else:
                                weight = np.exp(own @ mean + own @ product @ centred[token])
                                of_token = partial[token] @ slope + intercept
                            total, whole = total + weight * of_token, whole + weight
                        difference = np.abs(sequence.output[heads][head, t] - total / whole).max()
                        assert difference < 1e-5, f"layer {layer}, prompt {prompt}, row {t}"


def one_row(method: InfiniGen2Linear, key: torch.Tensor, value: torch.Tensor):
    """State and selection of a row after `TOKENS` tokens of one KV head with two query heads."""
    geometry = Geometry(1, 2, 1, HEAD_DIM, 0.35, "llama")
    lengths = Lengths(torch.tensor([PROMPT]), torch.tensor([TOKENS + 1]))
    state = method.new_state(geometry, lengths)
    queries = torch.randn(1, 2, PROMPT, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    real = torch.ones(1, PROMPT, dtype=torch.bool)
    state.prompt(0, queries, key[:, :, :PROMPT], value[:, :, :PROMPT], PromptRows(real, TOKENS + 1))
    tokens = torch.arange(TOKENS)[None]
    later = slice(PROMPT, TOKENS)
    state.append(0, key[:, :, later], value[:, :, later], tokens[:, later], later)
    at = torch.tensor([[TOKENS]])
    slots = torch.arange(TOKENS).view(1, 1, -1)
    rows = QueryRows(queries[:, :, :1], at, at >= 0, slots, at[:, None], torch.empty)
    return state, rows, state.select(0, rows)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys far from 0, and values that are linear in them."""
    generator = torch.Generator().manual_seed(seed)
    key = 3.0 + torch.randn(1, 1, TOKENS, HEAD_DIM, generator=generator)
    return key, key @ torch.randn(HEAD_DIM, HEAD_DIM, generator=generator) - 2.0


@pytest.mark.parametrize(("bits", "allowed"), [(None, 0.05), (8, 0.05), (4, 0.25)])
def test_linear_values_on_a_whole_index_are_nearly_all_attention(bits, allowed):
    """With and without codes. What is left is the ridge and the codes; a rest that is dropped errs far more."""
    key, value = drawn(1)
    settings = {"index_bits": bits, "projection_bits": bits, "statistics": "prompt", "partial_weight_ratio": 1.0}
    state, rows, selection = one_row(InfiniGen2Linear(budget=0.1, **settings), key, value)
    scores = 0.35 * rows.query[0, :, 0] @ key[0, 0].T
    everything = scores.softmax(-1) @ value[0, 0]
    read = scores.masked_fill(~selection.mask[0, 0, 0], -math.inf)
    dropped = read.softmax(-1) @ value[0, 0]
    rest = selection.rest.beside(read.logsumexp(-1).view(1, 1, 2, 1))
    share = rest.share.view(2, 1)
    estimated = (1 - share) * dropped + share * rest.value.view(2, -1)
    error = float((estimated - everything).norm() / (dropped - everything).norm())
    assert error < allowed


def test_slots_that_no_row_sees_may_hold_anything():
    key, value = drawn(2)
    method = InfiniGen2Linear(statistics="prompt")
    state, rows, clean = one_row(method, key, value)
    tokens = rows.slot_positions.clone()
    tokens[..., 30] = torch.iinfo(torch.int32).max
    state.partial_keys[0][:, :, 30] = 0  # the scale of zeros is 0
    rows.slot_positions = tokens
    wanted = state.select(0, rows).rest
    state.partial_keys[0][:, :, 30] = 255  # a scale that is not a number
    got = state.select(0, rows).rest
    assert torch.equal(got.value, wanted.value) and torch.equal(got.log_mass, wanted.log_mass)
    assert not torch.equal(got.log_mass, clean.rest.log_mass)


def test_nothing_is_estimated_where_every_token_is_read():
    state, rows, selection = one_row(InfiniGen2Linear(statistics="prompt", budget=1.0), *drawn(3))
    assert bool((selection.rest.log_mass == -math.inf).all()) and bool(selection.rest.value.isfinite().all())


def test_the_fit_is_counted():
    """M in 4 bits with two scales a row, intercept and mean key; the codes of the index are read twice."""
    state, rows, selection = one_row(InfiniGen2Linear(statistics="prompt", partial_weight_ratio=0.5), *drawn(4))
    columns, elements = 4, 2 * HEAD_DIM
    row_bits = HEAD_DIM * 4 + 32
    slope = columns * row_bits / 16 / elements
    means = 2 * HEAD_DIM / elements
    key_bits = columns * 4 + 32
    index = key_bits / 16 / elements
    projections = 2 * HEAD_DIM * (columns * 4 + 32) / 16 / elements
    centre = columns / elements
    expected = 2 * TOKENS * index + slope + means + projections + centre
    assert float(selection.side) == pytest.approx(expected)
