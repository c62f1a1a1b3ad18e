"""Decode steps as CUDA graphs: Python launches one graph a step, in place of every kernel.

With a `bucket` neighbouring steps of a session are one program (`TokenBatch`). The first step of a
kind runs as it is: kernels compile, and libraries make their workspaces. The second is recorded,
and it and all later ones are replayed. Recording runs a step's Python, but nothing on the device;
replaying runs the device, but no Python. So what Python notes in a step is kept with the recording,
and noted again at each replay: how many steps there were, which rows are under way, which buffers
are free, and how many rows crossed the link. A marked step is recorded with events between its
segments and around its transfers, and replayed once: they cost time, so no other step has them.
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
from harness.decode.links import LinkUse
from harness.decode.timeline import Timeline

if TYPE_CHECKING:
    from harness.decode.session import LiveSession

log = logging.getLogger(__name__)

BUCKET = 128
"""Generated tokens after which the first bucket of a text ends; a timed run has one for all."""
LEAST_TOKENS = 16
"""New tokens for which recording pays: it takes as long as a few steps by Python."""


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


class Marked(NamedTuple):
    """A step with its parts. segments: seconds, by `SEGMENTS`. busy_s, span_s: as of `LinkUse`; 0
    without a link."""

    logits: Tensor
    segments: dict[str, float]
    busy_s: float
    span_s: float


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
        return self._replay(recorded, begin)

    @torch.inference_mode()
    def marked_step(self, ids: Tensor) -> Marked | None:
        """`step`, recorded anew with its marks; None where CUDA refuses to record it. Waits for its
        end. Steps have been replayed before.
        """
        session = self.session
        assert self.ids is not None, "steps have run before"
        self.ids.copy_(ids)
        begin = HostState.of(session)
        timeline = Timeline(session.attached.device)
        use = None if session.link is None else LinkUse(session.link)
        recorded = self._record(begin, timeline, use)
        if recorded is None:
            return None
        if use is not None:
            use.begin()
        logits = self._replay(recorded, begin)
        if use is not None:
            use.mark()
        (segments,) = timeline.take()
        busy_s, span_s = (0.0, 0.0) if use is None else (use.busy_s, use.span_s)
        return Marked(logits, segments, busy_s, span_s)

    def _replay(self, recorded: Recorded, begin: HostState) -> Tensor:
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

    def _record(
        self, begin: HostState, timeline: Timeline | None = None, use: LinkUse | None = None
    ) -> Recorded | None:
        """Record a step. None where CUDA refuses it; the host is then as before.

        timeline, use: take its marks and its transfers; None: it has no events, which cost time.
        """
        try:
            graph = torch.cuda.CUDAGraph()
            with (
                self._watched(timeline, use),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                assert self.ids is not None, "a step of this kind has run"
                if timeline is not None:
                    timeline.begin_step()
                logits = self.session.run_step(self.ids)
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
            log.warning("decode steps run by Python, not as CUDA graphs: %s", self.failure)
            begin.give_to(self.session)
            return None
        self._pool = graph.pool()
        return Recorded(graph, logits, begin, HostState.of(self.session))

    @contextmanager
    def _watched(self, timeline: Timeline | None, use: LinkUse | None) -> Iterator[None]:
        """Within it segments and transfers are timed by these alone. And no memory is collected,
        which may wait for the device."""
        session, link = self.session, self.session.link
        before, session.timeline = session.timeline, timeline or Timeline(session.attached.device)
        if link is not None:
            uses, link.uses = link.uses, () if use is None else (use,)
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_collecting:
                gc.enable()
            session.timeline = before
            if link is not None:
                link.uses = uses
