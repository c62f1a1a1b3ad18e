"""Memory of live decoding: what a session and a prompt need and what is refused, page-locked slabs, managed memory.

CUDA's runtime is a stand-in where there is no GPU (`fake_cuda.Runtime`).
"""

import weakref
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.decode import memory
from harness.decode.memory import (
    ALIGNMENT,
    GIB,
    PinnedSlab,
    require_session,
)
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.prompts import prompt_bytes, run_prompt
from harness.replay.setup import Setup
from harness.settings.codecs import codec_named
from harness.settings.config import LatencyConfig
from harness.speed import latency as run
from harness.speed import timed_run as timing
from harness.speed.timed_run import TimedRun, run_shared_prompt, time_run
from methods.full import Full
from tests.cases import CASES
from tests.decode.test_fake_cuda import opened, system_of
from tests.fake_cuda import CUDA, LIBC10, fake_gpu, fake_model, fake_runtime
from tests.living import CPU, PROMPTS, attached_with_link, calibration_of, force, live, open_live, tiny, token_batch
from tests.tiny_models import tiny_model


@pytest.fixture
def runtime():
    """A GPU with 40 GiB free."""
    with fake_runtime() as runtime:
        yield runtime


SHAPE = LatencyConfig(2, 20, gen_len=12, warmup_steps=2, timed_steps=4, repeats=2)


class Held(TorchDispatchMode):
    """Bytes that tensors on a kind of device hold, of those made under it: now, and at most since `restart`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def restart(self) -> None:
        """Forget what has been freed."""
        self.peak = self.now

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device_type:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.storages.pop(key)


# What a session needs


LARGE = {"hidden_size": 256, "num_attention_heads": 16}
MODELS = {
    "opt": ("opt", {"ffn_dim": 1024, "word_embed_proj_dim": 256}),
    "gqa": ("llama", {"intermediate_size": 896, "num_key_value_heads": 4}),
    "small ffn": ("qwen2", {"intermediate_size": 256, "num_key_value_heads": 16}),
}


@pytest.mark.parametrize(("family", "rows"), [*((family, 2048) for family in MODELS), ("gqa", 64)])
def test_a_prompts_pass_stays_within_what_is_asked_for_and_a_step_below_it(family, rows, monkeypatch):
    """In a session, and as a shared prompt beside a cache of 260 tokens, which is asked for with it."""
    model_type, shape = MODELS[family]
    asked = []
    monkeypatch.setattr(run, "require_memory", lambda num_bytes, *_: asked.append(num_bytes))
    ids, real = token_batch((256, 256), 0)
    with attach(tiny_model(model_type, **LARGE, **shape)) as attached, torch.inference_mode():
        attached.decoder.rows_at_once = rows
        calibration_of(attached)  # kept by the process, so it is no part of the first session
        for codec in ("full", "int4"):
            with Held("cpu") as held, closing(open_live(attached, CASES[codec], 4)) as session:
                token = session.prefill(ids, real).argmax(-1)
                needed = session.needs.asked
                assert 0.7 * needed < held.peak <= needed
                with Held("cpu") as held_by_step:
                    session.decode_step(token)
                assert held_by_step.peak < prompt_bytes(attached, 512)
        geometry = attached.geometry
        run.require_shared_prompt(attached, 2, 256, 4)
        cache = geometry.num_layers * 2 * 260 * 2 * geometry.num_kv_heads * geometry.head_dim * 4
        with Held("cpu") as held:
            run_prompt(attached, ids, real)
    assert 0.7 * (asked[0] - cache) < held.peak <= asked[0] - cache


@pytest.mark.parametrize(
    ("needed", "device", "message"),
    [
        ((4, 2), CUDA, None),
        ((4, 3), CUDA, r"needs 3\.0 GiB of cuda memory and 2\.0 .* lower batch_size, prompt_l"),
        ((3, 1), CPU, None),  # one memory for both
        ((3, 2), CPU, r"needs 5\.0 GiB of cpu memory and 4\.0 GiB are available"),
    ],
)
def test_each_memory_is_asked_by_itself(needed, device, message, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda home: {"cpu": 4, "cuda": 2}[home.type] * GIB)
    host, on_device = (gib * GIB for gib in needed)
    with nullcontext() if message is None else pytest.raises(UserError, match=f"live decoding {message}"):
        require_session(host, on_device, 0, device)


# On a fake GPU: OPT-13B, batch 20, 1,920 + 128 tokens. Fake tensors have sizes and are freed as real ones are. Four
# layers stand for forty: a further one adds its store, and with a GPU cache its buffer, to both sides alike. Memory
# that the link's stream uses is not free before the host knows that the stream is done.


@pytest.mark.skipif(not LIBC10.exists(), reason="torch's library of devices has another name here")
@pytest.mark.parametrize("label", ["ideal", "offload", "offload+int4", "offload+h2o", "infinigen+reuse", "infinigen2"])
def test_the_refusal_knows_what_decoding_takes_of_a_gpu(label, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(memory, "require_memory", lambda *_: None)
    method, system = system_of(label)
    codec = codec_named(system.codec) if system.codec else None
    options = {"placement": system.placement, "gpu_cache": system.gpu_cache, "codec": codec, "steps": 128}
    with fake_gpu() as trace, monkeypatch.context() as patch:
        patch.setattr("harness.model.attach.model_digest", lambda model: "")
        model = fake_model("opt-13b", num_hidden_layers=4)  # its weights are not counted, nor what reads them
        with trace.follow(model):
            pass
        with Held("cuda") as held, opened(trace, model, (1920,) * 20, method, **options) as (session, token):
            needed, prompt = session.needs.asked, held.peak
            held.restart()
            for _ in range(2):
                token = session.decode_step(token).argmax(-1)
            assert session.device_bytes <= needed and held.peak <= needed
            assert 0.8 * needed <= prompt <= needed


# Page-locked memory


def test_pieces_are_aligned_zero_and_lie_in_what_was_locked(runtime):
    slab = PinnedSlab(1280 + 256 + 256)
    pieces = [slab.take(shape) for shape in ((2, 3, 5, 36), (1,), (4, 64))]
    ((address, size),) = runtime.locked.items()
    assert size == slab.nbytes == 1792
    assert [piece.data_ptr() - address for piece in pieces] == [0, 1280, 1536]
    assert address % ALIGNMENT == 0 and not any(piece.any() for piece in pieces)
    with pytest.raises(AssertionError, match="as large as its pieces"):
        slab.take((1,))
    slab.close()
    slab.close()
    assert runtime.names == ["cudaHostRegister", "synchronize", "cudaHostUnregister"], "once, the device being done"


@pytest.mark.parametrize(("num_bytes", "fails", "shown"), [(3 << 20, "cudaHostRegister", "0.0"), (1 << 52, "", "4194")])
def test_memory_that_cannot_be_locked_or_mapped_is_refused(runtime, num_bytes, fails, shown):
    runtime.fails = fails
    with pytest.raises(UserError, match=f"^platform.pinned=true: {shown}.* page-locked .*pinned=false$"):
        PinnedSlab(num_bytes)
    assert runtime.names == ["cudaHostRegister", "cudaGetLastError"] * bool(fails), "CUDA's last error is forgotten"


def test_sessions_one_after_another_ask_for_their_memory_and_lock_it_once(runtime, monkeypatch):
    """Until one needs another size. What the session before has left there is not seen."""
    asked, logits, slabs = [], [], []
    monkeypatch.setattr(memory, "require_session", lambda host, *_: asked.append(host))
    with attached_with_link() as (attached, link):
        for steps, is_new, locked in ((3, True, 1), (3, False, 1), (5, True, 2)):
            session = open_live(attached, CASES["kivi"], steps, placement="host", link=link, slabs=slabs)
            session.pinned = True
            logits.append(force(session, PROMPTS["padded"], 3))
            size = sum(runtime.locked.values())
            assert session.pinned_bytes == size and asked.pop() == (size if is_new else 0)
            session.close()
            assert session.pinned_bytes == 0 and len(runtime.locked) == 1
            assert runtime.names.count("cudaHostRegister") == locked
            with torch.inference_mode():
                slabs[0]._memory.fill_(255)  # not a number, if it is read
    assert torch.equal(logits[0], logits[1])
    slabs[0].close()
    assert not runtime.locked


# Managed memory


@pytest.fixture
def anywhere(runtime, monkeypatch):
    """Managed memory where the tests compute."""
    monkeypatch.setattr(memory, "require_managed", lambda *_: None)
    return runtime


def test_a_block_is_viewed_in_place_and_freed_with_its_last_view(runtime):
    tensor = memory.managed_empty((2, 3, 4), CUDA)
    assert (tensor.shape, tensor.dtype) == ((2, 3, 4), torch.uint8)
    assert [*runtime.blocks] == [tensor.data_ptr()] and len(runtime.blocks[tensor.data_ptr()]) == 24
    view = tensor[1]
    del tensor
    assert runtime.blocks and "cudaFree" not in runtime.names
    del view
    assert not runtime.blocks
    assert runtime.names[-3:] == ["cudaSetDevice", "cudaDeviceSynchronize", "cudaFree"], "no kernel may be reading it"
    runtime.fails = "cudaMallocManaged"
    with pytest.raises(RuntimeError, match="^cudaMallocManaged: out of memory$"):
        memory.managed_empty((8,), CUDA)


def test_a_device_without_managed_memory_is_refused(runtime):
    with pytest.raises(UserError, match="^placement=managed: needs platform=cuda; allowed on cpu: device, host$"):
        memory.require_managed(GIB, 0, CPU)
    runtime.concurrent = 0
    with pytest.raises(UserError, match="GPU has no concurrent managed access; allowed on it: device, host$"):
        memory.require_managed(GIB, 0, CUDA)


@pytest.mark.parametrize(("gib", "free"), [(None, 40), (30, 25)])
def test_managed_memory_is_refused_beyond_what_is_free(runtime, monkeypatch, gib, free):
    """Of 45 GiB, 5 are held. A smaller card has less that is free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    with memory.smaller_card(CUDA, gib):
        require_session(0, 0, free * GIB, CUDA)
        require_session(0, 2 * GIB, (free - 2) * GIB, CUDA)
        refusal = rf"^placement=managed: the KV cache of {free - 2}.0 GiB and 2.1 GiB .* at most the {free}.0 GiB of"
        with pytest.raises(UserError, match=refusal):
            require_session(0, int(2.1 * GIB), (free - 2) * GIB, CUDA)


def test_a_smaller_card_leaves_what_is_asked_for(runtime, monkeypatch):
    """Of 45 GiB, 5 are held and 40 are free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    for gib, taken in ((45, [0]), (44.5, [GIB // 2]), (6, [39 * GIB]), (None, [])):
        with memory.smaller_card(CUDA, gib):
            assert [*runtime.blocks] == taken
        assert not runtime.blocks
    with pytest.raises(KeyError), memory.smaller_card(CUDA, 20):
        raise KeyError
    assert not runtime.blocks
    for gib in (5, 45.1):
        with (
            pytest.raises(UserError, match=f"^platform.device_gib={gib}: must be above 5.0, .* and at most 45.0, "),
            memory.smaller_card(CUDA, gib),
        ):
            pytest.fail("refused before")


@pytest.mark.parametrize("name", ["h2o", "kivi", "infinigen", "oracle"])
def test_managed_is_the_device_bit_for_bit(name, anywhere):
    with attached_with_link() as (attached, _):
        expected = live(attached, CASES[name], PROMPTS["padded"], placement="device")
        got = live(attached, CASES[name], PROMPTS["padded"], placement="managed")
    assert torch.equal(got.logits, expected.logits)
    assert (got.budget, got.device_frac) == (expected.budget, expected.device_frac)
    assert "cudaMallocManaged" in anywhere.names and not anywhere.blocks


# Timing under managed memory


def timed(shape):
    ids = torch.randint(3, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    with attach(tiny("gqa")) as attached:
        prompt = run_shared_prompt(attached, ids, shape.repeats)
        return time_run(attached, prompt, TimedRun(Setup(Full(), None, None), shape, "managed"))


def test_what_the_driver_moves_is_not_measured(anywhere):
    metrics = timed(SHAPE).metrics
    over_link = {"h2d_bytes", "d2h_bytes", "late_bytes", "exposed_transfer_s", "transfer_s", "link_bytes_per_s"}
    over_link |= {"link_utilisation", "hit_rate", "host_kv_bytes"}
    assert {metrics[name] for name in over_link} == {None} and metrics["decode_s"] > 0
    assert metrics["num_timed_steps"] == 8 and metrics["device_kv_bytes"] == 0


@pytest.mark.parametrize(("limit_s", "steps"), [(1, [1]), (10, [4]), (11, [4, 1]), (15, [4, 2]), (None, [4, 4])])
def test_a_time_limit_ends_a_run_with_the_steps_it_has(anywhere, monkeypatch, limit_s, steps):
    """The clock goes on by two seconds whenever it is looked at: before the warm-up, after it, and after each timed
    step, so four steps take 10 seconds. A warm-up that takes all the time leaves one step; the second repeat has what
    the first leaves, and does not begin where that is nothing."""
    seconds = count(step=2)
    monkeypatch.setattr(timing, "_now", lambda device: float(next(seconds)))
    metrics, samples = timed(replace(SHAPE, time_limit_s=limit_s))
    assert [len(repeat) for repeat in samples["step_s"]] == steps and len(samples["segments"]) == sum(steps)
    assert metrics["num_timed_steps"] == sum(steps) and len(samples["dense_s"]) == len(steps)
    assert metrics["decode_s"] == 22, "two seconds a step, of gen_len - 1"
    assert (metrics["tpot_spread_s"] is None) == (len(steps) == 1)
