"""The real link's streams, seen on the CPU: every access is ordered after those that it must not overtake.

Tensors and values are real, torch.cuda's streams and events are vector clocks (`fake_cuda`). An access races where
another stream touched one of its bytes, one of the two wrote, and no event orders the one after the other. Memory that
another stream uses than the one that made it must be recorded there, or it is given away too early.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.decode import store
from harness.decode.links import CudaLink
from harness.model.attach import attach
from tests.cases import CASES, WIDE
from tests.fake_cuda import CUDA, Stream, Streams, fake_streams, place
from tests.living import PROMPTS, TOLERANCE, force, largest_difference, open_live, tiny

STEPS = 3
LINKED = {}
for name, case in CASES.items():
    # What keeps the whole prompt would keep these few steps, too.
    if case.method.when != "true_scores" and not getattr(case.method, "protect_prompt", False):
        LINKED[name] = case
ALL_FETCHED = {}
for name, case in LINKED.items():
    kind = case.method.when, type(case.codec), case.method.names_rows
    if case.method.names_rows or name not in WIDE:
        ALL_FETCHED.setdefault(kind, name)
RUNS = [
    *((name, int(case.method.names_rows), True) for name, case in LINKED.items() if name in WIDE),
    *((name, 0, True) for name in ALL_FETCHED.values()),
    *((name, 0, False) for name in ("full", "h2o", "quest", "infinigen")),
]
"""With a GPU cache a fetch brings the missing ones: a case of each method, and where slots are used again. One of
each time at which rows are chosen and codec fetches all that it reads.
Without overlap a transfer waits at its place whatever the method: one for each time at which rows are chosen."""


class Access(NamedTuple):
    """A tensor's bytes, read or written by operation `tick` of a stream, which knew `clock`."""

    bytes: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, size, stride
    stream: int
    tick: int
    clock: dict[int, int]
    writes: bool
    where: str


class Accesses(TorchDispatchMode):
    """All accesses, by storage. The storages are kept, so that none is another's successor."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.of: dict[int, list[Access]] = defaultdict(list)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation.namespace == "aten" and operation._can_decompose():
            with self:
                out = operation.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = operation(*args, **kwargs)
        written, read = self._arguments(operation, args, kwargs)
        known = {_storage(each) for each in (*written, *read)}
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and _storage(each) not in known]
        if written or made:  # else a view
            self.take(read, [*written, *made])
        return out

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Take what moves rows one by one on a CPU, which is numpy's and not seen here, as a kernel on all of them."""
        gather_rows, scatter_rows = store.gather_rows, store.scatter_rows

        def gather(slots: Tensor, index: Tensor, rows: Tensor, *others: Any) -> None:
            gather_rows(slots, index, rows, *others)
            self.take([slots, index, *(each for each in others if isinstance(each, Tensor))], [rows])

        def scatter(slots: Tensor, index: Tensor, rows: Tensor, *others: Any) -> None:
            scatter_rows(slots, index, rows, *others)
            self.take([rows, index], [slots])

        patch.setattr(store, "gather_rows", gather)
        patch.setattr(store, "scatter_rows", scatter)

    def _arguments(self, operation: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that the operation writes, and those that it reads."""
        written, read = [], []
        for at, argument in enumerate(operation._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(each for each in tree_leaves(value) if isinstance(each, Tensor))
        return written, read

    def take(self, read: list[Tensor], written: list[Tensor]) -> None:
        stream, where = Streams.current(), place()
        tick, clock = stream.tick(), dict(stream.clock)
        for tensor, writes in (*((each, False) for each in read), *((each, True) for each in written)):
            if tensor.numel():
                key, width = _storage(tensor), tensor.element_size()
                self.storages[key] = tensor.untyped_storage()
                strides = tuple(width * stride for stride in tensor.stride())
                extent = (width * tensor.storage_offset(), (*tensor.shape, width), (*strides, 1))
                self.of[key].append(Access(extent, stream.number, tick, clock, writes, where))

    def races(self) -> list[str]:
        """Accesses that nothing orders after a conflicting one."""
        return [race for key in self.shared() for race in _races(self.of[key], self.storages[key].nbytes())]

    def shared(self) -> list[int]:
        """Storages that more than one stream uses."""
        return [key for key, accesses in self.of.items() if len({access.stream for access in accesses}) > 1]

    def unrecorded(self, host: set[int]) -> list[str]:
        """Uses of memory on another stream than its own that the allocator is not told of; `host` is not its."""
        return [self.of[key][-1].where for key in self.shared() if key not in Streams.recorded | host]


def _races(accesses: list[Access], num_bytes: int) -> list[str]:
    streams = {access.stream for access in accesses}
    last = {(stream, writes): np.zeros(num_bytes, np.int32) for stream in streams for writes in (False, True)}
    found = []
    for access in accesses:
        offset, size, stride = access.bytes

        def touched(ticks: np.ndarray, offset: int = offset, size: Any = size, stride: Any = stride) -> np.ndarray:
            return as_strided(ticks[offset:], size, [4 * each for each in stride])

        for stream in streams - {access.stream}:
            for writes in (True, False)[: 1 + access.writes]:
                if touched(last[stream, writes]).max() > access.clock.get(stream, 0):
                    verbs = [("reads", "writes")[each] for each in (access.writes, writes)]
                    found.append(f"stream {access.stream} {verbs[0]}, at {access.where}, what {stream} {verbs[1]}")
        touched(last[access.stream, access.writes])[...] = access.tick
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def decode(
    name: str, *, gpu_cache: float = 0, overlap: bool = True, bucket: int = 0
) -> tuple[Tensor, Accesses, set[int]]:
    """Logits of a prompt and forced steps through the real link, what was accessed, and the storages of host memory."""
    accesses = Accesses()
    with attach(tiny("gqa")) as attached, pytest.MonkeyPatch.context() as patch:
        accesses.watch(patch)
        link = CudaLink(attached.device, overlap=overlap)
        options = {"steps": STEPS, "placement": "host", "link": link, "gpu_cache": gpu_cache, "bucket": bucket}
        session = open_live(attached, CASES[name], **options)
        with closing(session), accesses:
            logits = force(session, PROMPTS["padded"], STEPS)
            return logits, accesses, {_storage(store.slots) for store in session.stores}


def on_device(name: str) -> Tensor:
    with attach(tiny("gqa")) as attached, closing(open_live(attached, CASES[name], steps=STEPS)) as session:
        return force(session, PROMPTS["padded"], STEPS)


@pytest.mark.parametrize(("name", "gpu_cache", "overlap"), RUNS)
def test_no_access_overtakes_another(name, gpu_cache, overlap):
    with fake_streams():
        logits, accesses, host = decode(name, gpu_cache=gpu_cache, overlap=overlap)
        assert accesses.races() == [] and accesses.unrecorded(host) == []
        assert bool(accesses.shared()) == overlap
    if gpu_cache:  # rows lie in another order
        assert largest_difference(logits, on_device(name)) <= TOLERANCE
    else:
        assert torch.equal(logits, on_device(name))


@pytest.mark.parametrize(("name", "gpu_cache"), [("full", 0), ("int4", 0), ("h2o", 0), ("infinigen", 1)])
def test_no_access_overtakes_another_in_a_bucket(name, gpu_cache):
    with fake_streams():
        logits, accesses, host = decode(name, gpu_cache=gpu_cache, bucket=STEPS)
        assert accesses.races() == [] and accesses.unrecorded(host) == []
    assert largest_difference(logits, on_device(name)) <= TOLERANCE


@pytest.mark.parametrize("name", ["full", "infinigen"])
@pytest.mark.parametrize("forgotten", ["wait_stream", "wait_event", "record"])
def test_a_missing_wait_or_record_is_found(name, forgotten, monkeypatch):
    monkeypatch.setattr(Streams if forgotten == "record" else Stream, forgotten, lambda *_: None)
    with fake_streams():
        _, accesses, host = decode(name)
        assert accesses.unrecorded(host) if forgotten == "record" else accesses.races()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_drained_link_has_moved_everything(overlap):
    with fake_streams():
        link, moved = CudaLink(CUDA, overlap=overlap), []
        link.start(lambda: moved.append((Streams.current().number, Streams.current().tick())), [])
        link.drain()
        ((stream, tick),) = moved
        assert Stream.host[stream] >= tick
