"""Scores of half precision queries and keys, which are what their own values say, not what a product's rounding makes
of it; scores on coded keys, which are products with the decoded ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import projection
from methods.attention import MANY_ROWS, attention_scores
from methods.base import Geometry, Lengths, PromptRows, QueryRows
from methods.codecs.integers import IntegerCodec
from methods.infinigen import InfiniGen
from methods.projection import coded_scores, room_for_keys
from methods.quest import Quest
from methods.sparq import SparQ

BATCH, KV_HEADS, GROUP, TOKENS, HEAD_DIM = 2, 3, 2, 400, 80
SCALE = HEAD_DIM**-0.5  # no power of two: to scale a half precision query rounds it
GEOMETRY = Geometry(1, KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, SCALE, "llama")
HALF = [torch.float16, torch.bfloat16]


def queries_and_keys(dtype, rows):
    """Keys with a mean, as they have: scores of some tens."""
    generator = torch.Generator().manual_seed(3)
    query = 3 * torch.randn(BATCH, KV_HEADS * GROUP, rows, HEAD_DIM, generator=generator)
    keys = torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM, generator=generator)
    return query.to(dtype), (keys + 2 * torch.randn(HEAD_DIM, generator=generator)).to(dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", HALF)
def test_scores_of_half_precision_are_as_exact_as_fp32(dtype, rows):
    query, keys = queries_and_keys(dtype, rows)
    grouped = query.double().view(BATCH, KV_HEADS, GROUP, rows, HEAD_DIM)
    exact = grouped @ keys.double().mT.unsqueeze(2) * SCALE
    scores = attention_scores(query, keys, SCALE)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


def method_scores(method, query, keys):
    """[batch, num_kv_heads, group, 1, slots or full pages] of the last row over a prompt."""
    state = method.new_state(GEOMETRY, Lengths(*torch.full((2, BATCH), TOKENS)))
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    state.prompt(0, query, keys, keys, PromptRows(real, TOKENS))
    rows = QueryRows(
        query=query[:, :, -1:],
        positions=torch.full((BATCH, 1), TOKENS),
        real=real[:, :1],
        slot_positions=torch.arange(TOKENS).expand(BATCH, 1, -1),
        own_slots=torch.zeros(BATCH, 1, 1, dtype=torch.int64),
        true_scores=lambda: None,
    )
    return state.scores(0, rows)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("method", "roundings"),
    [(Quest(page_size=4), 0), (InfiniGen(skew=False), 1), (SparQ(), 1)],  # of a query's few numbers, to the keys' dtype
)
def test_methods_score_half_precision_as_they_score_the_same_numbers_in_fp32(method, roundings, dtype):
    query, keys = queries_and_keys(dtype, TOKENS)
    exact = method_scores(method, query.float(), keys.float())
    scores = method_scores(method, query, keys)
    assert scores.dtype == torch.float32
    tolerance = 1e-5 + roundings * torch.finfo(dtype).eps / 4 * exact.abs().mean()
    assert (scores - exact).abs().mean() <= tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALF)
def test_a_gpu_adds_up_in_fp32(dtype):
    query, keys = queries_and_keys(dtype, 3)
    strided = torch.cat([keys, keys], -1).cuda()[:, :, :-5, :HEAD_DIM]  # keys and values side by side, read in place
    got = attention_scores(query.cuda(), strided, SCALE)
    torch.testing.assert_close(got.cpu(), attention_scores(query, keys[:, :, :-5], SCALE), rtol=1e-5, atol=1e-4)


# Coded keys

SLOTS = 23


@settings(max_examples=60)
@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    columns=st.sampled_from([1, 7, 32, 64, 65, 130]),
    rows=st.sampled_from([1, 3, MANY_ROWS]),
    block_bytes=st.sampled_from([1, 2**14, 2**20]),
    seed=st.integers(0, 2**31),
)
def test_scores_are_products_with_the_decoded_keys(bits, columns, rows, block_bytes, seed):
    generator, codec = torch.Generator().manual_seed(seed), IntegerCodec(f"int{bits}")
    packed = codec.encode(torch.randn(2, 3, SLOTS, columns, generator=generator) + 3)
    query = torch.randn(2, 3, rows, columns, generator=generator)
    expected = query.double() @ codec.decode(packed, columns, torch.float64).mT
    keys = room_for_keys(packed[:, :, :1], SLOTS + 2)
    keys[:, :, :SLOTS] = packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "BLOCK_BYTES", block_bytes)
        for laid_out in (keys[:, :, :SLOTS], packed):
            got = coded_scores(query, laid_out, codec)
            torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
            halves = coded_scores(query.bfloat16(), laid_out, codec)
            rounded = query.bfloat16().double() @ codec.decode(packed, columns, torch.float64).mT
            torch.testing.assert_close(halves.double(), rounded, atol=1e-4, rtol=1e-5)
