"""Decode steps as CUDA graphs: Python launches one graph a step, in place of every kernel.

With a `bucket` neighbouring steps of a session are one program (`TokenBatch`). The first step of a
kind runs as it is: kernels compile, and libraries make their workspaces. The second is recorded,
and it and all later ones are replayed. Recording runs a step's Python, but nothing on the device;
replaying runs the device, but no Python. So what Python notes in a step is kept with the recording,
and noted again at each replay: how many steps there were, which rows are under way, which buffers
are free, and how many rows crossed the link.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from harness.decode.cache import Fetch
from harness.decode.timeline import Timeline

if TYPE_CHECKING:
    from harness.decode.session import LiveSession

log = logging.getLogger(__name__)


class HostState(NamedTuple):
    """What the host knows between two steps.

    pending: the rows under way, of each layer's fetcher. free: the shared buffers that hold no
    rows, in the order of their use. rows: decoded so far, of all sequences. crossed: rows by their
    bytes, of each count of the traffic.
    """

    steps: int
    pending: list[Fetch | None]
    free: list[Tensor]
    num_columns: int
    rows: int
    crossed: list[Counter[int]]

    @classmethod
    def of(cls, session: LiveSession) -> HostState:
        share = session.share
        return cls(
            session.steps,
            [cache.fetcher.fetch for cache in session.fetching],
            [*share.free],
            session.model_cache.num_columns,
            session.reads.rows,
            [count.of_host.copy() for count in session.traffic.counts],
        )

    def give_to(self, session: LiveSession) -> None:
        """Let the host know this and nothing else."""
        share = session.share
        share.batch.steps = self.steps
        for cache, fetch in zip(session.fetching, self.pending, strict=True):
            cache.fetcher.fetch = fetch
        share.free[:] = self.free
        session.model_cache.num_columns = self.num_columns
        session.reads.rows = self.rows
        for count, of_host in zip(session.traffic.counts, self.crossed, strict=True):
            count.of_host = of_host.copy()

    def after(self, begin: HostState, end: HostState) -> HostState:
        """This state after a step that leads from `begin` to `end`."""
        crossed = []
        for now, first, last in zip(self.crossed, begin.crossed, end.crossed, strict=True):
            crossed.append(now + (last - first))
        return HostState(
            self.steps + end.steps - begin.steps,
            end.pending,
            end.free,
            self.num_columns + end.num_columns - begin.num_columns,
            self.rows + end.rows - begin.rows,
            crossed,
        )


class Recorded(NamedTuple):
    """A recorded step: its graph, the logits that it writes, and the host before and after it."""

    graph: Any
    logits: Tensor
    begin: HostState
    end: HostState


class StepGraphs:
    """Runs the decode steps of a session, whose `bucket` is not 0.

    ids: int [batch], where a recorded step reads its tokens. recorded: by kind of step. failure:
    why a step could not be recorded, after which none is; None before.
    """

    def __init__(self, session: LiveSession) -> None:
        self.session = session
        self.ids: Tensor | None = None
        self.recorded: dict[Any, Recorded] = {}
        self.failure: str | None = None
        self._seen: set[Any] = set()
        self._pool: Any = None

    def step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence: as `LiveSession.decode_step`."""
        if self.ids is None:
            self.ids = ids.clone()
        self.ids.copy_(ids)
        begin = HostState.of(self.session)
        kind = self._kind(begin)
        recorded = self.recorded.get(kind)
        if recorded is None:
            if kind in self._seen and self.failure is None:
                recorded = self._record(begin)
            self._seen.add(kind)
            if recorded is None:
                return self.session.run_step(self.ids)
            self.recorded[kind] = recorded
        recorded.graph.replay()
        begin.after(recorded.begin, recorded.end).give_to(self.session)
        return recorded.logits.clone()

    def close(self) -> None:
        """Drop the graphs, whose memory is about to be freed, once they have run."""
        if self.recorded:
            torch.cuda.synchronize()
        self.recorded.clear()
        self._pool = None

    def _kind(self, begin: HostState) -> Any:
        """Steps of one kind are one program: lengths and buffers are the same."""
        batch = self.session.batch
        buffers = tuple(id(buffer) for buffer in begin.free)
        under_way = tuple(fetch and (fetch.count, id(fetch.shared)) for fetch in begin.pending)
        return batch.limit(), batch.limit(1), self.session.is_last_step, buffers, under_way

    def _record(self, begin: HostState) -> Recorded | None:
        """Record a step. None where CUDA refuses it; the host is then as before."""
        try:
            graph = torch.cuda.CUDAGraph()
            with (
                self._unwatched(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                assert self.ids is not None, "a step of this kind has run"
                logits = self.session.run_step(self.ids)
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            log.warning("decode steps run by Python, not as CUDA graphs: %s", self.failure)
            begin.give_to(self.session)
            return None
        self._pool = graph.pool()
        return Recorded(graph, logits, begin, HostState.of(self.session))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Within it no segment and no transfer is timed: an event of a graph tells no time. And no
        memory is collected, which may wait for the device."""
        session = self.session
        timeline, session.timeline = session.timeline, Timeline(session.attached.device)
        if session.link is not None:
            uses, session.link.uses = session.link.uses, ()
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_collecting:
                gc.enable()
            session.timeline = timeline
            if session.link is not None:
                session.link.uses = uses
