"""A codec for each layer: settings, bytes and sizes by hand; what rows read of it is in test_rules.py."""

from __future__ import annotations

from contextlib import closing

import pytest

from harness.decode.needs import Plan, sizes_of
from harness.errors import UserError
from harness.model.attach import attach
from harness.replay.setup import codec_of
from harness.run.cli import main
from harness.run.compose import load
from methods.codecs.floats import FloatCodec, Nvfp4Codec
from methods.codecs.integers import ChannelCodec, IntegerCodec
from methods.codecs.split import LayerCodecs, NamedLayers, SplitCodec, codec_at, without_keys
from methods.codecs.turbo import TurboCodec
from methods.full import Full
from methods.shadowkv import ShadowKV
from tests.cases import Case
from tests.living import PROMPTS, Crossed, attached_with_link, force, live, open_live, replay, tiny, token_batch
from tests.replaying import open_session

MIXED = LayerCodecs(
    IntegerCodec("int4"),
    (NamedLayers(1, 1, IntegerCodec("int8")), NamedLayers(3, None, SplitCodec(Nvfp4Codec(), FloatCodec("fp16")))),
)
"""On a model of four layers."""
PADDED = PROMPTS["padded"]


def test_a_setting_names_the_codec_of_each_layer():
    config = load(
        ["method=full", "method.dense_layers=0", "codec=int4", "value_codec=int2", "group_size=32",
         "codec_layers=[0-1:int8,5:fp16/turbo3,28-:nvfp4]"]
    )  # fmt: skip
    codec = codec_of(config)
    found = [codec_at(codec, layer) for layer in (0, 1, 2, 4, 5, 6, 27, 28, 29)]
    others = SplitCodec(IntegerCodec("int4", 32), IntegerCodec("int2", 32))
    assert found == [
        IntegerCodec("int8", 32), IntegerCodec("int8", 32), others, others,
        SplitCodec(FloatCodec("fp16"), TurboCodec("turbo3")), others, others, Nvfp4Codec(), Nvfp4Codec(),
    ]  # fmt: skip
    assert config.codec_name == "int4/int2[0-1:int8,5:fp16/turbo3,28-:nvfp4]"
    assert config.label == f"Full cache + {config.codec_name}"
    alone = codec_of(load(["method=full", "codec=int4", "codec_layers=4:int8"]))
    assert alone == LayerCodecs(IntegerCodec("int4"), (NamedLayers(4, 4, IntegerCodec("int8"), "4:int8"),))


def test_rotation_groups_and_the_last_tokens_are_those_of_integer_layers():
    config = load(
        ["method=full", "codec=int4", "rotation=hadamard", "key_groups=channel", "residual=64",
         "codec_layers=[3:fp16,4:int8/turbo4,5:fp8/fp16]"]
    )  # fmt: skip
    codec = codec_of(config)
    assert codec_at(codec, 3) == FloatCodec("fp16") and codec_at(codec, 5) == SplitCodec(
        FloatCodec("fp8"), FloatCodec("fp16")
    )
    assert codec_at(codec, 4) == SplitCodec(ChannelCodec("int8", 64, "hadamard"), TurboCodec("turbo4"), 64)
    assert codec.residual == 64


def test_bytes_and_sizes_by_hand():
    """2 KV heads of 16 elements, fp32, one dense layer: slots of 128 bytes; int8 2 * (4 + 16); int4 2 * (4 + 8); nvfp4
    4 + 2 + 8 and fp16 32, filled up to a multiple of 4."""
    slots = [128, 40, 24, 48]
    heads, cached = 2, range(24, 34)
    case = Case(Full(dense_layers=1), MIXED)
    with attached_with_link("gqa") as (attached, link):
        with closing(open_live(attached, case, placement="host", link=link)) as session, Crossed() as crossed:
            force(session, (24,), 10)
            assert [store.slot_bytes for store in session.stores] == slots
            assert int(session.traffic.loaded.num_bytes) == heads * sum(slots) * sum(cached)
            assert int(session.traffic.written.num_bytes) == heads * sum(slots) * 10
            session.drain()
            assert [crossed.written[store] for store in session.stores] == [heads * slot * 34 for slot in slots]
            own = heads * 4 * 128 * 10  # the current token of each layer
            assert float(session.reads.num_bytes) == heads * sum(slots) * sum(cached) + own
            budget = session.reads.budget
        needs = Plan(sizes_of(attached, case.method), case.method, MIXED, "device").needs(session.batch.counts)
        assert needs.slots == heads * sum(slots) * 34
        replayed = replay(attached, case, (24,))
    widths = [16, 8 + 32 / 16, 4 + 32 / 16, (4 + (8 + 32) / 16 + 16) / 2]
    assert budget == pytest.approx(sum(widths) / 16 / 4) and replayed.budget == pytest.approx(budget)


def test_the_artifacts_size_takes_the_mean_bits_of_the_coded_layers():
    ids, real = token_batch((24,), 6)
    with attach(tiny("gqa")) as attached:
        session = open_session(attached, Case(Full(dense_layers=1), MIXED), [30], 30)
        session.prefill(ids[:, :24], real[:, :24])
        session.decode(ids[:, 24:], real[:, 24:])
    assert session.reads.code_bits == pytest.approx((8 + 4 + (4 + 16) / 2) / 3)


def test_a_cache_of_values_alone_keeps_each_layers_codec_of_values():
    codec = without_keys(MIXED)
    assert [codec_at(codec, layer).values for layer in range(4)] == [
        IntegerCodec("int4"), IntegerCodec("int8"), IntegerCodec("int4"), FloatCodec("fp16")
    ]  # fmt: skip
    assert all(codec_at(codec, layer).keys.row_bytes(16) == 0 for layer in range(4))
    method = ShadowKV(budget=0.3, page_size=2, local_chunks=1, rank_frac=0.3, dense_layers=1)
    by_layer = LayerCodecs(FloatCodec("fp32"), (NamedLayers(2, 2, FloatCodec("fp16")),))
    with attach(tiny("gqa")) as attached:
        expected, got = (run(attached, Case(method, by_layer), PADDED) for run in (replay, live))
    assert (got.logits - expected.logits).abs().max() < 3e-3 and got.budget == pytest.approx(expected.budget)


def test_a_layer_that_the_model_does_not_have_is_refused_in_one_line(capsys, tmp_path):
    beyond = LayerCodecs(IntegerCodec("int4"), (NamedLayers(3, 4, IntegerCodec("int8"), "3-4:int8"),))
    wanted = r"^codec_layers=\[3-4:int8\]: the model has layers 0 to 3 that see every token$"
    with attach(tiny("gqa")) as attached, pytest.raises(UserError, match=wanted):
        live(attached, Case(Full(), beyond), PADDED)
    given = ["method=full", "codec=int4", "codec_layers=[30:int8]", "num_windows=1", "prefill_len=64", "seq_len=80",
             f"results_dir={tmp_path}"]  # fmt: skip
    assert main(given) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "codec_layers" in line]
    assert len(said) == 1 and "codec_layers=[30:int8]: the model has layers 0 to 29 that see every token" in said[0]
