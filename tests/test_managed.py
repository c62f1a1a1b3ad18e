"""A cache in managed memory: what is refused, what CUDA's runtime is asked for, and that it decodes as on the device.

Without a GPU a stand-in is the runtime: its managed memory is the host's.
"""

import ctypes
import sys
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import CASES
from living import PROMPTS, attached_with_link, live, open_live, tiny, token_batch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel
from harness.offload import memory as managed
from harness.offload.memory import RUNTIME
from harness.settings.speed import LatencyConfig
from harness.settings.systems import COUNTED, LABELS
from harness.speed import cell as timing
from harness.speed.cell import Cell, run_shared_prompt, time_cell
from harness.speed.latency import run_latency
from harness.tables.leaderboard import _step
from methods.full import Full
from methods.h2o import H2O
from tests.composed import load

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
GIB = 2**30
ON_CUDA = ["experiment=latency", "platform=cuda"]


class Runtime:
    """cuda.bindings.runtime without CUDA. blocks: what is allocated, by address; calls: names, in order; fails: the
    function that does."""

    cudaError_t = SimpleNamespace(cudaSuccess=0)  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrConcurrentManagedAccess=89)  # noqa: N815
    cudaMemAttachGlobal = 1  # noqa: N815

    def __init__(self):
        self.blocks, self.calls, self.fails, self.concurrent = {}, [], "", 1

    def __getattr__(self, name):
        def called(*arguments):
            self.calls.append(name)
            return (2,) if name == self.fails else (0, *getattr(self, f"_{name}")(*arguments))

        return called if name.startswith("cuda") else object.__getattribute__(self, name)

    def cudaGetErrorString(self, error):  # noqa: N802
        return 0, b"out of memory"

    def _cudaSetDevice(self, index):  # noqa: N802
        assert index == 0
        return ()

    def _cudaDeviceSynchronize(self):  # noqa: N802
        return ()

    def _cudaDeviceGetAttribute(self, attribute, index):  # noqa: N802
        assert (attribute, index) == (89, 0)
        return (self.concurrent,)

    def _cudaMallocManaged(self, size, flags):  # noqa: N802
        assert flags == self.cudaMemAttachGlobal
        block = ctypes.create_string_buffer(b"\x7f" * size, size)  # whatever was there before
        self.blocks[ctypes.addressof(block)] = block
        return (ctypes.addressof(block),)

    def _cudaMalloc(self, size):  # noqa: N802
        self.blocks[size] = None
        return (size,)

    def _cudaFree(self, pointer):  # noqa: N802
        del self.blocks[pointer]
        return ()


def host_tensor(block, device):
    """The block as a tensor of the CPU, which keeps it as one of CUDA does."""
    view = SimpleNamespace(__array_interface__=block.__cuda_array_interface__ | {"version": 3}, block=block)
    return torch.from_numpy(np.asarray(view))


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's runtime, with device memory to spare."""
    stand_in = Runtime()
    monkeypatch.setitem(sys.modules, RUNTIME, stand_in)
    monkeypatch.setattr(managed, "_as_tensor", host_tensor)
    monkeypatch.setattr(managed, "available_bytes", lambda device: 40 * GIB)
    monkeypatch.setattr(managed, "available_memory", lambda: 50 * GIB)
    return stand_in


@pytest.fixture
def anywhere(runtime, monkeypatch):
    """Managed memory where the tests compute."""
    monkeypatch.setattr(managed, "_require_managed_access", lambda device: None)
    return runtime


# Settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=latency", "placement=managed"], "placement=managed: needs platform=cuda; allowed on cpu: device"),
        (["experiment=latency", "label=uvm"], "placement=managed: needs platform=cuda"),
        (["experiment=generate", "prompt=a", "placement=managed"], "placement=managed: needs platform=cuda"),
        ([*ON_CUDA, "placement=managed", "reuse=true"], "reuse=true: only fetched selections"),
        (
            [*ON_CUDA, "placement=managed", "platform.overlap=false"],
            "platform.overlap=false: placement=managed uses no link; use placement=host",
        ),
        ([*ON_CUDA, "label=uvm", "codec=int4"], "codec=int4: label=uvm stands for codec=None"),
        ([*ON_CUDA, "label=uvm", "placement=device"], "placement=device: label=uvm stands for placement=managed"),
        ([*ON_CUDA, "label=uvm", "platform.device_gib=0"], "platform.device_gib=0.0: must be above 0"),
        ([*ON_CUDA, "label=uvm", "platform.device_gib=-4"], "platform.device_gib=-4.0: must be above 0"),
        ([*ON_CUDA, "label=uvm", "platform.device_gib=big"], "platform.device_gib=big: must be a number"),
        ([*ON_CUDA, "label=offload", "platform.device_gib=48"], "platform.device_gib=48: is for placement=managed"),
        (
            ["experiment=latency", "platform.device_gib=48"],
            "platform.device_gib=48.0: makes a smaller card of platform=c",
        ),
        (["experiment=latency", "time_limit_s=0"], "time_limit_s=0.0: must be at least 1"),
    ],
)
def test_refuses(overrides, message):
    with pytest.raises(UserError, match=message.replace("+", "[+]")) as refused:
        load(overrides)
    assert "\n" not in str(refused.value)


def test_labels_of_managed_memory_are_systems_of_a_gpu():
    assert set(LABELS) - set(COUNTED) == {"uvm", "uvm+h2o"}
    for label, method in (("uvm", Full), ("uvm+h2o", H2O)):
        config = load([*ON_CUDA, f"label={label}", "platform.device_gib=48"])
        assert (config.placement, type(config.method), config.platform.device_gib) == ("managed", method, 48)
        assert load([*ON_CUDA, f"method={config.method_name}", "placement=managed"]).label == label
    assert load([*ON_CUDA, "method=streaming", "placement=managed"]).label == "streaming (managed)"


# Memory


def test_a_block_is_viewed_in_place_and_freed_with_its_last_view(runtime):
    tensor = managed.managed_empty((2, 3, 4), CUDA)
    assert (tensor.shape, tensor.dtype) == ((2, 3, 4), torch.uint8)
    assert [*runtime.blocks] == [tensor.data_ptr()] and len(runtime.blocks[tensor.data_ptr()]) == 24
    view = tensor[1]
    del tensor
    assert runtime.blocks and "cudaFree" not in runtime.calls
    del view
    assert not runtime.blocks
    assert runtime.calls[-3:] == ["cudaSetDevice", "cudaDeviceSynchronize", "cudaFree"], "no kernel may be reading it"


def test_an_error_of_cudas_is_told_in_its_words(runtime):
    runtime.fails = "cudaMallocManaged"
    with pytest.raises(RuntimeError, match="^cudaMallocManaged: out of memory$"):
        managed.managed_empty((8,), CUDA)
    assert not runtime.blocks


def refusals(device=CUDA, num_bytes=GIB):
    """What is said of managed memory on a device, by either way to ask for it."""
    for ask in (managed.require_managed, lambda num_bytes, device: managed.managed_empty((num_bytes,), device)):
        with pytest.raises(UserError) as refused:
            ask(num_bytes, device)
        yield str(refused.value)


def test_a_device_without_managed_memory_is_refused(runtime, monkeypatch):
    assert {*refusals(CPU)} == {"placement=managed: needs platform=cuda; allowed on cpu: device, host"}
    runtime.concurrent = 0
    assert {*refusals()} == {
        "placement=managed: this GPU has no concurrent managed access; allowed on it: device, host"
    }
    monkeypatch.setitem(sys.modules, RUNTIME, None)
    assert {*refusals()} == {"placement=managed: needs the package cuda-bindings, which torch's CUDA build brings"}


def test_a_cache_that_would_only_thrash_or_not_fit_is_refused(runtime, monkeypatch):
    managed.require_managed(50 * GIB, CUDA)
    with pytest.raises(UserError, match="needs 50.0 GiB of host memory, where its pages go, and 49.9 GiB are avail"):
        monkeypatch.setattr(managed, "available_memory", lambda: int(49.9 * GIB))
        managed.require_managed(50 * GIB, CUDA)
    monkeypatch.setattr(managed, "available_memory", lambda: 100 * GIB)
    managed.require_managed(60 * GIB, CUDA)
    with pytest.raises(UserError, match=r"KV cache of 61.0 GiB may be at most 1.5 times the 40.0 GiB of device memory"):
        managed.require_managed(61 * GIB, CUDA)


def test_a_smaller_card_leaves_what_is_asked_for(runtime, monkeypatch):
    """Of 45 GiB, 5 are held and 40 are free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    for gib, taken in ((45, 0), (44.5, GIB // 2), (6, 39 * GIB)):
        with managed.smaller_card(CUDA, gib):
            assert [*runtime.blocks] == [taken]
        assert not runtime.blocks
    with pytest.raises(KeyError), managed.smaller_card(CUDA, 20):
        raise KeyError
    assert not runtime.blocks
    runtime.calls.clear()
    with managed.smaller_card(CUDA, None):
        assert not runtime.calls
    for gib in (5, 45.1):
        with (
            pytest.raises(UserError, match=f"^platform.device_gib={gib}: must be above 5.0, .* and at most 45.0, "),
            managed.smaller_card(CUDA, gib),
        ):
            pytest.fail("refused before")


def test_nothing_of_cuda_is_imported_for_a_cache_elsewhere(monkeypatch):
    monkeypatch.delitem(sys.modules, RUNTIME, raising=False)
    with attached_with_link() as (attached, link):
        live(attached, CASES["full"], PROMPTS["even"], placement="host", link=link)
    assert RUNTIME not in sys.modules


# Decoding


@pytest.mark.parametrize("padding", PROMPTS)
@pytest.mark.parametrize("name", ["full", "h2o", "int4", "kivi", "snapkv", "infinigen", "quest", "oracle"])
def test_managed_is_the_device_bit_for_bit(name, padding, anywhere):
    with attached_with_link() as (attached, _):
        expected = live(attached, CASES[name], PROMPTS[padding], placement="device")
        got = live(attached, CASES[name], PROMPTS[padding], placement="managed")
    assert torch.equal(got.logits, expected.logits)
    assert (got.size, got.device_frac) == (expected.size, expected.device_frac)
    assert "cudaMallocManaged" in anywhere.calls and not anywhere.blocks


def test_a_session_asks_for_all_layers_at_once_and_counts_no_page(anywhere, monkeypatch):
    asked = []
    monkeypatch.setattr(managed, "require_managed", lambda num_bytes, device: asked.append(num_bytes))
    ids, real = token_batch(PROMPTS["even"])
    with attached_with_link() as (attached, link):
        session = open_live(attached, CASES["full"], placement="managed", link=link)
        session.prefill(ids[:, :8], real[:, :8])
        session.decode_step(ids[:, 8])
        allocated = sum(map(len, anywhere.blocks.values()))
        assert asked == [allocated] == [sum(store.nbytes for store in session.stores)]
        assert session.fetcher.link is None and session.h2d_bytes == session.d2h_bytes == session.device_bytes == 0
        session.close()


def test_a_session_on_the_cpu_is_refused():
    ids, real = token_batch(PROMPTS["even"])
    with (
        attached_with_link() as (attached, _),
        pytest.raises(UserError, match="placement=managed: needs platform=cuda"),
    ):
        open_live(attached, CASES["full"], placement="managed").prefill(ids, real)


# Timing

SHAPE = LatencyConfig(2, 20, gen_len=12, warmup_steps=2, timed_steps=4, repeats=2)


def timed(shape):
    ids = torch.randint(3, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    with attach(tiny("gqa")) as attached:
        return time_cell(attached, run_shared_prompt(attached, ids), Cell(Full(), shape, "managed"))


def test_what_the_driver_moves_is_not_measured(anywhere):
    metrics = timed(SHAPE).metrics()
    unknown = {"h2d_bytes", "d2h_bytes", "exposed_transfer_s", "transfer_s", "link_bytes_per_s", "prediction_s"}
    of_weights = {"weight_bytes", "weights_on_device"}  # all of which are there
    assert {name for name, value in metrics.items() if value is None} == unknown | of_weights
    assert metrics["num_timed_steps"] == 8 and metrics["device_kv_bytes"] == 0
    record = {"metrics": metrics | {"late_frac": 0.0}, "config": {"size": None}}
    assert _step(record, record) == {}, "the leaderboard's seconds go with bytes"


def test_a_warm_up_leaves_the_memory_to_the_session_that_is_timed(anywhere, monkeypatch):
    held = []
    monkeypatch.setattr(managed, "require_managed", lambda *_: held.append(len(anywhere.blocks)))
    with attach(tiny("gqa")) as attached:
        time_cell(attached, torch.full((2, 20), 7), Cell(Full(), SHAPE, "managed"))
    assert held == [0, 0] and not anywhere.blocks


@pytest.mark.parametrize(("limit_s", "steps"), [(1, [1]), (6, [3]), (10, [4, 1]), (None, [4, 4])])
def test_a_time_limit_ends_a_cell_with_the_steps_it_has(anywhere, monkeypatch, limit_s, steps):
    """The clock goes on by two seconds whenever it is looked at: before the warm-up, after it, and after each timed
    step. A warm-up that takes all the time leaves one step."""
    seconds = count(step=2)
    monkeypatch.setattr(timing, "_now", lambda device: float(next(seconds)))
    result = timed(replace(SHAPE, time_limit_s=limit_s))
    assert [len(block) for block in result.step_s] == steps and len(result.segments) == sum(steps)
    assert result.metrics()["num_timed_steps"] == sum(steps)
    assert result.decode_s == 22, "two seconds a step, of gen_len - 1"


def test_a_run_pages_on_the_card_it_asks_for(anywhere, monkeypatch, tmp_path):
    config = load([
        *ON_CUDA, "label=uvm+h2o", "model.weights=random", "batch_size=2", "prompt_len=20", "gen_len=6",
        "timed_steps=1", "platform.device_gib=48", f"results_dir={tmp_path}",
    ])  # fmt: skip
    cards = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr("harness.speed.link_rate.measure_copy_rate", lambda: 1e10)
    monkeypatch.setattr(managed, "require_managed", lambda *_: cards.append([*anywhere.blocks]))
    outcome = run_latency(config, LoadedModel(tiny("gqa"), None, "tiny", 512, "f" * 64))
    assert cards == [[12 * GIB]], "of 60 GiB"
    assert (outcome.metrics["platform"], outcome.metrics["source"]) == ("cuda", "measured")
    assert outcome.metrics["h2d_bytes"] is None and outcome.metrics["size"] < 1
    assert not anywhere.blocks


# On a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
def test_managed_memory_is_the_gpus_in_place_and_is_given_back():
    before = managed.available_bytes(CUDA)
    managed.require_managed(GIB, CUDA)
    tensor = managed.managed_empty((2, GIB // 2), CUDA)
    assert tensor.device == CUDA and torch.cuda.memory_allocated() < GIB, "no copy"
    tensor.fill_(3)
    assert tensor[1].sum(dtype=torch.int64).item() == 3 * (GIB // 2)
    assert managed.available_bytes(CUDA) < before - GIB // 2, "its pages are here"
    del tensor
    assert managed.available_bytes(CUDA) > before - GIB // 2


@gpu
def test_a_cache_larger_than_a_smaller_card_keeps_what_is_written():
    held = torch.cuda.memory_reserved() / GIB
    with managed.smaller_card(CUDA, held + 1):
        assert managed.available_bytes(CUDA) <= 1.05 * GIB
        pages = managed.managed_empty((5, GIB // 4), CUDA)
        for number, part in enumerate(pages):
            part.fill_(number)
        assert [int(part.max()) for part in pages] == [int(part.min()) for part in pages] == [0, 1, 2, 3, 4]
        del pages
