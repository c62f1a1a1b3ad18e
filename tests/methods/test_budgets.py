"""Settings that land on a reported budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.model.budgets import TOLERANCE, code_width, expected_budget, with_budget_as_stored
from harness.run.compose import load
from harness.settings.schema import options
from methods.base import Geometry, Lengths, TokenCounts
from methods.codecs.floats import FloatCodec
from methods.codecs.integers import IntegerCodec
from methods.codecs.split import SplitCodec
from methods.doublesparsity import DoubleSparsity
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2Sampled
from methods.infinigen_pool import InfiniGenPool
from methods.loki import Loki
from methods.oracle import Oracle
from methods.pariskv import ParisKV
from methods.pqcache import PQCache
from methods.prompt_evicting import SnapKV
from methods.quest import Quest
from methods.random_attention import RandomAttention
from methods.rkv import RKV
from methods.rocketkv import RocketKV
from methods.socket import Socket
from methods.sparq import SparQ
from methods.streaming import DuoAttention, Streaming
from methods.tova import TOVA
from methods.vattention import VAttention
from tests.cases import Case, preset
from tests.living import PROMPT, STEPS, attached_with_link, force, live, open_live, replay, setup_of, token_batch

decode_rows = st.builds(
    lambda contexts: [
        TokenCounts(cached, prompt, prompt + rows + 1)
        for prompt, rows, times in contexts
        for cached in range(prompt, prompt + rows)
        for _ in range(times)
    ],
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4),
)
codecs = st.sampled_from([None, IntegerCodec("int2"), IntegerCodec("int1")])
sizeable = st.sampled_from(
    [
        H2O(dense_layers=2),
        Streaming(num_sinks=1, dense_layers=2),
        Oracle(dense_layers=2),
        InfiniGen(dense_layers=1),
        InfiniGen(cap_of="final"),
        Quest(page_size=1, dense_layers=0),
        SnapKV(window=1, num_sinks=1, layers="pyramid", heads="adaptive", dense_layers=2),
        TOVA(dense_layers=2),
        RKV(window=1, divide_length=3, dense_layers=2),
        RandomAttention(divide_length=3, dense_layers=2),
        DuoAttention(num_sinks=1, num_recent=1, dense_layers=2),
        ParisKV(num_sinks=0, dense_layers=2),
        Socket(num_sinks=1, dense_layers=2),
        RocketKV(window=2, num_sinks=1, dense_layers=0),
    ]
)
GEOMETRY = Geometry(num_layers=32, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, family="llama")


@settings(max_examples=40)
@given(sizeable, decode_rows, st.integers(4, 9), st.floats(0.01, 1.0), codecs)
def test_with_budget_lands_on_the_target_or_says_so(method, rows, num_layers, target, codec):
    counted, geometry = Counter(rows), replace(GEOMETRY, num_layers=num_layers)
    width = code_width(codec, geometry)
    try:
        found = with_budget_as_stored(method, codec, geometry, rows, target, nearest=False)
    except UserError as error:
        if "cannot have it" in str(error):  # a prompt that is no longer than the window
            assert isinstance(method, SnapKV | RocketKV) and min(row.prompt for row in rows) <= method.safe, error
            return
        assert f"budget={target}" in str(error)
        least = max(method.min_budget(row) for row in rows)
        budgets = [step / 500 for step in range(1, 501) if step / 500 >= least]
        reached = [
            expected_budget(method.with_budget(budget), counted, num_layers, [width] * num_layers) for budget in budgets
        ]
        assert min(abs(each - target) for each in reached) > TOLERANCE - 1e-9, "there was a budget"
    else:
        prompts, finals = (torch.tensor([getattr(row, name) for row in rows]) for name in ("prompt", "final"))
        if isinstance(found, Streaming | SnapKV | RKV | RandomAttention | RocketKV):
            found.new_state(GEOMETRY, Lengths(prompts, finals))  # refused nowhere
        assert type(found) is type(method) and found.dense_layers == method.dense_layers
        total = 0.0
        dense_layers = method.dense_layers
        for row in rows:
            reads = [found.tokens_read(row, layer) for layer in range(dense_layers, num_layers)]
            total += (dense_layers + sum(width * read / row.cached for read in reads)) / num_layers
        assert abs(total / len(rows) - target) <= TOLERANCE + 1e-9


SMALL = replace(GEOMETRY, num_layers=10)


def refusal_of(method, prompt: int, final: int, budget: float) -> str:
    """The refusal of a budget at these lengths; "" where it is met."""
    rows = [TokenCounts(cached, prompt, final) for cached in range(prompt, final - 1)]
    try:
        with_budget_as_stored(method, None, SMALL, rows, budget, nearest=False, preset="mine")
    except UserError as refusal:
        return str(refusal)
    return ""


STRUCTURE = {"duo", "kascade"}
"""Heads or layers that read everything by the method's own design."""
LONG_ANSWERS = {"random", "triattention"}
"""They keep the prompt whole."""


def test_at_the_default_lengths_methods_can_read_a_tenth():
    """Of conf/method, on a model of 10 layers: all that have a budget and no dense part by design."""
    refused = {}
    for name in options("method"):
        try:
            config = load([f"method={name}", "budget=0.1", "method.dense_layers=0"])
        except UserError as refusal:
            assert "has no budget to set" in str(refusal)
            continue
        assert (config.prefill_len, config.seq_len) == (960, 1024)
        if config.budget is not None:
            assert not config.budget_is_measured, "a closed form of every shipped method"
            said = refusal_of(config.method, config.prefill_len, config.seq_len, 0.1)
            if said:
                refused[name] = said
    assert set(refused) <= STRUCTURE | LONG_ANSWERS and "snapkv" not in refused


def test_a_codecs_bits_count_in_the_layers_that_it_codes():
    method, rows = Streaming(budget=0.2, num_sinks=1, dense_layers=2), {TokenCounts(100, 50, 200): 1}
    budget = expected_budget(method, rows, 10, [1, 1, 0.5, *[0.25] * 6, 0.125])
    assert budget == pytest.approx((2 + (0.5 + 6 * 0.25 + 0.125) * 0.4) / 10)


@pytest.mark.parametrize(
    ("codec", "geometry", "bits"),
    [
        (None, {}, 16),
        (IntegerCodec("int4", 8), {}, 4 + 32 / 8),
        (SplitCodec(IntegerCodec("int8", 8), IntegerCodec("int2", 8)), {}, ((8 + 4) + (2 + 4)) / 2),
        (SplitCodec(FloatCodec("fp16"), IntegerCodec("int4", 8)), {"value_dim": 24}, (8 * 16 + 24 * (4 + 4)) / 32),
        (IntegerCodec("int4", 8), {"value_dim": 4, "values_in_keys": True}, 4 + 4),
    ],
)
def test_the_bits_of_an_element_are_the_mean_over_key_and_value(codec, geometry, bits):
    assert code_width(codec, replace(GEOMETRY, **geometry)) == bits / 16


# What replay and live decoding report


CACHED = range(PROMPT, PROMPT + STEPS)


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        # floor(0.3 * 16) of 16 columns of every cached key, no value, and the projection of 16 x 4 numbers once
        (InfiniGen(skew=False, fixed_fetch=5, round_columns="down"), mean((4 * t + 16 * 4) / 32 / t for t in CACHED)),
        (
            InfiniGenPool(skew=False, fixed_fetch=5, pool_frac=20.5 / (PROMPT + STEPS)),
            mean((5 * 20 + 16 * 5) / 32 / t for t in CACHED),
        ),
        # two projections
        (preset("infinigen-balanced"), mean((5 * t + 2 * 16 * 5) / 32 / t for t in CACHED)),
        (InfiniGen(partial_weight_ratio=1.0, index_bits=4), mean((16 * 6 / 16 * t + 16 * 16) / 32 / t for t in CACHED)),
        # and with a sample a byte a token, and the mean value
        (
            InfiniGen2Sampled(partial_weight_ratio=0.3, index_bits=None, projection_bits=None, dense_layers=2),
            mean((5.5 * t + 2 * 16 * 5 + 16) / 32 / t for t in CACHED),
        ),
        (DoubleSparsity(rank=0.25), mean((4 * t + 16 * 4) / 32 / t for t in CACHED)),
        (Loki(rank=0.3, dense_layers=2), mean((5 * t + 16 * 5) / 32 / t for t in CACHED)),
        # every key
        (VAttention(when="true_scores", index_bits=None, num_sinks=0, dense_layers=2), 0.5),
        # 4 of 16 channels, and half a token for the mean value
        (SparQ(dense_layers=2), mean((4 * t / 32 + 0.5) / t for t in CACHED)),
        # four codes of 6 bits for each token, and 64 centroids of 16 elements of 16 bits
        (PQCache(num_sinks=0, dense_layers=2), mean((t * 24 + 64 * 16 * 16) / (32 * 16) / t for t in CACHED)),
        # a byte for each of two sub-vectors of a key of the zone; of half of it 3 bits for each of 16 elements, in 6
        # bytes, and two weights
        (
            ParisKV(num_sinks=0, recent_frac=0.0, dense_layers=2),
            mean((t * 2 + -(-t // 2) * (6 + 4)) / (2 * 32) / t for t in CACHED),
        ),
        # 60 hashes of 10 bits in 76 bytes, and the length of the value; the planes, which two KV heads share
        (Socket(num_sinks=0, dense_layers=2), mean(((76 + 2) / 2 * t + 60 * 10 * 16 / 2) / 32 / t for t in CACHED)),
        (
            Socket(num_sinks=0, tables=5, planes=3, value_weighted=False, dense_layers=2),
            mean((2 / 2 * t + 5 * 3 * 16 / 2) / 32 / t for t in CACHED),
        ),
        # every key in 4 bits
        (VAttention(num_sinks=0, dense_layers=2), 16 * (4 + 32 / 16) / 16 / 32),
    ],
    ids=lambda value: getattr(value, "title", None),
)
def test_what_is_read_of_an_index_by_hand(method, tokens):
    """So many tokens' score for each token, in two of four layers. Other methods are in test_counters.py."""
    with attached_with_link() as (attached, _):
        for run in (replay, live):
            found = run(attached, Case(method), (PROMPT,))
            assert found.device_frac - found.budget == pytest.approx(tokens / 2, rel=1e-9)


EVICTED = [
    (H2O(kept_tokens=20, dense_layers=2), [t - 20 for t in CACHED]),
    (Streaming(kept_tokens=30, num_sinks=1, dense_layers=2), [max(0, t - 30) for t in CACHED]),
    (SnapKV(kept_tokens=14, window=4, dense_layers=2), [PROMPT - 14] * STEPS),
    # back to 26 tokens after every third: 27 - 26, then 29 - 26
    (RandomAttention(kept_tokens=26, divide_length=3, dense_layers=2), [0, 0, 0, 1, 1, 1, 4, 4, 4, 7]),
    (RandomAttention(kept_tokens=26, dense_layers=2), [0] * STEPS),  # the text ends before the first compression
    # of 4 KV heads in two layers 2 stream
    (DuoAttention(num_sinks=1, num_recent=9, dense_layers=2), [(t - 10) / 2 for t in CACHED]),
    (Quest(budget=0.4, page_size=3), None),
    (
        InfiniGenPool(skew=False, fixed_fetch=5, pool_frac=20.5 / (PROMPT + STEPS)),
        None,
    ),  # a pool, of which a part is read
]


@pytest.mark.parametrize(("method", "evicted"), EVICTED, ids=lambda value: getattr(value, "title", None))
def test_evicted_tokens_are_those_that_no_row_can_read_any_more(method, evicted):
    """Mean over rows, KV heads and the layers under the method; 0 where the budget is never reached."""
    case = Case(method)
    ids, real = token_batch((PROMPT,))
    with attached_with_link() as (attached, _):
        session = setup_of(attached, case).replay(attached, real.sum(-1), real.shape[1])
        session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        session.decode(ids[:, PROMPT:], real[:, PROMPT:])
        steps = open_live(attached, case)
        force(steps, (PROMPT,))
        found = session.reads.tokens_evicted, steps.reads.tokens_evicted
        steps.close()
    if evicted is None:
        assert found == (None, None) and "tokens_evicted" not in session.reads.shares
    else:
        assert found == pytest.approx((mean(evicted),) * 2, rel=1e-12)
        assert session.reads.shares["tokens_evicted"] == found[0]
        assert (found[0] == 0) == (max(evicted) == 0), "no rounding makes it look as if a budget bit"
