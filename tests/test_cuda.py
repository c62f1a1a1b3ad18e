"""What CUDA asks of a decode step: no synchronisation, no tensor on the CPU, the contract.

The first needs no GPU: tensors of the device `meta` have no values, so an operation that would wait for one
(`item`, `bool`, `nonzero`, a boolean index) raises, and so does mixing them with tensors of the CPU.
"""

from copy import deepcopy

import pytest
import torch
from cases import CASES, Case
from living import PROMPT, PROMPTS, STEPS, calibration_of, largest_difference, open_live, replay, tiny, token_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.model.attach import attach
from harness.model.tiny import tiny_model
from harness.offload import store as store_module
from harness.offload.links.link import Link, Ticket, Transfer
from harness.offload.links.open import open_link
from harness.offload.session import LiveSession
from harness.replay.session import ReplaySession

META = torch.device("meta")
PROMPT_LENGTHS = PROMPTS["padded"]
HERE = {
    "llama": lambda: tiny_model("llama", num_key_value_heads=2),
    "qwen3": lambda: tiny_model("qwen3", num_key_value_heads=2, head_dim=32),
    "opt": lambda: tiny_model("opt", word_embed_proj_dim=64),
}
SCANNED = (
    *(
        "full",
        "int4",
        "h2o",
        "streaming",
        "snapkv",
        "snapkv-both",
        "keydiff",
        "expected",
        "tova",
        "rkv",
        "duo",
        "quest",
        "oracle",
        "infinigen",
        "infinigen-fixed",
        "infinigen-final",
    ),
    *("pool-fifo", "pool-lru", "pool-fills"),
)
PLACED = [
    (name, placement, reuse)
    for name, case in ((name, CASES[name]) for name in SCANNED)
    for placement, reuse in (("device", False), ("host", False), ("host", True))
    if (placement == "device" or case.method.selects != "scores") and (case.method.names_rows or not reuse)
]


class Arrived(Ticket):
    """A transfer that is over."""

    def wait(self) -> torch.Tensor:
        return self._rows

    @property
    def exposed_s(self) -> float:
        return 0.0


class NoLink(Link):
    """Transfers nothing: what runs on the link's own stream is no part of the step."""

    def prefetch(self, store, request, buffer) -> Ticket:
        return Arrived(store.rows_in(buffer, request))

    def write_back(self, store, rows, at) -> Ticket:
        return Arrived(rows)

    def copy(self, source, target) -> Ticket:
        return Arrived(target)

    def drain(self) -> None: ...

    def take_transfers(self) -> list[Transfer]:
        return []

    def close(self) -> None: ...


class NothingFromTheCPU(TorchDispatchMode):
    """Raises where an operation takes or makes a tensor on the CPU: each would be a copy that waits."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                raise AssertionError(f"{operation} on a tensor of the CPU")
        return out


def to_meta(thing):
    """Every tensor and device of an object's attributes, without values."""

    def convert(leaf):
        if isinstance(leaf, torch.Tensor):
            return torch.empty_like(leaf, device=META)
        if isinstance(leaf, torch.device):
            return META
        if type(leaf).__name__ == "Shared":
            return type(leaf)(convert(leaf.value))
        return leaf

    for name, value in list(vars(thing).items()):
        object.__setattr__(thing, name, tree_map(convert, value))


@pytest.mark.parametrize(
    ("name", "placement", "reuse", "family"),
    [
        *((*placed, "llama") for placed in PLACED),
        *(("infinigen", "host", False, family) for family in ("qwen3", "opt")),
    ],
)
def test_a_step_waits_for_no_value_and_touches_no_tensor_of_the_cpu(name, placement, reuse, family, monkeypatch):
    model = HERE[family]()
    monkeypatch.setattr(store_module, "gather_rows", lambda *_: torch.empty((), dtype=torch.int64, device=META))
    monkeypatch.setattr(store_module, "scatter_rows", lambda *_: torch.empty((), dtype=torch.int64, device=META))
    ids, real = token_batch(PROMPT_LENGTHS)
    with attach(model) as attached:
        session = open_live(attached, CASES[name], placement=placement, link=NoLink(), reuse=reuse)
        session.prefill(ids[:, :PROMPT], real[:, :PROMPT])
        session.decode_step(ids[:, PROMPT])
        model.to(META)
        attached.device = META
        session.fetcher._pending.clear()
        states = [state for state in {id(cache.state): cache.state for cache in session.caches}.values() if state]
        for thing in (session, session.batch, session.fetcher, session.reads, *states, *session.stores):
            to_meta(thing)
        with NothingFromTheCPU():
            token = torch.empty(len(ids), dtype=torch.int64, device=META)
            for _ in range(2):
                token = session.decode_step(token).argmax(-1)


def test_the_scan_finds_what_it_is_for():
    scores = torch.empty(3, device=META)
    for waits in (scores.max().item, lambda: bool((scores > 0).any()), lambda: scores[scores > 0], scores.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
    with pytest.raises(AssertionError, match="of the CPU"), NothingFromTheCPU():
        scores + torch.tensor(1.0)


# On a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def attached():
    """The grouped-query model on the GPU, with exact fp32 products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with attach(deepcopy(tiny("gqa")).cuda()) as attached:
        yield attached


@pytest.fixture
def link(attached):
    with open_link(attached.device) as link:
        yield link


def calibration_on(attached):
    return {name: tensor.to(attached.device) for name, tensor in calibration_of(attached).items()}


def decode(attached, case: Case, **options) -> tuple[torch.Tensor, LiveSession]:
    """Logits of teacher-forced steps; any synchronisation after the first step raises."""
    ids, real = (tensor.to(attached.device) for tensor in token_batch(PROMPT_LENGTHS))
    session = LiveSession(
        attached,
        case.method,
        max_new_tokens=STEPS,
        codec=case.codec,
        calibration=calibration_on(attached),
        **options,
    )
    logits = [session.prefill(ids[:, :PROMPT], real[:, :PROMPT])]
    logits.append(session.decode_step(ids[:, PROMPT]))  # kernels are compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, STEPS):
            logits.append(session.decode_step(ids[:, PROMPT + step]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(logits, 1), session


@gpu
@pytest.mark.parametrize("name", CASES)
def test_live_is_replay_on_a_gpu(attached, link, name):
    case = CASES[name]
    ids, real = (tensor.to(attached.device) for tensor in token_batch(PROMPT_LENGTHS))
    replayed = ReplaySession(
        attached,
        case.method,
        final_lengths=real.sum(-1),
        num_columns=ids.shape[1],
        codec=case.codec,
        calibration=calibration_on(attached),
    )
    first = replayed.prefill(ids[:, :PROMPT], real[:, :PROMPT])[:, -1:]
    rows = replayed.decode(ids[:, PROMPT:], real[:, PROMPT:])
    expected = attached.logits(torch.cat([first, rows], 1))
    flips = case.codec is not None and case.codec.bits < 16 and case.codec.name != "smooth"
    tolerance = 3e-2 if flips else 1e-3
    device, session = decode(attached, case)
    assert largest_difference(device, expected) <= tolerance
    assert session.reads.kv_frac == pytest.approx(replayed.reads.kv_frac)
    if case.method.selects == "scores":
        return
    host, session = decode(attached, case, placement="host", link=link)
    assert torch.equal(host, device)
    session.close()
    if case.method.names_rows:
        reused, session = decode(attached, case, placement="host", link=link, reuse=True)
        assert largest_difference(reused, device) <= tolerance
        session.close()


@gpu
@pytest.mark.parametrize("name", ["full", "infinigen", "pool-counter", "h2o"])
def test_a_gpu_decodes_what_the_cpu_decodes(attached, link, name):
    with attach(tiny("gqa")) as on_cpu:
        expected = replay(on_cpu, CASES[name], PROMPT_LENGTHS).logits
    got, session = decode(attached, CASES[name], placement="host", link=link)
    session.close()
    assert largest_difference(got.cpu(), expected) <= 1e-3


@gpu
def test_a_pageable_cache_without_overlap_gives_the_same(attached):
    case = CASES["infinigen"]
    ids, real = (tensor.to(attached.device) for tensor in token_batch(PROMPT_LENGTHS))
    expected, _ = decode(attached, case)
    with open_link(attached.device, overlap=False) as link:
        session = LiveSession(
            attached,
            case.method,
            max_new_tokens=STEPS,
            calibration=calibration_on(attached),
            placement="host",
            link=link,
            pinned=False,
        )
        logits = [session.prefill(ids[:, :PROMPT], real[:, :PROMPT])]
        logits += [session.decode_step(ids[:, PROMPT + step]) for step in range(STEPS)]
        session.close()
    assert torch.equal(torch.stack(logits, 1), expected)


@gpu
@pytest.mark.parametrize("name", ["full", "int4", "h2o", "infinigen"])
def test_a_managed_cache_gives_what_one_on_the_device_gives(attached, name):
    """Padded prompts make rows of unequal number, so all ways to read a store are taken."""
    device, session = decode(attached, CASES[name])
    session.close()
    managed, session = decode(attached, CASES[name], placement="managed")
    session.close()
    assert torch.equal(managed, device)


@gpu
def test_sequences_leave_the_gpus_memory_where_it_was(attached, link):
    def run(count: int) -> None:
        for number in range(count):
            _, session = decode(attached, CASES[("full", "infinigen", "h2o")[number % 3]], placement="host", link=link)
            session.close()

    run(10)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run(50)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= 1.02 * before
