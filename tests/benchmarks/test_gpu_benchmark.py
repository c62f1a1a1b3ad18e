"""`python -m benchmarks.gpu` on the CPU with a tiny model and under a fake GPU."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu
from harness.decode import memory as pinned
from harness.model.load import Resources
from harness.results.record import read_record
from harness.run import runner
from harness.run.all_runs import run_apart
from harness.run.compose import load
from harness.settings.config import LatencyConfig
from tests.fake_cuda import CUDA, FakeSlab, fake_gpu
from tests.runs import refusal_of

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def here(runs, resources):
    """Runs in this process, where the tests' changes are."""
    for todo in runs:
        try:
            yield runner.run(todo, resources)
        except Exception as error:
            yield error


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """The folders of which figures were asked for; settings composed once, an emulated link."""
    folders: list[Path] = []
    monkeypatch.setattr("plots.draw_figures", lambda folder: folders.append(folder) or [])
    monkeypatch.setattr(gpu, "load", load)
    monkeypatch.setattr("harness.run.all_runs.run_apart", here)
    monkeypatch.setattr("harness.speed.link_rate.measure_copy_rate", lambda device: 62e9)
    return folders


def run(out: Path, *arguments: str, platform: str = "cpu") -> int:
    return gpu.main(["--platform", platform, "--out", str(out), *arguments])


def records(out: Path) -> list[dict]:
    return [read_record(path) for path in sorted((out / "runs" / "latency").glob("*/record.json"))]


def test_everything_is_measured_in_ordinary_runs_once(tmp_path, drawn, monkeypatch, capsys):
    labels = ("ideal", "infinigen+int4", "offload-pageable")
    monkeypatch.setattr(gpu, "SYSTEMS", labels)
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "rates.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows if row["part"] == "link"] == ["h2d", "d2h", "h2d with d2h"]
    gathers = [row["at"] for row in rows if row["part"] == "gather"]
    assert len(gathers) == len(gpu.ROWS) and "row_bytes 144, int4, head_dim 128" in gathers
    assert all(float(row["low"]) <= float(row["bytes_per_s"]) <= float(row["high"]) for row in rows)
    found = {(each["config"]["label"], each["metrics"]["prompt_len"]) for each in records(tmp_path)}
    assert found == {(label, prompt) for label in labels for prompt in (24, 48)}
    assert {each["config"]["model"]["weights"] for each in records(tmp_path)} == {"random"}
    assert drawn == [tmp_path] and (tmp_path / "tables" / "fig15.csv").is_file()
    assert (tmp_path / "tables" / "latency.csv").read_text().count("\n") == 1 + len(found)
    assert printed.count("2 x 48      ideal ") == len(found), "all runs are shown after each"
    places = [printed.index(words) for words in ("h2d ", "gather ", "2 x 48 ")]
    assert places == sorted(places), "rates come first"
    assert run(tmp_path) == 0
    assert f"{len(found)} of {len(found)} runs were finished before, skipped" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "gather_rates", lambda *_: iter([gpu.Rate("gather", [1.0], "new")]))
    assert run(tmp_path, "--parts", "gather") == 0
    table = (tmp_path / "rates.csv").read_text()
    assert table.count("\ngather,") == 1 and table.count("\nlink,") == 3, "in place of the part's earlier rates"


def test_the_floor_of_a_step_is_ideals_or_its_bytes_over_the_link():
    common = {"batch_size": 2, "prompt_len": 48, "gen_len": 11, "d2h_bytes": 0, "link_ceiling_bytes_per_s": 1e9}
    steps = {"infinigen": (1e7, 0.003), "ideal": (0, 0.002), "offload": (4e7, 0.006)}
    measured = [
        {"config": {"label": label}, "metrics": common | {"h2d_bytes": moved, "tpot_p50_s": step}}
        for label, (moved, step) in steps.items()
    ]
    assert [" ".join(line.split()[3:]) for line in gpu.render_floors(measured).splitlines()[1:]] == [
        "ideal 2.00 ms 0.0 MiB 2.00 ms 1.00",
        "infinigen 3.00 ms 1.0 MiB 2.00 ms 1.50",
        "offload 6.00 ms 3.8 MiB 4.00 ms 1.50",
    ]


def test_no_run_begins_after_the_minutes(tmp_path, capsys):
    assert run(tmp_path, "--minutes", "0", "--parts", "steps", "--shapes", "1x24") == 2
    assert "--minutes are spent: runs are left; the same command goes on" in capsys.readouterr().err
    assert len(records(tmp_path)) == 1


def test_a_part_that_fails_is_a_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def breaks(*_):
        yield gpu.Rate("h2d", [1.0], "")
        raise RuntimeError("driver")

    monkeypatch.setattr(gpu, "link_rates", breaks)
    monkeypatch.setattr(gpu, "gather_rates", lambda *_: iter([gpu.Rate("gather", [1.0], "")]))
    assert run(tmp_path, "--parts", "link", "gather") == 2
    assert "link: failed, RuntimeError: driver" in capsys.readouterr().out.splitlines()
    table = (tmp_path / "rates.csv").read_text()
    assert "h2d" in table and "gather" in table, "what came before a failure stays"


def spoilt(pipe):
    """A process in which every run ends with a bug that names it, as after a CUDA error."""
    while pipe.recv():
        pipe.send(RuntimeError(str(os.getpid())))


def test_after_a_bug_the_next_run_has_a_new_process(monkeypatch):
    monkeypatch.setattr("harness.run.all_runs._child", spoilt)
    one, two = map(str, run_apart(["one", "two"], Resources()))
    assert one != two


def test_a_decode_step_is_traced(tmp_path, capsys):
    file = tmp_path / "made" / "step.json.gz"
    assert run(tmp_path, "--trace", str(file), "--shapes", "1x24") == 0
    printed = capsys.readouterr().out
    assert "a step without the profiler" in printed and "aten::" in printed
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == gpu.STEP]
    assert len(steps) == 1, "the first profile is left out"
    assert not (tmp_path / "runs").exists(), "instead of the parts"


def test_a_device_is_busy_once_where_streams_overlap():
    times = [("a", 0, 4), ("b", 2, 3), ("c", 3, 6), (gpu.STEP, 0, 20), ("d", 9, 10), ("host", 0, 20)]
    events = []
    for name, start, end in times:
        kind = DeviceType.CPU if name == "host" else DeviceType.CUDA
        events.append(SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end)))
    assert gpu.busy_s(SimpleNamespace(events=lambda: events)) == pytest.approx(7e-6)


def test_rates_of_a_gpu_go_through_its_kernels_and_copies(monkeypatch):
    monkeypatch.setattr(gpu, "PinnedSlab", FakeSlab)
    with fake_gpu() as trace:
        assert [rate.at for rate in gpu.link_rates(CUDA, 2**20, None)] == [f"bytes {2**20}"] * 2 + [f"bytes {2**21}"]
        gathers = list(gpu.gather_rates(CUDA, 2**22))
        assert trace.faults == []
        assert trace.link[None, "cudaMemcpy2DAsync"] == 4 * (gpu.REPEATS + 1), "one way, the other, both"
        assert trace.launches[None, "_move_rows"] == len(gathers) * (gpu.REPEATS + 1)
    locked, unlocked = [], []
    monkeypatch.setattr(gpu, "PinnedSlab", pinned.PinnedSlab)
    monkeypatch.setattr(pinned, "call_cuda", lambda name, address, num_bytes, flags: locked.append(num_bytes))
    monkeypatch.setattr(pinned, "_unlock", unlocked.append)
    (rate,) = gpu.pin_rates(torch.device("cpu"), 2**20)
    assert locked == [2**20] * (gpu.REPEATS + 1) and len(unlocked) == len(rate.samples) + 1, "anew each time"


def test_the_runs_of_a_gpu_are_ordinary_ones():
    options = gpu.parse([])
    assert (options.platform, options.model, options.minutes) == ("cuda", "opt-13b", 10)
    for label in gpu.SYSTEMS:
        config = load([*gpu.run_settings(options), f"system={label}", "batch_size=20", "prompt_len=1920"])
        shape = LatencyConfig(20, prompt_len=1920, gen_len=128, warmup_steps=2, timed_steps=5, repeats=2)
        assert config.latency == shape and config.platform.name == "cuda"
    assert gpu.SYSTEMS[0] == "ideal" and gpu.SYSTEMS[-1] == "offload-pageable"


def test_refuses_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refusal_of(gpu.main, ["--platform", "cuda"], capsys)
    assert "platform=cuda: torch finds no CUDA device here; allowed: cpu" in said


@with_gpu
def test_on_a_gpu_all_of_it_is_measured(tmp_path):
    tiny_runs = ["--model", "opt-125m", "--shapes", "2x48", "--labels", "ideal", "infinigen+int4"]
    assert run(tmp_path, *gpu.TINY[1:], *tiny_runs, platform="cuda") == 0
    assert {each["metrics"]["source"] for each in records(tmp_path)} == {"measured"}
    assert "page-locking" in (tmp_path / "rates.csv").read_text()
