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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.timing import in_turn, spread
from harness.contract import open_replay
from harness.data.text import offline_text, token_ids
from harness.model.attach import Attached, attach
from harness.model.load import load_model
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


def run_window(attached: Attached, setup: Setup, window: Tensor, prompt: int) -> None:
    """One window [1, seq_len] from first token to last logits; `prompt` tokens run as one dense pass."""
    real = torch.ones_like(window, dtype=torch.bool)
    session = open_replay(attached, setup, real)
    hidden = [session.prefill(window[:, :prompt], real[:, :prompt])]
    if prompt < window.shape[1]:
        hidden.append(session.decode(window[:, prompt:], real[:, prompt:]))
        session.reads.check_fired()
    for rows in torch.cat(hidden, 1)[0].split(HEAD_CHUNK):
        attached.logits(rows)


@contextmanager
def windows(cases: Sequence[str], seq_len: int, prefill_len: int) -> Iterator[dict[str, Callable[[], None]]]:
    """`run_window` of each case on the default model; the full cache is a single dense pass."""
    configs = {case: load(CASES[case]) for case in cases}
    loaded = load_model(configs[cases[0]].model)
    window = torch.tensor([token_ids(offline_text(), loaded.tokenizer)[1024 : 1024 + seq_len]])
    with attach(loaded.model) as attached:
        yield {
            case: partial(
                run_window,
                attached,
                prepare(config, loaded, attached, list),
                window,
                seq_len if case == "full" else prefill_len,
            )
            for case, config in configs.items()
        }


def ratios(args: argparse.Namespace) -> None:
    """Print medians, spread and the ratio to full."""
    with windows(list(CASES), args.seq_len, args.prefill_len) as runs:
        seconds, _ = in_turn(runs, args.rounds, warm_up=True)
    print(f"window {args.seq_len}, prompt {args.prefill_len}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    full = statistics.median(seconds["full"])
    for case, values in seconds.items():
        median = statistics.median(values)
        limit = f"   limit {LIMITS[case]}" if case in LIMITS else ""
        print(f"{case:22s} {median:6.2f} s ({spread(values)})   {median / full:5.2f} x full{limit}")


def peak_bytes(case: str, seq_len: int, prefill_len: int) -> int:
    """Peak resident memory of this process after one window."""
    with windows([case], seq_len, prefill_len) as runs:
        runs[case]()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--prefill-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    args = parser.parse_args()
    if not 1 <= args.prefill_len < args.seq_len - 1:
        parser.error(f"--prefill-len {args.prefill_len}: must be from 1 to --seq-len - 2 = {args.seq_len - 2}")
    if not args.memory:
        ratios(args)
        return
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            peak = process.submit(peak_bytes, case, args.seq_len, args.prefill_len).result()
        print(f"{case:22s} {peak / 2**30:5.2f} GiB peak resident, window {args.seq_len}")


if __name__ == "__main__":
    main()
