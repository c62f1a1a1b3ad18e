"""Rates between host memory and the device, through the harness's own stores and links.

Samples are bytes/s of payload, from an idle device to an idle device. On the CPU the link is the emulated one, and
gathers and copies are those within RAM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from harness.offload.fetch import indices
from harness.offload.links import open_link
from harness.offload.memory import DEFAULT_TUNING, PinnedSlab, Tuning
from harness.offload.store import KVStore, RowFormat, SlotRequest, chosen
from methods.codec import Codec

REPEATS = 5
HEAD_DIM, ROW_BYTES = 128, 512
"""Of fp16 rows, K and V side by side."""
CAPACITY, KEPT = 2048, 409
"""Slots of a head, and the 20 % of them that a gather takes."""
ROWS = (
    *(("fp16", head_dim) for head_dim in (16, 32, 64, 128, 256, 512)),  # 64 B to 2 KiB
    *((codec, head_dim) for codec in ("int8", "int4") for head_dim in (64, 128)),
)
PIECES = tuple(kib * 2**10 for kib in (4, 16, 64, 256, 1024))


class Rate(NamedTuple):
    """Bytes/s of each repeat, and the conditions that tell it from others of its part."""

    name: str
    samples: list[float]
    at: dict[str, Any]


def link_rates(device: torch.device, num_bytes: int, bytes_per_s: float | None) -> Iterator[Rate]:
    """Of one copy of `num_bytes` each way, and of both at once, whose bytes count together.

    bytes_per_s: the emulated link's, None under CUDA. The emulated link is one for both directions; under CUDA each has
    a stream of its own.
    """
    slots = num_bytes // ROW_BYTES
    with ExitStack() as stack:
        source, target = (stack.enter_context(_store(device, 1, slots)) for _ in range(2))
        there = stack.enter_context(open_link(device, bytes_per_s=bytes_per_s))
        back = stack.enter_context(open_link(device)) if device.type == "cuda" else there
        loaded, written = (each.rows_in(each.new_buffer(slots), slots)[:, :, :slots] for each in (source, target))

        def move(ways: Sequence[str]) -> None:
            if "h2d" in ways:
                there.prefetch(source, slots, loaded)
            if "d2h" in ways:
                back.write_back(target, written, 0)
            there.drain()
            back.drain()

        for ways in (("h2d",), ("d2h",), ("h2d", "d2h")):
            times = seconds(device, partial(move, ways))
            moved = len(ways) * slots * ROW_BYTES
            yield Rate(" with ".join(ways), [moved / each for each in times], {"bytes": moved})


def gather_rates(device: torch.device, num_bytes: int, tuning: Tuning) -> Iterator[Rate]:
    """Of the gather of a fifth of `num_bytes` of slots, in order within a head as a selection is, by size of row."""
    for codec, head_dim in ROWS:
        heads = max(1, num_bytes // (CAPACITY * _format(codec, head_dim).slot_bytes))
        with _store(device, heads, CAPACITY, head_dim, codec, tuning) as store:
            kept = torch.rand(1, heads, CAPACITY, device=device).topk(KEPT).indices
            mask = torch.zeros(1, heads, CAPACITY, dtype=torch.bool, device=device).scatter_(-1, kept, True)
            samples = _load_rates(device, store, chosen(indices(mask, KEPT)), heads * KEPT)
            yield Rate("gather", samples, {"row_bytes": store.slot_bytes, "codec": codec, "head_dim": head_dim})


def copy_rates(device: torch.device, num_bytes: int, tuning: Tuning) -> Iterator[Rate]:
    """Of `num_bytes` in whole pieces, one a head, by copies and by the gather, by size of piece."""
    for piece in PIECES:
        count, heads = piece // ROW_BYTES, max(1, num_bytes // piece)
        capacity = count + 1  # a slot between two pieces: they do not merge into one
        with _store(device, heads, capacity, tuning=tuning) as store:
            rows = torch.arange(count, device=device).expand(1, heads, -1).contiguous()
            for name, request in (("copies", count), ("gather", chosen(rows))):
                samples = _load_rates(device, store, request, heads * count)
                yield Rate(name, samples, {"piece_bytes": piece, "pieces": heads})


def pin_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """Of page-locking `num_bytes` that no one touched before."""
    times = []
    for _ in range(REPEATS):
        began = _idle(device)
        slab = PinnedSlab(num_bytes)
        times.append(_idle(device) - began)
        slab.close()
    yield Rate("page-locking", [num_bytes / each for each in times], {"bytes": num_bytes})


def seconds(device: torch.device, run: Callable[[], object]) -> list[float]:
    """Of `REPEATS` runs, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        began = _idle(device)
        run()
        times.append(_idle(device) - began)
    return times[1:]


def _load_rates(device: torch.device, store: KVStore, request: SlotRequest, num_rows: int) -> list[float]:
    count = num_rows // store.slots.shape[1]
    rows = store.rows_in(store.new_buffer(count), count)[:, :, :count]
    return [num_rows * store.slot_bytes / each for each in seconds(device, lambda: store.load(request, rows))]


@contextmanager
def _store(
    device: torch.device,
    heads: int,
    capacity: int,
    head_dim: int = HEAD_DIM,
    codec: str = "fp16",
    tuning: Tuning = DEFAULT_TUNING,
) -> Iterator[KVStore]:
    """A store in host memory, page-locked under CUDA, freed in the end."""
    row_format = _format(codec, head_dim)
    slab = PinnedSlab(heads * capacity * row_format.slot_bytes) if device.type == "cuda" else None
    store = KVStore(
        row_format, batch=1, num_kv_heads=heads, capacity=capacity, placement="host", device=device, slab=slab,
        tuning=tuning,
    )  # fmt: skip
    try:
        yield store
    finally:
        store.free()
        if slab is not None:
            slab.close()


def _format(codec: str, head_dim: int) -> RowFormat:
    return RowFormat(Codec(codec), head_dim, torch.float16)


def _idle(device: torch.device) -> float:
    """perf_counter once nothing is under way on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
