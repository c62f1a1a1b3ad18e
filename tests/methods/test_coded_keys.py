"""Scores on coded keys against products with the decoded ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods import coded_keys
from methods.attention import MANY_ROWS
from methods.base import Geometry, Lengths, PromptRows, QueryRows
from methods.codecs.integers import IntegerCodec
from methods.coded_keys import coded_scores, room_for_keys
from methods.loki import Loki

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


def test_an_index_takes_the_bytes_of_its_codec_and_keeps_its_layout_in_a_fork():
    geometry = Geometry(1, 4, 2, 16, 1.0, "opt")
    method = Loki(rank=0.5, index_bits=4)
    final = torch.tensor([12, 12])
    calibration = {"rotation": torch.linalg.qr(torch.randn(1, 2, 16, 16)).Q}
    state = method.new_state(geometry, Lengths(final, final), calibration)
    key = torch.randn(2, 2, 9, 16)
    real = torch.ones(2, 9, dtype=torch.bool)
    state.prompt(0, key.repeat_interleave(2, 1), key, key, PromptRows(real, 12))
    child = state.fork(torch.tensor([1, 0, 1]), 20)
    keys, forked = state.partial_keys[0], child.partial_keys[0]
    assert keys.nbytes == 2 * 2 * 12 * IntegerCodec("int4").row_bytes(8)
    assert forked.shape[:3] == (3, 2, 20) and forked.mT.is_contiguous() and keys.mT.is_contiguous()
    tokens = torch.arange(9).expand(2, 1, -1).int()
    rows = QueryRows(torch.randn(2, 4, 1, 16), final[:, None], real[:, :1], tokens, tokens[..., :1], torch.Tensor)
    expected = state.scores(0, rows)
    rows.query = rows.query.flip(0)
    assert torch.equal(child.fork(torch.tensor([0, 1]), 20).scores(0, rows), expected.flip(0))
