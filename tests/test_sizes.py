"""Settings that land on a reported size."""

from __future__ import annotations

import pytest
import torch
from harness.sizing import TOLERANCE, DecodeRow, kv_frac, sized
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from methods.base import Geometry
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.oracle import Oracle
from methods.streaming import Streaming

decode_rows = st.builds(
    lambda contexts: [
        DecodeRow(cached, prompt + rows + 1, times)
        for prompt, rows, times in contexts
        for cached in range(prompt, prompt + rows)
    ],
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4),
)
sizeable = st.sampled_from(
    [H2O(), Streaming(num_sinks=1), Oracle(), InfiniGen(num_exempt_layers=1), H2O(num_exempt_layers=0)]
)
GEOMETRY = Geometry(num_layers=32, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, family="llama")


@given(sizeable, decode_rows, st.integers(4, 32), st.floats(0.01, 1.0))
def test_sized_lands_on_the_target_or_says_so(method, rows, num_layers, target):
    try:
        found = sized(method, rows, num_layers, target)
    except UserError as error:
        assert f"target_kv_frac={target}" in str(error)
        least = method.min_size(min(row.final_length for row in rows))
        sizes = [step / 500 for step in range(1, 501) if step / 500 >= least]
        reached = [kv_frac(method.with_size(size), rows, num_layers) for size in sizes]
        assert min(abs(each - target) for each in reached) > TOLERANCE - 1e-9, "there was a size"
    else:
        if isinstance(found, Streaming):
            found.new_state(GEOMETRY, torch.tensor([row.final_length for row in rows]))  # refused nowhere
        assert type(found) is type(method) and found.num_exempt_layers == method.num_exempt_layers
        total = weight = 0.0
        for row in rows:
            read = found.tokens_read(row.cached, row.final_length)
            exempt = method.num_exempt_layers
            layers = [1.0] * exempt + [read / row.cached] * (num_layers - exempt)
            total += row.multiplicity * sum(layers) / num_layers
            weight += row.multiplicity
        assert abs(total / weight - target) <= TOLERANCE + 1e-9


def test_a_window_of_no_more_than_the_sinks_is_refused_by_the_target_with_the_smallest_one():
    rows = [DecodeRow(cached, 100) for cached in range(50, 99)]
    smallest = kv_frac(Streaming(kv_frac=0.0501), rows, 10)  # 5 of 100 tokens
    with pytest.raises(UserError, match=f"target_kv_frac=0.21: .* allowed here: {smallest:.3f} to 1") as refusal:
        sized(Streaming(), rows, 10, 0.21)
    assert "kv_frac=" not in str(refusal.value).replace("target_kv_frac=", "")
    assert sized(Streaming(), rows, 10, smallest).tokens_read(99, 100) == 5
    with pytest.raises(ValueError, match="num_sinks=100: must be below 100"):
        sized(Streaming(num_sinks=100), rows, 10, 0.5)


@given(st.integers(0, 50), st.integers(1, 3000))
def test_the_smallest_window_is_one_token_more_than_the_sinks(num_sinks, more):
    method, length = Streaming(num_sinks=num_sinks), num_sinks + more
    assert method.with_size(method.min_size(length)).tokens_read(length, length) == num_sinks + 1


def test_rows_without_cached_tokens_count_nothing():
    rows = [DecodeRow(0, 10), DecodeRow(5, 10)]
    method = Streaming(kv_frac=0.5, num_sinks=1)
    assert kv_frac(method, rows, 4) == kv_frac(method, rows[1:], 4)


def test_a_size_that_depends_on_the_data_is_refused():
    with pytest.raises(ValueError, match="depends on the data"):
        kv_frac(InfiniGen(), [DecodeRow(5, 10)], 4)
