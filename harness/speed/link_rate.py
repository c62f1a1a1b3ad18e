"""The rate of the link, measured once per results folder and kept in `<results_dir>/link.json`, by
device.

On the CPU: the copy rate of RAM, from which the emulated link's rate follows. Under CUDA: the rate
of a plain copy from pinned memory, the ceiling of the real link.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.decode.disk import BLOCK_BYTES, Disk, DiskFile
from harness.files import write_atomic
from harness.results.environment import processor

MEMORY_TO_LINK = 62
"""Memory bandwidth over link bandwidth of the paper's machine: RTX A6000 768 GB/s, PCIe 3.0 x16
12.4 GB/s achieved."""
CPU = torch.device("cpu")
COPIED = 256 * 2**20
"""Bytes of a copy that measures a rate."""
MEASURED_ON_DISK = 128 * 2**20
"""Bytes that are written and read to find a disk's rate."""
REPEATS = 5


@dataclass(frozen=True)
class LinkRate:
    """bytes_per_s: of the link, both directions alike. copy_bytes_per_s: measured; None where the
    rate was given."""

    bytes_per_s: float
    copy_bytes_per_s: float | None


def link_rate(results_dir: str | Path, device: torch.device, link_gbps: float | None) -> LinkRate:
    """The rate of the link to `device`; `link_gbps` (10^9 bytes/s) sets the emulated one. Raises
    UserError where the results folder cannot be written."""
    if link_gbps is not None:
        return LinkRate(link_gbps * 1e9, None)
    path = Path(results_dir) / "link.json"
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu, {processor()}"
    if name not in known:
        known[name] = measure_copy_rate(device)
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    rate = known[name]
    return LinkRate(rate if is_cuda else rate / MEMORY_TO_LINK, rate)


def disk_rate(disk: Disk) -> LinkRate:
    """What the disk reads in long pieces at that moment. It is not kept: two runs may find
    different disks under one name."""
    num_blocks = MEASURED_ON_DISK // BLOCK_BYTES
    blocks = np.arange(num_blocks)
    seconds = []
    with closing(DiskFile(disk, num_blocks)) as file:
        disk.reserve(num_blocks)
        file.write(blocks, blocks)
        for _ in range(REPEATS):
            began = time.perf_counter()
            file.read(blocks, blocks)
            seconds.append(time.perf_counter() - began)
    return LinkRate(MEASURED_ON_DISK / statistics.median(seconds), None)


def measure_copy_rate(device: torch.device = CPU) -> float:
    """Payload bytes/s of plain copies, the median: within this machine's RAM, where each is read
    once and written once, or from pinned memory to another device, the ceiling of its link."""

    source = torch.ones(COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(COPIED, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        began = idle_s(device)
        target.copy_(source, non_blocking=True)
        seconds.append(idle_s(device) - began)
    return COPIED / statistics.median(seconds[1:])  # the first copy maps the pages


def idle_s(device: torch.device) -> float:
    """perf_counter once nothing is under way on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
