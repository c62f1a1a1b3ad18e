"""Counts the FLOPs and bytes of every transformer block, turns them into seconds, and walks compute
and link: the paper's systems, as published.

Counted are matrix products (2 FLOPs a multiply-add), weights, cached tokens and, in prefill, the
score matrix of eager attention. Norms, biases and activations are left out: under 2 % of any
segment. Everything is fp16. `step` walks the step of a live session in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import mean
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from harness.model.shape import WEIGHT_BYTES, ModelShape, read_yaml
from harness.results.step_stats import times_of
from harness.settings.schema import CONF_DIR, build
from harness.settings.systems import LABELS, System
from methods.base import Method, TokenCounts
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen

# Machines

Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its
    size. link_bytes_per_s: host to device from pinned memory, as achieved.
    host_channel_bytes_per_s: one channel of host memory, which limits the one core that stages a
    copy from pageable memory. cards: among which a model's heads are split; rates and size are of
    one, which has a link of its own. host_bytes: host memory of all of them; None: any.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: Rate
    memory_bytes_per_s: Rate
    device_bytes: Rate
    link_bytes_per_s: Rate
    host_channel_bytes_per_s: Rate
    cards: Annotated[int, Field(ge=1)] = 1
    host_bytes: Rate | None = None

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a
        write of the channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)

    @property
    def together(self) -> Platform:
        """All cards as one: their rates and memories added."""
        added = ("flops_per_s", "memory_bytes_per_s", "device_bytes", "link_bytes_per_s")
        return replace(self, **{name: self.cards * getattr(self, name) for name in added})


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


# Work and time


class Work(NamedTuple):
    """One kernel, or several that the same resource limits."""

    flops: float
    bytes: float


def matmul(rows: int, weights: int, weight_bytes: float = WEIGHT_BYTES) -> Work:
    """The product of some rows with a matrix of weights, which are read once."""
    return Work(2 * rows * weights, weight_bytes * weights)


def seconds(platform: Platform, efficiency: Efficiency, *works: Work) -> float:
    """Each kernel takes as long as the slower of its arithmetic and its memory traffic."""
    flops_per_s = platform.flops_per_s * efficiency.matmul
    bytes_per_s = platform.memory_bytes_per_s * efficiency.memory
    return sum(max(work.flops / flops_per_s, work.bytes / bytes_per_s) for work in works)


class BlockTimes(NamedTuple):
    """Seconds of one block when nothing waits. load: the input of its attention over the link;
    store: its output over the link; prediction: of the next block's tokens; other: the output head,
    which follows the last block; late: the part of the input that is known only after the block's
    own query (overlap `block`)."""

    load: float
    attention: float
    ffn: float
    prediction: float = 0.0
    store: float = 0.0
    other: float = 0.0
    late: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds on the compute resource."""
        return self.prediction + self.attention + self.ffn + self.other


Overlap = Literal["none", "ffn", "block"]
"""How early the next block's transfer starts: after this block, after its attention, or with it."""


def block_ends(blocks: Sequence[BlockTimes], overlap: Overlap) -> list[float]:
    """When the compute of each block ends, in seconds; blocks of successive steps follow one
    another.

    A task starts when its resource (compute or link) is free and the one task it waits for has
    ended. A block's attention waits for its own transfer; the first block's transfer has nothing to
    hide behind. Its late part starts after the prediction, with the link to itself. With overlap
    `none` every task waits for the one before it.
    """
    ends = []
    if overlap == "none":
        now = 0.0
        for block in blocks:
            rest = block.prediction, block.attention, block.store, block.ffn + block.other
            for task in (block.load, *rest):
                now += task
            ends.append(now)
        return ends
    compute, link = 0.0, blocks[0].load  # when each resource is free
    arrived = link
    for block, load in zip(blocks, [*(block.load for block in blocks[1:]), 0.0], strict=True):
        compute, here = compute + block.prediction, arrived
        if block.late:
            compute = link = max(compute, link) + block.late
        if overlap == "block":
            link = arrived = max(link, compute) + load
        compute = max(compute, here) + block.attention
        if overlap == "ffn":
            link = arrived = max(link, compute) + load
        link = max(link, compute) + block.store
        compute += block.ffn + block.other
        ends.append(compute)
    return ends


# The paper's systems

OVERLAPS: dict[str, Overlap] = {
    "uvm": "none",  # a page fault stalls
    "uvm+h2o": "none",
    "offload": "ffn",
    "offload-pageable": "none",
    "offload+int4": "ffn",
    "offload+h2o": "ffn",
    "infinigen": "none",
    "ideal": "ffn",
}
"""How much transfer a system hides, as published. FlexGen loads the cache of the next attention
during the FFN. InfiniGen's artifact gathers on the host behind a device sync
(speedup/infinigen/infinigen/kv_selection_controller.py)."""
WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are
not counted."""
DENSE_LAYERS = 2
"""First layers that InfiniGen's artifact leaves to the full cache under every method (`layer_id >
1` in `speedup/flexgen`, `i >= 2` in `accuracy/lm_eval`), whatever their own code does."""
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


class Layer(NamedTuple):
    """is_dense: reads the full cache although others do not. predicts: chooses the tokens of the
    next layer."""

    is_dense: bool = False
    predicts: bool = False


class BlockWork(NamedTuple):
    """A block's kernels by segment, and the bytes that cross the link to and from the device.

    row_bytes: cached tokens fetched one by one; load_bytes: everything that comes in one piece.
    """

    attention: tuple[Work, ...]
    ffn: Work
    prediction: tuple[Work, ...] = ()
    load_bytes: float = 0.0
    row_bytes: float = 0.0
    store_bytes: float = 0.0


@dataclass(frozen=True)
class Case:
    """A run to predict. label: one of `OVERLAPS`."""

    platform: Platform
    shape: ModelShape
    label: str
    batch_size: int
    prompt_len: int
    gen_len: int
    efficiency: Efficiency = FITTED

    @property
    def system(self) -> System:
        """Where the cache lies, which method reads it, in which format."""
        return LABELS[self.label]

    @property
    def final_len(self) -> int:
        """T: tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len

    @cached_property
    def method(self) -> Method:
        """The method with its default settings, which are the paper's."""
        return {"full": Full, "h2o": H2O, "infinigen": InfiniGen}[self.system.method]()

    @property
    def layers(self) -> list[Layer]:
        """The layers of the model, first to last. A layer predicts if the next one is not dense."""
        reads_all = self.system.method == "full" and self.system.codec is None
        dense_layers = 0 if reads_all else DENSE_LAYERS
        layers = []
        for at in range(self.shape.num_layers):
            is_before = dense_layers - 1 <= at < self.shape.num_layers - 1
            predicts = is_before and self.system.method == "infinigen"
            layers.append(Layer(at < dense_layers, predicts))
        return layers

    def tokens(self, cached: int) -> tuple[float, int]:
        """Tokens of `cached` that a decode step reads in a layer under the method, and those it
        keeps."""
        row = TokenCounts(cached, prompt=cached, final=self.final_len)
        read = self.method.tokens_read(row, DENSE_LAYERS)
        if read is None:
            above_threshold = float(np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS))
            read = min(above_threshold, self.method.max_tokens_read(row, DENSE_LAYERS))
        return read, self.method.tokens_kept(row, DENSE_LAYERS)

    @property
    def host_block_bytes(self) -> float:
        """Bytes of a block's weights that lie in host memory and cross the link in each pass: the
        least share that makes the rest fit, in tenths (0.3 for the paper's OPT-30B, as there).
        Managed memory and `ideal` have none."""
        if self.system.placement in ("managed", "device"):
            return 0.0
        excess = self.shape.weight_bytes - WEIGHTS_FRAC * self.platform.device_bytes
        least = max(0.0, excess / (self.shape.num_layers * self.shape.block_bytes))
        return self.shape.block_bytes * min(1.0, math.ceil(10 * least) / 10)

    def pages(self, cached: int, scores_of: int = 0) -> bool:
        """True for managed memory that does not fit: weights, the cache after `cached` tokens, and
        in prefill the attention scores of `scores_of` tokens."""
        kept = self.tokens(cached)[1]
        tokens = sum(cached if layer.is_dense else kept for layer in self.layers)
        scores = self.batch_size * self.shape.num_heads * scores_of**2
        cache_bytes = self.batch_size * tokens * self.shape.token_bytes
        needed = self.shape.weight_bytes + cache_bytes + UVM_SCORE_PEAK_BYTES * scores
        return self.system.placement == "managed" and needed > self.platform.device_bytes

    def loaded(self, works: Sequence[BlockWork]) -> float:
        """Bytes that the blocks bring to the device."""
        cached = sum(work.load_bytes + work.row_bytes for work in works)
        return cached + len(works) * self.host_block_bytes

    def times(self, work: BlockWork) -> BlockTimes:
        """The seconds of a block."""
        pinned, platform = self.system.pinned, self.platform
        link = platform.link_bytes_per_s if pinned else platform.pageable_bytes_per_s
        in_one_piece = work.load_bytes + self.host_block_bytes
        on_device = partial(seconds, platform, self.efficiency)
        return BlockTimes(
            load=in_one_piece / link + work.row_bytes / (link * self.efficiency.row_fetch),
            attention=on_device(*work.attention),
            ffn=on_device(work.ffn),
            prediction=on_device(*work.prediction),
            store=work.store_bytes / link,
        )


def predict(case: Case) -> dict[str, Any]:
    """Seconds and bytes of `case`, a row of the latency table: prefill, then gen_len - 1 decode
    steps, one walk each.

    The segments are of one block under the method in the last step; transfer is the time that
    compute waits. Bytes over the link: prefill included.
    """
    num_layers, overlap, layers = case.shape.num_layers, OVERLAPS[case.label], case.layers
    vocabulary = matmul(case.batch_size, case.shape.vocab_size * case.shape.hidden_size)
    head_s = seconds(case.platform, case.efficiency, vocabulary)
    kept = case.tokens(case.prompt_len)[1]
    paged = case.pages(case.prompt_len, scores_of=case.prompt_len)
    prompt = [prefill_block(case, layer, kept, paged=paged) for layer in layers]
    paged = case.pages(case.final_len)
    width = INT4_SHARE if case.system.codec == "int4" else 1.0
    dense_share = mean(layer.is_dense for layer in layers)
    rows: list[BlockWork] = []  # the blocks of all decode steps, one step after the other
    times: list[BlockTimes] = []
    budgets = []
    for cached in range(case.prompt_len, case.final_len - 1):
        read = case.tokens(cached)[0]
        works = {layer: decode_block(case, layer, cached, read, paged=paged) for layer in {*layers}}
        of_layer = {layer: case.times(work) for layer, work in works.items()}
        rows += [works[layer] for layer in layers]
        times += [of_layer[layer] for layer in layers]
        times[-1] = times[-1]._replace(other=head_s)
        budgets.append(dense_share + (1 - dense_share) * width * read / cached)
    ends = block_ends(times, overlap)
    loaded, link_s = case.loaded(rows), sum(block.load for block in times)
    ttft_s = block_ends([case.times(work) for work in prompt], overlap)[-1] + head_s
    step_s = np.diff([0.0, *ends[num_layers - 1 :: num_layers]]).tolist()
    speed = times_of(ttft_s, step_s, batch_size=case.batch_size)
    return {
        "platform": case.platform.name,
        "source": "modelled",
        "model": case.shape.name,
        "method": case.system.codec or case.system.method,
        "label": case.label,
        "batch_size": case.batch_size,
        "prompt_len": case.prompt_len,
        "gen_len": case.gen_len,
        **speed,
        "total_s": ttft_s + speed["decode_s"],
        "h2d_bytes": round(case.loaded(prompt) + loaded),
        "d2h_bytes": round(sum(work.store_bytes for work in (*prompt, *rows))),
        "exposed_transfer_s": _exposed(ends[-1], times),
        "link_bytes_per_s": loaded / link_s if link_s else None,
        "budget": mean(budgets),
        "transfer_s": _exposed(ends[-2] - ends[-3], times[-2:-1]),
        "attention_s": times[-2].attention,
        "ffn_s": times[-2].ffn,
        "prediction_s": times[-2].prediction,
        "other_s": times[-2].other,
    }


def decode_block(
    case: Case, layer: Layer, cached: int, read: float, *, paged: bool = False
) -> BlockWork:
    """One token per sequence through a block, with `cached` tokens before it, of which a layer
    under the method reads `read`.

    paged: managed memory that does not fit: every page a block touches comes in and evicts another.
    """
    shape, batch_size, placement = case.shape, case.batch_size, case.system.placement
    tokens = batch_size * (cached if layer.is_dense else read)
    width = _width(case, layer)
    attention = [
        matmul(batch_size, shape.attention_weights),
        Work(
            4 * shape.query_size * (tokens + batch_size), shape.token_bytes * (tokens + batch_size)
        ),
    ]
    if width < 1:
        attention.append(Work(0, DEQUANTIZE_BYTES * 2 * shape.kv_size * tokens))
    prediction: tuple[Work, ...] = ()
    if layer.predicts:
        # The partial query projection, and its product with the partial keys of all cached tokens.
        ratio = InfiniGen.partial_weight_ratio
        weights = ratio * shape.hidden_size * shape.query_size
        columns = ratio * batch_size * cached
        prediction = (
            Work(2 * batch_size * weights, WEIGHT_BYTES * weights),
            Work(2 * columns * shape.query_size, WEIGHT_BYTES * columns * shape.kv_size),
        )
    load, store = tokens * shape.token_bytes * width, batch_size * shape.token_bytes * width
    if placement == "device":
        load, store = 0.0, 0.0
    elif placement == "managed":
        load = store = paged * (load + shape.block_bytes)
    by_rows = case.system.method == "infinigen" and not layer.is_dense
    return BlockWork(
        attention=tuple(attention),
        ffn=matmul(batch_size, shape.ffn_weights),
        prediction=prediction,
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
    shape, prompt_len, placement = case.shape, case.prompt_len, case.system.placement
    rows = case.batch_size * prompt_len
    scores = rows * shape.num_heads * prompt_len
    load, store = 0.0, 0.0
    if placement == "managed":
        load = UVM_SCORE_BYTES * scores + paged * shape.block_bytes
        store = paged * load
    elif placement != "device":
        tokens = case.batch_size * (prompt_len if layer.is_dense else kept)
        store = tokens * shape.token_bytes * _width(case, layer)
    attention = Work(4 * shape.head_dim * scores, EAGER_SCORE_BYTES * scores)
    return BlockWork(
        attention=(matmul(rows, shape.attention_weights), attention),
        ffn=matmul(rows, shape.ffn_weights),
        load_bytes=load,
        store_bytes=store,
    )


def _width(case: Case, layer: Layer) -> float:
    """Of a layer's stored tokens, as a share of fp16."""
    return INT4_SHARE if case.system.codec == "int4" and not layer.is_dense else 1.0


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))
