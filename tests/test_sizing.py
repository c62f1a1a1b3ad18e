"""Settings that land on a reported size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.sizing import TOLERANCE, DecodeRow, kv_frac, sized
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
sizeable = st.sampled_from([H2O(), Streaming(), Oracle(), InfiniGen(num_exempt_layers=1), H2O(num_exempt_layers=0)])


@given(sizeable, decode_rows, st.integers(4, 32), st.floats(0.01, 1.0))
def test_sized_lands_on_the_target_or_says_so(method, rows, num_layers, target):
    try:
        found = sized(method, rows, num_layers, target)
    except UserError as error:
        assert f"target_kv_frac={target}" in str(error)
        reached = [kv_frac(method.with_size(step / 500), rows, num_layers) for step in range(1, 501)]
        assert min(abs(each - target) for each in reached) > TOLERANCE - 1e-9, "there was a size"
    else:
        assert type(found) is type(method) and found.num_exempt_layers == method.num_exempt_layers
        total = weight = 0.0
        for row in rows:
            read = found.tokens_read(row.cached, row.final_length)
            exempt = method.num_exempt_layers
            layers = [1.0] * exempt + [read / row.cached] * (num_layers - exempt)
            total += row.multiplicity * sum(layers) / num_layers
            weight += row.multiplicity
        assert abs(total / weight - target) <= TOLERANCE + 1e-9


def test_rows_without_cached_tokens_count_nothing():
    rows = [DecodeRow(0, 10), DecodeRow(5, 10)]
    method = Streaming(kv_frac=0.5, num_sinks=1)
    assert kv_frac(method, rows, 4) == kv_frac(method, rows[1:], 4)


def test_a_size_that_depends_on_the_data_is_refused():
    with pytest.raises(ValueError, match="depends on the data"):
        kv_frac(InfiniGen(), [DecodeRow(5, 10)], 4)
