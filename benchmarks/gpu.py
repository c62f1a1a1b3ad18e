"""How fast KV-cache offloading can be on this machine, how near each system comes, and whether it computes right.

    python -m benchmarks.gpu                      results in outputs/gpu-<device>, in under 10 minutes on an H200
    python -m benchmarks.gpu --parts link,gather,pin --minutes 2
    python -m benchmarks.gpu --parts steps --shapes 8x1920 --labels ideal,infinigen --run-seconds 90
    python -m benchmarks.gpu --trace step.json.gz --labels infinigen2     a decode step under torch's profiler instead
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny model, emulated link
    python -m benchmarks.gpu --platform cpu --model smollm2-135m --shapes 8x1024 platform.link_gbps=0.3

Parts, in this order:

link      rate of plain copies between pinned host memory and the device: each way, and both ways at once
gather    rate of the row gather by row size
pin       rate at which host memory is page-locked; under CUDA only
equal     decoding with the cache on the host is bit for bit that on the device; Triton kernels against torch's code
steps     a decode step of every system whose transfers are counted (`harness.settings.systems`), shape by shape,
          against its floor: max(step of ideal, bytes over the link / its rate)

Each part, and each run of `steps`, has a process of its own (`benchmarks/gpu_parts/apart.py`). If one fails, hangs or
dies, its traceback or the stacks of its threads are printed, and the others go on. `--minutes` limits the whole
command, `--run-seconds` each process; a part that needs more time than is left is cut off. The same command repeats
no run that is finished.

They are ordinary runs (`experiment=latency`): OUT/runs has their records. OUT/rates.csv and OUT/tables are written
as results come, OUT/figures at the end. Exit code: 0; 1 where a part failed or two ways were not equal; 2 for a user's
mistake; 75 where the time did not suffice.

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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.gpu_parts.apart import call_apart
from benchmarks.gpu_parts.equal import equalities
from benchmarks.gpu_parts.rates import Rate, gather_rates, link_rates, pin_rates
from benchmarks.gpu_parts.trace import trace_step
from harness.errors import UNFINISHED, UnfinishedError, UserError, exit_code, interruptible, nearest, reason
from harness.files import write_atomic
from harness.model.load import require_kernels
from harness.model.resources import Resources
from harness.results.record import read_record
from harness.run.compose import load
from harness.run.runner import Run, fail, report, require_devices, run
from harness.settings.config import RunConfig
from harness.settings.paths import RESULTS
from harness.settings.systems import COUNTED, LABELS, ON_A_DISK
from harness.speed.link_rate import LinkRate, link_rate

MIB = 2**20
FAILED = 1
PARTS = ("link", "gather", "pin", "equal", "steps")
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


class Benchmark:
    """The parts of one command. problems: exit codes of the parts that failed or were cut off."""

    def __init__(self, options: argparse.Namespace, began_s: float) -> None:
        self.device = torch.device(options.platform)
        self.until_s = began_s + 60 * options.minutes
        self.run_s: float = options.run_seconds
        self.out = Path(options.out or f"{RESULTS}/gpu-{_slug(self.device)}")
        self.settings = run_settings(options)
        self.shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
        self.labels = options.labels
        self.parts = options.parts
        self.trace = options.trace
        self.problems: list[int] = []

    @cached_property
    def link(self) -> LinkRate:
        """Of the link, measured once for each folder of results."""
        return link_rate(self.out, self.device, None)

    def run(self) -> int:
        """Run every part in turn; returns the exit code."""
        if self.trace is not None:
            config = self.run_config(*self.shapes[0], self.labels[0])
            self.attempt("trace", partial(self.apart, partial(trace_step, config, Path(self.trace))))
            return max(self.problems, default=0)
        acts = {
            "link": self.measure_link,
            "gather": self.measure_gather,
            "pin": self.measure_pinning,
            "equal": self.check_equality,
        }
        for part, act in acts.items():
            if part in self.parts:
                self.attempt(part, partial(self.apart, act))
        if "steps" in self.parts:
            self.time_steps()
        return FAILED if FAILED in self.problems else max(self.problems, default=0)

    def attempt(self, part: str, act: Callable[[], object]) -> bool:
        """Run a part, and name it if it fails or is cut off: the others are of use. True if it ended well."""
        try:
            act()
            return True
        except UnfinishedError as error:
            print(f"{part}: cut off, {error}", flush=True)
            self.problems.append(UNFINISHED)
        except Exception as error:
            print(f"{part}: failed, {error if isinstance(error, UserError) else reason(error)}", flush=True)
            self.problems.append(FAILED)
        return False

    def left_s(self) -> float:
        return max(0.0, self.until_s - time.perf_counter())

    def apart(self, act: Callable[[], object]) -> None:
        """Call in a process of its own, which has `run_s` seconds, or what is left of all.

        Raises UserError where it fails, UnfinishedError where no time is left for it.
        """
        left_s = self.left_s()
        try:
            if left_s == 0:
                raise TimeoutError
            call_apart(act, min(self.run_s, left_s))
        except TimeoutError as error:
            if left_s < self.run_s:
                raise UnfinishedError("the minutes are over") from error
            raise UserError(f"{error} (--run-seconds); the stacks of its threads are above") from error

    # Parts, each in a process of its own

    def measure_link(self) -> None:
        emulated = None if self.device.type == "cuda" else self.link.bytes_per_s
        self.measure("link", link_rates(self.device, self.num_bytes, emulated))

    def measure_gather(self) -> None:
        self.measure("gather", gather_rates(self.device, self.num_bytes, self.link.tuning))

    def measure_pinning(self) -> None:
        self.measure("pin", pin_rates(self.device, 8 * self.num_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that rates are measured on."""
        return 512 * MIB if self.device.type == "cuda" else MIB // 4

    def measure(self, part: str, found: Iterator[Rate]) -> None:
        """Print rates as they come, and keep them in a table, in place of earlier ones of the part."""
        path = self.out / "rates.csv"
        known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["part"])
        rows = known[known["part"] != part].to_dict("records")
        for name, samples, at in found:
            low, value, high = min(samples), statistics.median(samples), max(samples)
            print(f"{name:14}{value / 1e9:8.3f} GB/s ({low / 1e9:.3f} to {high / 1e9:.3f}); {at}", flush=True)
            row = {"part": part, "name": name, "at": at, "bytes_per_s": value, "low": low, "high": high}
            rows.append(row | {"num_samples": len(samples)})
            write_atomic(path, pd.DataFrame(rows).to_csv(index=False))

    def check_equality(self) -> None:
        """Decode on the host and on the device, by kernels and by torch's code, on a tiny model."""
        offloading = [label for label in SYSTEMS if LABELS[label].placement == "host"]
        num_unequal = 0
        for words, is_equal in equalities(self.device, offloading, self.link):
            print(words, flush=True)
            num_unequal += not is_equal
        if num_unequal:
            raise UserError(f"{num_unequal} comparisons of two ways differ")

    # Decode steps

    def time_steps(self) -> None:
        """Time every run as an ordinary one, and show all after each."""
        ideal = self.runs(["ideal"])  # for the floors, also where it was timed by an earlier command
        paths: list[Path] = []
        for todo in self.runs(self.labels):
            shape = todo.config.latency
            if todo.is_finished():
                paths.append(run(todo, Resources()))  # says that it is skipped
            elif self.attempt(
                f"{shape.batch_size} x {shape.prompt_len} {todo.config.label}", partial(self.time_run, todo)
            ):
                paths.append(todo.path)
                self.attempt("tables", partial(self.show, paths, ideal))
        if paths:
            self.attempt("tables", lambda: print(report(paths)))
            if self.left_s():
                self.attempt("figures", self.draw)

    def show(self, paths: Sequence[Path], ideal: Sequence[Run]) -> None:
        """Bring the tables up to date, and print the steps of all runs up to now against their floor."""
        report(paths)
        shown = [todo.path for todo in ideal if todo.is_finished()]
        shown += [path for path in paths if path not in shown]
        print(f"\n{render_floors([read_record(path) for path in shown])}\n", flush=True)

    def draw(self) -> None:
        from plots import draw_figures

        print(*draw_figures(self.out), sep="\n")

    def runs(self, labels: Sequence[str]) -> list[Run]:
        """The run of every shape and label."""
        return [Run.of(self.run_config(*shape, label)) for shape in self.shapes for label in labels]

    def run_config(self, batch: int, prompt: int, label: str) -> RunConfig:
        """Settings of a run."""
        of_run = [f"system={label}", f"batch_size={batch}", f"prompt_len={prompt}", f"results_dir={self.out}"]
        slow = [] if LABELS[label].pinned else PAGEABLE_STEPS
        return load([*self.settings, *slow, *of_run])

    def time_run(self, todo: Run) -> None:
        """Do a run in a process of its own. If that dies, the record says so."""
        try:
            self.apart(partial(run, todo, Resources()))
        except UnfinishedError:
            raise
        except UserError as error:
            record = todo.found()
            if record is None or record["status"] != "failed":
                fail(todo, error)
            raise


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
    parser.add_argument("--minutes", type=float, default=10, help="what would take longer is cut off")
    parser.add_argument("--run-seconds", type=float, default=120, help="a part or run that takes longer is ended")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; returns the exit code."""
    began_s = time.perf_counter()
    options, codes = parse(argv), []

    def act() -> None:
        require_devices([load(run_settings(options))])  # before any work
        if options.platform == "cuda":
            require_kernels()
        benchmark = Benchmark(options, began_s)
        benchmark.out.mkdir(parents=True, exist_ok=True)
        codes.append(benchmark.run())
        print(f"{time.perf_counter() - began_s:.0f} s; results in {benchmark.out}")

    return exit_code(act) or codes[0]


def _slug(device: torch.device) -> str:
    """The device's name as that of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(interruptible(main))
