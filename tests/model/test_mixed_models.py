"""Models whose layers are not all full attention: replay is the model's own pass, live is replay, sizes by hand."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from harness.decode.links import EmulatedLink
from harness.decode.resident import LocalCache
from harness.errors import UserError
from harness.model.attach import attach
from methods.base import Window
from methods.full import Full
from methods.h2o import H2O
from tests.cases import CASES, Case
from tests.living import PROMPT, STEPS, Crossed, force, open_live
from tests.replaying import assert_close, open_session, pad, run_one, run_ragged, token_ids
from tests.tiny_models import LOCAL, MIXED, WINDOW, mixed

every_model = pytest.mark.parametrize("name", MIXED)
local_models = pytest.mark.parametrize("name", LOCAL)
HEADS, ROW = 2 * 2, 2 * 16 * 4
"""Of the models but for deepseek_v3: KV heads of a batch of two, and bytes of a token's key and value."""


# Windows and chunks


@local_models
def test_the_ring_stays_on_the_device(name):
    """Over the link go the four layers that see every token; a ring holds what the next row sees beside its own."""
    with attach(mixed(name)) as attached, EmulatedLink(1e12) as link:
        geometry, width = attached.geometry, Window(WINDOW, is_chunk=name == "llama4_text")
        assert attached.numbers == [None, 0, 1, None, 2, 3]
        assert (geometry.num_layers, geometry.windows) == (4, (width, width))
        opened = closing(open_live(attached, Case(Full()), placement="host", link=link))
        with opened as session, Crossed() as crossed:
            force(session, (PROMPT, PROMPT))
            rings = [cache for cache in session.caches if isinstance(cache, LocalCache)]
            assert [cache.keys.shape[2] for cache in rings] == [WINDOW - 1] * 2
            assert session.traffic.loaded.num_bytes == 4 * HEADS * sum(range(PROMPT, PROMPT + STEPS)) * ROW
            assert session.traffic.written.num_bytes == 4 * HEADS * STEPS * ROW
            rows = range(PROMPT, PROMPT + STEPS)
            in_rings = 2 * sum(
                (t % WINDOW if width.is_chunk else WINDOW - 1) + 1 for t in rows
            )  # with the current token
            in_all = 4 * sum(t + 1 for t in rows)
            assert float(session.reads.num_bytes) == HEADS * ROW * (in_all + in_rings)
            session.drain()  # the last rows may be under way
            assert crossed.written.total() == 4 * HEADS * (PROMPT + STEPS) * ROW
        kinds = [policy.kind for policy in open_session(attached, CASES["h2o"], [20], 20).policies]
        assert kinds == ["local", "full", "full", "local", "method", "method"], "dense by its number among them"


def test_a_sequence_that_has_ended_changes_no_recurrent_state_of_another():
    ids, valid = pad([token_ids(20), token_ids(13, 1)], left=True)
    rest = torch.tensor([token_ids(6, 2)] * 2)
    real = torch.ones_like(rest, dtype=torch.bool)
    with attach(mixed("qwen3_next")) as attached:
        session = open_session(attached, CASES["h2o"], [26, 19], 26)
        session.prefill(ids, valid)
        twin = session.fork(torch.tensor([0, 1]), 26)
        both = attached.logits(session.decode(rest, real))
        real[1] = False
        assert_close(attached.logits(twin.decode(rest, real))[:1], both[:1])


# Sizes, by hand: more in test_mixed_tables.py


def test_recurrent_bytes_are_of_a_sequence():
    one, several = (decode(mixed("qwen3_next"), CASES["h2o"]).reads.shares for decode in (run_one, run_ragged))
    assert one["recurrent_bytes"] == several["recurrent_bytes"]


def test_a_latent_is_stored_once_for_all_heads_by_hand():
    """24 latent and 8 rotary elements a token and layer, of which the first 24 are the value as well."""
    with attach(mixed("deepseek_v3")) as attached, EmulatedLink(1e12) as link:
        with closing(open_live(attached, Case(Full()), placement="host", link=link)) as session:
            force(session, (PROMPT, PROMPT))
            assert session.traffic.loaded.num_bytes == 4 * 2 * sum(range(PROMPT, PROMPT + STEPS)) * 32 * 4
        with closing(open_live(attached, CASES["kivi"], placement="host", link=link)) as session:
            force(session, (PROMPT, PROMPT))
            codec = session.stores[2].codec
            ring_rows, packed = codec.residual + codec.span + 1, 32 // 2 + 32 * 4 // codec.span
            assert [cache.device_bytes for cache in session.caches] == [0, 0, *[2 * ring_rows * (32 * 4 + packed)] * 2]
        with pytest.raises(UserError, match="in this model they hold the values"):
            open_session(attached, CASES["shadowkv"], [20], 20)


# Sinks and softcaps


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_the_weights_that_a_method_sees_are_the_models(name):
    """Attention weights by the model's own eager code, summed over the group and the prompt's rows: H2O's score."""
    ids = token_ids(20)
    model = mixed(name)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            weights = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    with attach(model) as attached:
        session = open_session(attached, Case(H2O(heavy_frac=0.7, recent_frac=0.3)), [21], 21)
        session.prefill(torch.tensor([ids]), torch.ones(1, 20, dtype=torch.bool))
        state = session.state
        for number, layer in ((2, 4), (3, 5)):
            received = weights[layer][0].sum(1).view(2, 2, 20).sum(1)
            assert_close(state.score[number][0, :, :20], received, 1e-5)
