"""`python -m benchmarks.gpu`, on the CPU at tiny shapes: what it writes, what it skips, what a failure leaves."""

import csv
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from benchmarks import live
from benchmarks.gpu import command, rates, steps
from benchmarks.gpu.plan import CPU, CUDA, LONG, PLANS, SYSTEMS, Shape
from benchmarks.gpu.report import Report
from harness.errors import UserError
from harness.offload import memory as pinned
from harness.offload.memory import Tuning
from harness.settings.speed import LatencyConfig
from harness.settings.systems import COUNTED, LABELS
from harness.speed.link_rate import LinkRate
from harness.tables import columns

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COPY_RATE = 62e9
SMALL = replace(CPU, first=(Shape("opt-tiny", 1, 24),), then=())


def run(out: Path, *arguments: str, platform: str = "cpu") -> tuple[int, dict]:
    code = command.main(["--platform", platform, "--out", str(out), *arguments])
    return code, json.loads((out / "gpu.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everything, once."""
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.speed.link_rate.measure_copy_rate", lambda: COPY_RATE)
        code, found = run(out)
    return SimpleNamespace(code=code, found=found, out=out)


@pytest.fixture(autouse=True)
def known_link(monkeypatch):
    """An emulated link of 1 GB/s."""
    monkeypatch.setattr("harness.speed.link_rate.measure_copy_rate", lambda: COPY_RATE)


def test_every_part_is_measured(whole):
    found = whole.found
    assert (whole.code, found["source"], found["schema"], found["minutes"]) == (0, "emulated", 1, 8)
    assert [(gap["part"], gap["kind"]) for gap in found["gaps"]] == [("pin", "not applicable")]
    by_part: dict[str, list[dict]] = {}
    for each in found["measurements"]:
        by_part.setdefault(each["part"], []).append(each)
    assert {*by_part} == {"link", "gather", "copies", "steps"}
    assert [each["name"] for each in by_part["link"]] == ["rate that bounds a step", "h2d", "d2h", "h2d with d2h"]
    rows = {(each["at"]["codec"], each["at"]["head_dim"]): each["at"]["row_bytes"] for each in by_part["gather"]}
    assert {*rows} == {*rates.ROWS} and (min(rows.values()), max(rows.values())) == (64, 2048)
    assert rows["int4", 128] == 144
    pieces = [(each["name"], each["at"]["piece_bytes"]) for each in by_part["copies"]]
    assert pieces == [(name, piece) for piece in rates.PIECES for name in ("copies", "gather")]


def test_every_number_has_a_unit_and_a_spread(whole):
    for each in whole.found["measurements"]:
        assert each["unit"] in ("B", "B/s", "s", "1")
        assert 0 <= each["low"] <= each["value"] <= each["high"], each
        assert each["num_samples"] >= 1
    (step,) = (
        each
        for each in whole.found["measurements"]
        if each["name"] == "step" and each["at"] == cell_of(Shape("opt-tiny", 2, 48), "offload")
    )
    assert (step["unit"], step["num_samples"]) == ("s", 2 * CPU.timed_steps)


def cell_of(shape, label):
    return {"model": shape.model, "batch_size": shape.batch, "prompt_len": shape.prompt, "label": label}


def test_every_cell_is_compared_with_its_bound(whole):
    cells = [cell_of(shape, label) for shape in (*CPU.first, *CPU.then) for label in shape.labels]
    values = {
        (each["name"], *each["at"].values()): each["value"]
        for each in whole.found["measurements"]
        if each["part"] == "steps"
    }
    (rate,) = (each["value"] for each in whole.found["measurements"] if each["name"] == "rate that bounds a step")
    for cell in cells:
        ideal = values["step", *(cell | {"label": "ideal"}).values()]
        step, moved, best, ratio = (
            values[name, *cell.values()] for name in ("step", "link a step", "best step", "step / best step")
        )
        assert best == max(ideal, moved / rate)
        assert ratio == pytest.approx(step / best)
        assert (moved == 0) == (cell["label"] == "ideal")


def test_the_machine_and_the_code_are_told(whole):
    told = whole.found["environment"]
    assert {"driver", "cuda", "device_name", "commit", "cpu", "memory_bytes", "pcie_generation"} <= told.keys()
    assert told["packages"]["torch"] and "triton" in told["packages"]
    assert {*told["code"]} == {"full", "h2o", "infinigen"}
    assert all({"code:method", "code:harness"} == {*digests} for digests in told["code"].values())
    assert whole.found["started"].startswith("20") and whole.found["seconds"] > 0


def read_rows(out, name):
    with (out / "tables" / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_cells_are_latency_tables_and_figures(whole):
    rows = read_rows(whole.out, "latency")
    assert tuple(rows[0]) == columns.names(columns.LATENCY)
    assert len(rows) == len(whole.found["latency"]) == len({row["run_id"] for row in rows}) == 3 * 8 + len(LONG)
    assert {(row["source"], row["platform"]) for row in rows} == {("emulated", "cpu")}
    assert {row["label"] for row in rows} == {*COUNTED}
    assert {row["prompt_len"] for row in read_rows(whole.out, "fig16a") if row["model"] == "opt-tiny"} == {"24", "48"}
    assert {row["batch_size"] for row in read_rows(whole.out, "fig14") if row["model"] == "opt-tiny"} == {"2"}
    assert not (whole.out / "tables" / "fig16b.csv").exists(), "no shape was timed with two models"
    for name in ("fig14", "fig15", "fig16a", "fig18"):
        assert (whole.out / "figures" / f"{name}.png").is_file()


def test_what_does_not_fit_into_the_minutes_is_skipped_with_a_line(tmp_path, capsys):
    code, found = run(tmp_path, "--minutes", "1e-6")
    assert code == command.UNFINISHED
    parts = ["link", "gather", "copies", *(shape.title for shape in (*CPU.first, *CPU.then)), "figures"]
    assert {gap["part"] for gap in found["gaps"] if gap["kind"] == "skipped"} == {*parts}
    printed = capsys.readouterr().out.splitlines()
    assert "link: skipped, estimated at 1 s, 0 s are left" in printed
    assert not found["latency"] and not (tmp_path / "tables").exists()


def test_a_cell_is_skipped_by_what_its_label_took_before(tmp_path):
    report = Report(tmp_path, torch.device("cpu"), 8, {})
    asked = []
    timing = steps.Steps(SMALL, report, lambda part, seconds, run: (asked.append(seconds), run()), LinkRate(1e9, None))
    timing.time_shape(Shape("opt-tiny", 1, 24, ("ideal",)))
    took = timing._s_per_byte["ideal"]
    timing.time_shape(Shape("opt-tiny", 2, 24, ("ideal",)))
    cache = 32 * 2 * 3 * 64 * 4  # tokens, K and V, layers, elements, fp32
    assert asked[0] == pytest.approx(cache * (1 / SMALL.pin_bytes_per_s + 6 / 1e9))
    assert took > 0 and asked[1] == pytest.approx(took * 2 * cache), "as the first shape's cell, twice as many bytes"


def test_a_failure_is_a_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def refuse(attached, prompt, label, *arguments, **settings):
        if label == "ideal":
            raise UserError("the KV cache needs 1.0 GiB")
        if label == "infinigen":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return measure(attached, prompt, label, *arguments, **settings)

    def breaks(*_):
        yield rates.Rate("h2d", [1.0], {})
        raise RuntimeError("driver")

    measure = steps.measure
    monkeypatch.setattr(steps, "measure", refuse)
    monkeypatch.setattr(rates, "link_rates", breaks)
    monkeypatch.setitem(PLANS, "cpu", SMALL)
    code, found = run(tmp_path)
    assert code == command.FAILED
    failed = {gap["part"]: gap["reason"] for gap in found["gaps"] if gap["kind"] == "failed"}
    assert failed == {
        "link": "RuntimeError: driver",
        "opt-tiny 1 x 24 ideal": "the KV cache needs 1.0 GiB",
        "opt-tiny 1 x 24 infinigen": "OutOfMemoryError: CUDA out of memory. Tried to allocate",
    }
    assert "opt-tiny 1 x 24 ideal: failed, the KV cache needs 1.0 GiB" in capsys.readouterr().out.splitlines()
    assert {row["label"] for row in found["latency"]} == {*COUNTED} - {"ideal", "infinigen"}
    measured = {(each["part"], each["name"]) for each in found["measurements"]}
    assert ("link", "h2d") in measured and ("copies", "gather") in measured, "what came before a failure stays"
    values = {each["name"]: each["value"] for each in found["measurements"] if each["at"].get("label") == "offload"}
    (rate,) = (each["value"] for each in found["measurements"] if each["name"] == "rate that bounds a step")
    assert values["best step"] == values["link a step"] / rate, "the link alone bounds it"


def test_rows_cross_as_this_device_does_it_fastest(tmp_path, monkeypatch):
    """In gathers, copies and cells alike."""
    tuned, used = Tuning(num_programs=32), []

    def using(module, name):
        make = getattr(module, name)

        def made(*arguments, **settings):
            used.append((name, settings["tuning"]))
            return make(*arguments, **settings)

        monkeypatch.setattr(module, name, made)

    using(rates, "KVStore")
    using(live, "open_link")
    monkeypatch.setattr(command, "link_rate", lambda *_: LinkRate(1e9, None, tuned))
    monkeypatch.setattr(rates, "link_rates", lambda *_: iter(()))
    monkeypatch.setitem(PLANS, "cpu", SMALL)
    assert run(tmp_path)[0] == 0
    assert {*used} == {("KVStore", tuned), ("open_link", tuned)}


def test_what_a_failure_held_is_gone_before_memory_is_given_back(tmp_path, monkeypatch):
    class Held:
        pass

    def fails():
        held = Held()
        frames.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory")

    frames: list[weakref.ref] = []
    found = []
    benchmark = command.Benchmark(SMALL, Report(tmp_path, torch.device("cpu"), 8, {}), time.perf_counter())
    monkeypatch.setattr(benchmark, "_release", lambda: found.append(frames[0]()))
    benchmark.attempt("part", 0, fails)
    assert found == [None]


def test_a_prompt_that_cannot_stay_in_memory_runs_for_every_cell(tmp_path, monkeypatch):
    def refuse(*_):
        raise UserError("too large")

    prompts = []
    measure = steps.measure

    def seen(attached, prompt, *arguments, **settings):
        prompts.append(prompt)
        return measure(attached, prompt, *arguments, **settings)

    monkeypatch.setattr(steps, "require_shared_prompt", refuse)
    monkeypatch.setattr(steps, "measure", seen)
    report = Report(tmp_path, torch.device("cpu"), 8, {})
    timing = steps.Steps(SMALL, report, lambda part, seconds, run: run(), LinkRate(1e9, None))
    timing.time_shape(Shape("opt-tiny", 2, 24, ("ideal", "offload")))
    assert [tuple(prompt.shape) for prompt in prompts] == [(2, 24)] * 2
    assert len(report.rows) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes 0: must be a number above 0"),
        (["--minutes", "nan"], "--minutes nan: must be a number above 0"),
        (["--out", "taken"], "--out taken: has runs, whose tables would be replaced; choose another folder"),
        (["--out", "file"], "file"),
    ],
)
def test_refuses_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken" / "runs").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert command.main(["--platform", "cpu", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --platform cuda: torch finds no CUDA device here; allowed: cpu")
    assert not (tmp_path / "out").exists()


def test_measured_is_what_a_gpu_measured(tmp_path):
    reports = {name: Report(tmp_path, torch.device(name), 8, {}) for name in ("cpu", "cuda")}
    assert {name: report.source for name, report in reports.items()} == {"cpu": "emulated", "cuda": "measured"}


def test_the_plan_for_a_gpu_is_that_of_the_figures():
    shapes = (*CUDA.first, *CUDA.then)
    assert {*SYSTEMS} == {*COUNTED} and not LABELS[SYSTEMS[-1]].pinned
    assert all(shape.labels[0] == "ideal" for shape in shapes)
    paper = [shape for shape in shapes if shape.model == "opt-13b"]
    assert [shape.batch for shape in paper if shape.prompt == 1920] == [8, 4, 20, 16], "the most important first"
    assert {shape.prompt for shape in paper if shape.batch == 8} == {384, 896, 1408, 1920}
    for shape in shapes:
        file = Path(__file__).parents[1] / "conf" / "model" / f"{CUDA.models[shape.model].shape}.yaml"
        limit = yaml.safe_load(file.read_text())["shape"]["max_position_embeddings"]
        assert shape.prompt + CUDA.gen_len <= limit
        LatencyConfig(shape.batch, shape.prompt, CUDA.gen_len, CUDA.warmup_steps, CUDA.timed_steps, 2)


def test_page_locking_is_timed_anew_each_time(monkeypatch):
    locked, unlocked = [], []
    monkeypatch.setattr(pinned, "_lock", lambda address, num_bytes: locked.append(num_bytes))
    monkeypatch.setattr(pinned, "_unlock", unlocked.append)
    (rate,) = rates.pin_rates(torch.device("cpu"), 2**20)
    assert (rate.name, rate.at) == ("page-locking", {"bytes": 2**20})
    assert locked == [2**20] * rates.REPEATS and len(unlocked) == len(rate.samples) == rates.REPEATS
    assert min(rate.samples) > 0


@gpu
def test_on_a_gpu_all_of_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(PLANS, "cuda", replace(CPU, pin_bytes=2**20))
    code, found = run(tmp_path, platform="cuda")
    assert (code, found["source"], found["gaps"]) == (0, "measured", [])
    assert {row["source"] for row in read_rows(tmp_path, "latency")} == {"measured"}
    assert "pin" in {each["part"] for each in found["measurements"]}
    assert found["environment"]["device_name"] and found["environment"]["cuda"]
