"""Scores on coded keys against products with the decoded ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import coded_keys
from methods.attention import MANY_ROWS
from methods.codecs.integers import IntegerCodec
from methods.coded_keys import coded_scores, room_for_keys

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
        patch.setattr(coded_keys, "BLOCK_BYTES", block_bytes)
        for laid_out in (keys[:, :, :SLOTS], packed):
            got = coded_scores(query, laid_out, codec)
            torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
            halves = coded_scores(query.bfloat16(), laid_out, codec)
            rounded = query.bfloat16().double() @ codec.decode(packed, columns, torch.float64).mT
            torch.testing.assert_close(halves.double(), rounded, atol=1e-4, rtol=1e-5)
