"""A model over several devices (`model.device=map`): nothing mixes devices, and the numbers are those of one.

On fake CUDA devices every operation that meets tensors of two raises. The numbers are computed on the CPU, where layers
that say `cpu` and layers that say `cpu:0` are of two devices for us, and of one for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

from harness.decode import weights as weights_module
from harness.decode.links import CudaLink, EmulatedLink
from harness.decode.session import LiveSession
from harness.decode.weights import streamed_weights
from harness.errors import UserError
from harness.model import load
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.load import load_model
from harness.model.tiny import tiny_model
from harness.replay.session import ReplaySession
from harness.run.compose import load as composed
from harness.settings.config import ModelConfig
from methods.full import Full
from tests.cases import CASES, Case, FollowingState
from tests.fake_cuda import CUDA, LIBC10, FakeSlab, Stream, Trace, fake_gpu
from tests.living import PROMPTS, Crossed, force, live, open_live, replay, tiny

SECOND = torch.device("cuda", 1)
PADDED = PROMPTS["padded"]


METHODS = (
    "full", "int4", "h2o", "infinigen", "quest", "pool-counter", "shadowkv", "retroinfer", "kvzip", "kivi", "kascade",
    "following", "projected",
)  # fmt: skip
PLACED = [*((name, "host") for name in METHODS), ("int4", "device"), ("infinigen", "device")]


# No operation mixes devices

needs_fakes = pytest.mark.skipif(not LIBC10.exists(), reason="torch's library of devices has another name here")


@cache
def spread_fake() -> Any:
    """A tiny model whose last two layers, norm and head are on a second device, under accelerate's hooks."""
    with CUDA:
        model = tiny_model("llama", num_key_value_heads=2)
    parts = {name: CUDA for name, _ in model.model.named_children()}
    places = {f"model.{name}": CUDA for name in parts if name != "layers"} | {"lm_head": SECOND}
    places |= {"model.norm": SECOND, "model.rotary_emb": SECOND}
    places |= {f"model.layers.{layer}": SECOND if layer > 1 else CUDA for layer in range(4)}
    for name, device in places.items():
        for module in model.get_submodule(name).modules():
            for kind, held in ((nn.Parameter, module._parameters), (torch.Tensor, module._buffers)):
                for key, tensor in held.items():
                    if tensor is not None:
                        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                        held[key] = nn.Parameter(moved, requires_grad=False) if kind is nn.Parameter else moved
    dispatch_model(model, places, skip_keys=["past_key_values"])
    return model


@pytest.fixture
def gpus() -> Iterator[Trace]:
    pytest.importorskip("triton")
    with fake_gpu() as trace:
        yield trace


@needs_fakes
@pytest.mark.parametrize(("name", "placement"), PLACED)
def test_a_step_mixes_no_devices_and_waits_for_none(gpus, name, placement):
    case = CASES[name]
    with gpus.prompted(spread_fake(), PADDED) as (attached, measured, ids, real):
        links = {device: CudaLink(device) for device in attached.devices} if placement == "host" else None
        options = {"max_new_tokens": 5, "codec": case.codec, "calibration": measured, "placement": placement}
        with closing(LiveSession(attached, case.method, link=links, **options)) as session:
            token = session.prefill(ids, real).argmax(-1)
            assert token.device == CUDA and [fault for fault in gpus.faults if "kernel on" in fault[1]] == []
            gpus.restart()
            Stream.waits.clear()
            for _ in range(2):
                token = session.decode_step(token).argmax(-1)
            assert gpus.faults == [] and Stream.waits == []
            session.drain()
            assert isinstance(session.traffic.loaded.num_bytes, int) or session.traffic.loaded.num_bytes.device == CUDA


@needs_fakes
@pytest.mark.parametrize("name", ["int4", "infinigen", "kvzip", "following"])
def test_replay_mixes_no_devices(gpus, monkeypatch, name):
    asked, case = gpus._value, CASES[name]

    def value(operation, args):
        """The host may ask for values: what is known, or else zeros and yes."""
        if isinstance(args[0], torch.Tensor) and args[0] in gpus._known:
            return asked(operation, args)
        return len(args) > 1 or args[0].dtype == torch.bool

    monkeypatch.setattr(gpus, "_value", value)
    with gpus.prompted(spread_fake(), PADDED) as (attached, measured, ids, real):
        lengths, columns = real.sum(-1) + 4, real.shape[1] + 4
        options = {"final_lengths": lengths, "num_columns": columns, "codec": case.codec, "calibration": measured}
        session = ReplaySession(attached, case.method, **options)
        hidden = session.prefill(ids, real)
        rows = torch.ones(len(ids), 4, dtype=torch.bool, device=CUDA)
        hidden = session.decode(torch.empty(rows.shape, dtype=torch.int64, device=CUDA), rows)
        assert hidden.device == CUDA and attached.logits(hidden).device == CUDA
        assert [fault for fault in gpus.faults if "kernel on" in fault[1]] == []
    with attach(spread_fake()) as attached:
        assert attached.decoder.no_prediction is attached.decoder.no_padding is None
        assert [layer.device for layer in attached.layers] == [CUDA, CUDA, SECOND, SECOND]
        assert attached.devices == [CUDA, SECOND] and all(layer.positions for layer in attached.layers)


@needs_fakes
def test_streamed_weights_come_by_the_link_of_their_device(gpus, monkeypatch):
    monkeypatch.setattr(weights_module, "PinnedSlab", FakeSlab)
    monkeypatch.setattr(weights_module, "require_memory", lambda *_: None)
    with gpus.prompted(spread_fake(), PADDED) as (attached, _, ids, real):
        links = {device: CudaLink(device) for device in attached.devices}
        copied = {link: [] for link in links.values()}

        def copy(link, source, target):
            copied[link].append(source.nbytes)
            return original(link, source, target)

        original = CudaLink.copy
        monkeypatch.setattr(CudaLink, "copy", copy)
        with streamed_weights(attached, links, 0.4) as weights:
            session = LiveSession(attached, Full(), max_new_tokens=5, placement="host", link=links)
            token = session.prefill(ids, real).argmax(-1)
            for sizes in copied.values():
                sizes.clear()
            gpus.restart()
            Stream.waits.clear()
            before = weights.num_bytes
            token = session.decode_step(token).argmax(-1)
            assert weights.num_bytes - before == weights.host_bytes
            assert gpus.faults == [] and Stream.waits == []
            for device, link in links.items():
                own = [size for size, at in zip(weights._sizes, weights._devices, strict=True) if at == device]
                assert len(own) == 2 and copied[link] == own[::-1]
            session.close()
        assert [layer.device for layer in attached.layers] == [CUDA, CUDA, SECOND, SECOND]


# The numbers are those of one device


@contextmanager
def split(family: str = "gqa") -> Iterator[Attached]:
    """A tiny model whose later layers say `cpu:0`."""
    with attach(tiny(family)) as attached:  # checked once, while it is whole
        layers = attached.decoder.layers
    try:
        for layer in layers[2:]:
            layer.device = torch.device("cpu", 0)
        with attach(tiny(family)) as attached:
            assert len(attached.devices) == 2
            yield attached
    finally:
        for layer in layers:
            layer.device = torch.device("cpu")


def over_host(attached: Attached, case: Case) -> tuple[Any, list[tuple[int, int]]]:
    """What it computes, and what crossed of each layer to the device and back."""
    with ExitStack() as stack:
        links = {device: stack.enter_context(EmulatedLink(1e12)) for device in attached.devices}
        link = links if len(links) > 1 else next(iter(links.values()))
        computed = live(attached, case, PADDED, placement="host", link=link)
        with closing(open_live(attached, case, placement="host", link=link)) as session, Crossed() as crossed:
            force(session, PADDED)
            session.drain()
            buffers = [buffer.nbytes for share in session.shares.values() for buffer in share.buffers]
            assert session.links == list(links.values()) and session.device_bytes >= sum(buffers) > 0
            return computed, [(crossed.loaded[store], crossed.written[store]) for store in session.stores]


@pytest.mark.parametrize("name", METHODS)
def test_numbers_and_bytes_are_those_of_one_device(name):
    case = CASES[name]
    whole, parts = [], []
    for found, model in ((whole, attach(tiny("gqa"))), (parts, split())):
        with model as attached:
            found += [replay(attached, case, PADDED), live(attached, case, PADDED), *over_host(attached, case)]
    for one, other in zip(whole[:3], parts[:3], strict=True):
        assert torch.equal(one.logits, other.logits)
        assert (one.budget, one.device_frac) == (other.budget, other.device_frac)
    assert whole[3] == parts[3]


def test_what_layers_share_or_managed_memory_is_refused(monkeypatch):
    monkeypatch.setattr(FollowingState, "handed_on", ())
    with split() as attached:
        with pytest.raises(UserError, match="FollowingState takes selections from earlier layers"):
            replay(attached, CASES["following"], PADDED)
        with pytest.raises(UserError, match="placement=managed: the model lies on several devices"):
            open_live(attached, Case(Full()), placement="managed")


# Loading


def test_a_map_needs_the_platform_cuda():
    with pytest.raises(UserError, match="model.device=map: needs platform=cuda; allowed on cpu: auto, cpu"):
        composed(["model.device=map"])
    assert composed(["model.device=map", "platform=cuda"]).model.device == "map"
    with pytest.raises(UserError, match="model.device=map: kind=analysis"):
        composed(["experiment=fig7", "model.device=map", "platform=cuda"])


def test_layers_that_do_not_fit_on_the_devices_are_refused(tmp_path, monkeypatch):
    """Without a CUDA device accelerate leaves all layers in host memory."""
    tiny("gqa").save_pretrained(tmp_path)
    config = ModelConfig(name="some", device="map", path=str(tmp_path))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="model.device=map: torch finds no CUDA device here; allowed: auto, cpu"):
            load_model(config)
    monkeypatch.setattr(load, "_placement", lambda config: ([torch.device("cpu")], torch.float32))
    with pytest.raises(UserError, match="^model.device=map: model some leaves .* in host memory or on disk; choose"):
        load_model(config)
