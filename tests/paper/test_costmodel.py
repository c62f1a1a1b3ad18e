"""The cost model: timelines and counts worked by hand, limits, units, and how far it is from the paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.model.shape import FFN_MATRICES, ModelShape, as_config, count_weights, load_shape, read_yaml
from harness.paper.costmodel import published
from harness.paper.costmodel.__main__ import main
from harness.paper.costmodel.predict import (
    INT4_SHARE,
    BlockTimes,
    Case,
    Layer,
    Work,
    block_ends,
    decode_block,
    load_platform,
    prefill_block,
)
from harness.results import columns
from harness.settings.paths import SHIPPED
from harness.settings.schema import CONF_DIR
from methods.base import TokenCounts
from methods.codecs.integers import IntegerCodec
from methods.h2o import H2O
from methods.infinigen import InfiniGen

A6000 = load_platform("a6000-pcie3")
TINY = ModelShape("tiny", 4, 8, 2, 1, 4, 16, 3, 10, 2)
"""Gated FFN, grouped queries: 192 attention weights, 384 FFN weights, 16 bytes a cached token and layer."""


def tiny(label: str, platform=A6000) -> Case:
    return Case(platform, TINY, label, batch_size=2, prompt_len=20, gen_len=5)


def opt13b(label: str, **settings) -> Case:
    sizes = {"batch_size": 8, "prompt_len": 1920, "gen_len": 3} | settings
    return Case(platform=A6000, shape=load_shape("opt-13b"), label=label, **sizes)


THREE = [BlockTimes(load=10, attention=2, ffn=3)] * 3
PREDICTED = [BlockTimes(load=4, prediction=1, attention=2, ffn=3)] * 3
WAITING = [BlockTimes(load=3, prediction=1, attention=2, ffn=0), BlockTimes(load=1, attention=0, ffn=0)]
STORED = [BlockTimes(load=1, attention=1, ffn=2, store=1)] * 2
ADDED = BlockTimes(load=4, prediction=1, attention=2, ffn=3, store=0.5)


@pytest.mark.parametrize(
    ("blocks", "overlap", "ends"),
    [
        (WAITING, "block", [5, 5]),  # loads 0-3 and, after the prediction 0-1 and the first load, 3-4; attention 3-5
        ([WAITING[0]._replace(attention=0.5), WAITING[1]], "block", [3.5, 4]),
        (THREE, "ffn", [15, 27, 39]),  # loads 0-10, 12-22, 24-34: only the FFN is beside them
        (PREDICTED, "block", [9, 15, 21]),  # loads 0-4, 4-8, 10-14; predictions 0-1, 9-10, 15-16
        ([ADDED, ADDED._replace(other=1)], "none", [10.5, 22]),
        (STORED, "ffn", [4, 7]),  # loads 0-1, 3-4 (after the first store, 2-3); attention 1-2, 4-5
        (STORED, "block", [4, 7]),
    ],
)
def test_compute_and_link_are_two_resources(blocks, overlap, ends):
    assert block_ends(blocks, overlap) == ends


def test_blocks_by_hand():
    """OPT-13B, batch 8 after 2,000 tokens: 5,120 squared is 26,214,400; K and V of a token are 20,480 bytes."""
    work = decode_block(opt13b("offload"), Layer(), 2000, 2000)
    assert work.attention == (
        Work(2 * 8 * 4 * 26_214_400, 2 * 4 * 26_214_400),
        Work(4 * 5120 * 8 * 2001, 20_480 * 8 * 2001),
    )
    assert work.ffn == Work(2 * 8 * 8 * 26_214_400, 2 * 8 * 26_214_400)
    assert (work.load_bytes, work.row_bytes, work.store_bytes) == (327_680_000, 0, 163_840)
    work = decode_block(tiny("infinigen"), Layer(predicts=True), 20, 3)
    assert work.attention == (Work(2 * 2 * 192, 2 * 192), Work(4 * 8 * 8, 16 * 8))
    assert work.ffn == Work(2 * 2 * 384, 2 * 384)
    weights, keys = work.prediction
    assert weights == pytest.approx((2 * 2 * 0.3 * 64, 2 * 0.3 * 64))
    assert keys == pytest.approx((2 * 0.3 * 2 * 20 * 8, 2 * 0.3 * 2 * 20 * 4))
    assert (work.load_bytes, work.row_bytes, work.store_bytes) == (0, 2 * 3 * 16, 2 * 16)
    full, int4 = (decode_block(tiny(label), Layer(), 20, 20) for label in ("offload", "offload+int4"))
    assert int4.load_bytes == full.load_bytes * 0.28125
    assert int4.attention[:2] == full.attention and int4.attention[2] == Work(0, 13 * 2 * 4 * 40)
    # 20 tokens of 2 sequences, 2 heads: 1,600 scores, each 4 FLOPs an element of head_dim.
    work = prefill_block(tiny("offload+h2o"), Layer(), kept=4)
    assert work.attention == (Work(2 * 40 * 192, 2 * 192), Work(4 * 4 * 1600, 12 * 1600))
    assert (work.load_bytes, work.store_bytes) == (0, 2 * 4 * 16)
    assert prefill_block(tiny("offload+h2o"), Layer(is_dense=True), kept=4).store_bytes == 2 * 20 * 16


def test_layers_and_constants_are_those_of_the_harness():
    assert tiny("offload").layers == [Layer()] * 4
    assert tiny("offload+h2o").layers == [Layer(is_dense=True)] * 2 + [Layer()] * 2
    assert tiny("infinigen").layers == [Layer(True), Layer(True, True), Layer(predicts=True), Layer()]
    infinigen = InfiniGen()
    read = {cached: opt13b("infinigen").tokens(cached)[0] for cached in (100, 512, 768, 2048, 4000)}
    assert read == {100: infinigen.budget * 100, 512: 37, 768: 48.5, 2048: 73, 4000: 73}, "the paper's, capped"
    assert infinigen.dense_layers == 2 and infinigen.partial_weight_ratio == 0.3
    assert IntegerCodec("int4").bits_per_element(128) / 16 == INT4_SHARE
    h2o = opt13b("offload+h2o", gen_len=128)
    for cached in (30, 2000):
        assert h2o.tokens(cached)[0] == H2O().tokens_read(TokenCounts(cached, 1920, 2048), 2)


SHAPES = {path.stem: read_yaml(path)["shape"] for path in sorted((CONF_DIR / "model").glob("*.yaml"))}


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape["model_type"] in FFN_MATRICES])
def test_every_model_of_a_known_family_has_its_weights(name):
    """Without norms, biases and OPT's positions."""
    counted = count_weights(name, as_config(name, SHAPES[name]))
    assert load_shape(name).weight_bytes / 2 == pytest.approx(counted, rel=0.015)


def test_every_published_number_the_fit_and_its_errors_are_printed(capsys):
    assert main([]) == 0
    table, fitted, errors = capsys.readouterr().out.split("\n\n")
    _, *lines = table.splitlines()
    assert len(lines) == 29 and all(0.8 < float(line.split()[-1]) < 1.2 for line in lines)
    numbers = columns.published()
    metrics = set(numbers[numbers.figure.isin(published.FIGURES)].metric)
    inputs = {"tokens_above_threshold", "tokens_loaded", "partial_weight_memory_share", "partial_key_memory_share"}
    assert metrics - {word for line in lines for word in line.split()} == inputs
    assert re.search(r"fitted to all 29: matmul 0.36\d, memory 0.8[01]\d, row_fetch 0.8[23]\d", fitted)
    assert "used:             matmul 0.36, memory 0.81, row_fetch 0.83" in fitted and fitted.endswith(": 8.1%")
    found = [re.search(r"^(.*?) +\(.* ([\d.]+)% +([\d.]+)%$", line).groups() for line in errors.splitlines()[1:]]
    assert [name for name, _, _ in found] == ["fig14 and fig15", "fig16a", "fig16b", "fig18"]
    numbers = [float(number) for _, *pair in found for number in pair]
    assert numbers == pytest.approx([11.2, 18.6, 4.1, 7.0, 7.2, 8.7, 25.5, 48.9], abs=0.11)


def test_the_shipped_predictions_are_made_again(tmp_path, capsys):
    assert main(["--write", "--results-dir", str(tmp_path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [tmp_path / "tables" / f"{figure}-modelled.csv" for figure in published.FIGURES]
    for path in (*paths, *(path.with_suffix(".md") for path in paths)):
        assert path.read_bytes() == (SHIPPED / "tables" / path.name).read_bytes()
