"""Scores on a few numbers a key: Double Sparsity, Loki, SparQ and InfiniGen's indexes against plain rules, a row at a
time; the algebra of the balanced projections; limit cases, sizes by hand, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CASES, Case
from living import calibration
from replaying import MODELS, assert_close, run_ragged
from test_field import BATCHES, every_batch, every_model, replayed, softmax

from methods.base import EMPTY, Geometry, Lengths, PromptRows, Rows
from methods.infinigen import InfiniGen, Oracle, balanced, moments
from methods.projected import DoubleSparsity, Loki, PartialKeysState, SparQ
from methods.quest import Quest

HEAD_DIM = 16


def measured(name: str, geometry: Geometry, layer: int, head: int) -> np.ndarray:
    """A part of the tests' calibration."""
    return calibration(geometry.num_kv_heads, geometry.head_dim)[name][layer, head].double().numpy()


def coded(keys: np.ndarray, bits: int | None) -> np.ndarray:
    """Each row as it reads back: a minimum and a step in fp16, and a code each."""
    if bits is None:
        return keys
    back = np.empty_like(keys)
    for row, key in enumerate(keys):
        lo, step = float(np.float16(key.min())), float(np.float16((key.max() - key.min()) / (2**bits - 1)))
        back[row] = [min(max(round((x - lo) / step), 0), 2**bits - 1) * step + lo for x in key]
    return back


def best(scores: np.ndarray, count: int, group: str, recent: int = 0) -> set[int]:
    """The `count` best of [heads, tokens], the `recent` last among them; ties to the lowest token."""
    worth = scores.sum(0) if group == "sum_logits" else (scores - scores.max(1, keepdims=True)).max(0)
    forced = range(len(worth) - recent, len(worth))
    others = sorted(set(range(len(worth))) - set(forced), key=lambda token: (-worth[token], token))
    return {*forced, *others[: count - recent]}


def scores_of_columns(method: DoubleSparsity, geometry, layer, head, prompt, query, key) -> np.ndarray:
    worth = measured(method.channels, geometry, layer, head)
    channels = sorted(range(HEAD_DIM), key=lambda channel: -worth[channel])[: math.ceil(method.rank * HEAD_DIM)]
    return query[:, channels] @ coded(key[:, channels], method.index_bits).T


def scores_of_components(method: Loki, geometry, layer, head, prompt, query, key) -> np.ndarray:
    first = measured("rotation", geometry, layer, head)[:, : math.ceil(method.rank * HEAD_DIM)]
    return query @ first @ coded(key @ first, method.index_bits).T


def scores_of_largest(method: SparQ, geometry, layer, head, prompt, query, key) -> np.ndarray:
    magnitude = np.abs(query)
    channels = np.argsort(-magnitude.sum(0))[: math.ceil(method.rank * HEAD_DIM)]
    share = magnitude[:, channels].sum(1) / magnitude.sum(1)
    return query[:, channels] @ key[:, channels].T / np.sqrt(share)[:, None]


def scores_of_index(method: InfiniGen, geometry, layer, head, prompt, query, key) -> np.ndarray:
    """All columns in few bits, turned by A or not."""
    basis = measured("rotation", geometry, layer, head) if method.skew else np.eye(HEAD_DIM)
    return query @ basis @ coded(key @ basis, method.index_bits).T


PLAIN = {
    DoubleSparsity: scores_of_columns,
    Loki: scores_of_components,
    SparQ: scores_of_largest,
    InfiniGen: scores_of_index,
}
INDEX = {"alpha": math.inf, "max_fetch_frac": 0.3, "when": "own_query"}
METHODS = {
    "doublesparsity": DoubleSparsity(read_frac=0.4, rank=0.25),
    "doublesparsity-q": DoubleSparsity(read_frac=0.2, rank=0.1, channels="q", num_exempt_layers=1),
    "doublesparsity-coded": DoubleSparsity(read_frac=0.3, rank=0.5, channels="k", index_bits=2),
    "loki": Loki(read_frac=0.3, rank=0.3),
    "loki-tokens": Loki(read_tokens=7, rank=0.05, num_exempt_layers=0),
    "loki-coded": Loki(read_frac=0.3, rank=0.5, index_bits=4),
    "sparq": SparQ(read_tokens=None, read_frac=0.4),
    "sparq-few": SparQ(read_tokens=9, rank=0.1, recent_frac=0.5, mean_value=False, num_exempt_layers=1),
    "sparq-best": SparQ(read_tokens=6, rank=0.5, recent_frac=0.0, group="best"),
    "infinigen-coded": InfiniGen(partial_weight_ratio=1.0, index_bits=4, **INDEX),
    "infinigen-bits": InfiniGen(partial_weight_ratio=1.0, index_bits=2, skew=False, **INDEX),
}


def tokens_to_read(method, t: int) -> int:
    if isinstance(method, InfiniGen):
        return max(1, math.floor(method.max_fetch_frac * t))
    return min(t, method.read_tokens or max(1, math.floor(method.read_frac * t)))


def check(found, batch: str, geometry: Geometry, method, scores) -> None:
    """Every row of every head reads what is best by `scores(method, geometry, layer, head, prompt, query, key)`."""
    for layer, sequences in found.items():
        for (prompt, length), sequence in zip(BATCHES[batch], sequences, strict=True):
            grouped = sequence.query.reshape(geometry.num_kv_heads, geometry.group, length, -1) * geometry.scale
            for head, (query, key) in enumerate(zip(grouped, sequence.key, strict=True)):
                for t in range(prompt, length):
                    count = tokens_to_read(method, t)
                    past = scores(method, geometry, layer, head, (grouped[head], key, prompt), query[:, t], key[:t])
                    recent = math.floor(method.recent_frac * count)
                    assert sequence.read[head][t - prompt] == best(past, count, method.group, recent), (layer, head, t)
                    assert sequence.num_read[t - prompt] == count


@every_batch
@every_model
@pytest.mark.parametrize("name", METHODS)
def test_what_is_read_is_best_by_the_plain_rule(model, name, batch, monkeypatch):
    method = METHODS[name]
    geometry, found = replayed(model, Case(method), batch, monkeypatch)
    check(found, batch, geometry, method, PLAIN[type(method)])


# Balanced projections


def root(matrix: np.ndarray, power: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * values**power @ vectors.T


def product(of_query: np.ndarray, of_key: np.ndarray, rank: int) -> np.ndarray:
    """W_q W_k^T as the SVD of C_q^(1/2) C_k^(1/2) gives it, inverses and all."""
    ridges = [1e-4 * np.trace(each) / len(each) * np.diag(np.linspace(1, 2, len(each))) for each in (of_query, of_key)]
    of_query, of_key = of_query + ridges[0], of_key + ridges[1]
    left, strength, right = np.linalg.svd(root(of_query, 0.5) @ root(of_key, 0.5))
    kept = left[:, :rank] * strength[:rank] @ right[:rank]
    return root(of_query, -0.5) @ kept @ root(of_key, -0.5)


def plain_moments(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """query: [heads, tokens, head_dim]; key: [tokens, head_dim]."""
    rows = query.reshape(-1, query.shape[-1])
    return sum(np.outer(row, row) for row in rows) / len(rows), np.cov(key.T, bias=True)


def scores_of_balanced(method: InfiniGen, geometry, layer, head, prompt, query, key) -> np.ndarray:
    queries, keys, length = prompt
    of_query, of_key = 0.0, 0.0
    if method.statistics != "calibration":
        own = plain_moments(queries[:, :length] / geometry.scale, keys[:length])
        of_query, of_key = of_query + own[0], of_key + own[1]
    if method.statistics != "prompt":
        of_query = of_query + measured("query", geometry, layer, head)
        of_key = of_key + measured("key", geometry, layer, head)
    return query @ product(of_query, of_key, math.ceil(method.partial_weight_ratio * HEAD_DIM)) @ key.T


@every_batch
@every_model
@pytest.mark.parametrize("statistics", ["prompt", "calibration", "both"])
def test_a_balanced_index_reads_what_is_best_by_the_product(model, statistics, batch, monkeypatch):
    method = InfiniGen(index="balanced", statistics=statistics, **INDEX)
    geometry, found = replayed(model, Case(method), batch, monkeypatch)
    check(found, batch, geometry, method, scores_of_balanced)


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, 6, 50, 8] of three KV heads and keys that lie unlike them, off the origin."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 50, 8, generator=generator) for heads in (6, 3))
    mixing = torch.randn(2, 8, 8, generator=generator)
    return query @ mixing[0] * torch.linspace(0.2, 2, 8), key @ mixing[1] * torch.linspace(3, 0.1, 8) + 1.5


def mean_square(pair: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Of what the projected scores lack, over all queries and keys of a head, keys centred: [3]."""
    rows, centred = query.double().view(3, -1, 8), (key - key.mean(2, keepdim=True))[0].double()
    lacking = rows @ centred.mT - (rows @ pair[0]) @ (centred @ pair[1]).mT
    return lacking.square().mean((1, 2))


def test_no_other_pair_of_projections_errs_less_on_the_sample(sample):
    query, key = sample
    found = moments(query, key, torch.ones(1, 50, dtype=torch.bool))
    generator = torch.Generator().manual_seed(1)
    for columns in (1, 3, 7):
        (pair,) = balanced([found], columns)
        least = mean_square(pair, query, key)
        for _ in range(50):
            any_pair = torch.linalg.qr(torch.randn(3, 8, columns, generator=generator).double()).Q
            near = pair + 0.03 * pair.std() * torch.randn(pair.shape, generator=generator)
            for other in (torch.stack([any_pair, any_pair]), near):
                assert (mean_square(other, query, key) > least).all()
        of_queries = torch.linalg.svd(query.view(3, -1, 8), full_matrices=False).Vh.mT[..., :columns].double()
        assert (mean_square(torch.stack([of_queries, of_queries]), query, key) > least).all(), "InfiniGen's rotation"


def test_all_columns_are_exact_and_the_product_is_the_plain_one(sample):
    query, key = sample
    found = moments(query, key, torch.ones(1, 50, dtype=torch.bool))
    (pair,) = balanced([found], 8)
    assert torch.allclose(pair[0] @ pair[1].mT, torch.eye(8).double(), atol=1e-9)
    (pair,) = balanced([found], 3)
    for head in range(3):
        plain = plain_moments(query[0, 2 * head : 2 * head + 2].double().numpy(), key[0, head].double().numpy())
        assert np.allclose((pair[0, head] @ pair[1, head].mT).numpy(), product(*plain, 3), atol=1e-5)


def test_moments_know_no_padding_and_one_token_is_enough(sample):
    query, key = sample
    real = torch.arange(50)[None] >= 20
    padded, alone = moments(query, key, real), moments(query[:, :, 20:], key[:, :, 20:], real[:, 20:])
    for name in ("query", "key"):
        assert torch.allclose(padded[name], alone[name], rtol=1e-5, atol=1e-6)
    single = moments(query[:, :, :1], key[:, :, :1], real[:, -1:])
    assert balanced([single], 5).isfinite().all()


# What SparQ does not read


def test_sparqs_mean_value_weighs_what_is_not_read():
    """In blocks of any size, as replay and live append rows."""
    geometry = Geometry(1, 4, 2, HEAD_DIM, 0.25, "llama")
    generator = torch.Generator().manual_seed(2)
    prompt, length = (7, 4), (15, 12)
    query, key, value = (torch.randn(2, heads, 15, HEAD_DIM, generator=generator) for heads in (4, 2, 2))
    real = torch.arange(7) >= 7 - torch.tensor(prompt)[:, None]
    positions = torch.arange(15) - 7 + torch.tensor(prompt)[:, None]
    tokens = torch.where(positions < 0, EMPTY, positions)
    method = SparQ(read_tokens=3, rank=0.25, num_exempt_layers=0)
    for size in (1, 3, 8):
        state = method.new_state(geometry, Lengths(torch.tensor(prompt), torch.tensor(length)))
        state.prompt(0, query[:, :, :7], key[:, :, :7], value[:, :, :7], PromptRows(real, 15))
        for begin in range(7, 15, size):
            own = slice(begin, min(begin + size, 15))
            state.append(0, key[:, :, own], value[:, :, own], positions[:, own], own)
            rows = Rows(
                query=query[:, :, own],
                positions=positions[:, own],
                real=torch.ones(2, own.stop - begin, dtype=torch.bool),
                slot_positions=tokens[:, None, : own.stop],
                own_slots=torch.arange(begin, own.stop).expand(2, 1, -1),
                true_scores=lambda: torch.empty(0),
            )
            selection = state.select(0, rows)
            for b, head, row in np.ndindex(2, 2, own.stop - begin):
                column = begin + row
                seen = [each for each in range(column + 1) if positions[b, each] >= 0]
                expected = value[b, head, seen].mean(0)
                assert torch.allclose(selection.rest.value[b, head, row], expected, atol=1e-6)
                group = query[b, 2 * head : 2 * head + 2, column].double().numpy() * 0.25
                keys = key[b, head, seen].double().numpy()
                scores = scores_of_largest(method, geometry, 0, head, None, group, keys)
                unread = [not selection.mask[b, head, row, each] and each != column for each in seen]
                for query_head, own_scores in enumerate(scores):
                    share = softmax(own_scores)[unread].sum()
                    assert float(selection.rest.share[b, head, query_head, row]) == pytest.approx(share, abs=1e-6)


# Limit cases


@every_model
@pytest.mark.parametrize(
    "method", [DoubleSparsity(read_frac=1.0), Loki(read_frac=1.0, index_bits=2), SparQ(read_tokens=None, read_frac=1.0)]
)
def test_all_tokens_are_the_full_cache(model, method):
    full, limit = run_ragged(model, CASES["full"]).logits, run_ragged(model, Case(method))
    for got, expected in zip(limit.logits, full, strict=True):
        assert_close(got, expected, 2e-5)
    assert limit.reads.size == 1


ALL = {"rank": 1.0, "read_frac": 0.3, "recent_frac": 0.0, "group": "best"}


@every_model
@pytest.mark.parametrize(
    "method",
    [
        DoubleSparsity(**ALL),
        Loki(**ALL),
        SparQ(**ALL, read_tokens=None, mean_value=False),
        InfiniGen(partial_weight_ratio=1.0, **INDEX),
        InfiniGen(partial_weight_ratio=1.0, index="balanced", **INDEX),
        InfiniGen(partial_weight_ratio=1.0, index="balanced", statistics="prompt", **INDEX),
    ],
)
def test_all_columns_rank_as_the_true_scores(model, method):
    oracle = run_ragged(model, Case(Oracle(alpha=math.inf, max_fetch_frac=0.3)))
    got = run_ragged(model, Case(method))
    for rows, expected in zip(got.logits, oracle.logits, strict=True):
        assert_close(rows, expected)
    assert got.reads.size == pytest.approx(oracle.reads.size)


@pytest.mark.parametrize("name", ["infinigen-coded", "infinigen-balanced", "doublesparsity", "loki", "sparq"])
def test_an_index_chooses_other_than_by_the_true_scores(name, monkeypatch):
    """Otherwise the comparisons above would show nothing."""
    case = CASES[name]
    exact = {"index_bits": None, "index": "columns"} if name.startswith("infinigen") else {"rank": 1.0}
    ratio = {"partial_weight_ratio": 1.0} if name.startswith("infinigen") else {}
    with monkeypatch.context() as patch:
        _, found = replayed(MODELS["gqa"], case, "even", patch)
    with monkeypatch.context() as patch:
        _, reference = replayed(MODELS["gqa"], Case(replace(case.method, **exact, **ratio)), "even", patch)
    assert found[2][0].read != reference[2][0].read


# Sizes


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        (DoubleSparsity(rank=0.25), 4 / 32),
        (DoubleSparsity(rank=0.25, index_bits=4), 4 * (4 + 32 / 4) / 16 / 32),
        (Loki(rank=0.3), 5 / 32),
        (InfiniGen(), 5 / 32),
        (InfiniGen(index="balanced"), 5 / 32),
        (InfiniGen(partial_weight_ratio=1.0, index_bits=4), 16 * (4 + 32 / 16) / 16 / 32),
        (InfiniGen(partial_weight_ratio=1.0, index_bits=2, pool_frac=1.0), 16 * (2 + 32 / 16) / 16 / 32),
    ],
)
def test_what_is_read_of_an_index_by_hand(method, tokens):
    """So many tokens' worth for each token, in two of four layers."""
    assert run_ragged(MODELS["gqa"], Case(method)).reads.index_frac == pytest.approx(tokens / 2)


def test_sparq_reads_channels_and_the_mean_value():
    lengths = Lengths(torch.tensor([5]), torch.tensor([9]))
    geometry = Geometry(1, 4, 2, HEAD_DIM, 0.25, "llama")
    for mean_value, more in ((True, 0.5), (False, 0.0)):
        state = SparQ(mean_value=mean_value).new_state(geometry, lengths)
        assert state.index_read(0, torch.tensor([[8]])).item() == 8 * 4 / 32 + more


@pytest.mark.parametrize(("bits", "width"), [(8, 4 + 16), (4, 4 + 8), (2, 4 + 4), (1, 4 + 2)])
def test_a_coded_index_lies_coded_on_the_device(bits, width, monkeypatch):
    seen = []
    scores = PartialKeysState.scores

    def noting(state, layer, rows):
        seen.append(state.partial_keys[layer])
        return scores(state, layer, rows)

    monkeypatch.setattr(PartialKeysState, "scores", noting)
    run_ragged(MODELS["gqa"], Case(InfiniGen(partial_weight_ratio=1.0, index_bits=bits)))
    assert {(each.dtype, each.shape[-1]) for each in seen} == {(torch.uint8, width)}


# Refusals


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Loki, {"rank": 0.0}, r"method\.rank=0\.0: .*\(0, 1\]"),
        (Loki, {"rank": 1.5}, r"method\.rank=1\.5: .*\(0, 1\]"),
        (Loki, {"index_bits": 3}, r"method\.index_bits=3: must be one of 8, 4, 2, 1, or null"),
        (DoubleSparsity, {"channels": "kq"}, r"method\.channels=kq: must be one of qk, q, k"),
        (SparQ, {"when": "previous_layer"}, r"method\.when=previous_layer: must be own_query.*mean_value=false"),
        (InfiniGen, {"index": "pca"}, r"method\.index=pca: must be one of columns, balanced"),
        (InfiniGen, {"statistics": "all"}, r"method\.statistics=all: must be one of prompt, calibration, both"),
        (InfiniGen, {"index_bits": 16}, r"method\.index_bits=16: must be one of 8, 4, 2, 1, or null"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(method, settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        method(**settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("method", [Loki(), DoubleSparsity(), InfiniGen(index="balanced")])
def test_a_method_without_its_calibration_is_refused(method):
    geometry, lengths = Geometry(4, 4, 2, HEAD_DIM, 0.25, "llama"), Lengths(torch.tensor([5]), torch.tensor([9]))
    assert method.needs_calibration
    with pytest.raises(ValueError, match=r"needs a calibration; calibrate first"):
        method.new_state(geometry, lengths)


def test_what_needs_no_calibration_says_so():
    for method in (SparQ(), Quest(), InfiniGen(index="balanced", statistics="prompt"), InfiniGen(skew=False)):
        assert not method.needs_calibration
    assert InfiniGen(index="balanced", skew=False).needs_calibration


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "InfiniGen"),
        ({"index_bits": 4}, "InfiniGen, coded index"),
        ({"index": "balanced", "skew": False}, "InfiniGen, balanced index"),
        ({"index": "balanced", "index_bits": 4}, "InfiniGen, balanced coded index"),
        ({"skew": False, "index_bits": 2}, "InfiniGen without skewing, coded index"),
    ],
)
def test_another_index_is_another_label(settings, label):
    assert InfiniGen(**settings).label == label


def test_channels_and_components_are_measured_on_the_calibration():
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(heads, 30, HEAD_DIM, generator=generator) for heads in (4, 2))
    key = key * torch.linspace(0.5, 3, HEAD_DIM) + 5
    geometry = Geometry(1, 4, 2, HEAD_DIM, 0.25, "llama")
    worth = DoubleSparsity().calibrate(query, key, geometry)
    rotation = Loki().calibrate(query, key, geometry)["rotation"].double().numpy()
    for head in range(2):
        group, keys = query[2 * head : 2 * head + 2].double().numpy(), key[head].double().numpy()
        plain = {"qk": np.abs(group * keys).mean((0, 1)), "q": np.abs(group).mean((0, 1)), "k": np.abs(keys).mean(0)}
        for name, expected in plain.items():
            assert np.allclose(worth[name][head], expected, rtol=1e-5)
        variances = np.diag(rotation[head].T @ np.cov(keys.T) @ rotation[head])
        assert np.allclose(variances, np.linalg.eigvalsh(np.cov(keys.T))[::-1], rtol=1e-4)
