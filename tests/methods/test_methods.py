"""Methods without a model: refusals, some sizes, the choice itself, columns of the index."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from harness.run.compose import load
from harness.run.runner import digests_of
from methods.base import Geometry, Lengths, PromptRows, QueryRows, TokenCounts
from methods.capkv import CapKV
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen, choose_columns
from methods.infinigen2 import balanced, mixing, moments
from methods.infinigen_pool import InfiniGenPool
from methods.kascade import Kascade
from methods.oracle import Oracle
from methods.pariskv import LEVELS, ParisKV, shares_of
from methods.pqcache import PQCache
from methods.projection import right_vectors
from methods.prompt_evicting import ExpectedAttention, SnapKV
from methods.quest import Quest
from methods.retroinfer import RetroInfer
from methods.rkv import RKV
from methods.rocketkv import RocketKV
from methods.selection import GROUPS
from methods.shadowkv import low_rank
from methods.sparq import SparQ
from methods.streaming import DuoAttention, Streaming
from methods.tova import TOVA
from methods.vattention import VAttention
from tests.cases import preset

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4
GEOMETRY = Geometry(
    num_layers=1, num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.5, family="llama"
)
SHAPE = Geometry(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, family="llama")


def lengths_of(prompts: list[int], finals: list[int]) -> Lengths:
    return Lengths(torch.tensor(prompts), torch.tensor(finals))


# Refusals

REFUSED = {
    ">= 0": [(Full, "dense_layers", -1), (CapKV, "tau", -0.1)],
    ">= 0, inf or null": [(Oracle, "alpha", -1.0)],
    ">= 1": [(Quest, "page_size", 0), (SnapKV, "window", 0)],
    "an integer >= 16": [(RetroInfer, "segment", 15)],
    "a list of layers >= 0, or null": [(Kascade, "anchors", (-1,))],
    ">= 1 or null": [(Oracle, "fixed_fetch", 0)],
    "odd integer >= 1": [(SnapKV, "kernel", 4)],
    "in [0, 1]": [(H2O, "heavy_frac", -0.1), (H2O, "heavy_frac", math.nan)],
    "in (0, 1]": [(Streaming, "budget", 0.0), (Quest, "budget", math.nan), (InfiniGenPool, "pool_frac", 1.5)],
    "in (0, 0.5]": [(VAttention, "delta", 0.6)],
    "in (0, 1] or null": [(ParisKV, "candidate_frac", 0.0)],
    "above num_sinks + window=32, or null": [(SnapKV, "kept_tokens", 32)],
    "above window=8, or null": [(RKV, "kept_tokens", 8)],
    "best, the distance that alpha bounds": [(Oracle, "group", "sum_probs")],
    "one of previous_step, previous_layer, own_query": [(Quest, "when", "layer")],
    "one of own_query": [(SparQ, "when", "previous_layer")],
    "one of best": [(InfiniGenPool, "group", "sum_probs")],
    "one of 8, 4, 2, 1, null": [(InfiniGen, "index_bits", 16)],
    "a file that exists, or null": [(DuoAttention, "pattern", "nowhere.tsv")],
}
"""By what is allowed."""


@pytest.mark.parametrize("allowed", REFUSED)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(allowed):
    for method, name, value in REFUSED[allowed]:
        with pytest.raises(ValueError) as refusal:
            method(**{name: value})
        assert str(refusal.value).startswith(f"method.{name}={value}: must be ")
        assert allowed in str(refusal.value) and "\n" not in str(refusal.value)


AT_A_BATCH = [
    (lambda: H2O(heavy_frac=0.7, recent_frac=0.6), [], [], "method.heavy_frac + method.recent_frac=1.29"),
    (Streaming(budget=0.1, num_sinks=4), [50, 20], [100, 40], "method.budget=0.1: must be more: it keeps 4"),
    (InfiniGen(), [20], [40], "method InfiniGen: needs a calibration; calibrate first"),
    (InfiniGenPool(skew=False, pool_frac=0.01), [20], [40], "method.pool_frac=0.01: must be larger, to hold at"),
    (SnapKV(budget=0.2, window=4), [40, 20], [50, 30], "method.budget=0.2: must be at least 0.25 for a"),
    (PQCache(part_size=3), [90], [120], "method.part_size=3: must be a divisor of 16, the elements of a head"),
    (PQCache(budget=0.3, num_sinks=32), [90], [120], "method.num_sinks=32: must be below 27, what is read of"),
    (RocketKV(), [90, 40], [99, 60], "method.budget=0.2: must be more: it keeps 23 of 40 tokens, which"),
    (RocketKV(budget_tokens=40, num_sinks=20), [90], [99], "method.num_sinks=20: must be below 20, what is read of a"),
    (RetroInfer(num_sinks=64, recent_frac=0.2), [80], [90], "method.num_sinks=64: must be below 64, so that a prompt"),
    (VAttention(fixed_frac=0.5, budget=0.1), [40], [60], "method.num_sinks=4: must be below 4, the fixed set of a"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "prompts", "finals", "message"), AT_A_BATCH)
def test_settings_that_do_not_go_together_or_with_a_batch_are_refused(method, prompts, finals, message):
    with pytest.raises(ValueError) as refusal:
        (method() if callable(method) else method).new_state(SHAPE, lengths_of(prompts, finals))
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


SINKS = Quest(page_size=1, num_sinks=20)
ALWAYS_KEEPING = (SnapKV(), ExpectedAttention(), RKV(), Streaming(), RocketKV(), SINKS, VAttention())


@pytest.mark.parametrize("method", ALWAYS_KEEPING, ids=lambda method: method.title)
def test_the_least_budget_is_the_least_that_a_batch_takes(method):
    prompt, final = 100, 120
    least, lengths = method.min_budget(TokenCounts(prompt, prompt, final)), lengths_of([prompt], [final])
    method.with_budget(least).new_state(SHAPE, lengths)
    with pytest.raises(ValueError, match="must be"):
        method.with_budget(0.99 * least).new_state(SHAPE, lengths)


def test_the_least_budget_of_retroinfer_reads_a_token_beside_the_first_and_the_last_ones():
    least = RetroInfer(recent_frac=0.06).min_budget(TokenCounts(1000, 1000, 1100))
    assert least == pytest.approx((4 + 60 + 1) / 1000, abs=1e-9)


def test_duos_gates_come_from_a_file_or_a_calibration(tmp_path):
    pattern = tmp_path / "gates.tsv"
    pattern.write_text("0\t1\n1\t0\n0.3\t0.9\n0.4\t0.1\n")
    method, lengths = DuoAttention(pattern=str(pattern), dense_layers=2), lengths_of([40, 20], [50, 30])
    assert not method.needs_calibration and DuoAttention().needs_calibration
    assert method.file == str(pattern) and DuoAttention().file is None
    heads = method.new_state(SHAPE, lengths).heads.tolist()
    assert heads == [[False, False], [False, False], [True, False], [False, True]]
    three = DuoAttention(pattern=str(pattern), sparsity=0.65, dense_layers=2).new_state(SHAPE, lengths)
    assert three.heads.tolist() == [[False, False], [False, False], [True, False], [True, True]]
    config = load(["method=duo", f"method.pattern={pattern}"])
    first = digests_of(config)["method"]
    for text, allowed in (("0\t1\n", "4 lines of 2 finite numbers"), ("a\tb\n", "numbers separated by tabs")):
        pattern.write_text(text)
        with pytest.raises(ValueError, match=rf"method\.pattern=.*: must be {allowed}"):
            method.new_state(SHAPE, lengths)
    assert digests_of(config)["method"] != first, "the file's contents are an input of the run"
    with pytest.raises(ValueError, match=r"method\.pattern=None: must be a file: llama has no rotary positions"):
        DuoAttention().new_state(SHAPE, lengths, {"gates": torch.ones(4, 2)})


# Names, and sizes by hand


def test_budgets_of_the_artifacts_prefill():
    assert H2O(heavy_frac=0.25, recent_frac=0.125).artifact_budget() == 0.375
    assert TOVA(budget=0.3).artifact_budget() == 0.3 and TOVA(kept_tokens=3).artifact_budget() == 1
    given = (Streaming(budget=0.4), InfiniGen(budget=0.4), Oracle(budget=0.4), Quest(budget=0.4))
    assert [method.artifact_budget() for method in given] == [0.4] * 4
    tokens = (SparQ(), Quest(read_tokens=32), InfiniGen(fixed_fetch=32), Oracle(fixed_fetch=32))
    assert [method.artifact_budget() for method in tokens] == [1] * 4
    assert Full().artifact_budget() == SnapKV(budget=0.4).artifact_budget() == 1


def test_pariskvs_shares_of_a_zone_and_what_it_takes():
    found = [shares_of(zone) for zone in (4999, 5000, 10_000, 30_000, 10**7)]
    assert found == [(0.5, 0.5), (0.25, 0.3), (0.2, 0.25), (0.1, 0.2), (0.1, 0.2)]
    assert ParisKV(budget=0.1).plan(3) == [0] * 8, "nothing lies between the first and the last tokens"
    with pytest.raises(ValueError, match="method ParisKV: a key of 20 elements .*; allowed: a multiple of 8"):
        ParisKV().new_state(replace(SHAPE, head_dim=20), lengths_of([40], [50]))


def test_pariskvs_magnitudes_are_the_best_for_a_random_direction():
    """Near the official code's table, which a sample of random directions gave; and no other levels near them err
    less."""
    published = [0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633]
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    assert levels.tolist() == pytest.approx(published, abs=3.5e-3)
    vectors = torch.randn(50_000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    elements = (vectors / vectors.norm(dim=-1, keepdim=True)).abs().view(-1, 1)

    def error(levels):
        return float((elements - levels).square().amin(-1).mean())

    for number in range(8):
        for moved in (-0.02, 0.02):
            other = levels.clone()
            other[number] += moved
            assert error(other) > error(levels)


# The choice


def chosen(method, scores, positions, final, geometry=None):
    """What `method` selects of one sequence whose slots hold their tokens in order."""
    slots = torch.arange(scores.shape[-1]).expand(1, 1, -1)
    query = torch.empty(1, GROUP * KV_HEADS, positions.shape[1], 0)
    rows = QueryRows(query, positions, positions >= 0, slots, positions[:, None], lambda: scores)
    return method.choose(scores, rows, torch.tensor([final]), geometry or GEOMETRY)


@pytest.mark.parametrize("family, threshold", [("opt", 4), ("llama", 5), ("qwen3", 5)])
def test_alpha_null_is_the_papers(family, threshold):
    """Scores a unit apart, the cap out of the way: the count is the number of units within alpha."""
    scores = -torch.arange(20.0).expand(1, KV_HEADS, GROUP, 1, 20).clone()
    geometry = replace(GEOMETRY, family=family)
    selection = chosen(Oracle(budget=1.0), scores, torch.tensor([[20]]), 40, geometry)
    assert selection.num_read.item() == threshold + 1  # r = -alpha counts
    assert selection.mask.sum(-1).unique().tolist() == [threshold + 1]


REDUCTIONS = {
    "best": lambda s: (s - s.amax(-1, keepdim=True)).amax(0),
    "max_logits": lambda s: s.amax(0),
    "sum_logits": lambda s: s.mean(0),  # a mean ranks as the sum does
    "max_probs": lambda s: s.softmax(-1).amax(0),
    "sum_probs": lambda s: s.softmax(-1).mean(0),
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_heads_are_reduced_as_the_setting_says(group):
    """Against each rule on one row at a time, with sinks and recent tokens among the 8 of 20 that are read.

    A sink has most of one head's attention; the probabilities of the others do not know it.
    """
    scores = 3 * torch.randn(1, KV_HEADS, GROUP, 1, 20, generator=torch.Generator().manual_seed(5))
    scores[:, :, 0, :, 0] = 30
    method = Oracle(alpha=math.inf, budget=0.4, group=group, num_sinks=2, recent_frac=0.25)
    selection = chosen(method, scores.clone(), torch.tensor([[20]]), 40)
    forced = {0, 1, 18, 19}
    heads = scores[0, :, :, 0].double()

    def best(values):
        order = sorted(range(2, 18), key=lambda token: -values[token - 2])
        return forced | set(order[:4])

    def reduced(head):
        return REDUCTIONS[group](head[:, 2:18]) if group.endswith("probs") else REDUCTIONS[group](head)[2:18]

    for head, mask in zip(heads, selection.mask[0, :, 0], strict=True):
        sets = [best(row[2:18]) for row in head] if group == "union" else [best(reduced(head))]
        assert set(mask.nonzero().flatten().tolist()) == set.union(*sets)
    assert selection.num_read.item() == selection.mask[0, :, 0].sum(-1).double().mean().item()


# Columns


@pytest.mark.parametrize("rounding", ["up", "down"])
def test_one_column_is_the_least(rounding):
    assert InfiniGen(partial_weight_ratio=0.1, round_columns=rounding).num_columns(4) == 1


@pytest.mark.parametrize("rule", ["sum", "query", "union"])
@pytest.mark.parametrize(("prompt", "magnitude"), [(32_768, 10.0), (9, 2e4)], ids=["long", "large"])
def test_the_importance_of_columns_overflows_in_no_half_precision(rule, prompt, magnitude):
    """Sums beyond 65504, fp16's largest number: all columns would tie at infinity."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.4, 1, 8)[torch.randperm(8, generator=generator)] * magnitude
    signs = torch.randn(2, KV_HEADS * GROUP, prompt, 8, generator=generator).sign()
    query = (signs * spread).half()
    key = (signs[:, :KV_HEADS] * spread.flip(-1)).half()
    real = torch.ones(2, prompt, dtype=torch.bool)
    real[1, :4] = False
    basis = torch.eye(8, dtype=torch.float16).expand(KV_HEADS, -1, -1)
    method = InfiniGen(columns=rule)
    got = choose_columns(query, key, real, basis, method)
    assert got.dtype == torch.float16 and float(query.abs().sum(2, dtype=torch.float32).min()) > 65_504
    assert torch.equal(got.float(), choose_columns(query.float(), key.float(), real, basis.float(), method))


# A balanced index in few bits


def prompt_of(bias: float) -> tuple[torch.Tensor, torch.Tensor, PromptRows]:
    """Query [1, 4, 40, 16], key [1, 2, 40, 16] whose channels differ in size and have a mean, and the rows."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2))
    channels = torch.linspace(0.1, 3, 16)
    return query, key * channels + bias * channels.flip(0), PromptRows(torch.ones(1, 40, dtype=torch.bool), 48)


def svd_pair(of_query: np.ndarray, of_key: np.ndarray, columns: int, white_keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """W_q and W_k of a head by its SVD. Of the two signs of a column, its direction's largest element is positive."""
    factors = []
    for moment in (of_query, of_key):
        ridge = 1e-4 * np.trace(moment) / len(moment) * np.linspace(1, 2, len(moment))
        factors.append(np.linalg.cholesky(moment + np.diag(ridge)))
    left, right = factors
    images, strength, directions = np.linalg.svd(left.T @ right)
    pair = []
    for column in range(columns):
        direction, image, scale = directions[column], images[:, column], strength[column] ** 0.5
        sign = np.sign(direction[np.abs(direction).argmax()])
        of_scale = (1, scale**2) if white_keys else (scale, scale)
        pair.append((sign * right @ direction / of_scale[0], sign * left @ image / of_scale[1]))
    return tuple(np.array(side).T for side in zip(*pair, strict=True))


@pytest.mark.parametrize("white_keys", [False, True])
@pytest.mark.parametrize("columns", [6, 16])
def test_the_balanced_pair_is_that_of_the_svd_of_each_head(columns, white_keys):
    """Channels differ thirtyfold, two sequences have moments of their own, and all share a calibration."""
    query, key, _ = prompt_of(bias=0.0)
    batch = [torch.cat([states, 2 * states.flip(2, 3)]) for states in (query, key)]
    known = [
        moments(*batch, torch.ones(2, 40, dtype=torch.bool)),
        {name: each[0] for name, each in moments(query.roll(1, 2), key, torch.ones(1, 40, dtype=torch.bool)).items()},
    ]
    found = balanced(known, columns, white_keys=white_keys)
    of_query, of_key = (sum(each[name] for each in known).numpy() for name in ("query", "key"))
    for sequence, head in product(range(2), range(2)):
        wanted = svd_pair(of_query[sequence, head], of_key[sequence, head], columns, white_keys)
        for side in range(2):
            scale = np.abs(wanted[side]).max()
            assert np.abs(found[sequence, side, head].numpy() - wanted[side]).max() < 1e-8 * scale


def test_components_are_as_many_as_channels_also_of_few_tokens():
    basis = right_vectors(torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3)))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8).expand(2, 8, 8))


@pytest.mark.parametrize(("tokens", "width", "rank"), [(40, 12, 5), (12, 40, 5), (12, 40, 30), (12, 12, 12)])
def test_keys_of_low_rank_are_those_of_the_svd(tokens, width, rank):
    rows = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(2)) * torch.logspace(0, -3, width)
    left, right = low_rank(rows, rank)
    assert left.shape == (2, tokens, min(rank, tokens)) and right.shape == (2, min(rank, tokens), width)
    for sequence in range(2):
        images, strength, directions = np.linalg.svd(rows[sequence].double().numpy(), full_matrices=False)
        nearest = images[:, :rank] * strength[:rank] @ directions[:rank]
        assert np.abs((left @ right)[sequence].numpy() - nearest).max() < 1e-9


def of_all_layers(query: torch.Tensor, key: torch.Tensor, rows: PromptRows) -> dict[str, torch.Tensor]:
    """A calibration in which every layer has the moments of one sequence."""
    return {name: moment.expand(4, -1, -1, -1) for name, moment in moments(query, key, rows.real).items()}


@pytest.mark.parametrize("statistics", ["prompt", "calibration", "both"])
@pytest.mark.parametrize(("bits", "projection_bits", "one_code"), [(8, None, 0.02), (4, None, 0.3), (4, 4, 0.3)])
def test_a_mean_that_all_keys_share_costs_no_bits(bits, projection_bits, one_code, statistics):
    """Scores on coded keys, but for what all keys of a query have in common, are those without the mean. A number may
    fall to the next code."""
    options = {"index_bits": bits, "projection_bits": projection_bits, "dense_layers": 0}
    method = preset("infinigen-balanced", statistics=statistics, **options)
    found, text = [], of_all_layers(*prompt_of(bias=0.0))
    for bias in (0.0, 100.0):
        query, key, rows = prompt_of(bias)
        state = method.new_state(SHAPE, lengths_of([40], [48]), text)
        state.prompt(0, query, key, key, rows)
        positions = torch.full((1, 1), 40)
        places = rows.positions[:, None], positions[None]
        scores = state.scores(0, QueryRows(query[:, :, -1:], positions, positions >= 0, *places, torch.empty))
        found.append(scores - scores.mean(-1, keepdim=True))
        width = 5 * bits + 32  # ceil(0.3 * 16) numbers and their scales
        row = 5 if projection_bits is None else (4 + 4) / 2  # of a projection: numbers, or bytes
        numbers = 40 * width / 16 + 2 * 16 * row + 5  # and the keys' mean
        assert state.index_read(0, positions).item() == pytest.approx(numbers / 32)
    torch.testing.assert_close(*found, rtol=0, atol=one_code)


@pytest.mark.parametrize("columns", [1, 5, 28])
def test_mixed_columns_keep_all_products(columns):
    matrix = mixing(columns, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(columns).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("at_once", "compiled"), [(2, set()), (7, set()), (1024, set()), (2, {"cpu"})])
def test_moments_are_those_of_all_tokens_however_few_are_summed_at_once(at_once, compiled, monkeypatch):
    """2: fewer than the batch has sequences, so one token of each at a time; on a GPU an eighth of all."""
    monkeypatch.setattr("methods.infinigen2.MOMENT_TOKENS", at_once)
    monkeypatch.setattr("methods.compiled.COMPILED", compiled)
    query, key, _ = prompt_of(bias=3.0)
    real = torch.ones(3, 40, dtype=torch.bool)
    real[1, :9] = False  # padding on the left
    found = moments(query.repeat(3, 1, 1, 1), key.repeat(3, 1, 1, 1), real)
    for sequence, is_real in enumerate(real):
        for head in range(2):
            queries = query[0, 2 * head : 2 * head + 2, is_real].double().flatten(0, 1)
            keys = key[0, head, is_real].double()
            of_query = queries.mT @ queries / len(queries)
            torch.testing.assert_close(found["query"][sequence, head], of_query)
            torch.testing.assert_close(found["key"][sequence, head], keys.mT.cov(correction=0))
