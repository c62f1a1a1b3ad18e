"""The rate of the link, measured once per results folder and kept in `<results_dir>/link.json`, by device.

On the CPU: the copy rate of RAM, from which the emulated link's rate follows. Under CUDA: the rate of a plain copy
from pinned memory, the ceiling of what the real link achieves.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.environment import processor
from harness.memory.emulated_link import default_bytes_per_s, measure_copy_rate
from harness.records import write_atomic

COPY_BYTES, REPEATS = 256 * 2**20, 5


@dataclass(frozen=True)
class LinkRate:
    """bytes_per_s: of the link, both directions alike. copy_bytes_per_s: measured; None where the rate was given."""

    bytes_per_s: float
    copy_bytes_per_s: float | None


def link_rate(results_dir: str | Path, device: torch.device, link_gbps: float | None) -> LinkRate:
    """The rate of the link to `device`; `link_gbps` (10^9 bytes/s) sets the emulated one.

    Raises UserError where the results folder cannot be written.
    """
    if link_gbps is not None:
        return LinkRate(link_gbps * 1e9, None)
    path = Path(results_dir) / "link.json"
    try:
        known = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}  # not there yet, or damaged: measured anew
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"cpu, {processor()}"
    if not isinstance(known.get(name), float):
        known[name] = _pinned_copy_rate(device) if cuda else measure_copy_rate(COPY_BYTES, REPEATS)
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    return LinkRate(known[name] if cuda else default_bytes_per_s(known[name]), known[name])


def _pinned_copy_rate(device: torch.device) -> float:
    """Payload bytes/s of copies from pinned memory to the device; the median."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return COPY_BYTES / sorted(seconds[1:])[REPEATS // 2]
