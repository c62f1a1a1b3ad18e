"""The cost model: timelines and counts worked by hand, limits, units, and how far it is from the paper."""

from __future__ import annotations

import csv
import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.model.shape import FFN_MATRICES, ModelShape, load_shape, read_yaml
from harness.paper.costmodel import counts, fit, hardware, published, schemes
from harness.paper.costmodel.__main__ import main
from harness.paper.costmodel.case import Case
from harness.paper.costmodel.counts import Layer, Work, decode_block, layers_of, prefill_block
from harness.paper.costmodel.hardware import FITTED, Efficiency, load_platform
from harness.paper.costmodel.overlap import BlockTimes, block_ends
from harness.paper.costmodel.predict import predict
from harness.paper.costmodel.published import FIGURES
from harness.paper.costmodel.schemes import SCHEMES, tokens_read
from harness.settings.choices import CONF_DIR
from harness.settings.systems import LABELS
from harness.tables.columns import LATENCY, OPTIONAL, PUBLISHED_CSV, names
from methods.base import Method, Row
from methods.codec import Codec
from methods.h2o import H2O
from methods.infinigen import InfiniGen

A6000 = load_platform("a6000-pcie3")
TINY = ModelShape("tiny", 4, 8, 2, 1, 4, 16, 3, 10, 2)
"""Gated FFN, grouped queries: 192 attention weights, 384 FFN weights, 16 bytes a cached token and layer."""


def tiny(label: str, **settings) -> Case:
    sizes = {"batch_size": 2, "prompt_len": 20, "gen_len": 5} | settings
    return Case(platform=sizes.pop("platform", A6000), shape=TINY, label=label, **sizes)


def opt13b(label: str, **settings) -> Case:
    sizes = {"batch_size": 8, "prompt_len": 1920, "gen_len": 3} | settings
    return Case(platform=A6000, shape=load_shape("opt-13b"), label=label, **sizes)


# the timeline


def test_a_task_waits_for_its_resource_and_for_one_other_task():
    """Loads run 0-3 and, after the prediction 0-1 and the first load, 3-4; attention waits for its load, 3-5."""
    blocks = [BlockTimes(load=3, prediction=1, attention=2, ffn=0), BlockTimes(load=1, attention=0, ffn=0)]
    assert block_ends(blocks, "block") == [5, 5]
    assert block_ends([blocks[0]._replace(attention=0.5), blocks[1]], "block") == [3.5, 4]


def test_a_slow_link_under_flexgens_schedule_hides_the_ffn_only():
    """Loads run 0-10, 12-22, 24-34; attention follows each, the FFN runs beside the next."""
    assert block_ends([BlockTimes(load=10, attention=2, ffn=3)] * 3, "ffn") == [15, 27, 39]


def test_a_fast_link_hides_behind_the_block_once_the_prediction_is_made():
    """Loads run 0-4, 4-8, 10-14; predictions 0-1, 9-10, 15-16; no attention waits after the first."""
    blocks = [BlockTimes(load=4, prediction=1, attention=2, ffn=3)] * 3
    assert block_ends(blocks, "block") == [9, 15, 21]


def test_without_overlap_everything_adds_up():
    block = BlockTimes(load=4, prediction=1, attention=2, ffn=3, store=0.5)
    assert block_ends([block, block._replace(other=1)], "none") == [10.5, 22]


def test_a_store_delays_the_next_load_but_no_compute():
    """Loads run 0-1, 3-4 (after the first store, 2-3); attention 1-2, 4-5."""
    blocks = [BlockTimes(load=1, attention=1, ffn=2, store=1)] * 2
    assert block_ends(blocks, "ffn") == [4, 7]
    assert block_ends(blocks, "block") == [4, 7]


# counts


def test_decode_block_of_opt_13b_by_hand():
    """Batch 8 after 2,000 tokens: 5,120 squared is 26,214,400; K and V of a token are 20,480 bytes."""
    shape = load_shape("opt-13b")
    work = decode_block(SCHEMES["offload"], shape, Layer(), batch_size=8, cached=2000, read=2000)
    assert work.attention == (
        Work(2 * 8 * 4 * 26_214_400, 2 * 4 * 26_214_400),
        Work(4 * 5120 * 8 * 2001, 20_480 * 8 * 2001),
    )
    assert work.ffn == (Work(2 * 8 * 8 * 26_214_400, 2 * 8 * 26_214_400),)
    assert (work.load_bytes, work.row_bytes, work.store_bytes) == (327_680_000, 0, 163_840)


def test_decode_block_with_few_kv_heads_by_hand():
    work = decode_block(SCHEMES["infinigen"], TINY, Layer(rehearses=True), batch_size=2, cached=20, read=3)
    assert work.attention == (Work(2 * 2 * 192, 2 * 192), Work(4 * 8 * 8, 16 * 8))
    assert work.ffn == (Work(2 * 2 * 384, 2 * 384),)
    weights, keys = work.prediction
    assert weights == pytest.approx((2 * 2 * 0.3 * 64, 2 * 0.3 * 64))
    assert keys == pytest.approx((2 * 0.3 * 2 * 20 * 8, 2 * 0.3 * 2 * 20 * 4))
    assert (work.load_bytes, work.row_bytes, work.store_bytes) == (0, 2 * 3 * 16, 2 * 16)


def test_int4_moves_less_and_pays_for_it():
    full, int4 = (
        decode_block(SCHEMES[label], TINY, Layer(), batch_size=2, cached=20, read=20)
        for label in ("offload", "offload+int4")
    )
    assert int4.load_bytes == full.load_bytes * 0.28125
    assert int4.attention[:2] == full.attention and int4.attention[2] == Work(0, 13 * 2 * 4 * 40)


def test_prefill_block_by_hand():
    """20 tokens of 2 sequences; 2 heads: 1,600 scores, each 4 FLOPs an element of head_dim."""
    work = prefill_block(SCHEMES["offload+h2o"], TINY, Layer(), batch_size=2, prompt_len=20, kept=4)
    assert work.attention == (Work(2 * 40 * 192, 2 * 192), Work(4 * 4 * 1600, 12 * 1600))
    assert (work.load_bytes, work.store_bytes) == (0, 2 * 4 * 16)
    exempt = prefill_block(SCHEMES["offload+h2o"], TINY, Layer(exempt=True), batch_size=2, prompt_len=20, kept=4)
    assert exempt.store_bytes == 2 * 20 * 16


def test_layers():
    assert layers_of(SCHEMES["offload"], TINY) == [Layer()] * 4
    assert layers_of(SCHEMES["offload+h2o"], TINY) == [Layer(exempt=True)] * 2 + [Layer()] * 2
    rehearsing = [Layer(exempt=True), Layer(True, True), Layer(rehearses=True), Layer()]
    assert layers_of(SCHEMES["infinigen"], TINY) == rehearsing


def test_infinigen_reads_the_papers_counts_or_a_trace_and_never_more_than_the_cap():
    scheme = SCHEMES["infinigen"]
    read = {cached: tokens_read(scheme, cached, 4096) for cached in (100, 512, 768, 2048, 4000)}
    assert read == {100: 20, 512: 37, 768: 48.5, 2048: 73, 4000: 73}
    assert [tokens_read(scheme, 100, 128, count) for count in (0.2, 12.5, 50)] == [1, 12.5, 20]


def test_constants_are_those_of_the_harness():
    infinigen = InfiniGen()
    assert Method().num_exempt_layers == SCHEMES["infinigen"].num_exempt_layers == 2
    assert infinigen.partial_weight_ratio == schemes.partial_weight_ratio() == 0.3
    assert tokens_read(SCHEMES["infinigen"], 100, 128, 99) == infinigen.max_fetch_frac * 100 == 20
    assert Codec("int4").bits_per_element(128) / 16 == counts.INT4_SHARE
    for cached in (30, 2000):
        assert tokens_read(SCHEMES["offload+h2o"], cached, 2048) == H2O().tokens_read(Row(cached, 1920, 2048), 2)


def test_schemes_are_the_systems_of_a_speed_comparison():
    """Where the system cannot overlap, the scheme does not, and a page fault overlaps with nothing."""
    for label, scheme in SCHEMES.items():
        assert scheme.system is LABELS[label]
        assert (scheme.system.overlap and scheme.placement != "managed") or scheme.overlap == "none"
    placements = {label: SCHEMES[label].placement for label in ("uvm", "offload", "offload-pageable", "ideal")}
    assert list(placements.values()) == ["managed", "pinned", "pageable", "device"]


def test_the_cost_model_starts_light():
    """The report reads the figures of the cost model; methods are loaded when something is predicted."""
    code = "import sys, harness.model.shape, harness.paper.costmodel.fit; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=CONF_DIR.parent, capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stdout + result.stderr


# hardware and shapes


NAMED_BY = {  # qwen2.5-coder's file holds the tied head a second time
    "phi3-mini": "3.8b", "qwen2.5-coder-0.5b": "0.63b", "phi4": "14.7b", "mistral-small": "23.6b",
}  # fmt: skip
MODEL_TYPES = {
    path.stem: read_yaml(path)["shape"]["model_type"] for path in sorted((CONF_DIR / "model").glob("*.yaml"))
}


@pytest.mark.parametrize("name", [name for name, model_type in MODEL_TYPES.items() if model_type in FFN_MATRICES])
def test_every_model_of_a_known_family_has_a_shape(name):
    """Its parameters are what the name says, to 15 %."""
    number, unit = re.search(r"([\d.]+)([bm])\b", NAMED_BY.get(name, name)).groups()
    billions = float(number) / (1 if unit == "b" else 1000)
    assert load_shape(name).weight_bytes / 2e9 == pytest.approx(billions, rel=0.15)


MODELLED = [
    path.stem for path in sorted((CONF_DIR / "platform").glob("*.yaml")) if "kind: modelled" in path.read_text()
]


@pytest.mark.parametrize("name", MODELLED)
def test_every_platform_has_plausible_rates(name):
    """Compute is far above memory, memory above host memory and the link; pageable copies are slower than pinned."""
    platform = load_platform(name)
    assert platform.name == name and platform.source
    assert 100 < platform.flops_per_s / platform.memory_bytes_per_s < 500
    assert 30 < platform.memory_bytes_per_s / platform.link_bytes_per_s < 70
    assert 0.25 < platform.pageable_bytes_per_s / platform.link_bytes_per_s < 0.5


# predictions


@pytest.mark.parametrize("label", ["offload", "offload-pageable"])
def test_an_infinite_link_is_ideal(label):
    fast = replace(A6000, link_bytes_per_s=1e30, host_channel_bytes_per_s=1e30)
    predicted, ideal = predict(tiny(label, platform=fast)), predict(tiny("ideal"))
    assert predicted.total_s == pytest.approx(ideal.total_s, rel=1e-9)
    assert predicted.exposed_transfer_s == pytest.approx(0, abs=1e-9 * ideal.total_s)


@pytest.mark.parametrize("label", ["offload", "offload-pageable", "offload+int4", "infinigen"])
def test_without_overlap_a_step_is_its_compute_and_its_bytes(label):
    """The second of two steps: what it adds to the bytes, in and out, over the link's rate, is what compute waits."""
    case = opt13b(label, overlap="none", efficiency=replace(FITTED, row_fetch=1.0))
    both, first = predict(case), predict(replace(case, gen_len=2))
    moved = both.h2d_bytes + both.d2h_bytes - first.h2d_bytes - first.d2h_bytes
    link = A6000.pageable_bytes_per_s if label == "offload-pageable" else A6000.link_bytes_per_s
    assert both.exposed_transfer_s - first.exposed_transfer_s == pytest.approx(moved / link, rel=1e-6)
    assert predict(replace(case, overlap=None)).prefill_s <= both.prefill_s


@pytest.mark.parametrize("label", list(SCHEMES))
def test_more_overlap_is_never_slower(label):
    totals = [predict(opt13b(label, overlap=overlap)).total_s for overlap in ("none", "ffn", "block")]
    assert totals == sorted(totals, reverse=True)


def test_steady_state_of_offload_is_transfer_and_attention():
    """The link of Fig 18 is never idle but for the attention: 8 * 2,046 tokens of 20,480 bytes at 12.4 GB/s."""
    predicted = predict(opt13b("offload", gen_len=128))
    assert predicted.block_s == pytest.approx(8 * 2046 * 20_480 / 12.4e9 + predicted.block["attention"], rel=2e-3)
    assert list(predicted.block) == ["attention", "ffn", "prediction", "other", "transfer"]


def test_units_and_columns_of_a_row():
    predicted = predict(opt13b("infinigen", gen_len=5))
    row = predicted.row("fig15")
    assert set(row) == {*names(LATENCY)} - {*OPTIONAL} and row["source"] == "modelled"
    assert row["total_s"] == row["prefill_s"] + row["decode_s"]
    assert row["decode_s"] == pytest.approx(math.fsum(predicted.step_s)) and len(predicted.step_s) == 4
    assert row["tokens_per_s"] == pytest.approx(8 * 5 / row["total_s"])
    assert sum(row[f"{name}_s"] for name in predicted.block) == pytest.approx(predicted.block_s)
    dense, rows = (
        2 * sum(range(1920, 1924)),
        38 * sum(tokens_read(SCHEMES["infinigen"], t, 0) for t in range(1920, 1924)),
    )
    assert row["h2d_bytes"] == pytest.approx(8 * 20_480 * (dense + rows), abs=1)
    assert row["d2h_bytes"] == 8 * 20_480 * 40 * 1924
    assert row["kv_frac"] == pytest.approx((dense + rows) / (40 * sum(range(1920, 1924))), rel=1e-6)
    assert A6000.link_bytes_per_s * FITTED.row_fetch < row["link_bytes_per_s"] < A6000.link_bytes_per_s
    assert predict(opt13b("infinigen", overlap="block")).row("x")["label"] == "infinigen (overlap block)"


def test_kv_frac_of_the_others():
    fractions = {label: predict(opt13b(label)).kv_frac for label in ("offload", "offload+int4", "ideal")}
    assert fractions == {"offload": 1, "ideal": 1, "offload+int4": pytest.approx((2 + 38 * 0.28125) / 40)}


def test_a_trace_replaces_the_papers_counts():
    paper = predict(opt13b("infinigen"))
    assert predict(opt13b("infinigen", trace=(300.0, 300.0))).total_s > paper.total_s
    counted = tuple(tokens_read(SCHEMES["infinigen"], cached, 1923) for cached in (1920, 1921))
    assert predict(opt13b("infinigen", trace=counted)) == replace(paper, case=opt13b("infinigen", trace=counted))


def test_managed_memory_thrashes_only_where_it_does_not_fit():
    """25.7 GB of weights and 33.6 GB of cache exceed 51.5 GB at batch 20, at batch 12 (20.1 GB) they do not."""
    fits, thrashes = (predict(opt13b("uvm", batch_size=batch, gen_len=128)) for batch in (12, 20))
    assert fits.exposed_transfer_s == pytest.approx(0, abs=1e-6)
    touched = 40 * 629_145_600 + 40 * 20 * 20_480 * 2046  # weights and cache
    assert thrashes.step_s[-1] == pytest.approx(2 * touched / 12.4e9, rel=0.02)
    assert predict(opt13b("uvm+h2o", batch_size=20, gen_len=128)).exposed_transfer_s == pytest.approx(0, abs=1e-6)


def test_weights_in_host_memory_cross_the_link_in_each_step():
    """The paper puts 30 % of OPT-30B there: 0.74 GB of a block, 48 blocks, on a link that is never idle."""
    paper = Case(A6000, load_shape("opt-30b"), "offload", batch_size=4, prompt_len=1920, gen_len=3)
    assert paper.host_block_bytes == pytest.approx(0.3 * 24 * 7168**2)
    roomy = replace(paper, platform=load_platform("h100-pcie5"))
    assert roomy.host_block_bytes == 0
    longer = predict(replace(roomy, host_weight_frac=0.3)).step_s[-1] - predict(roomy).step_s[-1]
    assert longer == pytest.approx(48 * paper.host_block_bytes / 4.96e10, rel=1e-3)
    with pytest.raises(UserError, match=r"host_weight_frac=0\.1: must be in \[0\.23, 1\] for opt-30b on a6000-pcie3"):
        replace(paper, host_weight_frac=0.1)


# beside the paper


@pytest.fixture(scope="module")
def comparisons():
    return published.calibrate()


def test_every_published_number_is_within_20_percent(comparisons):
    assert len(comparisons) == 29
    off = [
        f"{row.figure} {row.series} {row.metric}: {row.ratio:.2f}" for row in comparisons if abs(row.ratio - 1) > 0.2
    ]
    assert not off
    assert published.error(comparisons) < 0.083


def test_every_time_and_speedup_of_the_file_is_compared(comparisons):
    """What is left out is an input of the model, or a size."""
    with PUBLISHED_CSV.open() as lines:
        metrics = {row["metric"] for row in csv.DictReader(lines) if row["figure"] in published.FIGURES}
    left_out = {"tokens_above_threshold", "tokens_loaded", "partial_weight_memory_share", "partial_key_memory_share"}
    assert metrics - {row.metric for row in comparisons} == left_out


@pytest.mark.parametrize("name", ["matmul", "memory", "row_fetch"])
def test_no_efficiency_moved_alone_fits_better(comparisons, name):
    for step in (-0.02, 0.02):
        moved = published.calibrate(replace(FITTED, **{name: getattr(FITTED, name) + step}))
        assert published.error(moved) > published.error(comparisons)


def test_repeated_numbers_follow_from_the_others(comparisons):
    """Each by its arithmetic, as far as the rounding of what it is made of lets it."""
    independent = [row for row in comparisons if row.independent]
    assert len(independent) == 20 and len(comparisons) - len(independent) == len(published.REPEATED)
    known = {(row.figure, row.series, row.x, row.metric): row.published for row in comparisons}

    def rate(label: str, batch: int) -> float:
        return known["fig15", label, str(batch), "tokens_per_s"]

    infinigen_s = 20 * 128 / rate("infinigen", 20)
    follows = {
        ("fig14", label, "total_latency"): 20 * 128 / rate(label, 20)
        for label in ("infinigen", "offload+h2o", "offload+int4")
    }
    follows["fig14", "infinigen", "speedup_min"] = rate("infinigen", 20) / rate("offload+h2o", 20)
    follows["fig14", "infinigen", "speedup_max"] = known["fig14", "uvm", "20", "total_latency"] / infinigen_s
    follows["fig15", "infinigen", "speedup_min"] = rate("infinigen", 4) / rate("offload+h2o", 4)
    ideal = known["fig18", "ideal", "8", "block_latency"]
    for label in ("infinigen", "offload+h2o", "offload"):
        follows["fig18", label, "slowdown_vs_ideal"] = known["fig18", label, "8", "block_latency"] / ideal
    repeated = {(row.figure, row.series, row.metric): row.published for row in comparisons if not row.independent}
    assert follows == pytest.approx(repeated, rel=4e-3) and set(repeated) == set(published.REPEATED)


def test_the_fit_gives_the_committed_constants():
    """To two digits, and to its tolerance from a start far away."""
    assert {name: round(value, 2) for name, value in vars(fit.fit()).items()} == vars(FITTED)
    far = fit.fit(start=Efficiency(0.5, 0.6, 0.95))
    assert vars(far) == pytest.approx(vars(fit.fit()), rel=fit.TOLERANCE)


def test_a_fit_to_the_independent_numbers_is_near(comparisons):
    """Better on them than the committed one, and how far the constants move says how well they are known."""
    found = fit.fit(independent_only=True)
    refitted, committed = (
        published.error([row for row in rows if row.independent]) for rows in (published.calibrate(found), comparisons)
    )
    assert refitted < committed
    for name, value in vars(found).items():
        assert value == pytest.approx(getattr(FITTED, name), rel=0.15)


def test_figures_left_out_of_the_fit_are_predicted_less_well(comparisons):
    """Fig 18 alone tells the memory rate from the rest."""
    results = {result.figures: result for result in fit.held_out()}
    assert sorted(name for figures in results for name in figures) == sorted(FIGURES)
    errors = {figures[-1]: published.error(result.comparisons) for figures, result in results.items()}
    assert errors == pytest.approx({"fig15": 0.11, "fig16a": 0.04, "fig16b": 0.07, "fig18": 0.25}, abs=0.01)
    assert results[("fig18",)].worst == pytest.approx(0.49, abs=0.01)
    for figures, result in results.items():
        in_sample = [row for row in comparisons if row.figure in figures]
        assert published.error(result.comparisons) > published.error(in_sample)
    everything = [row for result in results.values() for row in result.comparisons]
    assert published.error(everything) > published.error(comparisons)
    assert published.error([row for row in comparisons if row.independent]) == pytest.approx(0.086, abs=0.001)


def test_the_command_prints_a_line_per_number_and_a_figures_rows(capsys, comparisons):
    assert main(["--calibrate"]) == 0
    table, fitted, errors = capsys.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert len(lines) == 1 + len(comparisons) and not any(line.endswith("*") for line in lines)
    assert "8.1% over all 29 numbers, 8.6% over the 20 independent ones" in fitted
    assert len(errors.splitlines()) == 1 + len(fit.LEFT_OUT)
    assert main(["--figure", "fig18", "--platform", "rtx4090-pcie4"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["label"] for row in rows] == [*published.OFFLOADED, "ideal"]
    assert {row["platform"] for row in rows} == {"rtx4090-pcie4"}


def test_every_figure_has_a_table_of_its_rows(tmp_path, capsys):
    assert main(["--write", "--results-dir", str(tmp_path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [tmp_path / "tables" / f"{figure}-modelled.csv" for figure in FIGURES]
    before = [path.read_bytes() for path in paths]
    for path, (figure, cells) in zip(paths, FIGURES.items(), strict=True):
        rows = list(csv.DictReader(path.open()))
        assert list(rows[0]) == list(names(LATENCY)) and {row["source"] for row in rows} == {"modelled"}
        assert {row["experiment"] for row in rows} == {figure}
        read = [(row["label"], row["model"], int(row["batch_size"])) for row in rows]
        assert read == [(cell.label, cell.model, cell.batch_size) for cell in cells]
        titles = re.findall("^## (.*)$", path.with_suffix(".md").read_text(), re.MULTILINE)
        assert titles == [f"{model} on a6000-pcie3, modelled" for model in dict.fromkeys(cell.model for cell in cells)]
    published.write_tables(tmp_path)
    assert [path.read_bytes() for path in paths] == before
    (tmp_path / "file").touch()
    assert main(["--write", "--results-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: results_dir: ")


# refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "infinigem"}, "label=infinigem: did you mean 'infinigen'?"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"gen_len": 1}, "gen_len=1: must be at least 2"),
        ({"trace": (1.0,)}, "trace: 1 steps, must be gen_len - 1 = 4"),
        ({"host_weight_frac": 1.5}, r"host_weight_frac=1.5: must be in \[0.00, 1\]"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        tiny(**({"label": "offload"} | settings))


def test_bad_names_and_rates_are_refused(capsys, monkeypatch, tmp_path):
    assert main(["--figure", "fig51"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: figure=fig51: did you mean .*'fig15'.*\? allowed: fig14, .*, fig18\n", said)
    with pytest.raises(UserError, match="platform=a6000: did you mean 'a6000-pcie3'"):
        load_platform("a6000")
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "cuda.yaml").write_text("name: cuda\nkind: measured\n")
    monkeypatch.setattr(hardware, "CONF_DIR", tmp_path)
    with pytest.raises(UserError, match="platform=cuda: is measured"):
        load_platform("cuda")
    monkeypatch.undo()
    with pytest.raises(UserError, match="model=opt-14b"):
        load_shape("opt-14b")
    with pytest.raises(UserError, match="model=qwen3-next: the cost model knows opt, .*, and not qwen3_next"):
        load_shape("qwen3-next")
    with pytest.raises(UserError, match=r"efficiency\.memory=1\.2: must be in \(0, 1\]"):
        Efficiency(0.5, 1.2, 0.5)
    with pytest.raises(UserError, match=r"platform\.link_bytes_per_s=0 of a6000-pcie3"):
        replace(A6000, link_bytes_per_s=0.0)
