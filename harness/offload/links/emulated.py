"""The link of a CPU-only machine: a worker thread that copies within RAM at the pace of a much slower link.

A transfer starts once it is submitted and the link is free, and ends when bytes / bandwidth have passed, the
copy's own time included; so the link is occupied serially at the emulated rate. Who waits for a transfer
sleeps until that end. The worker goes on to the next copy, whose start is computed, so late wake-ups do not
add up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness.errors import UserError
from harness.offload.links.link import Direction, Link, Ticket, Transfer
from harness.offload.request import Chosen, SlotRequest
from harness.offload.store import KVStore

# Memory bandwidth over link bandwidth of the paper's machine: RTX A6000 768 GB/s, PCIe 3.0 x16 12.4 GB/s
# achieved.
MEMORY_TO_LINK = 62
_SLEEP_SLACK_S = 1e-4  # time.sleep wakes some 80 us late; the rest of a wait yields the core instead


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


class _Job:
    """One transfer of the emulated link; times are perf_counter seconds, set by the worker before `done`."""

    def __init__(self, direction: Direction, move: Callable[[], int | Tensor]) -> None:
        self.direction, self.move = direction, move
        self.submitted_s = time.perf_counter()
        self.end_s = self.submitted_s
        self.error: BaseException | None = None
        self.done = threading.Event()


class EmulatedLink(Link):
    """A worker thread that copies within RAM and holds the link for bytes / bytes_per_s.

    The worker copies on one thread, as a copy engine that takes no compute cores would. If it dies, every
    transfer under way and every later call raises its error.
    """

    def __init__(self, bytes_per_s: float, *, overlap: bool = True) -> None:
        if not bytes_per_s > 0:
            raise UserError(f"link_gbps={bytes_per_s / 1e9} must be positive")
        self.bytes_per_s, self.overlap = bytes_per_s, overlap
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._transfers: list[Transfer] | None = None
        self._last: _Job | None = None
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="kv-link", daemon=True)
        self._worker.start()

    def prefetch(self, store: KVStore, request: SlotRequest, buffer: Tensor) -> Ticket:
        rows = store.rows_in(buffer, request)
        ticket = _EmulatedTicket(self, rows, "h2d", partial(store.load, request, rows))
        if self.overlap:
            ticket.submit()
        return ticket

    def write_back(self, store: KVStore, rows: Tensor, at: int | Chosen | Tensor) -> Ticket:
        ticket = _EmulatedTicket(self, rows, "d2h", partial(store.write, rows, at))
        ticket.submit()
        if not self.overlap:
            ticket.wait()
        return ticket

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        ticket = _EmulatedTicket(self, target, "h2d", lambda: target.copy_(source).nbytes)
        if self.overlap:
            ticket.submit()
        return ticket

    def drain(self) -> None:
        if (job := self._last) is not None:
            self.complete(job)

    def take_transfers(self) -> list[Transfer]:
        self.drain()
        taken, self._transfers = self._transfers, []
        return taken or []

    def close(self) -> None:
        self._jobs.put(None)
        self._worker.join()

    def submit(self, direction: Direction, move: Callable[[], int | Tensor]) -> _Job:
        """Queues a copy; raises the worker's error if it died."""
        if self._error is not None:
            raise self._error
        if not self._worker.is_alive():
            raise RuntimeError("the link is closed")
        self._last = _Job(direction, move)
        self._jobs.put(self._last)
        return self._last

    def complete(self, job: _Job) -> None:
        """Blocks until the job has ended on the emulated link; raises its error."""
        while not job.done.wait(timeout=1.0):
            if not self._worker.is_alive() and not job.done.is_set():
                raise self._error or RuntimeError("the link was closed under a transfer")
        if job.error is not None:
            raise job.error
        _sleep_until(job.end_s)

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: OpenMP keeps the number per thread
        free_s = 0.0
        while (job := self._jobs.get()) is not None:
            try:
                num_bytes = int(job.move())
            except BaseException as error:
                self._error = job.error = error
                job.done.set()
                return
            start_s = max(job.submitted_s, free_s)
            job.end_s = free_s = max(start_s + num_bytes / self.bytes_per_s, time.perf_counter())
            if self._transfers is not None:
                self._transfers.append(Transfer(job.direction, start_s, free_s, num_bytes))
            job.done.set()


class _EmulatedTicket(Ticket):
    def __init__(self, link: EmulatedLink, rows: Tensor, direction: Direction, move: Callable) -> None:
        super().__init__(rows)
        self._link, self._direction, self._move = link, direction, move
        self._job: _Job | None = None

    def submit(self) -> _Job:
        if self._job is None:
            self._job = self._link.submit(self._direction, self._move)
        return self._job

    def wait(self) -> Tensor:
        self._link.complete(self.submit())
        return self._rows


def _sleep_until(end_s: float) -> None:
    """Returns microseconds after `end_s` (perf_counter) without holding a core before its last 0.1 ms."""
    remaining = end_s - time.perf_counter()
    if remaining > _SLEEP_SLACK_S:
        time.sleep(remaining - _SLEEP_SLACK_S)
    while time.perf_counter() < end_s:
        time.sleep(0)
