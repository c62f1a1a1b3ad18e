"""How fast KV-cache offloading can be on this machine, how near each system comes, and whether it computes right.

    python -m benchmarks.gpu                      results in outputs/gpu-<device>, in under 8 minutes on an H200
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny model, emulated link
    python -m benchmarks.gpu --platform cpu --model smollm2-135m --shapes 8x1024 platform.link_gbps=0.3

Parts, the most important first:

link      rate of plain copies between pinned host memory and the device: each way, and both ways at once
equal     decoding with the cache on the host is bit for bit that on the device; Triton kernels against torch's code;
          scores on coded keys against products with decoded ones
steps     a decode step of every system whose transfers are counted (`harness.settings.systems`), shape by shape,
          against its floor: max(step of ideal, bytes over the link / its rate)
gather    rate of the row gather by row size
pin       rate at which host memory is page-locked

The steps are ordinary runs (`experiment=latency`): OUT/runs has their records, OUT/tables and OUT/figures what is made
of them, and the same command goes on where it stopped. OUT/rates.csv has the rates. A part that the time left does not
suffice for is skipped, and a part that fails stops no other; both are named. Exit code: 0; 1 where a part failed or two
ways were not equal; 2 for a user's mistake; 75 where cells were skipped.

Weights are random, of the shape in conf/model; infinigen then selects up to its cap of 20 %. Ten steps of a cell are
timed, two of pageable memory. The time it takes is worked out in `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pandas as pd
import torch

from benchmarks.timing import idle_s
from harness.checks.contract import TOLERANCE, largest_difference, live
from harness.errors import UserError, exit_code, reason, refused
from harness.files import write_atomic
from harness.live.links import open_link
from harness.live.memory import DEFAULT_TUNING, PinnedSlab, Tuning
from harness.live.store import KVStore, RowFormat, chosen, indices
from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.model.load import require_kernels
from harness.model.resources import Resources
from harness.model.tiny import VOCAB_SIZE, tiny_model
from harness.replay.setup import Setup, codec_of
from harness.results.record import read_record
from harness.run.compose import load
from harness.run.runner import Run, report, run
from harness.settings.paths import RESULTS
from harness.settings.systems import COUNTED, LABELS, ON_A_DISK
from harness.speed.link_rate import LinkRate, link_rate
from methods import compiled
from methods.codec import Codec
from methods.coded_keys import coded_scores, room_for_keys

MIB = 2**20
FAILED, UNFINISHED = 1, 75  # 75 as of `run.py`
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
FIRST_CELL_S = 30.0
"""Supposed of a system's first cell, and of a part."""
EQUAL_PROMPTS = (200, 180)
CODED_TOLERANCE = 3e-2
"""Of logits under int4, where rounding moves a number to the next code."""
SCORE_TOLERANCE = 1e-3
"""Of scores of up to 60, which are sums of 128 products in fp32."""
REPEATS = 5
HEAD_DIM, ROW_BYTES = 128, 512
"""Of fp16 rows, K and V side by side."""
CAPACITY, KEPT = 2048, 409
"""Slots of a head, and the 20 % of them that a gather takes."""
ROWS = (
    *(("fp16", head_dim) for head_dim in (16, 32, 64, 128, 256, 512)),  # 64 B to 2 KiB
    *((codec, head_dim) for codec in ("int8", "int4") for head_dim in (64, 128)),
)


class Rate(NamedTuple):
    """Bytes/s of each repeat. at: the conditions that tell it from others of its part."""

    name: str
    samples: list[float]
    at: str


class Benchmark:
    """The parts of one command. problems: exit codes of the parts that failed or were skipped."""

    def __init__(self, options: argparse.Namespace, began_s: float) -> None:
        self.device = torch.device(options.platform)
        self.until_s = began_s + 60 * options.minutes
        self.out = Path(options.out or f"{RESULTS}/gpu-{_slug(self.device)}")
        self.settings = cell_settings(options)
        self.shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
        self.link: LinkRate = link_rate(self.out, self.device, None)
        self.problems: list[int] = []
        self.rates: list[dict[str, Any]] = []

    def run(self) -> int:
        """Run every part in turn; returns the exit code."""
        device, is_cuda = self.device, self.device.type == "cuda"
        num_bytes = 512 * MIB if is_cuda else MIB // 4
        emulated = None if is_cuda else self.link.bytes_per_s
        self.attempt("link", partial(self.measure, "link", link_rates(device, num_bytes, emulated)))
        self.attempt("equal", self.check_equality)
        self.time_steps()
        self.attempt("gather", partial(self.measure, "gather", gather_rates(device, num_bytes, self.link.tuning)))
        if is_cuda:
            self.attempt("pin", partial(self.measure, "pin", pin_rates(device, 8 * num_bytes)))
        return FAILED if FAILED in self.problems else max(self.problems, default=0)

    def attempt(self, part: str, act: Callable[[], Any], estimate_s: float = FIRST_CELL_S) -> None:
        """Run a part if its estimated seconds are left; name a part that fails or is skipped."""
        left_s = self.until_s - time.perf_counter()
        if estimate_s > left_s:
            print(f"{part}: skipped, estimated at {estimate_s:.0f} s, {max(0.0, left_s):.0f} s are left", flush=True)
            self.problems.append(UNFINISHED)
            return
        failure = None
        try:
            act()
        except UserError as error:
            failure = str(error)
        except Exception as error:  # whatever it is, the other parts are of use
            failure = reason(error)
        if failure is not None:
            print(f"{part}: failed, {failure}", flush=True)
            self.problems.append(FAILED)
            gc.collect()  # after the handler: the error's frames held their tensors
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self, part: str, found: Iterator[Rate]) -> None:
        """Print rates as they come, and keep them in a table."""
        for name, samples, at in found:
            low, value, high = min(samples), statistics.median(samples), max(samples)
            print(f"{name:14}{value / 1e9:8.3f} GB/s ({low / 1e9:.3f} to {high / 1e9:.3f}); {at}", flush=True)
            row = {"part": part, "name": name, "at": at, "bytes_per_s": value, "low": low, "high": high}
            self.rates.append(row | {"num_samples": len(samples)})
            write_atomic(self.out / "rates.csv", pd.DataFrame(self.rates).to_csv(index=False))

    def check_equality(self) -> None:
        """Decode on the host and on the device, by kernels and by torch's code, on a tiny model."""
        unequal = [words for words, equal in equalities(self.device, self.link) if print(words) or not equal]
        if unequal:
            raise UserError(f"{len(unequal)} comparisons of two ways differ")

    def time_steps(self) -> None:
        """Time every cell as an ordinary run; print the tables, and steps against their floor."""
        resources, paths = Resources(), []
        took: dict[str, float] = {}  # seconds per cached token

        def time_cell(config: Any, tokens: int) -> None:
            began = time.perf_counter()
            paths.append(run(Run.of(config), resources))
            took[config.label] = (time.perf_counter() - began) / tokens

        for batch, prompt in self.shapes:
            for label in SYSTEMS:
                of_cell = [f"label={label}", f"batch_size={batch}", f"prompt_len={prompt}"]
                slow = [] if LABELS[label].pinned else PAGEABLE_STEPS
                config = load([*self.settings, *of_cell, *slow, f"results_dir={self.out}"])
                tokens = batch * prompt
                estimate_s = took[label] * tokens if label in took else FIRST_CELL_S
                self.attempt(f"{batch} x {prompt} {label}", partial(time_cell, config, tokens), estimate_s)
        if paths:
            print(f"\n{report(paths)}\n\n{render_floors([read_record(path) for path in paths])}\n", flush=True)

            from plots import draw_figures

            self.attempt("figures", lambda: print(*draw_figures(self.out), sep="\n"))


def cell_settings(options: argparse.Namespace) -> list[str]:
    """Settings of every cell."""
    given = TINY if options.model is None else [f"model={options.model}", *STEPS]
    calibration = "calibration.num_tokens=128"  # as a head has elements: random weights teach no more
    common = ["experiment=latency", "model.weights=random", f"platform={options.platform}", "repeats=2", calibration]
    return [*common, *given, *options.settings]


def render_floors(records: Sequence[dict[str, Any]]) -> str:
    """A line a cell: its step, its bytes over the link, and the floor of the step.

    The floor is the longer of ideal's step at that shape and of the bytes over the link's rate.
    """
    ideal_s = {}
    lines = [f"{'shape':12}{'label':18}{'step':>12}{'over link':>14}{'floor':>12}{'step / floor':>14}"]
    for record in sorted(records, key=lambda record: record["config"]["label"] != "ideal"):
        cell, label = record["metrics"], record["config"]["label"]
        shape, step_s = f"{cell['batch_size']} x {cell['prompt_len']}", cell["tpot_p50_s"]
        if label == "ideal":
            ideal_s[shape] = step_s
        moved = (cell["h2d_bytes"] + cell["d2h_bytes"]) / (cell["gen_len"] - 1)
        floor_s = max(ideal_s.get(shape, 0.0), moved / cell["link_ceiling_bytes_per_s"])
        times = f"{moved / MIB:10.1f} MiB{1e3 * floor_s:9.2f} ms{step_s / floor_s:14.2f}"
        lines.append(f"{shape:12}{label:18}{1e3 * step_s:9.2f} ms{times}")
    return "\n".join(lines)


def equalities(device: torch.device, rate: LinkRate) -> Iterator[tuple[str, bool]]:
    """Words for each comparison of two ways to decode, and whether they agree."""
    model: Any = tiny_model("llama", num_key_value_heads=2)
    emulated = rate.bytes_per_s if device.type == "cpu" else None
    with attach(model.to(device)) as attached, open_link(device, bytes_per_s=emulated, tuning=rate.tuning) as link:
        for label in SYSTEMS[1:]:
            config = load(["experiment=latency", f"label={label}"])
            method, codec = config.method, codec_of(config)
            ids = torch.arange(256) % VOCAB_SIZE
            calibration = calibrate(attached, method, ids.tolist()) if method.needs_calibration else None
            decode = partial(live, attached, Setup(method, codec, calibration), EQUAL_PROMPTS)
            on_device = decode(placement="device").logits
            rows = {"device_rows": config.device_rows, "prefetch": config.prefetch}
            on_host = decode(placement="host", link=link, pinned=config.platform.pinned, **rows).logits
            # Rows that stay on the device are summed in another order.
            others = [("host and device", on_host, TOLERANCE if config.device_rows else 0)]
            if device.type == "cuda":
                with patch.object(compiled, "COMPILED", set()):
                    plain = decode(placement="device").logits
                others.append(("kernels and torch", plain, TOLERANCE if codec is None else CODED_TOLERANCE))
            for ways, logits, allowed in others:
                difference = largest_difference(logits, on_device)
                words = f"{label:18}{ways}: logits differ by {difference:g} (at most {allowed:g})"
                yield words, difference <= allowed
    yield coded_scores_equality(device)


def coded_scores_equality(device: torch.device) -> tuple[str, bool]:
    """Words for scores on an index in 4 bits against products with its decoded keys in fp64, and whether they agree."""
    codec = Codec("int4")
    packed = codec.encode(torch.randn(2, 8, CAPACITY, HEAD_DIM, device=device))
    keys = room_for_keys(packed[:, :, :1], CAPACITY)
    keys.copy_(packed)
    query = torch.randn(2, 8, 4, HEAD_DIM, device=device)
    expected = query.double() @ codec.decode(packed, HEAD_DIM, torch.float64).mT
    difference = float((coded_scores(query, keys, codec) - expected).abs().max())
    words = f"{'coded keys':18}scores and decoded: they differ by {difference:g} (at most {SCORE_TOLERANCE:g})"
    return words, difference <= SCORE_TOLERANCE


def link_rates(device: torch.device, num_bytes: int, bytes_per_s: float | None) -> Iterator[Rate]:
    """Of one copy of `num_bytes` each way, and of both at once, whose bytes count together.

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


def gather_rates(device: torch.device, num_bytes: int, tuning: Tuning) -> Iterator[Rate]:
    """Of the gather of a fifth of `num_bytes` of slots, in order within a head as a selection is, by size of row."""
    for codec, head_dim in ROWS:
        heads = max(1, num_bytes // (CAPACITY * row_format(codec, head_dim).slot_bytes))
        with host_store(device, heads, CAPACITY, head_dim, codec, tuning) as store:
            kept = torch.rand(1, heads, CAPACITY, device=device).topk(KEPT).indices
            mask = torch.zeros(1, heads, CAPACITY, dtype=torch.bool, device=device).scatter_(-1, kept, True)
            rows = store.rows_in(store.new_buffer(KEPT), KEPT)[:, :, :KEPT]
            seconds = repeated(device, partial(store.load, chosen(indices(mask, KEPT)), rows))
            payload = heads * KEPT * store.slot_bytes
            at = f"row_bytes {store.slot_bytes}, {codec}, head_dim {head_dim}"
            yield Rate("gather", [payload / each for each in seconds], at)


def pin_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """Of page-locking `num_bytes` of fresh memory."""
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
    device: torch.device,
    heads: int,
    capacity: int,
    head_dim: int = HEAD_DIM,
    codec: str = "fp16",
    tuning: Tuning = DEFAULT_TUNING,
) -> Iterator[KVStore]:
    """A store in host memory, page-locked under CUDA, freed at the end."""
    stored = row_format(codec, head_dim)
    slab = PinnedSlab(heads * capacity * stored.slot_bytes) if device.type == "cuda" else None
    store = KVStore(
        stored, batch=1, num_kv_heads=heads, capacity=capacity, placement="host", device=device, tuning=tuning
    ).allocate(slab)
    try:
        yield store
    finally:
        store.free()
        if slab is not None:
            slab.close()


def row_format(codec: str, head_dim: int) -> RowFormat:
    """Of rows that are computed with in fp16."""
    return RowFormat(Codec(codec), head_dim, torch.float16)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; returns the exit code."""
    began_s = time.perf_counter()
    options, codes = parse(argv), []

    def act() -> None:
        check(options)
        torch.manual_seed(0)
        benchmark = Benchmark(options, began_s)
        codes.append(benchmark.run())
        print(f"{time.perf_counter() - began_s:.0f} s; results in {benchmark.out}")

    return exit_code(act) or codes[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=tuple(DEFAULTS), default="cuda", help="cpu: emulated link")
    parser.add_argument("--out", metavar="DIR", help="folder of the results; default: outputs/gpu-<device>")
    parser.add_argument("--minutes", type=float, default=8, help="a part that would take longer is skipped")
    parser.add_argument("--model", help="a shape under conf/model; default: opt-13b, on the CPU a tiny one")
    parser.add_argument("--shapes", metavar="8x1920,...", help="batch size x prompt length")
    parser.add_argument("settings", nargs="*", help="settings of every cell, as on run.py's command line")
    options = parser.parse_args(argv)
    model, shapes = DEFAULTS[options.platform]
    options.model, options.shapes = options.model or model, options.shapes or shapes
    return options


def check(options: argparse.Namespace) -> None:
    """UserError for options that make no sense, before any work."""
    if not (0 < options.minutes < math.inf):
        raise UserError(f"--minutes {options.minutes:g}: must be a number above 0")
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", options.shapes):
        raise UserError(f"--shapes {options.shapes}: must be batch size x prompt length, as in 8x1920,20x1920")
    if options.platform == "cuda" and not torch.cuda.is_available():
        raise UserError("--platform cuda: torch finds no CUDA device here; allowed: cpu (tiny shapes, emulated link)")
    if options.platform == "cuda":
        require_kernels()
    with refused("the settings of the cells"):
        load(cell_settings(options))


def _slug(device: torch.device) -> str:
    """The device's name as that of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
