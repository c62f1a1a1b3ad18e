"""The link between host and device memory: asynchronous transfers, one after another.

    with open_link(device) as link:
        ticket = link.prefetch(store, request, rows)   # returns at once; layer l computes meanwhile
        ticket.wait()                                  # layer l + 1 may read the rows now
        link.write_back(store, store.format.pack(k, v), at=column)

`CudaLink` is the real link. `EmulatedLink` stands in for it on a CPU. `DiskLink` leads to a file on
a local disk. Packed rows and weights cross.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.decode.disk import Disk
from harness.decode.store import Chosen, KVStore, SlotRequest
from harness.decode.timeline import has_passed, now, seconds, wait_for

CPU = torch.device("cpu")
SLEEP_SLACK_S = 1e-4
"""time.sleep wakes some 80 us late; the rest of a wait yields the core instead."""
TRANSFERS_KEPT = 256
"""Transfers that a `LinkUse` keeps before it sums the earliest."""

Move = Callable[[], int]
"""Copies, and returns the bytes moved, as `KVStore.load`."""


class Moved(NamedTuple):
    """A transfer of a worker that has ended: in perf_counter seconds, and the bytes moved."""

    end_s: float
    num_bytes: int


class LinkUse:
    """How long a link is busy in a span of time: from the last `begin` to the last `mark`.

    The link adds the transfers that are asked for while the use is open, one after another in time.
    It is opened before the span, for those that are under way when the span begins. Earlier
    transfers are summed, so that a use is small however long it lasts. No method but `busy_s` and
    `span_s` waits.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._transfers: deque[tuple[Any, Any]] = deque()
        self.begin()

    def begin(self) -> None:
        """The span begins now."""
        self._since = self._until = now(self._link.device)
        self._summed_s = 0.0

    def add(self, start: Any, end: Any) -> None:
        """A transfer occupies the link from `start` to `end`, times of the link's clock."""
        self._transfers.append((start, end))

    def mark(self) -> None:
        """The span ends now, until the next mark."""
        if len(self._transfers) > TRANSFERS_KEPT and has_passed(self._until):
            self._sum_ended()
        self._until = now(self._link.device)

    def close(self) -> None:
        """Add no further transfers. Idempotent."""
        self._link.uses = tuple(use for use in self._link.uses if use is not self)

    @property
    def span_s(self) -> float:
        """Seconds of the span."""
        wait_for(self._until)
        return seconds(self._since, self._until)

    @property
    def busy_s(self) -> float:
        """Seconds of the span in which at least one transfer was under way. Drains the link."""
        self._link.drain()
        wait_for(self._until)
        self._sum_ended()
        if not self._transfers:
            return self._summed_s
        start, _ = self._transfers[0]  # the first of those that end after the span
        return self._summed_s + self._seconds_within(start, self._until)

    def _sum_ended(self) -> None:
        """Sum the transfers that ended within the span."""
        while self._transfers:
            start, end = self._transfers[0]
            if not has_passed(end) or seconds(end, self._until) < 0:
                return
            self._summed_s += self._seconds_within(start, end)
            self._transfers.popleft()

    def _seconds_within(self, start: Any, end: Any) -> float:
        """Seconds from `start` to `end` that are not before the span."""
        begin = start if seconds(self._since, start) > 0 else self._since
        return max(0.0, seconds(begin, end))


class Ticket:
    """A transfer: under way, or, on a link without overlap, to be run when it is waited for."""

    def __init__(self, link: Link, move: Move, used: Sequence[Tensor]) -> None:
        self._link = link
        self._is_done = False
        self._start = partial(link.start, move, used)
        self._started = self._start() if link.overlap else None

    def wait_moved(self) -> None:
        """Block the host until the bytes have moved, so that the memory that they left is free.
        Raises the error of a failed transfer."""
        if self._started is not None:
            self._link.wait_moved(self._started)

    def wait(self) -> None:
        """Let what runs next on the current stream use the moved data. Raises the error of a failed
        transfer."""
        if not self._is_done:
            if self._started is None:
                self._started = self._start()
            self._link.finish(self._started)
            self._is_done = True

    @property
    def block_bytes(self) -> int:
        """Bytes that a disk moved for it, once it is waited for; 0 for another memory."""
        if self._started is None or not isinstance(self._link, DiskLink):
            return 0
        return self._started.result().num_bytes


class Link(AbstractContextManager["Link"], ABC):
    """Moves rows between stores under host placement and the device, and weights to it, in the
    order of the calls.

    overlap: transfers run beside the computation. False: a transfer runs when it is waited for, a
    write-back at once; with pageable stores this is the baseline as InfiniGen's artifact ran it.
    """

    def __init__(self, device: torch.device = CPU, *, overlap: bool = True) -> None:
        self.device = device
        self.overlap = overlap
        self.uses: tuple[LinkUse, ...] = ()

    def prefetch(self, store: KVStore, request: SlotRequest, rows: Tensor) -> Ticket:
        """Start loading the requested slots into `rows`, a part of a buffer on the device.

        Work already queued on the current stream may still read the buffer. A row of negative index
        keeps its content. Raises the error of an earlier transfer that failed.
        """
        load = partial(store.load, request, rows)
        return Ticket(self, load, [rows, *_tensors_of(request)])

    def write_back(self, store: KVStore, rows: Tensor, at: int | Chosen) -> Ticket:
        """Start writing packed `rows`, not to be changed any more, into slots `at` of the store.

        Later reads see them, so the ticket needs no waiting. Raises as `prefetch`.
        """
        ticket = Ticket(self, partial(store.write, rows, at), [rows, *_tensors_of(at)])
        if not self.overlap:
            ticket.wait()
        return ticket

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Start copying `source`, contiguous and in host memory, to `target` on the device. Raises
        as `prefetch`."""
        return Ticket(self, lambda: target.copy_(source, non_blocking=True).nbytes, [target])

    def open_use(self) -> LinkUse:
        """Measure how busy the link is, until the use is closed."""
        use = LinkUse(self)
        self.uses = (*self.uses, use)
        return use

    @abstractmethod
    def start(self, move: Move, used: Sequence[Tensor]) -> Any:
        """Queue a transfer; returns what `finish` takes. used: tensors of the device that must
        outlive it."""

    @abstractmethod
    def finish(self, started: Any) -> None:
        """Let what runs next wait for a started transfer."""

    @abstractmethod
    def wait_moved(self, started: Any) -> None:
        """Block the host until the bytes of a started transfer have moved."""

    @abstractmethod
    def drain(self) -> None:
        """Block the host until the link is idle. Raises the error of a transfer that failed."""

    def join(self) -> None:
        """Let what runs next on the current stream wait for all transfers so far."""
        self.drain()

    @abstractmethod
    def close(self) -> None:
        """End the link after its last transfer; it takes no more. Idempotent, raises nothing."""

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors_of(request: SlotRequest) -> list[Tensor]:
    if not isinstance(request, Chosen):
        return []
    return [part for part in request if isinstance(part, Tensor)]


def open_link(
    device: torch.device, *, bytes_per_s: float | None = None, overlap: bool = True
) -> Link:
    """The link of a device: the real one under CUDA, an emulated one of `bytes_per_s` on the
    CPU."""
    if device.type == "cuda":
        return CudaLink(device, overlap=overlap)
    assert bytes_per_s is not None, "an emulated link has a rate"
    return EmulatedLink(bytes_per_s, overlap=overlap)


class EmulatedLink(Link):
    """A link within RAM, of a given rate.

    A transfer starts once it is submitted and the link is free, and ends bytes / bytes_per_s later,
    the copy's own time included. Who waits for it sleeps until then. A worker thread goes on to the
    next copy, whose start is computed, so late wake-ups do not add up. It copies on one thread, as
    a copy engine that takes no compute cores would. Behind a transfer that fails nothing moves any
    more: who waits for it, or for a later one, gets its error.
    """

    def __init__(self, bytes_per_s: float, *, overlap: bool = True) -> None:
        super().__init__(overlap=overlap)
        self.bytes_per_s = bytes_per_s
        self._worker = ThreadPoolExecutor(1, "kv-link", torch.set_num_threads, (1,))
        self._last: Future[Moved] = self._worker.submit(Moved, 0.0, 0)
        self._last.result()  # the worker has begun
        torch.set_num_threads(torch.get_num_threads())  # of threads to come, which had the worker's

    def ends_at(self, start_s: float, num_bytes: int) -> float:
        """When a transfer that has moved its bytes gives the link free, in perf_counter seconds."""
        return max(start_s + num_bytes / self.bytes_per_s, time.perf_counter())

    def start(self, move: Move, used: Sequence[Tensor]) -> Future[Moved]:
        self._last = self._worker.submit(self._run, move, self._last, time.perf_counter())
        return self._last

    @torch.inference_mode()
    def _run(self, move: Move, before: Future[Moved], submitted_s: float) -> Moved:
        """A transfer, in the worker. before: the transfer before it, which has ended."""
        start_s = max(submitted_s, before.result().end_s)
        num_bytes = move()
        end_s = self.ends_at(start_s, num_bytes)
        for use in self.uses:
            use.add(start_s, end_s)
        return Moved(end_s, num_bytes)

    def wait_moved(self, started: Future[Moved]) -> None:
        started.result()

    def finish(self, started: Future[Moved]) -> None:
        # Sleep without holding a core before the last 0.1 ms.
        end_s = started.result().end_s
        remaining = end_s - time.perf_counter()
        if remaining > SLEEP_SLACK_S:
            time.sleep(remaining - SLEEP_SLACK_S)
        while time.perf_counter() < end_s:
            time.sleep(0)

    def drain(self) -> None:
        self.finish(self._last)

    def close(self) -> None:
        self._worker.shutdown()


class DiskLink(EmulatedLink):
    """Rows of files on a disk, whose own rate it has. A transfer's bytes are those of whole blocks.

    It closes the disk.
    """

    def __init__(self, disk: Disk, *, overlap: bool = True) -> None:
        self.disk = disk
        super().__init__(math.inf, overlap=overlap)

    def close(self) -> None:
        super().close()
        self.disk.close()


class CudaLink(Link):
    """Transfers between stores under host placement and `device`, on a stream of their own.

    Each starts after the work that was queued on the current stream when it was submitted. Streams
    wait for each other by events; the host waits for neither. Without overlap transfers run on the
    current stream itself.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        super().__init__(device, overlap=overlap)
        # Its few programs go before the computation's next blocks.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def start(self, move: Move, used: Sequence[Tensor]) -> torch.cuda.Event:
        compute = torch.cuda.current_stream(self.device)
        stream = self.stream if self.overlap else compute
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            uses = self.uses
            start = now(self.device) if uses else None
            move()
            end = torch.cuda.Event(enable_timing=bool(uses))  # which costs more
            end.record(stream)
            # Within a graph the event that is waited for tells no time.
            ended = now(self.device) if uses and torch.cuda.is_current_stream_capturing() else end
        for tensor in used:
            tensor.record_stream(stream)
        for use in uses:
            use.add(start, ended)
        return end

    def finish(self, started: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(started)

    def wait_moved(self, started: torch.cuda.Event) -> None:
        if self.overlap:  # else the computing stream moves them before it uses the memory again
            started.synchronize()

    def drain(self) -> None:
        stream = self.stream if self.overlap else torch.cuda.current_stream(self.device)
        stream.synchronize()

    def join(self) -> None:
        if self.overlap:  # else they ran on the current stream
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def close(self) -> None:
        self.drain()  # kernels may still be reading pinned memory that is about to be freed
