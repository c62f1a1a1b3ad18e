"""A decode step that can be recorded once and replayed: with `bucket` neighbouring steps are one program.

Seen twice without a GPU: two steps queue the same operations on the same memory (tensors without values), and a step
that was written down on a CPU gives the next steps' logits when it runs again from its own storages alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.decode import cache, store
from harness.decode import gpu_cache as gpu_cache_module
from harness.decode.gpu_cache import missing_rows
from harness.decode.graphs import BUCKET, LEAST_TOKENS
from harness.decode.links import CudaLink, Link
from harness.decode.store import KVStore
from harness.decode.timeline import SEGMENTS
from harness.model.attach import attach
from tests.cases import CASES, WIDE
from tests.decode.test_fake_cuda import fake_tiny, gpu, opened  # noqa: F401
from tests.fake_cuda import LIBC10, Program
from tests.living import (
    PROMPTS,
    Crossed,
    LatestLink,
    attached_with_link,
    largest_difference,
    live,
    open_live,
    tiny,
    token_batch,
)

STEPS = 10

# Two steps

EAGER = {
    "kivi": "groups of tokens are packed in some steps",
    "shadowkv": "a step reads the rows that stay on the device, one more in each",
    "retroinfer": "clusters are made in some steps",
    "triattention-all": "tokens leave in some steps",
    "random-all": "tokens leave in some steps",
    "rkv": "tokens leave in some steps",
    **dict.fromkeys(("projected", "following", "biased"), "a method of one's own, which does not say that it may"),
}
"""The cases whose steps are not replayed, and why."""
REPLAYED = [name for name in WIDE if name not in EAGER]
HOOKS = ("append", "select", "scores", "partial_query", "choose", "observe", "rest", "enter")


def code_of_a_step(name: str) -> tuple[Any, ...]:
    """What a method runs in a step. Those that evict after the prompt alone have it in common."""
    state = CASES[name].method.state
    return CASES[name].codec, *(getattr(state, hook, None) for hook in HOOKS)


CHECKED = {code_of_a_step(name): name for name in REPLAYED}.values()


def test_steps_that_cannot_be_replayed_have_no_bucket():
    with attach(tiny("gqa")) as attached:
        for name in WIDE:
            session = open_live(attached, CASES[name], bucket=STEPS)
            assert bool(session.why_eager()) == (name in EAGER)
            assert session.bucket == (0 if name in EAGER else STEPS)


@pytest.mark.parametrize(("steps", "bucket"), [(LEAST_TOKENS - 1, 0), (LEAST_TOKENS, BUCKET)])
def test_steps_are_recorded_where_it_pays(steps, bucket):
    with attach(tiny("gqa")) as attached:
        session = open_live(attached, CASES["full"], steps, graphs=True)
        assert (session.bucket, session.graphs is not None) == (bucket, bucket > 0)


@pytest.mark.skipif(not LIBC10.exists(), reason="torch's library of devices has another name here")
@pytest.mark.parametrize(
    ("name", "gpu_cache"), [*((name, 0) for name in CHECKED), ("infinigen", 1), ("infinigen-sampled", 1)]
)
def test_neighbouring_steps_are_one_program(gpu, name, gpu_cache):  # noqa: F811
    """Two buffers take turns, so that of three layers' steps every other one has the same."""
    pytest.importorskip("triton")
    case = CASES[name]
    placement = "device" if case.method.when == "true_scores" else "host"
    options = {"codec": case.codec, "placement": placement, "gpu_cache": gpu_cache, "bucket": STEPS}
    with opened(gpu, fake_tiny("llama"), PROMPTS["even"], case.method, steps=STEPS, **options) as (session, token):
        known, programs = {}, []
        with Program(known) as program:
            program.note("buffers", [session.share.buffers])
        for _ in range(4):
            with Program(known) as program:
                session.decode_step(token)
            programs.append(program.entries)
        assert programs[1] and programs[1] == programs[3]


# A step within a capture


@pytest.mark.parametrize("name", ["int4", "h2o", "infinigen", "knorm"])
def test_a_step_can_be_captured(gpu, name):  # noqa: F811
    """The third of a session's steps."""
    case = CASES[name]
    options = {"codec": case.codec, "placement": "host", "steps": STEPS, "bucket": STEPS}
    with opened(gpu, fake_tiny("llama"), PROMPTS["even"], case.method, **options) as (session, token):
        for _ in range(2):
            session.decode_step(token)
        with torch.cuda.graph(object()):
            session.decode_step(token)


# A step that is written down


class Tape(TorchDispatchMode):
    """The operations of a step, which can run again on the storages that they had.

    current: the one that is written.
    """

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        assert "_local_scalar" not in name, f"{name} waits for a value"
        if operation._schema.is_mutable:
            self.write_down(operation, args, kwargs or {}, [])
        elif "empty" not in name:
            self.write_down(operation, args, kwargs or {}, out)
        return out

    @contextmanager
    def recording(self) -> Iterator[None]:
        Tape.current = self
        try:
            with self:
                yield
        finally:
            Tape.current = None

    def write_down(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if made and {_storage(each) for each in made} <= given:
            return  # a view

        def again() -> None:
            new = [each for each in tree_leaves(function(*args, **kwargs)) if isinstance(each, Tensor)]
            for target, source in zip(made, new, strict=bool(made)):
                target.copy_(source)

        self.entries.append(again)

    def run_again(self) -> None:
        for again in self.entries:
            again()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is one entry of a tape, as a kernel is: on a CPU it is numpy's, or asks for values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tape, Tape.current = Tape.current, None
        if tape is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            out = function(*args, **kwargs)
        Tape.current = tape
        tape.write_down(function, args, kwargs, out)
        return out

    return call


KERNELS = (
    "missing_rows",
    "num_true",
    "indices",
    "largest",
    "hide",
    "at_least",
    "ascending",
    "summed_probs",
    "coded_scores",
    "ranked",
    "log_weights",
)
"""Functions that a GPU runs as kernels, wherever they are imported."""


@contextmanager
def kernels_as_one() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for method in ("load", "write"):
            patch.setattr(KVStore, method, as_one(getattr(KVStore, method)))
        for module in [module for path, module in sys.modules.items() if path.startswith(("harness.", "methods."))]:
            for function in KERNELS:
                if function in vars(module):
                    patch.setattr(module, function, as_one(getattr(module, function)))
        yield patch


class NowLink(Link):
    """Moves at once."""

    def start(self, move: Callable[[], object], used: Any) -> None:
        move()

    def finish(self, started: None) -> None:
        pass

    wait_moved = finish

    def drain(self) -> None:
        pass

    close = drain


# Graphs


@contextmanager
def numbers_on_device() -> Iterator[None]:
    """Numbers of rows are tensors, as on a GPU."""

    def missing(*given: Any) -> tuple[Any, ...]:
        *lists, number = missing_rows(*given)
        return *lists, torch.tensor(number)

    with pytest.MonkeyPatch.context() as patch:
        for module in (store, cache):
            patch.setattr(module, "num_true", lambda mask: mask.sum())
        patch.setattr(gpu_cache_module, "missing_rows", missing)
        yield


class TapeGraph:
    """torch.cuda.CUDAGraph on a CPU. What is recorded runs at once, so the first replay does nothing."""

    made: list[TapeGraph] = []

    def __init__(self) -> None:
        self.tape, self.replays = Tape(), 0
        TapeGraph.made.append(self)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        if self.replays:
            self.tape.run_again()
        self.replays += 1


@pytest.mark.parametrize(
    ("name", "gpu_cache"),
    [
        ("full", 0),
        ("int4", 0),
        ("h2o-fills", 0),
        ("infinigen", 0),
        ("infinigen", 1.5),
        ("infinigen-sampled", 1.5),
        ("quest", 0),
        ("rocketkv", 0),
        ("pool-counter", 0),
        ("knorm", 0),
    ],
)
def test_replayed_steps_are_those_of_python(name, gpu_cache):
    """In buckets that end at 4, 8, 16 and 18 steps: logits, rows that cross the link, and the budget."""
    steps, found = 18, []
    ids, real = token_batch(PROMPTS["padded"], steps)
    columns = ids.shape[1] - steps
    TapeGraph.made.clear()
    for graphs in (False, True):
        with numbers_on_device(), kernels_as_one() as patch, attach(tiny("gqa")) as attached:
            patch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
            patch.setattr(torch.cuda, "graph", lambda graph, **_: graph.tape.recording())
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            options = {"placement": "host", "gpu_cache": gpu_cache, "link": NowLink(), "bucket": 4, "graphs": graphs}
            with closing(open_live(attached, CASES[name], steps, **options)) as session:
                logits = [session.prefill(ids[:, :columns], real[:, :columns])]
                logits += [session.decode_step(ids[:, columns + step]) for step in range(steps - 3)]
                for token in ids[:, -3:-1].T:
                    logits.append(session.graphs.marked_step(token).logits if graphs else session.decode_step(token))
                rows = [int(count.num_rows) for count in session.traffic.counts]
                found.append((torch.stack(logits), rows, session.reads.budget, session.steps))
    (expected, *others), (replayed, *of_replay) = found
    assert sum(graph.replays for graph in TapeGraph.made) >= 6
    assert torch.equal(replayed, expected) and of_replay == others


@pytest.mark.parametrize("is_joined", [True, False])
def test_what_cuda_refuses_to_record_runs_by_python(gpu, monkeypatch, is_joined):  # noqa: F811
    graph = SimpleNamespace(pool=lambda: None, replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    if not is_joined:
        monkeypatch.setattr(CudaLink, "join", lambda link: None)
    options = {"placement": "host", "steps": STEPS, "bucket": STEPS, "graphs": True}
    with opened(gpu, fake_tiny("llama"), PROMPTS["even"], CASES["infinigen"].method, **options) as (session, token):
        for _ in range(7):
            session.decode_step(token)
        assert session.steps == 7 and bool(session.graphs.recorded) == is_joined
        assert (session.graphs.failure is None) == is_joined
        marked = session.graphs.marked_step(token) if is_joined else None
        assert marked is None or (set(marked.segments) == set(SEGMENTS) and session.steps == 8)


# Buckets


@pytest.mark.parametrize("name", ["full", "int4", "h2o-fills", "snapkv-both", "infinigen-step", "oracle"])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_bucket_changes_no_number(name, prompts):
    """Columns behind the step's own are hidden: the sums are the same but for rounding."""
    placement = "device" if CASES[name].method.when == "true_scores" else "host"
    with attached_with_link() as (attached, link):
        expected = live(attached, CASES[name], PROMPTS[prompts], placement=placement, link=link)
        for bucket in (3, STEPS):
            found = live(attached, CASES[name], PROMPTS[prompts], placement=placement, link=link, bucket=bucket)
            assert largest_difference(found.logits, expected.logits) <= 1e-5
            assert found[1:] == pytest.approx(expected[1:])


@pytest.mark.parametrize("name", ["full", "int4", "h2o-fills", "infinigen", "kascade"])
def test_a_bucket_moves_no_byte_more(name):
    """Also under a link that moves everything as late as it may."""
    moved, logits = [], []
    for bucket, other in ((0, None), (STEPS, None), (STEPS, LatestLink())):
        with attached_with_link() as (attached, link), Crossed() as crossed:
            options = {"placement": "host", "link": other or link, "bucket": bucket}
            logits.append(live(attached, CASES[name], PROMPTS["padded"], **options).logits)
        moved.append([*crossed.loaded.values(), *crossed.written.values()])
    assert moved[0] == moved[1] == moved[2]
    assert torch.equal(logits[1], logits[2])
