"""The rate of the link, measured once per results folder and kept in `<results_dir>/link.json`, by device.

On the CPU: the copy rate of RAM, from which the emulated link's rate follows. Under CUDA: the rate of a plain copy
from pinned memory, the ceiling of what the real link achieves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.files import write_atomic
from harness.offload.links.emulated import default_bytes_per_s, measure_copy_rate
from harness.records.environment import processor


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
        known[name] = _measure(device)
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    return LinkRate(known[name] if cuda else default_bytes_per_s(known[name]), known[name])


def _measure(device: torch.device) -> float:
    if device.type == "cpu":
        return measure_copy_rate()
    from harness.offload.links.cuda import measure_pinned_copy_rate

    return measure_pinned_copy_rate(device)
