"""The link of a CUDA machine: copies and gathers between pinned memory and the device, on their own stream.

Streams wait for each other by events; the host waits for neither, except where a result is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from harness.offload.links.link import Direction, Link, Ticket, Transfer
from harness.offload.request import Chosen, SlotRequest, tensors_of
from harness.offload.store import KVStore
from harness.offload.tuning import DEFAULT_TUNING, Tuning


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


class _Record(NamedTuple):
    """A transfer whose times and size are still on the device."""

    direction: Direction
    start: torch.cuda.Event
    end: torch.cuda.Event
    num_bytes: int | Tensor


class CudaLink(Link):
    """Transfers between stores under host placement and `device`, on a stream of their own.

    Each starts after the work that was queued on the current stream when it was submitted. Without overlap
    they run on the current stream itself.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True, tuning: Tuning = DEFAULT_TUNING) -> None:
        self.device, self.overlap, self.tuning = device, overlap, tuning
        self.stream = torch.cuda.Stream(device, priority=-1)  # its few programs go before the computation's next blocks
        self._records: list[_Record] | None = None
        self._origin = _event(self.stream, timed=True)

    def prefetch(self, store: KVStore, request: SlotRequest, buffer: Tensor) -> Ticket:
        rows = store.rows_in(buffer, request)
        used = (buffer, *tensors_of(request))
        ticket = _CudaTicket(rows, partial(self._transfer, "h2d", partial(store.load, request, rows), used))
        if self.overlap:
            ticket.submit()
        return ticket

    def write_back(self, store: KVStore, rows: Tensor, at: int | Chosen | Tensor) -> Ticket:
        used = (rows, *tensors_of(at))
        ticket = _CudaTicket(rows, partial(self._transfer, "d2h", partial(store.write, rows, at), used))
        if self.overlap:
            ticket.submit()
        else:
            ticket.wait()
        return ticket

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        def move() -> int:
            return target.copy_(source, non_blocking=True).nbytes

        ticket = _CudaTicket(target, partial(self._transfer, "h2d", move, (target,)))
        if self.overlap:
            ticket.submit()
        return ticket

    def drain(self) -> None:
        self.stream.synchronize()

    def take_transfers(self) -> list[Transfer]:
        self.drain()
        taken, self._records = self._records or [], []
        for record in taken:
            record.end.synchronize()  # without overlap it ran on another stream
        return [
            Transfer(direction, self._seconds(start), self._seconds(end), int(num_bytes))
            for direction, start, end, num_bytes in taken
        ]

    def close(self) -> None:
        self.drain()  # kernels may still be reading pinned memory that is about to be freed

    def _seconds(self, event: torch.cuda.Event) -> float:
        return self._origin.elapsed_time(event) / 1e3

    def _transfer(
        self, direction: Direction, move: Callable[[], int | Tensor], used: tuple[Tensor, ...]
    ) -> torch.cuda.Event:
        """Queues `move`; returns the event of its end. `used`: device tensors that must outlive it."""
        compute = torch.cuda.current_stream(self.device)
        stream = self.stream if self.overlap else compute
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            start = None if self._records is None else _event(stream, timed=True)
            num_bytes = move()
            end = _event(stream, timed=start is not None)
        for tensor in used:
            tensor.record_stream(stream)
        if self._records is not None and start is not None:
            self._records.append(_Record(direction, start, end, num_bytes))
        return end


class _CudaTicket(Ticket):
    def __init__(self, rows: Tensor, transfer: Callable[[], torch.cuda.Event]) -> None:
        super().__init__(rows)
        self._transfer = transfer
        self._end: torch.cuda.Event | None = None
        self._waited = False

    def submit(self) -> torch.cuda.Event:
        if self._end is None:
            self._end = self._transfer()
        return self._end

    def wait(self) -> Tensor:
        if not self._waited:
            torch.cuda.current_stream(self._rows.device).wait_event(self.submit())
            self._waited = True
        return self._rows


def _event(stream: torch.cuda.Stream, *, timed: bool) -> torch.cuda.Event:
    """An event recorded on `stream` now; one that keeps the time costs more."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event
