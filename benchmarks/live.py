"""A decode step of ours, full cache on the device, against one of transformers with its `DynamicCache`.

Both start from the same prompt and run in five rounds or more, in turn. Compared is the ratio of medians in each round;
printed are its median and spread. transformers' step is the forward pass that `generate` makes for every token.

`DynamicCache` makes every layer's cache anew in a step. On a CPU that takes as long as the allocator needs to map fresh
pages, between nothing and four steps. To keep the allocator out of the comparison, freed memory stays mapped on either
side (glibc's thresholds for returning it are raised); `--returned` leaves the allocator as it is. Page faults in a step
tell which of the two happened. The first line names the CPU, its caches and the rate at which one thread copies memory.

Weights are random, of the shape in `conf/model/<model>.yaml`. torch, transformers and numpy are enough, with triton
under CUDA. Steps of the offloading systems against their floor: `python -m benchmarks.gpu --platform cpu`.

    python -m benchmarks.live --platform cuda --model opt-13b --batch 8 --prompt 1920
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.timing import spread
from harness.errors import exit_code
from harness.model.attach import attach
from harness.results.environment import processor
from harness.settings.config import LatencyConfig
from harness.speed.link_rate import idle_s, measure_copy_rate
from harness.speed.timed_run import SharedPrompt, TimedRun, run_shared_prompt, time_run
from methods.full import Full

MODELS = Path(__file__).resolve().parent.parent / "conf" / "model"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def random_model(name: str, device: torch.device, **changes: Any) -> Any:
    """A model of a shape under conf/model, random weights: fp16 under CUDA, else fp32."""
    shape = yaml.safe_load((MODELS / f"{name}.yaml").read_text())["shape"] | changes
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def transformers_steps(model: Any, prompt: SharedPrompt, steps: int) -> tuple[list[float], float]:
    """Seconds of each decode step of transformers on a `DynamicCache` that holds the prompt, and page faults a step."""
    cache = DynamicCache(config=model.config)
    for layer, states in enumerate(prompt.prompt.layers):
        cache.update(states.key, states.value, layer)
    with torch.inference_mode():
        token = model.get_output_embeddings()(prompt.prompt.hidden).argmax(-1)
        faults, times = _page_faults(), [idle_s(model.device)]
        for _ in range(steps):
            logits = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].float().argmax(-1)
            times.append(idle_s(model.device))
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    return seconds, (_page_faults() - faults) / steps


def compare(model: Any, prompt: SharedPrompt, shape: LatencyConfig, rounds: int) -> float:
    """Print each round; returns the median over the rounds of transformers' median step over ours."""
    ratios = []
    for number in range(rounds):
        theirs, faults = transformers_steps(model, prompt, shape.warmup_steps + shape.steps_per_repeat)
        theirs = theirs[shape.warmup_steps :]
        with attach(model) as attached:
            (ours,) = time_run(attached, prompt, TimedRun(Full(), shape, "device")).samples["step_s"]
        our_s, their_s = statistics.median(ours), statistics.median(theirs)
        ratios.append(their_s / our_s)
        print(
            f"  round {number + 1}: {1e3 * our_s:7.2f} ms ({spread(ours, 1e3)}) against {1e3 * their_s:7.2f} ms "
            f"({spread(theirs, 1e3)}, {faults:.0f} page faults a step): {ratios[-1]:.2f}"
        )
    median = statistics.median(ratios)
    print(f"ours is {median:.2f} times as fast in the median round ({spread(ratios)})")
    return median


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory mapped, and serve large requests from it; returns whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return all(mallopt(threshold, 2**31 - 1) == 1 for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2-135m", help="a shape under conf/model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--returned", action="store_true", help="freed memory goes back to the system, as by default")
    options = parser.parse_args(argv)
    if not (MODELS / f"{options.model}.yaml").is_file():
        parser.error(f"--model {options.model}: allowed: {', '.join(sorted(path.stem for path in MODELS.iterdir()))}")
    if options.platform == "cuda" and not torch.cuda.is_available():
        parser.error("--platform cuda: torch finds no CUDA device here")
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    print(machine())
    kept = not options.returned and keep_freed_memory()  # before anything large is allocated
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    gen_len = options.warmup + options.steps + 1
    shape = LatencyConfig(options.batch, options.prompt, gen_len, options.warmup, options.steps, repeats=1)
    model = random_model(options.model, torch.device(options.platform))
    ids = torch.randint(model.config.vocab_size, (options.batch, options.prompt), device=model.device)
    print(f"{options.model}, random weights, {options.batch} x {options.prompt} + {gen_len} tokens")
    print(f"{options.threads} compute threads")
    print(f"memory that is freed {'stays mapped' if kept else 'goes back to the system as the C library decides'}")
    with attach(model) as attached:
        prompt = run_shared_prompt(attached, ids)
    compare(model, prompt, shape, options.rounds)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    sys.exit(main())
