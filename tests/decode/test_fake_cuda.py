"""What CUDA asks of prefill and decode, seen on tensors without values: no GPU is needed.

No step waits for a value of the device, nothing lies on the CPU that should be on the device, and a layer launches few
kernels: at small batches a step's time goes to launching.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.decode import memory as managed
from harness.decode.links import CudaLink
from harness.decode.session import LiveSession
from harness.model import decoder
from harness.replay.setup import codec_of
from harness.run.advise import KNOWN
from harness.run.compose import load
from harness.settings.codecs import codec_named
from harness.settings.systems import LABELS, ON_A_DISK, System
from methods.base import Method
from methods.codecs.integers import IntegerCodec
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infinigen2 import InfiniGen2, InfiniGen2Sampled
from methods.infinigen_pool import InfiniGenPool
from tests.cases import CASES, WIDE
from tests.fake_cuda import CUDA, LIBC10, Stream, Trace, fake_gpu, fake_model
from tests.living import PROMPTS
from tests.tiny_models import tiny_model

pytest.importorskip("triton")
from methods import kernels

pytestmark = pytest.mark.skipif(not LIBC10.exists(), reason="torch's library of devices has another name here")


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Trace]:
    """A fake GPU whose memory may be managed."""
    monkeypatch.setattr(managed, "require_managed", lambda *_: None)
    # The check of an output projection waits, once for a layer of a model.
    monkeypatch.setattr(decoder, "_require_plain", lambda *_: None)
    monkeypatch.setattr(
        managed, "managed_empty", lambda shape, device: torch.empty(shape, dtype=torch.uint8, device=device)
    )
    with fake_gpu() as trace:
        yield trace


@contextmanager
def opened(
    trace: Trace,
    model: Any,
    prompts: tuple[int, ...],
    method: Method,
    *,
    steps: int = 4,
    overlap: bool = True,
    **options: Any,
) -> Iterator[tuple[LiveSession, Tensor]]:
    """A session, and the token [batch] after prompts of these lengths."""
    with trace.prompted(model, prompts) as (attached, known, ids, real):
        link = CudaLink(CUDA, overlap=overlap) if options["placement"] == "host" else None
        session = LiveSession(attached, method, max_new_tokens=steps, link=link, calibration=known, **options)
        trace.restart()
        yield session, session.prefill(ids, real).argmax(-1)
        session.close()


# Nothing waits

FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "opt": {"word_embed_proj_dim": 64},
}
PLACED = [
    *(
        (name, "host", 0)
        for name in (*WIDE, "infinigen-union", "int4", "snapkv-both")
        if CASES[name].method.when != "true_scores"
    ),
    *((name, "host", 1) for name in ("infinigen", "infinigen-fixed", "pool-fifo", "quest", "sparq", "shadowkv")),
    *((name, "device", 0) for name in ("full", "h2o", "infinigen", "infinigen-final", "oracle", "pool-fills")),
    *((name, "managed", 0) for name in ("full", "int4", "h2o")),
]


@cache
def fake_tiny(family: str) -> Any:
    with CUDA:
        return tiny_model(family, **FAMILIES[family], num_hidden_layers=3)


@pytest.mark.parametrize(
    ("name", "placement", "gpu_cache", "family"),
    [
        *((*placed, "llama") for placed in PLACED),
        *(("infinigen", "host", 0, family) for family in ("qwen3", "opt")),
    ],
)
def test_nothing_waits_for_the_device_or_lies_on_the_cpu(gpu, name, placement, gpu_cache, family):
    case = CASES[name]
    options = {"codec": case.codec, "placement": placement, "gpu_cache": gpu_cache}
    with opened(gpu, fake_tiny(family), PROMPTS["padded"], case.method, **options) as (session, token):
        # Before its first layer a prefill asks for the prompts' lengths, and moves what a method counts on the CPU.
        assert [fault for fault in gpu.faults if fault[0] is not None] == []
        # Of three layers the last one waits, for the rows of the first to have left the device.
        assert all("links.py" in where for where in Stream.waits)
        assert len(Stream.waits) == (placement == "host")
        Stream.waits.clear()
        gpu.restart()
        for _ in range(2):
            token = session.decode_step(token).argmax(-1)
        assert gpu.faults == [] and Stream.waits == []


def test_no_step_attends_by_cudnn_which_plans_for_each_length(gpu, monkeypatch):
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(*arguments, **named):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return fused(*arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with opened(gpu, fake_tiny("llama"), PROMPTS["even"], CASES["full"].method, placement="device") as (session, token):
        assert all(seen)  # a prompt's plan serves all its layers
        seen.clear()
        session.decode_step(token)
        assert len(seen) == 3 and not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_kernels_take_as_many_heads_as_a_large_batch_has(gpu):
    """65,535 is the most that a GPU takes on any axis of a grid but the first."""
    batch, heads, head_dim, columns, slots = 2048, 40, 128, 64, 4096
    codec = IntegerCodec("int4", columns)
    query = torch.empty(batch, heads, 1, columns, device=CUDA)
    keys = torch.empty(batch, heads, slots, codec.row_bytes(columns), dtype=torch.uint8, device=CUDA)
    kernels.coded_scores(query, keys, codec.bits, codec.group_size)
    states = torch.empty(batch, heads, 1, head_dim, device=CUDA)
    side = torch.empty(batch, heads, head_dim, codec.row_bytes(columns), dtype=torch.uint8, device=CUDA)
    kernels.coded_product(states, side, codec.bits, columns)
    assert gpu.faults == []
    assert gpu.of_layer(None).keys() >= {"_coded_scores", "_coded_product"}


# Launches

BATCH, PROMPT_LEN, LAYERS = 2, 1920, 4
BUDGETS = {
    "ideal": (18, 18),
    "uvm": (18, 18),
    "uvm+h2o": (18, 41),
    "offload": (18, 18),
    "offload-pageable": (21, 21),
    "offload+int4": (18, 18),
    "offload+h2o": (18, 40),
    "infinigen": (18, 31),
    "infinigen-artifact": (21, 34),
    "infinigen+reuse": (18, 28),
    "infinigen+int4": (18, 29),
    "infinigen2": (37, 34),
    "infinigen2+rows": (34, 31),
    "infinigen2-sampled": (43, 40),
    "infinigen (device)": (18, 34),
    "pool": (18, 62),
}
"""Launches in the first layer, which mostly reads the full cache, and in one of the others, the next layer's prediction
included, and what torch launches to make a bias of a mask; at the shape of OPT-13B. A whole layer of a step costs them
all, whatever the batch: at 5 us each, 40 of them in each of 40 layers are 8 ms."""
METHODS = {"full": Full, "h2o": partial(H2O, dense_layers=2), "infinigen": InfiniGen}
METHODS["infinigen2"] = partial(InfiniGen2, statistics="prompt", partial_weight_ratio=0.3)


def system_of(label: str) -> tuple[Method, System]:
    if label == "pool":
        return InfiniGenPool(pool_frac=0.8), LABELS["infinigen"]
    if label == "infinigen2-sampled":
        return InfiniGen2Sampled(statistics="prompt", partial_weight_ratio=0.3), LABELS["infinigen2+rows"]
    if label == "infinigen (device)":
        return InfiniGen(), System("infinigen", "device")
    return METHODS[LABELS[label].method](), LABELS[label]


def test_layers_that_read_all_columns_share_a_padded_batchs_bias(gpu):
    model = fake_model("opt-13b", num_hidden_layers=LAYERS)
    with opened(gpu, model, (PROMPT_LEN, PROMPT_LEN - 120), Full(), placement="host") as (session, token):
        gpu.restart()
        session.decode_step(token)
        first, *others = [gpu.of_layer(layer).total() for layer in range(LAYERS - 1)]
        whole = BUDGETS["offload"][0]
        assert whole < first <= whole + 3 and max(others) <= whole


@pytest.mark.parametrize("label", sorted({*BUDGETS, *LABELS} - {*ON_A_DISK}))
def test_a_layer_launches_few_kernels(gpu, label):
    method, system = system_of(label)
    model = fake_model("opt-13b", num_hidden_layers=LAYERS)
    options = {name: getattr(system, name) for name in ("placement", "overlap", "gpu_cache", "pinned")}
    codec = codec_named(system.codec) if system.codec else None
    with opened(gpu, model, (PROMPT_LEN,) * BATCH, method, codec=codec, **options) as (session, token):
        gpu.restart()
        session.decode_step(token)
        whole, selecting = gpu.of_layer(0), gpu.of_layer(LAYERS - 2)
        budget = BUDGETS[label]
        assert whole.total() <= budget[0] and selecting.total() <= budget[1], (whole, selecting)


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "kivi4",
        "infinigen",
        "infinigen2",
        "infinigen2-linear",
        "infinigen2-sampled+int8",
        "pqcache",
        "quest",
        "retroinfer",
        "shadowkv",
        "snapkv+int8",
        "socket",
        "twilight",
        "vattention",
        "yakv",
    ],
)
def test_advice_counts_what_a_step_launches(gpu, name):
    method, _, codec = name.partition("+")
    words = ["experiment=latency", f"method={method}", *([f"codec={codec}"] if codec else [])]
    config = load(words)
    model = fake_model("opt-13b", num_hidden_layers=LAYERS)
    for placement, number in zip(("device", "host"), KNOWN["launches"][name], strict=True):
        options = {"codec": codec_of(config), "placement": placement}
        with opened(gpu, model, (PROMPT_LEN,) * BATCH, config.method, **options) as (session, token):
            gpu.restart()
            session.decode_step(token)
            assert gpu.of_layer(LAYERS - 2).total() == number
