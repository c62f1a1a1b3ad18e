"""Counts the FLOPs and bytes of every transformer block, turns them into seconds, and walks compute
and link.

Counted are matrix products (2 FLOPs a multiply-add), weights, cached tokens and, in prefill, the
score matrix of eager attention. Norms, biases and activations are left out: under 2 % of any
segment. Everything is fp16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from harness.model.shape import WEIGHT_BYTES, ModelShape, read_yaml
from harness.results.columns import TableRow
from harness.results.step_stats import times_of
from harness.settings.schema import CONF_DIR, build
from harness.settings.systems import LABELS, System

if TYPE_CHECKING:
    from methods.base import Method

WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are
not counted."""
PAPER_LENGTHS, PAPER_COUNTS = (512, 1024, 1536, 2048), (37.0, 60.0, 66.0, 73.0)
"""Mean tokens above InfiniGen's threshold by length, OPT-13B (paper, section 5.3). The model takes
straight lines in between and constants outside, capped like any selection."""
INT4_SHARE = (4 + 32 / 64) / 16
"""Of fp16, with an fp16 scale and minimum per group of 64."""
DEQUANTIZE_BYTES = 13
"""Device traffic per element of FlexGen's five passes: both halves of a byte are shifted or masked
(0.5 read, 0.5 written) and converted (0.5 read, 1 written), then divided and added to (2 read, 2
written each)."""
EAGER_SCORE_BYTES = 12
"""Device traffic per score of eager fp16 attention: product, mask (in, out), softmax (in, out),
product."""
UVM_SCORE_BYTES = 24
"""Managed memory that the artifact's uvm/selfattention.py allocates per score of the prompt: scores
and weights in fp16; ones, mask, scaled mask, masked scores and softmax in fp32."""
UVM_SCORE_PEAK_BYTES = 14
"""The part of it that lives at once: mask, masked scores and softmax in fp32, weights in fp16."""

Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""
Rate = Annotated[float, Field(gt=0)]


# The run: a machine, a system, a model and its sizes


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its
    size. link_bytes_per_s: host to device from pinned memory, as achieved.
    host_channel_bytes_per_s: one channel of host memory, which limits the one core that stages a
    copy from pageable memory.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    device_bytes: Rate
    link_bytes_per_s: Rate
    host_channel_bytes_per_s: Rate

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a
        write of the channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)


def load_platform(name: str) -> Platform:
    """`conf/platform/<name>.yaml` of a machine that is modelled."""
    return build(Platform, read_yaml(CONF_DIR / "platform" / f"{name}.yaml"), "platform")


class Efficiency(NamedTuple):
    """Achieved share of a data-sheet rate, in (0, 1]: the only fitted numbers of the cost model.

    matmul: of `flops_per_s` by matrix products too large to be limited by memory, which is prefill.
    memory: of `memory_bytes_per_s` by kernels that stream weights or cached tokens.
    row_fetch: of `link_bytes_per_s` when tokens are fetched one by one, 256 bytes a head, instead
    of in one piece.
    """

    matmul: float
    memory: float
    row_fetch: float


FITTED = Efficiency(matmul=0.36, memory=0.81, row_fetch=0.83)
"""`published.fit` over all published numbers, to two digits."""

DENSE_LAYERS = 2
"""First layers that InfiniGen's artifact leaves to the full cache under every method (`layer_id >
1` in `speedup/flexgen`, `i >= 2` in `accuracy/lm_eval`), whatever their own code does."""


@dataclass(frozen=True)
class Scheme:
    """A system as published: where the cache lies, which method reads it, in which format, and how
    much transfer it hides. The number of tokens read is asked of the method with its default
    settings, which are the paper's."""

    system: System
    overlap: Overlap

    @property
    def placement(self) -> Literal["device", "pinned", "pageable", "managed"]:
        """Where the cache lies; managed: all memory is CUDA's managed memory."""
        placement = self.system.placement
        assert placement != "disk", "the paper's systems have none"
        if placement != "host":
            return placement
        return "pinned" if self.system.pinned else "pageable"

    @property
    def predicts(self) -> bool:
        """True if a layer predicts the tokens of the next one (InfiniGen), which are then fetched
        one by one."""
        return self.system.method == "infinigen"

    @property
    def int4(self) -> bool:
        """True if the cache is stored in 4 bits."""
        return self.system.codec == "int4"

    @property
    def dense_layers(self) -> int:
        """First layers that read the full cache."""
        reads_all = self.system.method == "full" and not self.int4
        return 0 if reads_all else DENSE_LAYERS

    def tokens(self, cached: int, final_len: int) -> tuple[float, int]:
        """Tokens of `cached` that a decode step reads in a layer under the method, and those it
        keeps. T: `final_len`."""
        from methods.base import TokenCounts  # loads torch

        method = _method(self.system.method)
        row, layer = TokenCounts(cached, prompt=cached, final=final_len), DENSE_LAYERS
        read = method.tokens_read(row, layer)
        if read is None:
            read = min(
                float(np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS)),
                method.max_tokens_read(row, layer),
            )
        return read, method.tokens_kept(row, layer)


def _published(system: System) -> Scheme:
    """FlexGen loads the cache of the next attention during the FFN. InfiniGen's artifact gathers on
    the host behind a device sync (speedup/infinigen/infinigen/kv_selection_controller.py), and a
    page fault stalls: they hide nothing."""
    hides = system.overlap and system.method != "infinigen" and system.placement != "managed"
    return Scheme(system, "ffn" if hides else "none")


PUBLISHED = (
    "uvm",
    "uvm+h2o",
    "offload",
    "offload-pageable",
    "offload+int4",
    "offload+h2o",
    "infinigen",
    "ideal",
)
SCHEMES = {label: _published(LABELS[label]) for label in PUBLISHED}


@cache
def _method(name: str) -> Method:
    from methods.full import Full
    from methods.h2o import H2O
    from methods.infinigen import InfiniGen

    return {"full": Full, "h2o": H2O, "infinigen": InfiniGen}[name]()


@dataclass(frozen=True)
class Case:
    """A run to predict. label: one of `SCHEMES`."""

    platform: Platform
    shape: ModelShape
    label: str
    batch_size: int
    prompt_len: int
    gen_len: int
    efficiency: Efficiency = FITTED

    @property
    def scheme(self) -> Scheme:
        """The system of the label."""
        return SCHEMES[self.label]

    @property
    def final_len(self) -> int:
        """T: tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len

    @property
    def host_block_bytes(self) -> float:
        """Bytes of a block's weights that lie in host memory and cross the link in each pass: the
        least share that makes the rest fit, in tenths (0.3 for the paper's OPT-30B, as there).
        Managed memory and `ideal` have none."""
        if self.scheme.placement in ("managed", "device"):
            return 0.0
        excess = self.shape.weight_bytes - WEIGHTS_FRAC * self.platform.device_bytes
        least = max(0.0, excess / (self.shape.num_layers * self.shape.block_bytes))
        return self.shape.block_bytes * min(1.0, math.ceil(10 * least) / 10)


# The prediction


class Work(NamedTuple):
    """One kernel, or several that the same resource limits."""

    flops: float
    bytes: float


class BlockWork(NamedTuple):
    """A block's kernels by segment, and the bytes that cross the link to and from the device.

    row_bytes: cached tokens fetched one by one; load_bytes: everything that comes in one piece.
    """

    attention: tuple[Work, ...]
    ffn: tuple[Work, ...]
    prediction: tuple[Work, ...] = ()
    load_bytes: float = 0.0
    row_bytes: float = 0.0
    store_bytes: float = 0.0


class Layer(NamedTuple):
    """is_dense: reads the full cache although others do not. predicts: chooses the tokens of the
    next layer."""

    is_dense: bool = False
    predicts: bool = False


class BlockTimes(NamedTuple):
    """Seconds of one block when nothing waits. load: the input of its attention over the link;
    store: its output over the link; prediction: of the next block's tokens; other: the output head,
    which follows the last block."""

    load: float
    attention: float
    ffn: float
    prediction: float = 0.0
    store: float = 0.0
    other: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds on the compute resource."""
        return self.prediction + self.attention + self.ffn + self.other


def predict(case: Case) -> TableRow:
    """Seconds and bytes of `case`, a row of the latency table: prefill, then gen_len - 1 decode
    steps, one walk each.

    The segments are of one block under the method in the last step; transfer is the time that
    compute waits. Bytes over the link: prefill included. None is what the model does not know.
    """
    num_layers, overlap = case.shape.num_layers, case.scheme.overlap
    vocabulary = _matmul(case.batch_size, case.shape.vocab_size * case.shape.hidden_size)
    head_s = _seconds(case, (vocabulary,))
    # Of each decode step: the cached tokens, and how many of them a layer under the method reads.
    steps = [
        (at, case.scheme.tokens(at, case.final_len)[0])
        for at in range(case.prompt_len, case.final_len - 1)
    ]
    layers = layers_of(case)
    _, kept = case.scheme.tokens(case.prompt_len, case.final_len)
    paged = (
        _managed_bytes(case, case.prompt_len, kept, scores_of=case.prompt_len)
        > case.platform.device_bytes
    )
    prompt = [prefill_block(case, layer, kept, paged=paged) for layer in layers]
    _, kept = case.scheme.tokens(case.final_len, case.final_len)
    paged = _managed_bytes(case, case.final_len, kept) > case.platform.device_bytes
    rows: list[BlockWork] = []  # the blocks of all decode steps, one step after the other
    for cached, read in steps:
        different = {
            layer: decode_block(case, layer, cached, read, paged=paged) for layer in set(layers)
        }
        rows += [different[layer] for layer in layers]
    distinct = {work: _times(case, work) for work in set(rows)}  # most layers of a step are alike
    times = [distinct[work] for work in rows]
    times[num_layers - 1 :: num_layers] = [
        last._replace(other=head_s) for last in times[num_layers - 1 :: num_layers]
    ]
    ends = block_ends(times, overlap)
    loaded, link_s = _loaded(case, rows), sum(block.load for block in times)
    dense_share = mean(layer.is_dense for layer in layers)
    width = INT4_SHARE if case.scheme.int4 else 1.0
    ttft_s = block_ends([_times(case, work) for work in prompt], overlap)[-1] + head_s
    step_s = np.diff([0.0, *ends[num_layers - 1 :: num_layers]]).tolist()
    speed = times_of(ttft_s, step_s, batch_size=case.batch_size)
    assert speed.decode_s is not None, "there are steps"
    return {
        "platform": case.platform.name,
        "source": "modelled",
        "model": case.shape.name,
        "method": case.scheme.system.codec or case.scheme.system.method,
        "label": case.label,
        "batch_size": case.batch_size,
        "prompt_len": case.prompt_len,
        "gen_len": case.gen_len,
        **vars(speed),
        "total_s": ttft_s + speed.decode_s,
        "h2d_bytes": round(_loaded(case, prompt) + loaded),
        "d2h_bytes": round(sum(work.store_bytes for work in (*prompt, *rows))),
        "exposed_transfer_s": _exposed(ends[-1], times),
        "link_bytes_per_s": loaded / link_s if link_s else None,
        "peak_device_bytes": None,
        "budget": mean(
            dense_share + (1 - dense_share) * width * read / cached for cached, read in steps
        ),
        "run_id": "",
        "transfer_s": _exposed(ends[-2] - ends[-3], times[-2:-1]),
        **{
            f"{name}_s": getattr(times[-2], name)
            for name in ("attention", "ffn", "prediction", "other")
        },
    }


def layers_of(case: Case) -> list[Layer]:
    """The layers of a model, first to last. A layer predicts if the next one is not dense."""
    dense_layers, num_layers = case.scheme.dense_layers, case.shape.num_layers
    predicting = range(dense_layers - 1, num_layers - 1) if case.scheme.predicts else ()
    return [
        Layer(is_dense=at < dense_layers, predicts=at in predicting) for at in range(num_layers)
    ]


def decode_block(
    case: Case, layer: Layer, cached: int, read: float, *, paged: bool = False
) -> BlockWork:
    """One token per sequence through a block, with `cached` tokens before it, of which a layer
    under the method reads `read`.

    paged: managed memory that does not fit: every page a block touches comes in and evicts another.
    """
    scheme, shape, batch_size = case.scheme, case.shape, case.batch_size
    tokens = batch_size * (cached if layer.is_dense else read)
    quantized = scheme.int4 and not layer.is_dense
    attention = [
        _matmul(batch_size, shape.attention_weights),
        Work(
            4 * shape.query_size * (tokens + batch_size), shape.token_bytes * (tokens + batch_size)
        ),
    ]
    if quantized:
        attention.append(Work(0, DEQUANTIZE_BYTES * 2 * shape.kv_size * tokens))
    fetched = tokens * shape.token_bytes * (INT4_SHARE if quantized else 1)
    load, store = fetched, batch_size * shape.token_bytes * (INT4_SHARE if quantized else 1)
    if scheme.placement == "device":
        load, store = 0.0, 0.0
    elif scheme.placement == "managed":
        load = store = paged * (fetched + shape.block_bytes)
    by_rows = scheme.predicts and not layer.is_dense
    return BlockWork(
        attention=tuple(attention),
        ffn=(_matmul(batch_size, shape.ffn_weights),),
        prediction=_prediction(shape, batch_size, cached) if layer.predicts else (),
        load_bytes=0.0 if by_rows else load,
        row_bytes=load if by_rows else 0.0,
        store_bytes=store,
    )


def prefill_block(case: Case, layer: Layer, kept: float, *, paged: bool = False) -> BlockWork:
    """The prompt through a block, dense; a layer under the method writes `kept` of its tokens to
    the host.

    With managed memory each first touch of a page crosses the link once. Where the memory does not
    fit (`paged`) the weights come in too, and as much is written back.
    """
    scheme, shape, prompt_len = case.scheme, case.shape, case.prompt_len
    rows = case.batch_size * prompt_len
    scores = rows * shape.num_heads * prompt_len
    load, store = 0.0, 0.0
    if scheme.placement == "managed":
        load = UVM_SCORE_BYTES * scores + paged * shape.block_bytes
        store = paged * load
    elif scheme.placement != "device":
        tokens = case.batch_size * (prompt_len if layer.is_dense else kept)
        store = (
            tokens * shape.token_bytes * (INT4_SHARE if scheme.int4 and not layer.is_dense else 1)
        )
    return BlockWork(
        attention=(
            _matmul(rows, shape.attention_weights),
            Work(4 * shape.head_dim * scores, EAGER_SCORE_BYTES * scores),
        ),
        ffn=(_matmul(rows, shape.ffn_weights),),
        load_bytes=load,
        store_bytes=store,
    )


def block_ends(blocks: Sequence[BlockTimes], overlap: Overlap) -> list[float]:
    """When the compute of each block ends, in seconds; blocks of successive steps follow one
    another.

    A task starts when its resource (compute or link) is free and the one task it waits for has
    ended. A block's attention waits for its own transfer; the first block's transfer has nothing to
    hide behind. With overlap `none` every task waits for the one before it.
    """
    ends = []
    if overlap == "none":
        now = 0.0
        for block in blocks:
            for seconds in (
                block.load,
                block.prediction,
                block.attention,
                block.store,
                block.ffn + block.other,
            ):
                now += seconds
            ends.append(now)
        return ends
    compute, link = 0.0, blocks[0].load  # when each resource is free
    arrived = link
    for block, load in zip(blocks, [*(block.load for block in blocks[1:]), 0.0], strict=True):
        compute, here = compute + block.prediction, arrived
        if overlap == "block":
            link = arrived = max(link, compute) + load
        compute = max(compute, here) + block.attention
        if overlap == "ffn":
            link = arrived = max(link, compute) + load
        link = max(link, compute) + block.store
        compute += block.ffn + block.other
        ends.append(compute)
    return ends


def _managed_bytes(case: Case, dense_tokens: int, kept: int, scores_of: int = 0) -> float:
    """Bytes that managed memory must hold at once: weights, the cache (tokens of a sequence in
    dense and other layers), and in prefill the attention scores of `scores_of` tokens."""
    shape = case.shape
    tokens = sum(dense_tokens if layer.is_dense else kept for layer in layers_of(case))
    scores = case.batch_size * shape.num_heads * scores_of**2
    return (
        shape.weight_bytes
        + case.batch_size * tokens * shape.token_bytes
        + UVM_SCORE_PEAK_BYTES * scores
    )


def _matmul(rows: int, weights: int) -> Work:
    return Work(2 * rows * weights, WEIGHT_BYTES * weights)


def _prediction(shape: ModelShape, batch_size: int, cached: int) -> tuple[Work, ...]:
    """The partial query projection, and its product with the partial keys of every cached token."""
    from methods.infinigen import InfiniGen

    ratio = InfiniGen.partial_weight_ratio
    weights = ratio * shape.hidden_size * shape.query_size
    columns = ratio * batch_size * cached
    return (
        Work(2 * batch_size * weights, WEIGHT_BYTES * weights),
        Work(2 * columns * shape.query_size, WEIGHT_BYTES * columns * shape.kv_size),
    )


def _times(case: Case, work: BlockWork) -> BlockTimes:
    pageable = case.scheme.placement == "pageable"
    link = case.platform.pageable_bytes_per_s if pageable else case.platform.link_bytes_per_s
    in_one_piece = work.load_bytes + case.host_block_bytes
    return BlockTimes(
        load=in_one_piece / link + work.row_bytes / (link * case.efficiency.row_fetch),
        attention=_seconds(case, work.attention),
        ffn=_seconds(case, work.ffn),
        prediction=_seconds(case, work.prediction),
        store=work.store_bytes / link,
    )


def _seconds(case: Case, works: Sequence[Work]) -> float:
    """Each kernel takes as long as the slower of its arithmetic and its memory traffic."""
    flops_per_s = case.platform.flops_per_s * case.efficiency.matmul
    bytes_per_s = case.platform.memory_bytes_per_s * case.efficiency.memory
    return sum(max(work.flops / flops_per_s, work.bytes / bytes_per_s) for work in works)


def _loaded(case: Case, works: Sequence[BlockWork]) -> float:
    """Bytes that the blocks bring to the device."""
    return (
        sum(work.load_bytes + work.row_bytes for work in works) + len(works) * case.host_block_bytes
    )


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))
