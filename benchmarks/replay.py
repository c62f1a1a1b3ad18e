"""What replay of each method costs, in multiples of replay of the full cache with torch's fused attention.

    python -m benchmarks.replay                          ratios: one 2,048-token window, prompt 256, default model
    python -m benchmarks.replay --memory --seq-len 8192  peak memory of one window, one process per method

A timed interval is prompt, decode rows and output head of one window; loading, calibration and scoring are outside.
Methods run in turn within a round; the ratio is that of the medians over rounds.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from harness.data.text import offline_text, token_ids
from harness.model.attach import Attached, attach
from harness.model.load import load_model
from harness.replay.replay import ReplaySession
from harness.settings.compose import load
from harness.setup import Setup, prepare

HEAD_CHUNK = 128
CASES = {
    "full": ["method=full"],
    "int4": ["method=int4"],
    "infinigen": ["method=infinigen"],
    "infinigen, fixed cap": ["method=infinigen", "method.alpha=inf"],
    "h2o": ["method=h2o"],
    "streaming": ["method=streaming"],
    "snapkv": ["method=snapkv"],
    "quest": ["method=quest"],
    "oracle": ["method=oracle"],
}
LIMITS = {"int4": 1.2, "infinigen": 1.6, "infinigen, fixed cap": 1.6, "h2o": 1.8, "quest": 1.4}


class Bench(NamedTuple):
    """A loaded model, a window of its tokens [1, seq_len], and how much of it is the prompt."""

    attached: Attached
    setups: dict[str, Setup]
    window: torch.Tensor
    prefill_len: int


def run_window(bench: Bench, case: str) -> None:
    """One window from first token to last logits; the full cache is a single dense pass."""
    window, setup = bench.window, bench.setups[case]
    real = torch.ones_like(window, dtype=torch.bool)
    session = ReplaySession(
        bench.attached,
        setup.method,
        codec=setup.codec,
        calibration=setup.calibration,
        final_lengths=torch.tensor([window.shape[1]]),
        num_columns=window.shape[1],
    )
    prompt = window.shape[1] if case == "full" else bench.prefill_len
    hidden = [session.prefill(window[:, :prompt], real[:, :prompt])]
    if prompt < window.shape[1]:
        hidden.append(session.decode(window[:, prompt:], real[:, prompt:]))
        session.reads.check_fired()
    for rows in torch.cat(hidden, 1)[0].split(HEAD_CHUNK):
        bench.attached.logits(rows)


@contextmanager
def open_bench(cases: list[str], seq_len: int, prefill_len: int) -> Iterator[Bench]:
    """The default model with every case's method prepared."""
    configs = {case: load(CASES[case]) for case in cases}
    loaded = load_model(configs[cases[0]].model)
    ids = token_ids(offline_text(), loaded.tokenizer)[1024 : 1024 + seq_len]
    with attach(loaded.model) as attached:
        setups = {case: prepare(config, loaded, attached, list) for case, config in configs.items()}
        yield Bench(attached, setups, torch.tensor([ids]), prefill_len)


def ratios(args: argparse.Namespace) -> None:
    """Print medians, spread and the ratio to full."""
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with open_bench(list(CASES), args.seq_len, args.prefill_len) as bench:
        for repeat in range(args.rounds + 1):
            for case in CASES:
                began = time.perf_counter()
                run_window(bench, case)
                if repeat:  # the first round warms up
                    seconds[case].append(time.perf_counter() - began)
    print(f"window {args.seq_len}, prompt {args.prefill_len}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    full = statistics.median(seconds["full"])
    for case, values in seconds.items():
        median = statistics.median(values)
        limit = f"   limit {LIMITS[case]}" if case in LIMITS else ""
        print(f"{case:22s} {median:6.2f} s ({min(values):.2f}-{max(values):.2f})   {median / full:5.2f} x full{limit}")


def memory(args: argparse.Namespace) -> None:
    """Print each method's peak resident memory, every one in a process of its own."""
    if args.only is not None:
        with open_bench([args.only], args.seq_len, args.prefill_len) as bench:
            run_window(bench, args.only)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    for case in CASES:
        sizes = ["--seq-len", str(args.seq_len), "--prefill-len", str(args.prefill_len)]
        command = [sys.executable, "-m", "benchmarks.replay", "--memory", "--only", case, *sizes]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{case:22s} {peak / 2**30:5.2f} GiB peak resident, window {args.seq_len}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--prefill-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--only", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 1 <= args.prefill_len < args.seq_len - 1:
        parser.error(f"--prefill-len {args.prefill_len}: must be from 1 to --seq-len - 2 = {args.seq_len - 2}")
    (memory if args.memory else ratios)(args)


if __name__ == "__main__":
    main()
