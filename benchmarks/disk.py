"""Decode steps from a local disk: which layout and which gap suit which method, and who wins.

    python -m benchmarks.disk --prompt-len 4096 [model=NAME] [platform.disk_dir=DIR]

Prints for each system the median step, the bytes that its rows have and those that the disk read, the waiting, and
beside the disk's rate the step without a second memory. Contestants take turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from harness.model.resources import Memo, Resources
from harness.run.compose import load
from harness.speed.latency import run_latency

SYSTEMS = {
    "full (device)": ["method=full", "placement=device"],
    "full": ["method=full"],
    "int4": ["method=full", "codec=int4"],
    "infinigen": ["method=infinigen"],
    "infinigen2": ["method=infinigen2", "gpu_cache=0"],
    "infinigen2 rows2": ["method=infinigen2", "gpu_cache=2"],
    "quest": ["method=quest"],
    "retroinfer": ["method=retroinfer"],
    "h2o": ["method=h2o"],
}
LAYOUTS = ("heads", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--systems", nargs="*", default=[*SYSTEMS], choices=[*SYSTEMS])
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--gaps", nargs="*", type=int, default=[4])
    parser.add_argument("--budget", default=None, help="share that the selecting methods read, such as 0.1")
    options, settings = parser.parse_known_args()
    contestants: dict[tuple[str, str, int | str], list[str]] = {}
    for name in options.systems:
        words = SYSTEMS[name]
        if options.budget and not words[0].endswith("full"):
            words = [*words, f"budget={options.budget}"]
        if "placement=device" in words:
            contestants[name, "", ""] = words
            continue
        for layout in options.layouts:
            for gap in options.gaps:
                of_disk = [f"platform.disk_layout={layout}", f"platform.disk_gap_blocks={gap}"]
                contestants[name, layout, gap] = [*words, "placement=disk", *of_disk]
    shape = [
        f"prompt_len={options.prompt_len}", f"batch_size={options.batch_size}",
        f"gen_len={options.steps + 4}", f"timed_steps={options.steps}", "warmup_steps=2", "repeats=1",
    ]  # fmt: skip
    resources, prompts = Resources(), Memo()
    found: dict[tuple[str, str, int | str], list[dict[str, Any]]] = {key: [] for key in contestants}
    for _ in range(options.rounds):
        for key, words in contestants.items():
            config = load(["experiment=latency", *shape, *words, *settings])
            outcome = run_latency(config, resources.model(config.model), prompts)
            found[key].append(outcome.metrics | {"steps": outcome.samples["step_s"]})
            row = found[key][-1]
            print(key, {name: row[name] for name in ("h2d_bytes", "disk_read_bytes")}, flush=True)
    titles = ("step ms", "waits ms", "rows MB", "read MB", "times", "GB/s")
    print(f"{'system':18}{'layout':8}{'gap':>4}" + "".join(f"{title:>9}" for title in titles))
    for (name, layout, gap), rows in found.items():
        row = rows[-1]
        num_steps = row["gen_len"] - 1
        steps: list[float] = []
        for of_round in rows:
            for block in of_round["steps"]:
                steps += block
        wanted, read = row["h2d_bytes"] / num_steps / 1e6, (row["disk_read_bytes"] or 0) / num_steps / 1e6
        numbers = (
            statistics.median(steps) * 1e3, row["exposed_transfer_s"] / num_steps * 1e3, wanted, read,
            read / wanted if wanted else 0, (row["link_bytes_per_s"] or 0) / 1e9,
        )  # fmt: skip
        print(f"{name:18}{layout:8}{gap:>4}" + "".join(f"{number:9.2f}" for number in numbers))


if __name__ == "__main__":
    main()
