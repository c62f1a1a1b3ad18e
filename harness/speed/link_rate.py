"""The rate of the link, measured once per results folder and kept in `<results_dir>/link.json`, by device.

On the CPU: the copy rate of RAM, from which the emulated link's rate follows. Under CUDA: the rate of a plain copy
from pinned memory, the ceiling of what the real link achieves, and beside it how rows cross it fastest.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from harness.errors import reason
from harness.files import write_atomic
from harness.offload.memory import DEFAULT_TUNING, Tuning
from harness.records.environment import processor

log = logging.getLogger(__name__)
MEMORY_TO_LINK = 62
"""Memory bandwidth over link bandwidth of the paper's machine: RTX A6000 768 GB/s, PCIe 3.0 x16 12.4 GB/s achieved."""


@dataclass(frozen=True)
class LinkRate:
    """bytes_per_s: of the link, both directions alike. copy_bytes_per_s: measured; None where the rate was given.
    tuning: measured under CUDA."""

    bytes_per_s: float
    copy_bytes_per_s: float | None
    tuning: Tuning = DEFAULT_TUNING


def link_rate(results_dir: str | Path, device: torch.device, link_gbps: float | None) -> LinkRate:
    """The rate of the link to `device`; `link_gbps` (10^9 bytes/s) sets the emulated one.

    Raises UserError where the results folder cannot be written.
    """
    if link_gbps is not None:
        return LinkRate(link_gbps * 1e9, None)
    path = Path(results_dir) / "link.json"
    known = _read(path)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        rate, tuning = _rate(path, known, name), _tuning(known.get(f"{name}, tuning"))
        if rate is None or tuning is None:
            rate, tuning = _measure(device)
            _write(path, known | {name: rate, f"{name}, tuning": asdict(tuning)})
        return LinkRate(rate, rate, tuning)
    name = f"cpu, {processor()}"
    rate = _rate(path, known, name)
    if rate is None:
        rate = measure_copy_rate()
        _write(path, known | {name: rate})
    return LinkRate(default_bytes_per_s(rate), rate)


def measure_copy_rate(num_bytes: int = 256 * 2**20, repeats: int = 5) -> float:
    """Payload bytes/s (each read once and written once) of copies within this machine's RAM; the median."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    target.copy_(source)  # the first touch maps the pages
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return num_bytes / sorted(seconds)[repeats // 2]


def default_bytes_per_s(copy_rate: float) -> float:
    """The emulated link's rate from the copy rate, both in bytes/s: the paper's ratio of memory to link."""
    return copy_rate / MEMORY_TO_LINK


def _measure(device: torch.device) -> tuple[float, Tuning]:
    from harness.speed.tuning import measure_pinned_copy_rate, measure_tuning

    return measure_pinned_copy_rate(device), measure_tuning(device)


def _read(path: Path) -> dict[str, Any]:
    """What is known; nothing where the file is not there yet, or damaged, which is said."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        log.warning("%s: damaged (%s); measured anew", path, reason(error))
        return {}


def _write(path: Path, known: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(known, indent=1) + "\n")


def _rate(path: Path, known: dict[str, Any], name: str) -> float | None:
    """The rate of a device; None where it is not known, or no rate, which is said."""
    stored = known.get(name)
    if isinstance(stored, float) and 0 < stored < math.inf:
        return stored
    if stored is not None:
        log.warning("%s: %s=%s is no rate; measured anew", path, name, stored)
    return None


def _tuning(stored: Any) -> Tuning | None:
    """None where it is not whole."""
    names = {field.name for field in fields(Tuning)}
    if not isinstance(stored, dict) or set(stored) != names:
        return None
    return Tuning(**stored) if all(type(value) is int and value > 0 for value in stored.values()) else None
