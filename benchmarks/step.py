"""A decode step of an offloading system in multiples of the ideal's, by segment.

    python -m benchmarks.step                              infinigen2+rows at 10 %, batch 8, 1,024 tokens, SmolLM2
    python -m benchmarks.step --labels infinigen2 infinigen2+rows infinigen+reuse batch_size=4
    python -m benchmarks.step --labels doublesparsity loki quest      methods by name, their rows behind the link
    python -m benchmarks.step --labels infinigen2+rows infinigen2-sampled gpu_cache=2
    python -m benchmarks.step --labels infinigen2+rows infinigen2-sampled,codec=int8,group_size=16,gpu_cache=2

In every round each system decodes from the same prompt, the ideal first. A ratio is that of a round's median steps;
printed are its median over the rounds and its spread, and the medians of a step's segments. Settings are those of every
system, such as the model; those after a label's comma are its own. Under `platform=cpu` the link is emulated, so only
the rest is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks.machine import machine
from benchmarks.timing import keep_freed_memory, spread
from harness.decode.timeline import SEGMENTS
from harness.errors import exit_code
from harness.model.attach import attach
from harness.model.load import load_model
from harness.replay.setup import Setup, prepare
from harness.run.compose import load
from harness.settings.config import RunConfig
from harness.settings.schema import options
from harness.speed.latency import compute_threads, decode_rows, prompt_ids, two_memories
from harness.speed.timed_run import TimedRun, run_shared_prompt, time_run

IDEAL = "ideal"
BUDGET = "0.1"
NOT_IDEAL = ("budget=", "method.", "codec=", "group_size=", "rotation=", "gpu_cache=")
"""Settings that the ideal does not have."""


def config_of(label: str, settings: Sequence[str]) -> RunConfig:
    """The run of a system, or of a method by its name, with its own settings after commas. The ideal has none of
    `NOT_IDEAL`."""
    label, *own = label.split(",")
    named = f"system={label}" if label in options("system") else f"method={label}"
    budget = [] if label == IDEAL else [f"budget={BUDGET}"]
    common = ["experiment=latency", "batch_size=8", "repeats=1", "timed_steps=16", named, *budget]
    given = [setting for setting in settings if label != IDEAL or not setting.startswith(NOT_IDEAL)]
    return load([*common, *given, *own])


def timed_run(config: RunConfig, setup: Setup) -> TimedRun:
    """The run that `experiment=latency` makes of a config."""
    return TimedRun(setup.method, config.latency, config.placement, setup.codec, config.gpu_cache)


def labels_and_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are labels, and those that are settings: a setting has a = before any comma."""
    labels: list[str] = []
    settings: list[str] = []
    for word in words:
        kind = settings if "=" in word.partition(",")[0] else labels
        kind.append(word)
    return labels, settings


def compare(labels: Sequence[str], settings: Sequence[str], rounds: int) -> None:
    """Print each system's step, its ratio to the ideal's, and its segments in ms a step."""
    names = [IDEAL, *labels]
    configs = {name: config_of(name, settings) for name in names}
    first = configs[labels[0]]
    loaded = load_model(first.model)
    steps: dict[str, list[float]] = {name: [] for name in names}
    segments: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with attach(loaded.model) as attached, compute_threads(attached.device) as num_threads:
        setups = {}
        for name, config in configs.items():
            setups[name] = prepare(config, loaded, attached, lambda config=config: decode_rows(config.latency))
        prompt = run_shared_prompt(attached, prompt_ids(first, loaded))
        with two_memories(first, attached) as (rate, link):
            for _ in range(rounds):
                for name, config in configs.items():
                    run = timed_run(config, setups[name])
                    timing = time_run(attached, prompt, run, link=link, calibration=setups[name].calibration)
                    (of_round,) = timing.samples["step_s"]
                    steps[name].append(statistics.median(of_round))
                    medians = {}
                    for segment in SEGMENTS:
                        medians[segment] = statistics.median(step[segment] for step in timing.samples["segments"])
                    segments[name].append(medians)
    shape = first.latency
    print(f"{loaded.name}, {shape.batch_size} x {shape.prompt_len} + {shape.gen_len} tokens, {rounds} rounds")
    print(f"{num_threads} compute threads, link {rate.bytes_per_s / 1e9:.2f} GB/s, {first.platform.name}")
    titles = "".join(f"{segment:>12}" for segment in SEGMENTS)
    width = max(18, *(len(name) + 1 for name in names))
    print(f"{'ms a step':{width}}{'step':>9}{'x ideal':>9} {'(spread)':16}{titles}")
    for name in names:
        ratios = [ours / ideal for ours, ideal in zip(steps[name], steps[IDEAL], strict=True)]
        of_step = f"{1e3 * statistics.median(steps[name]):9.1f}{statistics.median(ratios):9.2f}"
        parts = ""
        for segment in SEGMENTS:
            median = statistics.median(medians[segment] for medians in segments[name])
            parts += f"{1e3 * median:12.1f}"
        print(f"{name:{width}}{of_step} ({spread(ratios)}){'':4}{parts}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=str(__doc__).splitlines()[0])
    parser.add_argument("--labels", nargs="+", default=["infinigen2+rows"], help="systems, or methods by name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="settings of every system, such as the model")
    options = parser.parse_intermixed_args(argv)

    def act() -> None:
        print(machine())
        keep_freed_memory()  # before anything large is allocated
        labels, settings = labels_and_settings([*options.labels, *options.settings])
        compare(labels, settings, options.rounds)

    return exit_code(act)


if __name__ == "__main__":
    sys.exit(main())
