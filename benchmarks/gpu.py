"""How fast KV-cache offloading can be on this machine, and how near each system comes.

    python -m benchmarks.gpu                      results in outputs/gpu-<device>, in under 10 minutes on an H200
    python -m benchmarks.gpu --parts link gather pin
    python -m benchmarks.gpu --parts steps --shapes 8x1920 --labels ideal infinigen
    python -m benchmarks.gpu --trace step.json.gz --labels infinigen2     a decode step under torch's profiler instead
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny model, emulated link
    python -m benchmarks.gpu platform.link_gbps=0.3 --platform cpu --model smollm2-135m --shapes 8x1024

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
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from harness.decode.links import open_link
from harness.decode.memory import PinnedSlab
from harness.decode.session import LiveSession
from harness.decode.store import Chosen, KVStore, RowFormat, indices
from harness.errors import UserError, exit_code, reason
from harness.files import write_atomic
from harness.model.load import Resources, require_kernels
from harness.results.record import read_record
from harness.run.all_runs import run_all
from harness.run.compose import load
from harness.run.runner import report, require_devices
from harness.settings.codecs import codec_named
from harness.settings.config import RunConfig
from harness.settings.paths import RESULTS
from harness.settings.systems import COUNTED, LABELS, ON_A_DISK
from harness.speed.generate import live
from harness.speed.latency import decode_rows, prompt_ids
from harness.speed.link_rate import idle_s, link_rate

MIB, GIB = 2**20, 2**30
PARTS = ("link", "gather", "pin", "steps")
ON_A_GPU = [label for label in COUNTED if label not in ON_A_DISK]
SYSTEMS = tuple(sorted(ON_A_GPU, key=lambda label: not LABELS[label].pinned))
"""Every system whose transfers are counted, the slowest, of pageable memory, last: time may run out."""
DEFAULTS = {"cuda": ("opt-13b", ["8x1920", "20x1920"]), "cpu": (None, ["2x48", "1x24"])}
"""Model and shapes by platform; no model is a tiny one of OPT's."""
TINY = [
    "model=opt-125m", "model.shape.num_hidden_layers=3", "model.shape.hidden_size=64", "model.shape.ffn_dim=128",
    "model.shape.word_embed_proj_dim=64", "model.shape.num_attention_heads=4", "model.shape.vocab_size=256",
    "gen_len=8", "warmup_steps=1", "timed_steps=2",
]  # fmt: skip
STEPS = ["gen_len=128", "warmup_steps=2", "timed_steps=5"]
PAGEABLE_STEPS = ["warmup_steps=1", "timed_steps=1"]
REPEATS = 5
"""Of a rate."""
HEAD_DIM, ROW_BYTES = 128, 512
"""Of fp16 rows, K and V side by side."""
CAPACITY, KEPT = 2048, 409
"""Slots of a head, and the 20 % of them that a gather takes."""
ROWS = (
    *(("fp16", head_dim) for head_dim in (16, 32, 64, 128, 256, 512)),  # 64 B to 2 KiB
    *((codec, head_dim) for codec in ("int8", "int4") for head_dim in (64, 128)),
)
WARM_UP = 3
"""Steps before the profiled one; the last of them is timed without the profiler."""
SHOWN = 30
"""Kernels of the profile's table."""
STEP = "decode step"


# Rates


class Rate(NamedTuple):
    """Bytes/s of each repeat. at: the conditions that tell it from others of its part."""

    name: str
    samples: list[float]
    at: str


def rates(part: str, device: torch.device, out: Path) -> Iterator[Rate]:
    """The rates of a part."""
    on_gpu = device.type == "cuda"
    num_bytes = 512 * MIB if on_gpu else MIB // 4
    if part == "pin":
        return pin_rates(device, 8 * num_bytes)
    if part == "gather":
        return gather_rates(device, num_bytes)
    link = link_rate(out, device, None)
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


def link_rates(device: torch.device, num_bytes: int, bytes_per_s: float | None) -> Iterator[Rate]:
    """The rates of one copy of `num_bytes` each way, and of both at once, whose bytes count together.

    bytes_per_s: the emulated link's, None under CUDA. The emulated link is one for both directions; under CUDA each
    direction has a stream of its own.
    """
    slots = num_bytes // ROW_BYTES
    with ExitStack() as stack:
        source, target = (stack.enter_context(host_store(device, 1, slots)) for _ in range(2))
        there = stack.enter_context(open_link(device, bytes_per_s=bytes_per_s))
        back = stack.enter_context(open_link(device)) if device.type == "cuda" else there
        loaded, written = (each.rows_in(each.new_buffer(slots), slots)[:, :, :slots] for each in (source, target))

        def move(ways: Sequence[str]) -> None:
            if "h2d" in ways:
                there.prefetch(source, slots, loaded)
            if "d2h" in ways:
                back.write_back(target, written, 0)
            there.drain()
            back.drain()

        for ways in (("h2d",), ("d2h",), ("h2d", "d2h")):
            moved = len(ways) * slots * ROW_BYTES
            seconds = repeated(device, partial(move, ways))
            yield Rate(" with ".join(ways), [moved / each for each in seconds], f"bytes {moved}")


def gather_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """The rates of the gather of a fifth of `num_bytes` of slots, in order within a head as a selection is, by row."""
    for codec, head_dim in ROWS:
        heads = max(1, num_bytes // (CAPACITY * RowFormat(codec_named(codec), head_dim, torch.float16).slot_bytes))
        with host_store(device, heads, CAPACITY, head_dim, codec) as store:
            kept = torch.rand(1, heads, CAPACITY, device=device).topk(KEPT).indices
            mask = torch.zeros(1, heads, CAPACITY, dtype=torch.bool, device=device).scatter_(-1, kept, True)
            rows = store.rows_in(store.new_buffer(KEPT), KEPT)[:, :, :KEPT]
            seconds = repeated(device, partial(store.load, Chosen(*indices(mask, KEPT)), rows))
            payload = heads * KEPT * store.slot_bytes
            at = f"row_bytes {store.slot_bytes}, {codec}, head_dim {head_dim}"
            yield Rate("gather", [payload / each for each in seconds], at)


def pin_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """The rate of page-locking `num_bytes` of fresh memory."""
    slabs: list[PinnedSlab] = []
    seconds = repeated(device, lambda: slabs.append(PinnedSlab(num_bytes)), lambda: slabs.pop().close())
    yield Rate("page-locking", [num_bytes / each for each in seconds], f"bytes {num_bytes}")


def repeated(device: torch.device, act: Callable[[], object], undo: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of `REPEATS` runs, from an idle device to an idle device, after one that warms up. undo: untimed, after
    each."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = idle_s(device)
        act()
        seconds.append(idle_s(device) - began)
        undo()
    return seconds[1:]


@contextmanager
def host_store(
    device: torch.device, heads: int, capacity: int, head_dim: int = HEAD_DIM, codec: str = "fp16"
) -> Iterator[KVStore]:
    """A store in host memory, page-locked under CUDA, freed at the end."""
    stored = RowFormat(codec_named(codec), head_dim, torch.float16)
    slab = PinnedSlab(heads * capacity * stored.slot_bytes) if device.type == "cuda" else None
    store = KVStore(stored, batch=1, num_kv_heads=heads, capacity=capacity, placement="host", device=device).allocate(
        slab
    )
    try:
        yield store
    finally:
        store.free()
        if slab is not None:
            slab.close()


# Steps


def time_steps(options: argparse.Namespace, out: Path, until_s: float) -> None:
    """Time every run as an ordinary one, and show all steps up to then against their floor after each.

    until_s: when no further run begins, by `time.perf_counter`. Raises UserError where runs are left."""
    from plots import draw_figures

    configs = []
    for shape in options.shapes:
        configs += [run_config(options, shape, label, out) for label in options.labels]
    paths: list[Path] = []
    try:
        for path in run_all(configs):
            paths.append(path)
            if len(paths) < len(configs) and time.perf_counter() > until_s:
                raise UserError("--minutes are spent: runs are left; the same command goes on")
            print(f"\n{render_floors([read_record(path) for path in paths])}\n", flush=True)
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


# A step under the profiler


def trace_step(config: RunConfig, path: Path) -> None:
    """Profile a decode step of the run that `config` describes. Writes a Chrome trace to `path`, compressed where it
    ends with .gz, and prints the step's time without the profiler, on a GPU the host's share of it, and its kernels.
    """
    loaded, shape = Resources().model(config.model), config.latency
    with (
        live(config, loaded, lambda: decode_rows(shape)) as (open_session, _),
        closing(open_session(shape.gen_len)) as session,
    ):
        device = session.attached.device
        found = _profiled(session, prompt_ids(config, loaded, shape.batch_size).to(device))
        pinned_gib = session.pinned_bytes / GIB
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    order = "self_cpu_time_total"
    if device.type == "cuda":
        order = "self_device_time_total"
        peak_gib = torch.cuda.max_memory_allocated() / GIB
        print(f"peak of the device {peak_gib:.2f} GiB, page-locked {pinned_gib:.2f} GiB")
    print(found.key_averages().table(sort_by=order, row_limit=SHOWN, max_name_column_width=90))


def _profiled(session: LiveSession, ids: torch.Tensor) -> profile:
    """Run the prompt and some steps; returns the profile of the last one."""
    device = session.attached.device
    began = idle_s(device)
    logits = session.prefill(ids, torch.ones_like(ids, dtype=torch.bool))
    prompt_s = idle_s(device) - began
    for _ in range(WARM_UP):
        began = idle_s(device)
        logits = session.decode_step(logits.argmax(-1))
        queued_s = time.perf_counter() - began
        step_s = idle_s(device) - began
    print(
        f"prompt {prompt_s:.2f} s; a step without the profiler {1e3 * step_s:.2f} ms, "
        f"of which the host queues for {1e3 * queued_s:.2f} ms"
    )
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):  # the first profile of a process is slow
        with profile(activities=activities) as found, record_function(STEP):
            logits = session.decode_step(logits.argmax(-1))
            idle_s(device)
    if device.type == "cuda":
        device_s = busy_s(found)
        print(
            f"the device works for {1e3 * device_s:.2f} ms; {1 - device_s / step_s:.0%} of the step is the host's alone"
        )
    return found


def busy_s(found: profile) -> float:
    """Seconds in which the device ran a kernel or a copy, on any stream."""
    ranges = []
    for event in found.events():
        if event.device_type == DeviceType.CUDA and event.name != STEP:  # the step's own range is no work
            ranges.append((event.time_range.start, event.time_range.end))
    busy_us = latest = 0.0
    for start, end in sorted(ranges):
        busy_us += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return busy_us / 1e6


# The command


def shape(text: str) -> str:
    """Checks a batch size and a prompt length, such as 8x1920."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text}: must be batch size x prompt length, as in 8x1920")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=tuple(DEFAULTS), default="cuda", help="cpu: emulated link")
    parser.add_argument("--out", metavar="DIR", help="folder of the results; default: outputs/gpu-<device>")
    parser.add_argument("--minutes", type=float, default=10, help="after which no further run begins, but the first")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--labels", nargs="+", choices=SYSTEMS, help="default: all whose transfers are counted")
    parser.add_argument("--model", help="a shape under conf/model; default: opt-13b, on the CPU a tiny one")
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="8x1920", help="batch size x prompt length")
    parser.add_argument("--trace", metavar="FILE", help="profile a decode step instead: first label, first shape")
    parser.add_argument("settings", nargs="*", help="settings of every run, as on run.py's command line")
    options = parser.parse_intermixed_args(argv)
    model, default_shapes = DEFAULTS[options.platform]
    options.model, options.shapes = options.model or model, options.shapes or default_shapes
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
