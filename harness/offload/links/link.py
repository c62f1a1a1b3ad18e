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

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from torch import Tensor

from harness.offload.request import Chosen, SlotRequest
from harness.offload.store import KVStore
from harness.offload.tuning import DEFAULT_TUNING, Tuning

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
