"""Live decoding on a bare machine: torch, transformers and numpy are enough, with triton under CUDA.

(a) A decode step of ours, full cache on the device, against one of transformers with its `DynamicCache` (the forward
    pass that `generate` makes for every token), from the same prompt, in five rounds or more of both in turn: the ratio
    of medians in each round, their median and spread. `DynamicCache` makes every layer's cache anew in a step, which on
    a CPU takes as long as the allocator needs to map fresh pages, seen between nothing and four steps. So that it is
    not the allocator that is compared, freed memory stays mapped on either side (glibc's thresholds for returning it
    are raised); `--returned` leaves the allocator as it is.
(b) Every system of `harness.settings` at one shape: the step, what crosses the link in it, at what rate, and the step
    that can be had at best, max(ideal's step, its bytes / the link's rate), which says what of the transfer is hidden.

The first line names the CPU, its caches and the rate at which one thread copies memory. Page faults in a step of
transformers tell whether its cache was made in memory that the system had to map first.

Weights are random, of the shape in `conf/model/<model>.yaml`: they change no time but through what infinigen selects,
which with random weights is its cap; `--fixed-fetch` sets another number.

    python -m benchmarks.live --platform cuda --model opt-13b --batch 8 --prompt 1920
    python -m benchmarks.live --batch 4 --prompt 2048 --only transformers
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from harness.errors import exit_code
from harness.model.attach import Attached, attach
from harness.model.calibration import Calibration, calibrate
from harness.offload.links import open_link
from harness.records.environment import processor
from harness.settings.speed import LatencyConfig
from harness.settings.systems import COUNTED, LABELS, System
from harness.speed.cell import Cell, SharedPrompt, run_shared_prompt, time_cell
from harness.speed.link_rate import LinkRate, link_rate, measure_copy_rate
from harness.speed.result import LatencyResult
from methods.base import Method
from methods.codec import Codec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen

MODELS = Path(__file__).resolve().parent.parent / "conf" / "model"
CALIBRATION_TOKENS = 1024
MIB, GIB = 2**20, 2**30
ROUNDS = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Row(NamedTuple):
    """A label at one shape: seconds of its median step, bytes over the link in a step, and the best step to be had."""

    label: str
    step_s: float
    h2d_bytes: float
    link_bytes_per_s: float | None
    best_s: float
    result: LatencyResult


def random_model(name: str, device: torch.device, overrides: dict[str, Any]) -> Any:
    """A model of a shape under conf/model, random weights: fp16 under CUDA, else fp32."""
    shape = yaml.safe_load((MODELS / f"{name}.yaml").read_text())["shape"] | overrides
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def transformers_steps(model: Any, prompt: SharedPrompt, steps: int) -> tuple[list[float], float]:
    """Seconds of each decode step of transformers on a `DynamicCache` that holds the prompt, and page faults a step."""
    cache = DynamicCache(config=model.config)
    for layer, (_, key, value) in enumerate(prompt.prompt.layers):
        cache.update(key, value, layer)
    with torch.inference_mode():
        token = model.get_output_embeddings()(prompt.prompt.hidden).argmax(-1)
        faults, times = _page_faults(), [_now(model.device)]
        for _ in range(steps):
            logits = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].float().argmax(-1)
            times.append(_now(model.device))
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    return seconds, (_page_faults() - faults) / steps


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed mapped, and serve large requests from it; whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    largest = 2**31 - 1
    return all(mallopt(threshold, largest) == 1 for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def machine() -> str:
    """The CPU, the data caches of its first core, and the rate at which one thread copies."""
    sizes = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):  # Linux only
        level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
        sizes += [f"L{level} {size}"] if kind != "Instruction" else []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rate = measure_copy_rate()
    torch.set_num_threads(threads)
    return f"{processor()}, {', '.join(sizes) or 'caches unknown'}; one thread copies {rate / 1e9:.1f} GB/s"


def compare(model: Any, prompt: SharedPrompt, shape: LatencyConfig) -> float:
    """Print (a); returns the median over the rounds of transformers' median step over ours."""
    once = replace(shape, repeats=1)
    ratios = []
    print("full cache on the device against transformers with DynamicCache, medians of a round's steps:")
    for number in range(max(ROUNDS, shape.repeats)):
        theirs, faults = transformers_steps(model, prompt, shape.warmup_steps + shape.block_steps)
        theirs = theirs[shape.warmup_steps :]
        with attach(model) as attached:
            ours = time_cell(attached, prompt, Cell(Full(), once, "device")).timed
        our_s, their_s = statistics.median(ours), statistics.median(theirs)
        ratios.append(their_s / our_s)
        print(
            f"  round {number + 1}: {1e3 * our_s:7.2f} ms ({_spread(ours, 1e3)}) against {1e3 * their_s:7.2f} ms "
            f"({_spread(theirs, 1e3)}, {faults:.0f} page faults a step): {ratios[-1]:.2f}"
        )
    median = statistics.median(ratios)
    print(f"ours is {median:.2f} times as fast in the median round ({_spread(ratios, 1)})")
    return median


def _spread(values: Sequence[float], factor: float) -> str:
    return f"{factor * min(values):.2f} to {factor * max(values):.2f}"


def method_of(system: System, fixed_fetch: int | None) -> Method:
    """The method of a system with its defaults."""
    if system.method == "infinigen":
        return InfiniGen(fixed_fetch=fixed_fetch)
    return {"full": Full, "h2o": H2O}[system.method]()


def measure(
    attached: Attached,
    prompt: SharedPrompt | Tensor,
    label: str,
    shape: LatencyConfig,
    *,
    rate: LinkRate,
    calibration: Calibration,
    fixed_fetch: int | None = None,
) -> LatencyResult:
    """Time one label; rate: the emulated link's, or how rows cross the real one."""
    system = LABELS[label]
    codec = Codec(system.codec) if system.codec else None
    method = method_of(system, fixed_fetch)
    cell = Cell(method, shape, system.placement, codec, reuse=system.reuse, pinned=system.pinned)
    emulated = rate.bytes_per_s if attached.device.type == "cpu" else None
    with open_link(attached.device, bytes_per_s=emulated, overlap=system.overlap, tuning=rate.tuning) as link:
        return time_cell(attached, prompt, cell, link=link, calibration=calibration)


def rows_of(results: dict[str, LatencyResult], bytes_per_s: float) -> list[Row]:
    """(b) from what was measured; where "ideal" is not among `results`, the link alone bounds a step."""
    ideal_s = statistics.median(results["ideal"].timed) if "ideal" in results else 0.0
    rows = []
    for label, result in results.items():
        moved = (result.h2d_bytes + result.d2h_bytes) / len(result.timed)
        best_s = max(ideal_s, moved / bytes_per_s)
        step_s = statistics.median(result.timed)
        rows.append(Row(label, step_s, moved, result.link_bytes_per_s, best_s, result))
    return rows


def render(rows: Sequence[Row]) -> str:
    """A line per label."""
    lines = [
        f"{'label':18}{'step p50':>12}{'over link':>12}{'link':>12}{'best step':>12}{'ratio':>8}{'prefill':>10}"
        f"{'exposed':>10}{'read':>8}"
    ]
    for row in rows:
        rate = "-" if row.link_bytes_per_s is None else f"{row.link_bytes_per_s / 1e9:.3f} GB/s"
        metrics = row.result.metrics()
        exposed_s = metrics["exposed_transfer_s"] / (row.result.shape.gen_len - 1)
        lines.append(
            f"{row.label:18}{1e3 * row.step_s:9.2f} ms{row.h2d_bytes / MIB:8.1f} MiB{rate:>12}"
            f"{1e3 * row.best_s:9.2f} ms{row.step_s / row.best_s:8.2f}{metrics['prefill_s']:8.2f} s"
            f"{1e3 * exposed_s:7.2f} ms{row.result.size:8.1%}"
        )
    seconds = {row.label: row.step_s for row in rows}
    if "offload" in seconds and "infinigen" in seconds:
        speedup = seconds["offload"] / seconds["infinigen"]
        lines.append(f"infinigen's decode is {speedup:.2f} times as fast as offload's")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2-135m", help="a shape under conf/model")
    parser.add_argument("--shape", type=json.loads, default={}, metavar="JSON", help="changes to that shape")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a repeat")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--fixed-fetch", type=int, help="tokens that infinigen fetches a head")
    parser.add_argument("--link-gbps", type=float, help="of the emulated link; else this machine's copy rate / 62")
    parser.add_argument("--threads", type=int, help="compute threads; else all cores but one, which is the link's")
    parser.add_argument("--labels", type=lambda text: text.split(","), default=list(COUNTED), metavar="A,B")
    parser.add_argument("--returned", action="store_true", help="freed memory goes back to the system, as by default")
    parser.add_argument("--only", choices=("transformers", "labels"), help="(a) or (b) alone")
    options = parser.parse_args(argv)
    unknown = sorted({*options.labels} - {*COUNTED})
    if unknown:
        parser.error(f"--labels {','.join(unknown)}: allowed: {', '.join(COUNTED)}")
    if not (MODELS / f"{options.model}.yaml").is_file():
        parser.error(f"--model {options.model}: allowed: {', '.join(sorted(path.stem for path in MODELS.iterdir()))}")
    if options.platform == "cuda" and not torch.cuda.is_available():
        parser.error("--platform cuda: torch finds no CUDA device here")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts; returns the exit code."""
    options = parse(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    print(machine())
    device = torch.device(options.platform)
    kept = not options.returned and keep_freed_memory()  # before anything large is allocated
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 2) - 1))
    torch.manual_seed(0)
    gen_len = options.warmup + options.repeats * options.steps + 1
    shape = LatencyConfig(options.batch, options.prompt, gen_len, options.warmup, options.steps, options.repeats)
    model = random_model(options.model, device, options.shape)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.prompt), device=device)
    with TemporaryDirectory() as folder:  # nothing is kept
        rate = link_rate(folder, device, options.link_gbps)
    source = "measured" if device.type == "cuda" else "emulated"
    print(f"{options.model}, random weights, {options.batch} x {options.prompt} + {gen_len} tokens; source: {source}")
    print(f"{torch.get_num_threads()} compute threads; link at {rate.bytes_per_s / 1e9:.3f} GB/s")
    print(f"memory that is freed {'stays mapped' if kept else 'goes back to the system as the C library decides'}")
    with attach(model) as attached:
        prompt = run_shared_prompt(attached, ids)
        calibration = calibrate(attached, InfiniGen(), ids[0, :CALIBRATION_TOKENS].tolist())
    if options.only != "labels":
        compare(model, prompt, shape)
    if options.only != "transformers":
        with attach(model) as attached:
            results = {
                label: measure(
                    attached, prompt, label, shape,
                    rate=rate, calibration=calibration, fixed_fetch=options.fixed_fetch,
                )
                for label in dict.fromkeys(["ideal", *options.labels])
            }  # fmt: skip
        print(render(rows_of(results, rate.bytes_per_s)))


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
