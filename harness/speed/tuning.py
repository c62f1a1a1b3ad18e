"""How rows cross the link of a CUDA device fastest, from timings: how the kernel that moves rows is launched at its
best, and from which size of a contiguous piece on a copy engine is faster. Some 0.1 s of the device, and the compiler's
time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from harness.offload.memory import Tuning
from harness.offload.store import copy_heads, gather_rows

CLOSE = 1.03
"""What takes up to so many times the least time is as good."""
NUM_PROGRAMS = (32, 64, 128)
TILE_BYTES = (2048, 4096, 8192)
GATHERED = (64, 4096, 144)
"""Heads, slots and bytes of a slot in the store that is gathered from: int4 rows of head_dim 128, of which half go."""
PIECE_BYTES = tuple(2**power for power in range(12, 19))
COPIED_BYTES, COPIED_SLOT_BYTES = 2**24, 512
REPEATS = 5


def measure_tuning(device: torch.device) -> Tuning:
    """The best of some launches of the kernel, and the crossover to copies with it."""
    num_programs, bytes_in_flight = choose_gather(_gather_seconds(device))
    tuning = Tuning(num_programs, bytes_in_flight)
    kernel_s, copy_s = _piece_seconds(device, tuning)
    return replace(tuning, min_copy_bytes=choose_min_copy(kernel_s, copy_s))


def choose_gather(seconds: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """The number of programs and the bytes in flight, from what the same gather takes with each pair of them.

    The fewest programs that are close to the fastest pair, since each takes a multiprocessor from the computation, and
    with those the fewest bytes that are.
    """
    enough = CLOSE * min(seconds.values())
    return min(pair for pair, took in seconds.items() if took <= enough)


def choose_min_copy(kernel_s: Mapping[int, float], copy_s: Mapping[int, float]) -> int:
    """The bytes of a piece from which on copying is faster, from what either takes by the bytes of a piece.

    The smallest size timed above which the kernel is never faster again; twice the largest where it still is there.
    """
    sizes = sorted(kernel_s)
    kernel_wins = [size for size in sizes if kernel_s[size] < copy_s[size]]
    slower = [size for size in sizes if not kernel_wins or size > kernel_wins[-1]]
    return slower[0] if slower else 2 * sizes[-1]


def measure_pinned_copy_rate(device: torch.device, num_bytes: int = 256 * 2**20, repeats: int = 5) -> float:
    """Payload bytes/s of plain copies from pinned memory to the device, the ceiling of a link; the median."""
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return num_bytes / sorted(seconds[1:])[repeats // 2]  # the first copy maps the pages


def _gather_seconds(device: torch.device) -> dict[tuple[int, int], float]:
    """What a gather of scattered rows takes, by the number of programs and the bytes in flight."""
    heads, capacity, slot_bytes = GATHERED
    slots = _host_slots(device, heads, capacity, slot_bytes)
    index = torch.rand(1, heads, capacity, device=device).argsort(-1)[..., : capacity // 2].contiguous()
    rows = torch.empty((1, heads, capacity // 2, slot_bytes), dtype=torch.uint8, device=device)
    seconds = {}
    for num_programs, tile_bytes in product(NUM_PROGRAMS, TILE_BYTES):
        tuning = Tuning(num_programs, num_programs * tile_bytes)
        move = partial(gather_rows, slots, index, rows, tuning=tuning)
        seconds[num_programs, tuning.bytes_in_flight] = _seconds(move)
    return seconds


def _piece_seconds(device: torch.device, tuning: Tuning) -> tuple[dict[int, float], dict[int, float]]:
    """What the kernel and a copy take to fetch every other piece of host memory, by the bytes of a piece."""
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
    """Slots in memory that `device` can address."""
    return torch.zeros((1, heads, capacity, slot_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")


def _seconds(move: Callable[[], object]) -> float:
    """Of the current stream, the median of some calls behind one that compiles and loads what it needs."""
    move()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        move()
        event.record()
    events[-1].synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False))
    return times[REPEATS // 2] / 1e3
