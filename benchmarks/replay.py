"""What replay of each method costs, in multiples of replay of the full cache with torch's fused attention.

    python -m benchmarks.replay                          ratios: one 2,048-token window, prompt 256, default model
    python -m benchmarks.replay --memory --seq-len 8192  peak memory of one window, one process per method
    python -m benchmarks.replay --memory --live --seq-len 8192 --prefill-len 8160 model=llama2-7b    the same, live

What is left are settings of every case, such as the model. A timed interval is prompt, decode rows and output head of
one window; loading, calibration and scoring are outside. Methods run in turn within a round, and the full cache with
them, asked for or not; the ratio is that of the medians over rounds. Live, the rows are decoded one by one, the cache
behind a link.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.timing import in_turn, spread
from harness.checks.two_ways import open_live, open_replay
from harness.data.text import offline_text, token_ids
from harness.decode.links import open_link
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import load_model
from harness.replay.setup import Setup, prepare
from harness.run.compose import load

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
    "infinigen2": ["method=infinigen2"],
}
LINK_RATE = 1e12
"""Bytes per second of the emulated link, where seconds do not count."""
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


def run_live(attached: Attached, setup: Setup, window: Tensor, prompt: int) -> None:
    """The same window live: the prompt, then a step for each further token."""
    steps = window.shape[1] - prompt
    with open_link(attached.device, bytes_per_s=LINK_RATE) as link:
        session = open_live(attached, setup, steps, placement="host", link=link)
        with closing(session):
            session.prefill(window[:, :prompt], torch.ones_like(window[:, :prompt], dtype=torch.bool))
            for step in range(steps):
                session.decode_step(window[:, prompt + step])


@contextmanager
def windows(args: argparse.Namespace, cases: Sequence[str]) -> Iterator[dict[str, Callable[[], None]]]:
    """A run of each case; the full cache is a single dense pass, unless it is decoded live."""
    configs = {case: load([*CASES[case], *args.settings]) for case in cases}
    loaded = load_model(configs[cases[0]].model)
    seq_len, run = args.seq_len, run_live if args.live else run_window
    window = torch.tensor([token_ids(offline_text(), loaded.tokenizer)[1024 : 1024 + seq_len]])
    with attach(loaded.model) as attached:
        yield {
            case: partial(
                run,
                attached,
                prepare(config, loaded, attached, list),
                window,
                seq_len if case == "full" and not args.live else args.prefill_len,
            )
            for case, config in configs.items()
        }


def ratios(args: argparse.Namespace) -> None:
    """Print medians, spread and the ratio to full, which is timed whatever the cases are."""
    cases = list(dict.fromkeys(["full", *args.cases]))
    with windows(args, cases) as runs:
        times, _ = in_turn(runs, args.rounds, warm_up=True)
    seconds = {case: [took.wall_s for took in of_case] for case, of_case in times.items()}
    print(f"window {args.seq_len}, prompt {args.prefill_len}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    full = statistics.median(seconds["full"])
    for case, values in seconds.items():
        median = statistics.median(values)
        limit = f"   limit {LIMITS[case]}" if case in LIMITS else ""
        print(f"{case:22s} {median:6.2f} s ({spread(values)})   {median / full:5.2f} x full{limit}")


def peak_bytes(case: str, args: argparse.Namespace) -> tuple[int, int]:
    """Peak resident memory of this process once the model is there, and after one window."""
    with windows(args, [case]) as runs:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        runs[case]()
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--prefill-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--live", action="store_true", help="live decoding instead of replay")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="methods, by default all")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings of every case, such as the model")
    args = parser.parse_intermixed_args()
    if not 1 <= args.prefill_len < args.seq_len - 1:
        parser.error(f"--prefill-len {args.prefill_len}: must be from 1 to --seq-len - 2 = {args.seq_len - 2}")
    if not args.memory:
        ratios(args)
        return
    for case in args.cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            before, peak = (each / 2**30 for each in process.submit(peak_bytes, case, args).result())
        print(
            f"{case:22s} {peak:5.2f} GiB peak resident, {before:.2f} before it began, window {args.seq_len}", flush=True
        )


if __name__ == "__main__":
    main()
