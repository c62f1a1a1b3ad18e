"""How fast KV-cache offloading can be on this machine, and how near each system comes.

    python -m benchmarks.gpu                      results in outputs/gpu-<device>, in under 10 minutes on an H200
    python -m benchmarks.gpu --parts link,gather,pin
    python -m benchmarks.gpu --parts steps --shapes 8x1920 --labels ideal,infinigen
    python -m benchmarks.gpu --trace step.json.gz --labels infinigen2     a decode step under torch's profiler instead
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny model, emulated link
    python -m benchmarks.gpu --platform cpu --model smollm2-135m --shapes 8x1024 platform.link_gbps=0.3

Parts, in this order:

link      rate of plain copies between pinned host memory and the device: each way, and both ways at once
gather    rate of the row gather by row size
pin       rate at which host memory is page-locked; under CUDA only
steps     a decode step of every system whose transfers are counted (`harness.settings.systems`), shape by shape,
          against its floor: max(step of ideal, bytes over the link / its rate)

The steps are ordinary runs (`experiment=latency`): OUT/runs has their records, and those of a shape share a process, as
in a sweep. One that fails is a line, and the others go on. After `--minutes` no further run begins. The same command
repeats no run that is finished. OUT/rates.csv is written as results come, OUT/tables and OUT/figures at the end. Exit
code: 0; 1 for a bug; 2 where a part or run failed, or the time did not suffice. Whether a GPU computes right is what
`python run.py experiment=contract platform=cuda` says.

Weights are random, of the shape in conf/model; infinigen then selects up to its cap of 20 %. Ten steps of a run are
timed, two of pageable memory. The time it takes is worked out in `benchmarks/NOTES.md`.

A machine without a network needs PyTorch for CUDA, Triton, transformers, pandas, matplotlib, psutil, tabulate, jinja2
and filelock, and the wheels that the first line makes on a machine of the same Python; the second installs them:

    pip wheel --no-deps -w wheels . $(grep -E '^(antlr4|gguf|hydra-c|omega|pydan|annotated-t|typing)' requirements.lock)
    pip install --no-index --no-deps wheels/*.whl
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.gpu_parts.rates import Rate, gather_rates, link_rates, pin_rates
from benchmarks.gpu_parts.trace import trace_step
from harness.errors import UserError, exit_code, nearest, reason
from harness.files import write_atomic
from harness.model.load import require_kernels
from harness.results.record import read_record
from harness.run.all_runs import run_all
from harness.run.compose import load
from harness.run.runner import Run, report, require_devices
from harness.settings.config import RunConfig
from harness.settings.paths import RESULTS
from harness.settings.systems import COUNTED, LABELS, ON_A_DISK
from harness.speed.link_rate import link_rate

MIB = 2**20
PARTS = ("link", "gather", "pin", "steps")
ON_A_GPU = [label for label in COUNTED if label not in ON_A_DISK]
SYSTEMS = tuple(sorted(ON_A_GPU, key=lambda label: not LABELS[label].pinned))
"""Every system whose transfers are counted, the slowest, of pageable memory, last: time may run out."""
DEFAULTS = {"cuda": ("opt-13b", "8x1920,20x1920"), "cpu": (None, "2x48,1x24")}
"""Model and shapes by platform; no model is a tiny one of OPT's."""
TINY = [
    "model=opt-125m", "model.shape.num_hidden_layers=3", "model.shape.hidden_size=64", "model.shape.ffn_dim=128",
    "model.shape.word_embed_proj_dim=64", "model.shape.num_attention_heads=4", "model.shape.vocab_size=256",
    "gen_len=8", "warmup_steps=1", "timed_steps=2",
]  # fmt: skip
STEPS = ["gen_len=128", "warmup_steps=2", "timed_steps=5"]
PAGEABLE_STEPS = ["warmup_steps=1", "timed_steps=1"]


def rates(part: str, device: torch.device, out: Path) -> Iterator[Rate]:
    """The rates of a part."""
    on_gpu = device.type == "cuda"
    num_bytes = 512 * MIB if on_gpu else MIB // 4
    if part == "pin":
        return pin_rates(device, 8 * num_bytes)
    link = link_rate(out, device, None)
    if part == "gather":
        return gather_rates(device, num_bytes, link.tuning)
    return link_rates(device, num_bytes, None if on_gpu else link.bytes_per_s)


def keep_rates(part: str, found: Iterator[Rate], path: Path) -> None:
    """Print rates as they come, and keep them in a table, in place of earlier ones of the part."""
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["part"])
    rows = known[known["part"] != part].to_dict("records")
    for name, samples, at in found:
        low, value, high = min(samples), statistics.median(samples), max(samples)
        print(f"{name:14}{value / 1e9:8.3f} GB/s ({low / 1e9:.3f} to {high / 1e9:.3f}); {at}", flush=True)
        row = {"part": part, "name": name, "at": at, "bytes_per_s": value, "low": low, "high": high}
        rows.append(row | {"num_samples": len(samples)})
        write_atomic(path, pd.DataFrame(rows).to_csv(index=False))


def time_steps(options: argparse.Namespace, out: Path, until_s: float) -> None:
    """Time every run as an ordinary one, and show all steps up to then against their floor after each.

    until_s: when no further run begins, by `time.perf_counter`. Raises UserError where runs are left."""
    from plots import draw_figures

    ideal = []  # for the floors, also where it was timed by an earlier command
    configs = []
    for shape in options.shapes:
        configs += [run_config(options, shape, label, out) for label in options.labels]
        ideal.append(Run.of(run_config(options, shape, "ideal", out)))
    paths: list[Path] = []
    try:
        for path in run_all(configs):
            paths.append(path)
            if len(paths) < len(configs) and time.perf_counter() > until_s:
                raise UserError("--minutes are spent: runs are left; the same command goes on")
            shown = dict.fromkeys([*(run.path for run in ideal if run.is_finished()), *paths])
            print(f"\n{render_floors([read_record(path) for path in shown])}\n", flush=True)
    finally:
        if paths:
            print(report(paths), *draw_figures(out), sep="\n")


def run_config(options: argparse.Namespace, shape: str, label: str, out: Path) -> RunConfig:
    """Settings of a run."""
    batch, prompt = shape.split("x")
    of_run = [f"system={label}", f"batch_size={batch}", f"prompt_len={prompt}", f"results_dir={out}"]
    slow = [] if LABELS[label].pinned else PAGEABLE_STEPS
    return load([*run_settings(options), *slow, *of_run])


def run_settings(options: argparse.Namespace) -> list[str]:
    """Settings of every run."""
    given = TINY if options.model is None else [f"model={options.model}", *STEPS]
    calibration = "calibration.num_tokens=128"  # as a head has elements: random weights teach no more
    common = ["experiment=latency", "model.weights=random", f"platform={options.platform}", "repeats=2", calibration]
    return [*common, *given, *options.settings]


def render_floors(records: Sequence[dict[str, Any]]) -> str:
    """A line a run: its step, its bytes over the link, and the floor of the step.

    The floor is the longer of ideal's step at that shape and of the bytes over the link's rate.
    """
    ideal_s = {}
    lines = [f"{'shape':12}{'label':18}{'step':>12}{'over link':>14}{'floor':>12}{'step / floor':>14}"]
    for record in sorted(records, key=lambda record: record["config"]["label"] != "ideal"):
        metrics, label = record["metrics"], record["config"]["label"]
        shape, step_s = f"{metrics['batch_size']} x {metrics['prompt_len']}", metrics["tpot_p50_s"]
        if label == "ideal":
            ideal_s[shape] = step_s
        moved = (metrics["h2d_bytes"] + metrics["d2h_bytes"]) / (metrics["gen_len"] - 1)
        floor_s = max(ideal_s.get(shape, 0.0), moved / metrics["link_ceiling_bytes_per_s"])
        times = f"{moved / MIB:10.1f} MiB{1e3 * floor_s:9.2f} ms{step_s / floor_s:14.2f}"
        lines.append(f"{shape:12}{label:18}{1e3 * step_s:9.2f} ms{times}")
    return "\n".join(lines)


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads words between commas, of those that are allowed."""

    def read(text: str) -> list[str]:
        for word in text.split(","):
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none; {nearest(word, allowed)}")
        return text.split(",")

    return read


def shapes(text: str) -> list[str]:
    """Reads batch sizes and prompt lengths, such as 8x1920,20x1920."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text}: must be batch size x prompt length, as in 8x1920,20x1920")
    return text.split(",")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=tuple(DEFAULTS), default="cuda", help="cpu: emulated link")
    parser.add_argument("--out", metavar="DIR", help="folder of the results; default: outputs/gpu-<device>")
    parser.add_argument("--minutes", type=float, default=10, help="after which no further run begins, but the first")
    parser.add_argument("--parts", type=words(PARTS), metavar="link,...", help=f"default: {','.join(PARTS)}")
    parser.add_argument(
        "--labels", type=words(SYSTEMS), metavar="infinigen,...", help="default: all whose transfers are counted"
    )
    parser.add_argument("--model", help="a shape under conf/model; default: opt-13b, on the CPU a tiny one")
    parser.add_argument("--shapes", type=shapes, metavar="8x1920,...", help="batch size x prompt length")
    parser.add_argument("--trace", metavar="FILE", help="profile a decode step instead: first label, first shape")
    parser.add_argument("settings", nargs="*", help="settings of every run, as on run.py's command line")
    options = parser.parse_args(argv)
    model, default_shapes = DEFAULTS[options.platform]
    options.model, options.shapes = options.model or model, options.shapes or shapes(default_shapes)
    options.labels = options.labels or (["infinigen"] if options.trace else [*SYSTEMS])
    options.parts = options.parts or [part for part in PARTS if part != "pin" or options.platform == "cuda"]
    return options


def measure(options: argparse.Namespace) -> None:
    """Do what a command line asks for. Raises UserError where a part failed, once the others have run."""
    began_s = time.perf_counter()
    require_devices([load(run_settings(options))])  # before any work
    if options.platform == "cuda":
        require_kernels()
    device = torch.device(options.platform)
    out = Path(options.out or f"{RESULTS}/gpu-{_slug(device)}")
    if options.trace is not None:
        trace_step(run_config(options, options.shapes[0], options.labels[0], out), Path(options.trace))
        return
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in options.parts:
        if part == "steps":
            continue
        try:
            keep_rates(part, rates(part, device, out), out / "rates.csv")
        except Exception as error:
            print(f"{part}: failed, {reason(error)}", flush=True)
            failed.append(part)
    if "steps" in options.parts:
        time_steps(options, out, began_s + 60 * options.minutes)
    print(f"{time.perf_counter() - began_s:.0f} s; results in {out}")
    if failed:
        raise UserError(f"--parts {','.join(failed)}: failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; returns the exit code."""
    return exit_code(partial(measure, parse(argv)))


def _slug(device: torch.device) -> str:
    """The device's name as that of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
