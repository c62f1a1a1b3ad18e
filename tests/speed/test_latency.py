"""Speed runs: what is counted and timed, every label, refusals, sweeps in child processes, interruptions."""

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import TINY
from harness import files
from harness.decode.graphs import Marked, StepGraphs
from harness.decode.links import open_link
from harness.decode.timeline import SEGMENTS
from harness.errors import UserError
from harness.model import load as models
from harness.model.attach import attach
from harness.model.load import LoadedModel, RandomIds, Resources
from harness.model.prompts import calibrate
from harness.replay.setup import Setup
from harness.results.columns import TABLES
from harness.results.metrics import LARGEST, OF_DISK, UNMET_BUDGET
from harness.run import all_runs
from harness.run.cli import main
from harness.run.compose import load
from harness.run.runner import Run
from harness.settings.config import LatencyConfig
from harness.settings.schema import options
from harness.settings.systems import COUNTED, LABELS, ON_A_DISK
from harness.speed import latency as speed
from harness.speed.timed_run import TimedRun, run_shared_prompt, time_run
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2
from methods.shadowkv import ShadowKV
from tests.conftest import refused
from tests.dying import die
from tests.runs import calls_of, rows_at

BATCH, PROMPT = 2, 40
ON_A_LINK = [label for label in COUNTED if label not in ON_A_DISK]
SHAPE = LatencyConfig(BATCH, PROMPT, gen_len=12, warmup_steps=2, timed_steps=4, repeats=2)
TIMED = 2 * [2, 3, 4, 5]
"""The steps that are timed, of both repeats; before step s, PROMPT + s tokens are cached."""
METHODS = {"full": Full, "h2o": H2O, "infinigen": InfiniGen, "infinigen2": InfiniGen2}
FAST = 1e9
"""Bytes/s of a link that costs nothing here."""

ONE_RUN = [
    "experiment=latency", "model.weights=random", "batch_size=2", "prompt_len=40", "gen_len=12", "timed_steps=4",
    "platform.link_gbps=1", "calibration.num_tokens=40",
]  # fmt: skip


@pytest.fixture
def timed(tiny_gqa):
    """Metrics and samples of a timed run of a method on the tiny model."""
    ids = torch.randint(3, 256, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))

    def run(method, shape=SHAPE, *, codec=None, gpu_cache=0, bytes_per_s=FAST, overlap=True, shared=True, **options):
        with attach(tiny_gqa) as attached, open_link(attached.device, bytes_per_s=bytes_per_s, overlap=overlap) as link:
            setup = Setup(method, codec, calibrate(attached, InfiniGen(), ids[0].tolist()), gpu_cache)
            prompt = run_shared_prompt(attached, ids, shape.repeats) if shared else ids
            return time_run(attached, prompt, TimedRun(setup, shape, **options), link=link)

    return run


HEADS, HEAD_DIM = 2, 16
EXACT = BATCH * HEADS * 2 * HEAD_DIM * 4  # a token's K and V in fp32, over batch and KV heads
OWN = 8 * 4 * EXACT  # the current tokens of the timed steps, in all layers
CACHED = sum(PROMPT + s for s in TIMED)  # tokens that a layer uses in the timed steps which reads all of them
SELECTED = EXACT * (2 * CACHED + 8 * 2 * 5)
COLUMNS = EXACT * 2 * CACHED * 5 // 32  # 5 of K's and V's 32 columns
PROJECTION = EXACT * 2 * 8 * 16 * 5 // 32  # 16 x 5 numbers a step and layer


@pytest.mark.parametrize(
    ("method", "options", "h2d_bytes", "d2h_bytes", "read_there"),
    [
        (InfiniGen(fixed_fetch=5), {}, SELECTED, OWN, COLUMNS + PROJECTION),
        (Full(), {"placement": "device"}, 0, 0, EXACT * 4 * CACHED),
    ],
    ids=["infinigen", "ideal"],
)
def test_bytes_are_those_computed_by_hand(timed, method, options, h2d_bytes, d2h_bytes, read_there):
    metrics, samples = timed(method, **options)
    read = h2d_bytes + read_there + OWN
    for name, num_bytes in {"h2d_bytes": h2d_bytes, "d2h_bytes": d2h_bytes, "device_read_bytes": read}.items():
        assert samples[f"timed_{name}"] == num_bytes
        assert metrics[name] == round(num_bytes * 11 / 8), "of gen_len - 1 steps"


def test_a_link_of_known_rate_takes_its_time_and_without_overlap_all_of_it_is_waited_for(timed):
    slow = 2e7
    metrics, samples = timed(Full(), bytes_per_s=slow)
    moved, steps_s = samples["timed_h2d_bytes"] + samples["timed_d2h_bytes"], sum(map(sum, samples["step_s"]))
    busy_s = moved / metrics["link_bytes_per_s"]
    # The first layer's rows of the first timed step may have crossed before; no step is faster than the rest of them.
    assert 0.9 * moved / slow <= busy_s <= steps_s + 0.05
    assert metrics["link_utilisation"] == pytest.approx(busy_s / steps_s, rel=0.3)
    assert 0 < metrics["exposed_transfer_s"] < metrics["decode_s"]
    assert metrics["host_kv_bytes"] == 4 * (PROMPT + 12) * EXACT and metrics["hit_rate"] == 0
    waiting, _ = timed(Full(), bytes_per_s=slow, overlap=False)
    all_of_it = 11 / 8 * sum(4 * (PROMPT + s) for s in TIMED) * EXACT / slow
    assert waiting["exposed_transfer_s"] >= 0.95 * all_of_it
    assert metrics["link_utilisation"] <= 1.0001


def test_metrics_are_those_of_the_raw_times(timed):
    metrics, samples = timed(Full())
    assert metrics["total_s"] == pytest.approx(metrics["ttft_s"] + metrics["decode_s"])
    steps_s = [seconds for repeat in samples["step_s"] for seconds in repeat]
    assert metrics["decode_s"] == pytest.approx(statistics.fmean(steps_s) * 11)
    assert metrics["decode_tokens_per_s"] == pytest.approx(BATCH / statistics.fmean(steps_s))
    first, second = (dense + begun for dense, begun in zip(samples["dense_s"], samples["begin_s"], strict=True))
    assert metrics["ttft_s"] == pytest.approx((first + second) / 2) and min(samples["dense_s"]) > 0
    assert metrics["ttft_spread_s"] == pytest.approx(abs(first - second) / 2**0.5)
    medians = [statistics.median(repeat) for repeat in samples["step_s"]]
    assert metrics["tpot_spread_s"] == pytest.approx(abs(medians[0] - medians[1]) / 2**0.5)
    assert metrics["prediction_s"] is None, "full predicts nothing"
    block = metrics["attention_s"] + metrics["ffn_s"] + metrics["transfer_s"] + metrics["other_s"]
    assert 0.3 * metrics["tpot_p50_s"] < 4 * block < 3 * metrics["tpot_p50_s"]


@pytest.mark.parametrize("steps", [4, 9], ids=["marked", "no room"])
def test_the_parts_of_replayed_steps_are_those_of_marked_ones(timed, monkeypatch, steps):
    """No event lies within a step that a graph runs. Two steps are run by Python, 4 or 9 timed, of 11."""
    segments = dict.fromkeys(SEGMENTS, 0.25) | {"attention": 0.5}
    monkeypatch.setattr(StepGraphs, "step", lambda graphs, ids: graphs.session.run_step(ids))

    def marked_step(graphs, ids):
        return Marked(graphs.session.decode_step(ids), segments, busy_s=1.0, span_s=2.0)

    monkeypatch.setattr(StepGraphs, "marked_step", marked_step)
    shape = replace(SHAPE, timed_steps=steps)
    metrics, samples = timed(Full(), shape, graphs=True)
    by_python, of_python = timed(Full(), shape)
    assert (samples["steps_by"], of_python["steps_by"]) == ("CUDA graphs", "Python")
    of_parts = ["attention_s", "ffn_s", "transfer_s", "other_s", "link_utilisation", "exposed_transfer_s"]
    found = [metrics[name] for name in of_parts]
    is_marked = steps == 4
    assert found == ([0.125, 0.0625, 0.0625, 0.0625, 0.5, 0.25 * 11] if is_marked else [None] * 6)
    assert (metrics["link_bytes_per_s"] is None) != is_marked
    assert all(by_python[name] is not None for name in of_parts)
    counted = ["h2d_bytes", "d2h_bytes", "device_kv_bytes", "num_timed_steps"]
    assert [metrics[name] for name in counted] == [by_python[name] for name in counted]


@pytest.mark.parametrize(
    ("method", "why"),
    [(Full(), ""), (ShadowKV(), "ShadowKV does not say that its steps are replayable")],
    ids=["no GPU", "shadowkv"],
)
def test_graphs_that_cannot_be_had_leave_steps_to_python_and_say_why(timed, method, why):
    metrics, samples = timed(method, graphs=True)
    assert samples["steps_by"].startswith(f"Python: {why}") and metrics["other_s"] > 0


@pytest.mark.parametrize("shared", [True, False])
def test_each_repeat_begins_anew_with_the_same_prompt(timed, shared):
    options = {"gpu_cache": 1, "shared": shared}
    once, _ = timed(InfiniGen(), replace(SHAPE, repeats=1), **options)
    metrics, samples = timed(InfiniGen(), replace(SHAPE, repeats=3), **options)
    assert [len(repeat) for repeat in samples["step_s"]] == [4, 4, 4] and metrics["num_timed_steps"] == 12
    assert len(samples["begin_s"]) == 3 and len({*samples["dense_s"]}) == (3 if shared else 1)
    assert once["ttft_spread_s"] is once["tpot_spread_s"] is None
    for name in ("h2d_bytes", "budget", "hit_rate", "device_kv_bytes"):
        assert once[name] == pytest.approx(metrics[name]), "repeats read the same rows"


def test_a_method_that_runs_the_prompt_itself_does_not_count_the_shared_pass(timed):
    class Sees(H2O):
        needs_inputs = True

    _, samples = timed(Sees())
    assert samples["dense_s"] == [0, 0] and min(samples["begin_s"]) > 0


def test_device_memory_is_weights_and_what_is_placed_there(timed, tiny_gqa):
    weights = sum(weight.nbytes for weight in tiny_gqa.parameters())

    def beside_weights(method, **placed) -> int:
        metrics, _ = timed(method, **placed)
        assert metrics["device_kv_bytes"] == metrics["peak_device_bytes"] - weights
        return metrics["device_kv_bytes"]

    assert beside_weights(Full(), placement="device") == 4 * (PROMPT + 12) * EXACT
    plain, caching = (beside_weights(InfiniGen(fixed_fetch=5), gpu_cache=gpu_cache) for gpu_cache in (0, 1))
    buffers, lists = 2 * (5 + 1) * EXACT, 2 * BATCH * 2 * 5 * 2 * 8  # with room for the own row; int64, of 2 KV heads
    assert caching == plain + buffers + lists, "in each of two layers"


def test_streamed_weights_are_bytes_of_their_own_and_leave_the_device(timed):
    whole, of_whole = timed(InfiniGen(), shared=False)
    some, of_some = timed(InfiniGen(), weights_on_device=0.7, shared=False)
    square = 64 * 64 * 4
    away = [5 * square // 2, 5 * square // 2, 3 * square, 5 * square // 2]  # 30 % of a layer's 9 matrices and norms
    layers = 4 * (9 * square + 2 * 64 * 4)
    assert of_some["timed_weight_bytes"] == 8 * sum(away) and some["weights_on_device"] == 1 - sum(away) / layers
    assert some["weight_bytes"] == 11 * sum(away), "of gen_len - 1 steps"
    assert whole["weight_bytes"] is whole["weights_on_device"] is None
    assert of_whole["dense_s"] == [0, 0] and min(of_whole["begin_s"]) > 0, "a prompt of its own"
    for name in ("h2d_bytes", "d2h_bytes", "device_kv_bytes"):
        assert some[name] == whole[name]
    crossed = sum(of_some[f"timed_{name}_bytes"] for name in ("h2d", "d2h", "weight"))
    busy_s = some["link_utilisation"] * sum(map(sum, of_some["step_s"]))
    assert some["link_bytes_per_s"] == pytest.approx(crossed / busy_s, rel=0.3)
    assert some["peak_device_bytes"] == whole["peak_device_bytes"] - sum(away) + 2 * max(away)


def chosen(label: str) -> str:
    """The word that chooses a system, which a local disk may hold too."""
    name = label.removeprefix("disk+")
    name = name if name in options("system") else "offload" + label.removeprefix("disk")
    return f"system={name}"


def test_systems_are_named_after_what_they_are():
    assert set(LABELS) - set(COUNTED) == {"uvm", "uvm+h2o"}
    assert {chosen(label) for label in LABELS} == {f"system={name}" for name in options("system")}
    for label, system in LABELS.items():
        platform = "cpu" if label in COUNTED else "cuda"
        on_disk = ["experiment=disk"] if label in ON_A_DISK else ["experiment=latency"]
        config = load([*on_disk, f"platform={platform}", chosen(label)])
        assert config.label == label and not config.label_given
        assert isinstance(config.method, METHODS[system.method]), label
        assert (config.placement, config.codec) == (system.placement, system.codec)
        assert config.gpu_cache == system.gpu_cache
        assert (config.platform.overlap, config.platform.pinned) == (system.overlap, system.pinned)
    assert load(["experiment=latency", *ON_CUDA, "system=uvm", "platform.device_gib=48"]).platform.device_gib == 48


ON_CUDA = ["platform=cuda"]
REFUSED = {
    "gen_len=10: has 9 decode steps; warmup_steps [+] timed_steps are 10": ["gen_len=10"],
    "placement=host: Oracle selects by the true scores": ["method=oracle"],
    "platform.overlap=false: placement=device uses no link": ["placement=device", "platform.overlap=false"],
    "method.eviction=artifact: .*not decoded live": [
        "method=infinigen-pool", "method.pool_frac=0.5", "method.eviction=artifact",
    ],
    "platform.link_gbps=3: sets the emulated link of platform=cpu": [*ON_CUDA, "platform.link_gbps=3"],
    "label=ideal: .* this run is offload": ["system=ideal", "placement=host", "label=ideal"],
    "placement=managed: needs platform=cuda; allowed on cpu: device": ["placement=managed"],
    "gpu_cache=2: placement=managed fetches no": [*ON_CUDA, "placement=managed", "gpu_cache=2"],
    "overlap=false: .*no link; use placement=host": [*ON_CUDA, "placement=managed", "platform.overlap=false"],
    "platform.device_gib=48: is for placement=managed": [*ON_CUDA, "system=offload", "platform.device_gib=48"],
    "platform.graphs=auto: is for experiment=latency and generate on platform=cuda": ["platform.graphs=auto"],
    "warmup_steps=2: must be at least 4 with platform.graphs=auto": [*ON_CUDA, "platform.graphs=auto"],
    "platform.weights_on_device=0.5: an emulated device": ["platform.device_gib=48", "platform.weights_on_device=0.5"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message):
    with refused(message):
        load(["experiment=latency", *REFUSED[message]])


@pytest.fixture
def tiny_runs(monkeypatch, tmp_path, tiny_gqa):
    """A run on a tiny model with random weights and a short text, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    loaded = LoadedModel(tiny_gqa, None, "tiny", 512, random_ids=RandomIds(256, start=1))
    monkeypatch.setattr(models, "load_model", lambda config: loaded)
    monkeypatch.setattr("harness.data.text.offline_text", lambda: "A cache of keys and values. " * 99)
    return ONE_RUN


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def records() -> list[dict]:
    return [*map(read, Path("outputs/runs/latency").glob("*/record.json"))]


def test_every_label_makes_a_record_and_a_complete_row_and_the_dense_pass_runs_once(tiny_runs, monkeypatch):
    passes = calls_of(monkeypatch, speed, "run_shared_prompt")
    assert main(["-m", *tiny_runs, f"system={','.join(ON_A_LINK)}"]) == 0
    rows = {row["label"]: row for row in rows_at("outputs/tables/latency.csv")}
    assert set(rows) == set(ON_A_LINK)
    for label, row in rows.items():
        absent = {"weights_on_device", "weight_bytes"}
        absent |= {"link_bytes_per_s", "link_utilisation", "hit_rate"} if label == "ideal" else set()
        absent |= {"prediction_s"} if "infinigen" not in label else set()
        absent |= {"tokens_evicted"} if "h2o" not in label else set()
        absent |= {column.name for column in (UNMET_BUDGET, *OF_DISK, *LARGEST)}
        absent |= {"settings", "shipped", "context", "memory_bytes"}
        assert {name for name, value in row.items() if value in ("", None)} | {"settings"} == absent, label
        assert tuple(row) == TABLES["latency"]
        assert (row["source"], row["platform"], row["batch_size"]) == ("emulated", "cpu", 2)
        assert float(row["exposed_transfer_s"]) == 0 or label != "ideal"
    assert float(rows["offload+int4"]["budget"]) < 1 == float(rows["offload"]["budget"])
    assert float(rows["infinigen+reuse"]["h2d_bytes"]) < float(rows["infinigen"]["h2d_bytes"])
    assert [(*ids.shape, repeats) for _, ids, repeats in passes] == [(2, 40, 2)]
    assert {path.stem for path in Path("outputs/tables").glob("fig*.csv")} == {"fig14", "fig15", "fig16a", "fig18"}
    (record,) = (each for each in records() if each["config"]["label"] == "offload")
    samples = record["samples"]
    assert [len(repeat) for repeat in samples["step_s"]] == [4, 4] and len(samples["segments"]) == 8
    assert record["metrics"]["link_ceiling_bytes_per_s"] == 1e9
    assert samples["copy_bytes_per_s"] is None, "the rate was given"
    assert samples["num_compute_threads"] == max(1, len(os.sched_getaffinity(0)) - 1)
    assert torch.get_num_threads() == 1, "put back"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompt_len=600"], "prompt_len=600 and gen_len=12: tiny takes at most 512 tokens"),
        (["batch_size=9000000"], "lower batch_size, prompt_len or gen_len"),
        (["method=full", "method.dense_layers=4"], "method.dense_layers=4: must be < 4 layers"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_line(tiny_runs, overrides, message, capsys):
    assert main([*tiny_runs, *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and len(line) < 300
    assert [record["status"] for record in records()] == ["failed"]


def test_a_grid_runs_each_shape_in_a_process_of_its_own_and_resumes(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    labels = ["offload", "infinigen"]
    configs = [load([*TINY, *ONE_RUN, f"system={label}"]) for label in labels]
    resources = Resources()
    paths = list(all_runs.run_all(configs, resources=resources))
    assert [each["config"]["label"] for each in map(read, paths)] == labels
    dense = {tuple(each["samples"]["dense_s"]) for each in map(read, paths)}
    assert len(dense) == 1 and len({*dense.pop()}) == 2, "a prefill for each repeat, in one process"
    monkeypatch.setattr(all_runs, "run_apart", lambda *_: pytest.fail("nothing is left to run"))
    assert list(all_runs.run_all(configs)) == paths
    assert "2 of 2 runs were finished before" in capsys.readouterr().out


def test_a_child_that_dies_fails_its_runs_and_no_others(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(all_runs, "_child", die)
    runs = [Run.of(load(["experiment=latency", f"system={label}"])) for label in ("ideal", "offload")]
    outcomes = list(all_runs.run_apart(runs, Resources()))
    assert [type(outcome) for outcome in outcomes] == [UserError, UserError]
    assert "exit code 3" in str(outcomes[0]) and "lower batch_size" in str(outcomes[0])


def test_a_host_that_shows_too_little_is_refused_until_the_settings_say_more(tiny_runs, monkeypatch, capsys):
    shown = SimpleNamespace(total=2**20, available=2**18)
    monkeypatch.setattr(files.psutil, "virtual_memory", lambda: shown)
    words = [*tiny_runs, "system=offload"]
    assert main(words) == 2
    refusal = capsys.readouterr().err.strip()
    assert refusal.startswith("error: the shared prompt with a cache needs 0.0 GiB of cpu memory")
    assert refusal.endswith("; set platform.host_gib where the host has more than it shows") and "\n" not in refusal
    assert main([*words, "platform.host_gib=1"]) == 0
    # It decides no number: the record is that of the run without it.
    assert "finished before" not in capsys.readouterr().out
    assert main(words) == 0 and "finished before" in capsys.readouterr().out
    (row,) = rows_at("outputs/tables/latency.csv")
    assert "host_gib" not in (row["settings"] or "")
