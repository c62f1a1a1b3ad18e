"""The link between host and device memory: asynchronous transfers, one after another, recorded for who measures.

    with open_link(device) as link:
        ticket = link.prefetch(store, index, buffer)   # returns at once; layer l computes meanwhile
        rows = ticket.wait()                           # layer l + 1 may read them now
        link.write_back(store, store.pack(k, v), at=column)

`CudaLink` is the real one, `EmulatedLink` stands in for it on the CPU. What crosses are the codec's packed rows,
and weights.

`overlap=False` makes a transfer run when it is waited for, and a write-back at once: with pageable stores,
the baseline as the InfiniGen artifact ran it.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from harness.errors import UserError
from harness.offload.store import Chosen, KVStore, SlotRequest, copy_heads, gather_rows, tensors_of
from harness.offload.tuning import DEFAULT_TUNING, Tuning, choose_gather, choose_min_copy

Direction = Literal["h2d", "d2h"]


class Transfer(NamedTuple):
    """When the link was occupied, in seconds from an arbitrary origin common to the link, and by how much."""

    direction: Direction
    start_s: float
    end_s: float
    num_bytes: int


class Ticket(ABC):
    """A transfer under way."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @abstractmethod
    def wait(self) -> Tensor:
        """The rows [batch, num_kv_heads, n, slot_bytes], or the target of a copy, which what runs next on the current
        stream may use.

        Those of a prefetch stay valid until its buffer is used again. Raises the error of a failed transfer.
        """


class Link(ABC):
    """Moves rows between stores under host placement and the device, and weights to it, in the order of the calls.

    tuning: what the stores on its host side are to be made with.
    """

    tuning: Tuning = DEFAULT_TUNING

    @abstractmethod
    def prefetch(self, store: KVStore, request: SlotRequest, buffer: Tensor) -> Ticket:
        """Starts loading the requested slots into `buffer`, flat and from `store.new_buffer`.

        The buffer may still be read by work already queued on the current stream. A row of negative index
        keeps what the buffer holds. Raises the error of an earlier transfer that failed.
        """

    @abstractmethod
    def write_back(self, store: KVStore, rows: Tensor, at: int | Chosen | Tensor) -> Ticket:
        """Starts writing `rows` (from `store.pack`, not to be changed any more) into slots `at` of the store.

        Reads submitted later see them, so the ticket needs no waiting. Raises as `prefetch`.
        """

    @abstractmethod
    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Starts copying `source`, contiguous and in host memory, to `target` on the device, alike.

        The target may still be read by work already queued on the current stream; the ticket gives it. Raises as
        `prefetch`.
        """

    @abstractmethod
    def drain(self) -> None:
        """Blocks the host until the link is idle. Raises the error of a transfer that failed."""

    @abstractmethod
    def take_transfers(self) -> list[Transfer]:
        """The transfers finished since the last call, after draining the link; forgets them.

        The first call returns none and starts the recording: where nobody measures, nothing is kept.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the link after what was submitted; it takes no more transfers. Idempotent, raises nothing."""

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def open_link(
    device: torch.device,
    *,
    bytes_per_s: float | None = None,
    overlap: bool = True,
    tuning: Tuning = DEFAULT_TUNING,
) -> Link:
    """The link of a device: the real one under CUDA, an emulated one of `bytes_per_s` on the CPU.

    bytes_per_s: None emulates `default_bytes_per_s(measure_copy_rate())`. tuning: of the real one. Raises UserError
    for a rate that is not positive, or one given under CUDA.
    """
    if device.type == "cuda":
        if bytes_per_s is not None:
            raise UserError(f"link_gbps={bytes_per_s / 1e9} sets the emulated link of a CPU: leave it null under cuda")
        return CudaLink(device, overlap=overlap, tuning=tuning)

    if bytes_per_s is None:
        bytes_per_s = default_bytes_per_s(measure_copy_rate())
    return EmulatedLink(bytes_per_s, overlap=overlap)


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
