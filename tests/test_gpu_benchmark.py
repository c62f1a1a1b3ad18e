"""`python -m benchmarks.gpu` on the CPU with a tiny model and under a fake GPU; the other timings of `benchmarks`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from fake_cuda import CUDA, FakeSlab, fake_gpu

from benchmarks import gpu, live
from harness.live import memory as pinned
from harness.live.memory import Tuning
from harness.results.record import read_record
from harness.settings.config import LatencyConfig
from harness.speed.timed_run import run_shared_prompt
from tests.composed import load
from tests.living import attach, tiny

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """The folders of which figures were asked for; an emulated link of 1 GB/s, settings composed once."""
    folders: list[Path] = []
    monkeypatch.setattr("plots.draw_figures", lambda folder: folders.append(folder) or [])
    monkeypatch.setattr(gpu, "load", load)
    monkeypatch.setattr("harness.speed.link_rate.measure_copy_rate", lambda: 62e9)
    return folders


def run(out: Path, *arguments: str, platform: str = "cpu") -> int:
    return gpu.main(["--platform", platform, "--out", str(out), *arguments])


def records(out: Path) -> list[dict]:
    return [read_record(path) for path in sorted((out / "runs" / "latency").glob("*/record.json"))]


def test_everything_is_measured_in_ordinary_runs_once(tmp_path, drawn, monkeypatch, capsys):
    labels = ("ideal", "infinigen+int4", "offload+h2o", "offload-pageable")
    monkeypatch.setattr(gpu, "SYSTEMS", labels)
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "rates.csv").open() as stream:
        rates = list(csv.DictReader(stream))
    assert [row["name"] for row in rates if row["part"] == "link"] == ["h2d", "d2h", "h2d with d2h"]
    gathers = [row["at"] for row in rates if row["part"] == "gather"]
    assert len(gathers) == len(gpu.ROWS) and "row_bytes 144, int4, head_dim 128" in gathers
    assert all(float(row["low"]) <= float(row["bytes_per_s"]) <= float(row["high"]) for row in rates)
    found = {(each["config"]["label"], each["metrics"]["prompt_len"]) for each in records(tmp_path)}
    assert found == {(label, prompt) for label in labels for prompt in (24, 48)}
    assert {each["config"]["model"]["weights"] for each in records(tmp_path)} == {"random"}
    assert drawn == [tmp_path] and (tmp_path / "tables" / "fig15.csv").is_file()
    assert (tmp_path / "tables" / "latency.csv").read_text().count("\n") == 1 + len(found)
    for label in labels[1:]:
        assert f"{label:18}host and device: logits differ by " in printed
        assert f"2 x 48      {label:18}" in printed
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.count("finished before, skipped") == len(found)


def test_the_floor_of_a_step_is_ideals_or_its_bytes_over_the_link():
    cell = {"batch_size": 2, "prompt_len": 48, "gen_len": 11, "d2h_bytes": 0, "link_ceiling_bytes_per_s": 1e9}
    steps = {"infinigen": (1e7, 0.003), "ideal": (0, 0.002), "offload": (4e7, 0.006)}
    measured = [
        {"config": {"label": label}, "metrics": cell | {"h2d_bytes": moved, "tpot_p50_s": step}}
        for label, (moved, step) in steps.items()
    ]
    assert [" ".join(line.split()[3:]) for line in gpu.render_floors(measured).splitlines()[1:]] == [
        "ideal 2.00 ms 0.0 MiB 2.00 ms 1.00",
        "infinigen 3.00 ms 1.0 MiB 2.00 ms 1.50",
        "offload 6.00 ms 3.8 MiB 4.00 ms 1.50",
    ]


def test_what_does_not_fit_into_the_minutes_is_skipped_with_a_line(tmp_path, capsys):
    assert run(tmp_path, "--minutes", "1e-6") == gpu.UNFINISHED
    lines = capsys.readouterr().out.splitlines()
    assert "link: skipped, estimated at 30 s, 0 s are left" in lines
    assert sum(": skipped, " in line for line in lines) == 3 + 2 * len(gpu.SYSTEMS)
    assert not (tmp_path / "runs").exists()


def test_a_failure_is_a_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def refuse(attached, prompt, cell, **settings):
        if cell.placement == "device":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return time_run(attached, prompt, cell, **settings)

    def breaks(*_):
        yield gpu.Rate("h2d", [1.0], "")
        raise RuntimeError("driver")

    from harness.speed.latency import time_run

    monkeypatch.setattr(gpu, "SYSTEMS", ("ideal", "offload"))
    monkeypatch.setattr(gpu, "gather_rates", lambda *_: iter(()))
    monkeypatch.setattr("harness.speed.latency.time_run", refuse)
    monkeypatch.setattr(gpu, "link_rates", breaks)
    monkeypatch.setattr(gpu, "equalities", lambda *_: iter([("offload: 1", False)]))
    assert run(tmp_path, "--shapes", "1x24") == gpu.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert {"link: failed, RuntimeError: driver", "equal: failed, 1 comparisons of two ways differ"} <= {*lines}
    (line,) = (line for line in lines if line.startswith("1 x 24 ideal: failed"))
    assert "out of memory: lower batch_size=1 or prompt_len=24" in line
    statuses = {each["config"]["label"]: each["status"] for each in records(tmp_path)}
    assert statuses == {"ideal": "failed", "offload": "finished"}
    assert "h2d" in (tmp_path / "rates.csv").read_text(), "what came before a failure stays"


def test_two_ways_that_differ_are_told(monkeypatch):
    monkeypatch.setattr(gpu, "SYSTEMS", ("ideal", "offload", "infinigen+reuse"))
    monkeypatch.setattr(gpu, "largest_difference", lambda *_: 1e-5)
    verdicts = list(gpu.equalities(torch.device("cpu"), gpu.link_rate("", torch.device("cpu"), 1.0)))
    assert [equal for _, equal in verdicts] == [False, True, True], "the last is of scores on coded keys"
    assert verdicts[0][0] == "offload           host and device: logits differ by 1e-05 (at most 0)"


def test_rates_of_a_gpu_go_through_its_kernels_and_copies(monkeypatch):
    monkeypatch.setattr(gpu, "PinnedSlab", FakeSlab)
    with fake_gpu() as trace:
        assert [rate.at for rate in gpu.link_rates(CUDA, 2**20, None)] == [f"bytes {2**20}"] * 2 + [f"bytes {2**21}"]
        gathers = list(gpu.gather_rates(CUDA, 2**22, Tuning()))
        assert trace.faults == []
        assert trace.link[None, "cudaMemcpy2DAsync"] == 4 * (gpu.REPEATS + 1), "one way, the other, both"
        assert trace.launches[None, "_move_rows"] == len(gathers) * (gpu.REPEATS + 1)
    locked, unlocked = [], []
    monkeypatch.setattr(gpu, "PinnedSlab", pinned.PinnedSlab)
    monkeypatch.setattr(pinned, "call_cuda", lambda name, address, num_bytes, flags: locked.append(num_bytes))
    monkeypatch.setattr(pinned, "_unlock", unlocked.append)
    (rate,) = gpu.pin_rates(torch.device("cpu"), 2**20)
    assert locked == [2**20] * (gpu.REPEATS + 1) and len(unlocked) == len(rate.samples) + 1, "anew each time"


def test_the_cells_of_a_gpu_are_settings_of_ordinary_runs():
    options = gpu.parse([])
    assert (options.platform, options.model, options.minutes) == ("cuda", "opt-13b", 8)
    for label in gpu.SYSTEMS:
        config = load([*gpu.cell_settings(options), f"label={label}", "batch_size=20", "prompt_len=1920"])
        assert config.latency == LatencyConfig(20, 1920, 128, 2, 5, 2) and config.platform.name == "cuda"
    assert gpu.SYSTEMS[0] == "ideal" and gpu.SYSTEMS[-1] == "offload-pageable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes 0: must be a number above 0"),
        (["--minutes", "nan"], "--minutes nan: must be a number above 0"),
        (["--shapes", "8*1920"], "--shapes 8*1920: must be batch size x prompt length"),
        (["--model", "opt-14b"], "opt-14b"),
        (["gen_length=3"], "the settings of the cells ("),
        (["--out", "file"], "file"),
        (["--platform", "cuda"], "--platform cuda: torch finds no CUDA device here; allowed: cpu"),
    ],
)
def test_refuses_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    assert gpu.main(["--platform", "cpu", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@with_gpu
def test_on_a_gpu_all_of_it_is_measured(tmp_path):
    tiny_cells = ["--model", "opt-125m", "--shapes", "2x48"]
    assert run(tmp_path, *tiny_cells, *gpu.TINY[1:], platform="cuda") == 0
    assert {each["metrics"]["source"] for each in records(tmp_path)} == {"measured"}
    assert "page-locking" in (tmp_path / "rates.csv").read_text()


def test_our_step_is_timed_against_transformers(capsys):
    model = tiny("gqa")
    with attach(model) as attached:
        prompt = run_shared_prompt(attached, torch.arange(3, 83).view(2, 40))
    ratio = live.compare(model, prompt, LatencyConfig(2, 40, 5, 1, 2, 1), rounds=3)
    printed = capsys.readouterr().out
    assert printed.count("  round ") == 3 and f"ours is {ratio:.2f} times as fast in the median round (" in printed
    with pytest.raises(SystemExit):
        live.main(["--model", "opt"])
    assert "--model opt: allowed: " in capsys.readouterr().err
    assert live.random_model("opt-125m", torch.device("meta"), num_hidden_layers=2).config.num_hidden_layers == 2
