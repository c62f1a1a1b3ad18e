"""The machine of a benchmark, in a line."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.results.environment import processor
from harness.speed.link_rate import measure_copy_rate


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
