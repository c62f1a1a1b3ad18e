"""Rates of a machine: of the link, of the row gather, and of page-locking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from harness.decode.links import open_link
from harness.decode.memory import PinnedSlab
from harness.decode.store import Chosen, KVStore, RowFormat, indices
from harness.settings.codecs import codec_named
from harness.speed.link_rate import idle_s

REPEATS = 5
HEAD_DIM, ROW_BYTES = 128, 512
"""Of fp16 rows, K and V side by side."""
CAPACITY, KEPT = 2048, 409
"""Slots of a head, and the 20 % of them that a gather takes."""
ROWS = (
    *(("fp16", head_dim) for head_dim in (16, 32, 64, 128, 256, 512)),  # 64 B to 2 KiB
    *((codec, head_dim) for codec in ("int8", "int4") for head_dim in (64, 128)),
)


class Rate(NamedTuple):
    """Bytes/s of each repeat. at: the conditions that tell it from others of its part."""

    name: str
    samples: list[float]
    at: str


def link_rates(device: torch.device, num_bytes: int, bytes_per_s: float | None) -> Iterator[Rate]:
    """Of one copy of `num_bytes` each way, and of both at once, whose bytes count together.

    bytes_per_s: the emulated link's, None under CUDA. The emulated link is one for both directions; under CUDA each
    direction has a stream of its own.
    """
    slots = num_bytes // ROW_BYTES
    with ExitStack() as stack:
        source, target = (stack.enter_context(host_store(device, 1, slots)) for _ in range(2))
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
            moved = len(ways) * slots * ROW_BYTES
            seconds = repeated(device, partial(move, ways))
            yield Rate(" with ".join(ways), [moved / each for each in seconds], f"bytes {moved}")


def gather_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """Of the gather of a fifth of `num_bytes` of slots, in order within a head as a selection is, by size of row."""
    for codec, head_dim in ROWS:
        heads = max(1, num_bytes // (CAPACITY * row_format(codec, head_dim).slot_bytes))
        with host_store(device, heads, CAPACITY, head_dim, codec) as store:
            kept = torch.rand(1, heads, CAPACITY, device=device).topk(KEPT).indices
            mask = torch.zeros(1, heads, CAPACITY, dtype=torch.bool, device=device).scatter_(-1, kept, True)
            rows = store.rows_in(store.new_buffer(KEPT), KEPT)[:, :, :KEPT]
            seconds = repeated(device, partial(store.load, Chosen(*indices(mask, KEPT)), rows))
            payload = heads * KEPT * store.slot_bytes
            at = f"row_bytes {store.slot_bytes}, {codec}, head_dim {head_dim}"
            yield Rate("gather", [payload / each for each in seconds], at)


def pin_rates(device: torch.device, num_bytes: int) -> Iterator[Rate]:
    """Of page-locking `num_bytes` of fresh memory."""
    slabs: list[PinnedSlab] = []
    seconds = repeated(device, lambda: slabs.append(PinnedSlab(num_bytes)), lambda: slabs.pop().close())
    yield Rate("page-locking", [num_bytes / each for each in seconds], f"bytes {num_bytes}")


def repeated(device: torch.device, act: Callable[[], object], undo: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of `REPEATS` runs, from an idle device to an idle device, after one that warms up. undo: untimed, after
    each."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = idle_s(device)
        act()
        seconds.append(idle_s(device) - began)
        undo()
    return seconds[1:]


@contextmanager
def host_store(
    device: torch.device,
    heads: int,
    capacity: int,
    head_dim: int = HEAD_DIM,
    codec: str = "fp16",
) -> Iterator[KVStore]:
    """A store in host memory, page-locked under CUDA, freed at the end."""
    stored = row_format(codec, head_dim)
    slab = PinnedSlab(heads * capacity * stored.slot_bytes) if device.type == "cuda" else None
    store = KVStore(stored, batch=1, num_kv_heads=heads, capacity=capacity, placement="host", device=device).allocate(
        slab
    )
    try:
        yield store
    finally:
        store.free()
        if slab is not None:
            slab.close()


def row_format(codec: str, head_dim: int) -> RowFormat:
    """Of rows that are computed with in fp16."""
    return RowFormat(codec_named(codec), head_dim, torch.float16)
