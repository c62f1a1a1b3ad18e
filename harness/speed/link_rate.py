"""The rate of the link, measured once per results folder and kept in `<results_dir>/link.json`, by
device.

On the CPU: the copy rate of RAM, from which the emulated link's rate follows. Under CUDA: the rate
of a plain copy from pinned memory, the ceiling of the real link, and how rows cross it fastest: how
the kernel that moves rows is launched best, and from which size of a contiguous piece on a copy
engine is faster. That takes some 0.1 s of the device, and the compiler's time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.decode.disk import BLOCK_BYTES, Disk, DiskFile
from harness.decode.memory import DEFAULT_TUNING, Tuning
from harness.decode.store import copy_heads, gather_rows
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
CLOSE = 1.03
"""A launch that takes up to this many times the least time is as good."""
NUM_PROGRAMS = (32, 64, 128)
TILE_BYTES = (2048, 4096, 8192)
GATHERED = (64, 4096, 144)
"""Heads, slots and bytes of a slot in the store that is gathered from: int4 rows of head_dim 128,
of which half go."""
PIECE_BYTES = tuple(2**power for power in range(12, 19))
COPIED_BYTES, COPIED_SLOT_BYTES = 2**24, 512
REPEATS = 5


@dataclass(frozen=True)
class LinkRate:
    """bytes_per_s: of the link, both directions alike. copy_bytes_per_s: measured; None where the
    rate was given. tuning: measured under CUDA."""

    bytes_per_s: float
    copy_bytes_per_s: float | None
    tuning: Tuning = DEFAULT_TUNING


def link_rate(results_dir: str | Path, device: torch.device, link_gbps: float | None) -> LinkRate:
    """The rate of the link to `device`; `link_gbps` (10^9 bytes/s) sets the emulated one. Raises
    UserError where the results folder cannot be written."""
    if link_gbps is not None:
        return LinkRate(link_gbps * 1e9, None)
    path = Path(results_dir) / "link.json"
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu, {processor()}"
    tuned = f"{name}, tuning"
    if name not in known or (is_cuda and tuned not in known):
        known[name] = measure_copy_rate(device)
        if is_cuda:
            known[tuned] = asdict(measure_tuning(device))
        write_atomic(path, json.dumps(known, indent=1) + "\n")
    rate = known[name]
    if is_cuda:
        return LinkRate(rate, rate, Tuning(**known[tuned]))
    return LinkRate(default_bytes_per_s(rate), rate)


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


def default_bytes_per_s(copy_rate: float) -> float:
    """The emulated link's rate from the copy rate, both in bytes/s: the paper's ratio of memory to
    link."""
    return copy_rate / MEMORY_TO_LINK


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


def measure_tuning(device: torch.device) -> Tuning:
    """The best launch of the kernel, and the crossover to copies with it."""
    num_programs, bytes_in_flight = choose_gather(_gather_seconds(device))
    tuning = Tuning(num_programs, bytes_in_flight)
    kernel_s, copy_s = _piece_seconds(device, tuning)
    return replace(tuning, min_copy_bytes=choose_min_copy(kernel_s, copy_s))


def choose_gather(seconds: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """The number of programs and the bytes in flight, from the seconds of the same gather with each
    pair of them.

    The fewest programs that are close to the fastest pair, since each takes a multiprocessor from
    the computation, and with those the fewest bytes.
    """
    enough = CLOSE * min(seconds.values())
    return min(pair for pair, took in seconds.items() if took <= enough)


def choose_min_copy(kernel_s: Mapping[int, float], copy_s: Mapping[int, float]) -> int:
    """The bytes of a piece from which on copying is faster; kernel_s, copy_s: seconds by bytes of a
    piece.

    The smallest size above which the kernel is never faster again; twice the largest if the kernel
    is faster there.
    """
    sizes = sorted(kernel_s)
    smallest = 2 * sizes[-1]
    for size in reversed(sizes):
        if kernel_s[size] < copy_s[size]:
            break
        smallest = size
    return smallest


def _gather_seconds(device: torch.device) -> dict[tuple[int, int], float]:
    """Seconds of a gather of scattered rows, by the number of programs and the bytes in flight."""
    heads, capacity, slot_bytes = GATHERED
    slots = _host_slots(device, heads, capacity, slot_bytes)
    order = torch.rand(1, heads, capacity, device=device).argsort(-1)
    index = order[..., : capacity // 2].contiguous()
    rows = torch.empty((1, heads, capacity // 2, slot_bytes), dtype=torch.uint8, device=device)
    seconds = {}
    for num_programs, tile_bytes in product(NUM_PROGRAMS, TILE_BYTES):
        tuning = Tuning(num_programs, num_programs * tile_bytes)
        move = partial(gather_rows, slots, index, rows, tuning=tuning)
        seconds[num_programs, tuning.bytes_in_flight] = _seconds(move)
    return seconds


def _piece_seconds(
    device: torch.device, tuning: Tuning
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds in which the kernel and a copy fetch every other piece of host memory, by the bytes
    of a piece."""
    kernel_s, copy_s = {}, {}
    for piece_bytes in PIECE_BYTES:
        heads, count = COPIED_BYTES // piece_bytes, piece_bytes // COPIED_SLOT_BYTES
        slots = _host_slots(device, heads, 2 * count, COPIED_SLOT_BYTES)
        rows = torch.empty((1, heads, count, COPIED_SLOT_BYTES), dtype=torch.uint8, device=device)
        index = torch.arange(count, device=device).expand(1, heads, -1).contiguous()
        kernel_s[piece_bytes] = _seconds(partial(gather_rows, slots, index, rows, tuning=tuning))
        copy_s[piece_bytes] = _seconds(partial(copy_heads, slots[:, :, :count], rows))
    return kernel_s, copy_s


def _host_slots(device: torch.device, heads: int, capacity: int, slot_bytes: int) -> Tensor:
    return torch.zeros(
        (1, heads, capacity, slot_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda"
    )


def _seconds(move: Callable[[], object]) -> float:
    """Median seconds of a call on the current stream, after one call that compiles and loads."""
    move()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        move()
        event.record()
    events[-1].synchronize()
    calls_ms = []
    for begin, end in zip(events, events[1:], strict=False):
        calls_ms.append(begin.elapsed_time(end))
    return statistics.median(calls_ms) / 1e3
