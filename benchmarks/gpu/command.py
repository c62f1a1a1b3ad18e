"""The command line of the benchmark: its parts in order, within the minutes that there are."""

from __future__ import annotations

import argparse
import gc
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import benchmarks.gpu
from benchmarks.gpu import rates
from benchmarks.gpu.plan import PLANS, Plan, Shape
from benchmarks.gpu.report import Gap, Kind, Measurement, Report, machine
from benchmarks.gpu.steps import Steps
from harness.errors import UserError, missing, reason
from harness.model.load import require_kernels
from harness.speed.link_rate import link_rate
from harness.speed.run import compute_threads

FAILED, UNFINISHED = 1, 75  # 75 as of `run.py`
FIGURES_S = 15.0


class Benchmark:
    """The parts of a plan. began_s: perf_counter when the minutes of the report began."""

    def __init__(self, plan: Plan, report: Report, began_s: float) -> None:
        self.plan, self.report, self.began_s = plan, report, began_s
        self.link = link_rate(report.out, report.device, None)
        self.report.add("link", {}, "rate that bounds a step", "B/s", [self.link.bytes_per_s])
        for name, value in asdict(self.link.tuning).items() if report.device.type == "cuda" else ():
            self.report.add("link", {}, name, "1" if name == "num_programs" else "B", [value])
        self.steps = Steps(plan, report, self.attempt, self.link)

    def run(self) -> int:
        """Try every part in turn; returns the exit code."""
        plan, device = self.plan, self.report.device
        emulated = self.link.bytes_per_s if device.type == "cpu" else None
        self._rates("link", rates.link_rates(device, plan.link_bytes, emulated))
        self._shapes(plan.first)
        self._rates("gather", rates.gather_rates(device, plan.gather_bytes, self.link.tuning))
        self._rates("copies", rates.copy_rates(device, plan.copy_bytes, self.link.tuning))
        if plan.pin_bytes:
            self._rates("pin", rates.pin_rates(device, plan.pin_bytes))
        else:
            self._miss("pin", "not applicable", "memory is page-locked under CUDA only")
        self._shapes(plan.then)
        self.attempt("figures", FIGURES_S, self._draw)
        kinds = {gap.kind for gap in self.report.gaps}
        return FAILED if "failed" in kinds else UNFINISHED if "skipped" in kinds else 0

    def attempt(self, part: str, estimate_s: float, run: Callable[[], None]) -> None:
        """Run a part that fits into the time left, and write the report; say why there is no result."""
        left_s = 60 * self.report.minutes - self._seconds()
        if estimate_s <= left_s:
            self._try(part, run)
        else:
            self._miss(part, "skipped", f"estimated at {estimate_s:.0f} s, {max(0.0, left_s):.0f} s are left")
        self.report.seconds = self._seconds()
        self.report.write()

    def _try(self, part: str, run: Callable[[], None]) -> None:
        try:
            run()
            return
        except UserError as error:
            why = str(error)
        except ImportError as error:
            why = missing(error)
        except Exception as error:  # whatever it is, the other parts are of use
            why = reason(error)
        self._miss(part, "failed", why)
        self._release()  # here, as the error holds its frames, and they their tensors, as long as it is handled

    def _rates(self, part: str, found: Iterator[rates.Rate]) -> None:
        bound = self.link.bytes_per_s if part == "link" or self.report.source == "measured" else None

        def run() -> None:
            for rate in found:
                print(_line(self.report.add(part, rate.at, rate.name, "B/s", rate.samples), bound), flush=True)

        self.attempt(part, self.plan.rate_s, run)

    def _shapes(self, shapes: Iterable[Shape]) -> None:
        for shape in shapes:
            self.attempt(shape.title, self.plan.prepare_s, partial(self.steps.time_shape, shape))
            self._release()  # pieces of other sizes than the next one's

    def _release(self) -> None:
        """Give back what nothing needs any more."""
        gc.collect()
        if self.report.device.type == "cuda":
            with suppress(RuntimeError):  # of a device that failed: every later part will say so
                torch.cuda.empty_cache()

    def _draw(self) -> None:
        from plots import draw_figures

        for path in draw_figures(self.report.out):
            print(path)

    def _miss(self, part: str, kind: Kind, why: str) -> None:
        self.report.gaps.append(Gap(part, kind, why))
        print(f"{part}: {kind}, {why}", flush=True)

    def _seconds(self) -> float:
        return time.perf_counter() - self.began_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; returns the exit code."""
    began_s = time.perf_counter()
    try:
        return _measure(_parse(argv), began_s)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace, began_s: float) -> int:
    _check(options)
    device = torch.device(options.platform)
    out = Path(options.out or f"results/gpu-{_slug(device)}")
    if (out / "runs").exists():
        raise UserError(f"--out {out}: has runs, whose tables would be replaced; choose another folder")
    torch.manual_seed(0)
    report = Report(out, device, options.minutes, machine(device))
    report.write()  # before any work, so that an unwritable folder costs nothing
    print(f"{report.environment['device_name'] or report.environment['cpu']}; source: {report.source}", flush=True)
    with compute_threads(device):
        code = Benchmark(PLANS[options.platform], report, began_s).run()
    print(
        f"\n{report.seconds:.0f} s; {len(report.measurements)} measurements in {out}/gpu.json, tables in {out}/tables"
    )
    for gap in report.gaps:
        print(f"{gap.kind}: {gap.part}, {gap.reason}")
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    description = str(benchmarks.gpu.__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description)
    parser.add_argument("--platform", choices=tuple(PLANS), default="cuda", help="cpu: tiny shapes, emulated link")
    parser.add_argument("--out", metavar="DIR", help="folder of the results; default: results/gpu-<device>")
    parser.add_argument("--minutes", type=float, default=8, help="a part that would take longer is skipped")
    return parser.parse_args(argv)


def _check(options: argparse.Namespace) -> None:
    if not (0 < options.minutes < math.inf):
        raise UserError(f"--minutes {options.minutes:g}: must be a number above 0")
    if options.platform == "cuda" and not torch.cuda.is_available():
        raise UserError("--platform cuda: torch finds no CUDA device here; allowed: cpu (tiny shapes, emulated link)")
    if options.platform == "cuda":
        require_kernels()


def _slug(device: torch.device) -> str:
    """The device's name as that of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _line(rate: Measurement, link_bytes_per_s: float | None) -> str:
    """A rate for people, with its spread, and as a share of the link's."""
    low, value, high = (each / 1e9 for each in (rate.low, rate.value, rate.high))
    share = "" if link_bytes_per_s is None else f", {rate.value / link_bytes_per_s:.1%} of the link's"
    at = ", ".join(f"{name} {size}" for name, size in rate.at.items())
    return f"{rate.name:14}{value:8.3f} GB/s ({low:.3f} to {high:.3f}, n = {rate.num_samples}{share}); {at}"
