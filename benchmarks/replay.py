"""What replay of each method costs, in multiples of replay of the full cache with torch's fused attention.

    python -m benchmarks.replay                          ratios: one 2,048-token window, prompt 256, default model
    python -m benchmarks.replay --memory --seq-len 8192 --cases h2o      this method's peak memory instead
    python -m benchmarks.replay model=llama2-7b --live --seq-len 8192 --prefill-len 8160 --memory --cases h2o

What is left are settings of every case, such as the model. A timed interval is prompt, decode rows and output head of
one window; loading, calibration and scoring are outside. Methods run in turn within a round, and the full cache with
them, asked for or not; the ratio is that of the medians over rounds. Live, the rows are decoded one by one, the cache
behind a link.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import in_turn, spread
from harness.checks.two_ways import LINK_BYTES_PER_S, open_live, open_replay
from harness.data.text import offline_text, token_ids
from harness.decode.links import open_link
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import load_model
from harness.replay.setup import Setup, prepare
from harness.run.compose import load

HEAD_CHUNK = 128
FIRST = 1024
"""The window's first token in the offline text."""
METHODS = ("full", "int4", "infinigen", "h2o", "streaming", "snapkv", "quest", "oracle", "infinigen2")


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
    with open_link(attached.device, bytes_per_s=LINK_BYTES_PER_S) as link:
        session = open_live(attached, setup, steps, placement="host", link=link)
        with closing(session):
            session.prefill(window[:, :prompt], torch.ones_like(window[:, :prompt], dtype=torch.bool))
            for step in range(steps):
                session.decode_step(window[:, prompt + step])


def ratios(runs: Mapping[str, Callable[[], None]], rounds: int) -> Iterator[str]:
    """A line of each method: median, spread and the ratio to full."""
    times, _ = in_turn(runs, rounds)
    full = statistics.median(took.wall_s for took in times["full"])
    for method, took in times.items():
        seconds = [each.wall_s for each in took]
        median = statistics.median(seconds)
        yield f"{method:22s} {median:6.2f} s ({spread(seconds)})   {median / full:5.2f} x full"


def peak_gib() -> float:
    """The largest resident memory of this process up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--prefill-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="peak memory of one method, instead of time")
    parser.add_argument("--live", action="store_true", help="live decoding instead of replay")
    parser.add_argument("--cases", nargs="+", metavar="METHOD", default=METHODS, help="files of conf/method")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings of every case, such as the model")
    options = parser.parse_intermixed_args()
    if not 1 <= options.prefill_len < options.seq_len - 1:
        parser.error(f"--prefill-len {options.prefill_len}: must be from 1 to --seq-len - 2 = {options.seq_len - 2}")
    if options.memory and len(options.cases) != 1:
        parser.error("--memory: a process has one peak, so give it one method by --cases")
    methods = options.cases if options.memory else dict.fromkeys(["full", *options.cases])
    configs = {method: load([f"method={method}", *options.settings]) for method in methods}
    loaded = load_model(next(iter(configs.values())).model)
    window = torch.tensor([token_ids(offline_text(), loaded.tokenizer)[FIRST : FIRST + options.seq_len]])
    runs = {}
    with attach(loaded.model) as attached:
        for method, config in configs.items():
            is_dense = method == "full" and not options.live
            prompt = options.seq_len if is_dense else options.prefill_len
            setup = prepare(config, loaded, attached, list)
            runs[method] = partial(run_live if options.live else run_window, attached, setup, window, prompt)
        lengths = f"window {options.seq_len}, prompt {options.prefill_len}, {torch.get_num_threads()} threads"
        if options.memory:
            before, method = peak_gib(), options.cases[0]
            runs[method]()
            print(f"{method}: {peak_gib():.2f} GiB peak resident, {before:.2f} before it began; {lengths}")
            return
        print(f"{lengths}, {options.rounds} rounds")
        print(*ratios(runs, options.rounds), sep="\n")


if __name__ == "__main__":
    main()
