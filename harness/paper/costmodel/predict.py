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
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from harness.model.shape import WEIGHT_BYTES, ModelShape
from harness.paper.costmodel.schemes import (
    DEQUANTIZE_BYTES,
    EAGER_SCORE_BYTES,
    FITTED,
    INT4_SHARE,
    SCHEMES,
    UVM_SCORE_BYTES,
    UVM_SCORE_PEAK_BYTES,
    WEIGHTS_FRAC,
    Efficiency,
    Overlap,
    Platform,
    Scheme,
)
from harness.results.step_stats import times_of

# The run: a machine, a system, a model and its sizes


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


def predict(case: Case) -> dict[str, Any]:
    """Seconds and bytes of `case`, a row of the latency table: prefill, then gen_len - 1 decode
    steps, one walk each.

    The segments are of one block under the method in the last step; transfer is the time that
    compute waits. Bytes over the link: prefill included. None is what the model does not know.
    """
    num_layers, overlap = case.shape.num_layers, case.scheme.overlap
    vocabulary = matmul(case.batch_size, case.shape.vocab_size * case.shape.hidden_size)
    head_s = seconds(case.platform, case.efficiency, vocabulary)
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
    return {
        "platform": case.platform.name,
        "source": "modelled",
        "model": case.shape.name,
        "method": case.scheme.system.codec or case.scheme.system.method,
        "label": case.label,
        "batch_size": case.batch_size,
        "prompt_len": case.prompt_len,
        "gen_len": case.gen_len,
        **speed,
        "total_s": ttft_s + speed["decode_s"],
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
        matmul(batch_size, shape.attention_weights),
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
        ffn=(matmul(batch_size, shape.ffn_weights),),
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
            matmul(rows, shape.attention_weights),
            Work(4 * shape.head_dim * scores, EAGER_SCORE_BYTES * scores),
        ),
        ffn=(matmul(rows, shape.ffn_weights),),
        load_bytes=load,
        store_bytes=store,
    )


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


def matmul(rows: int, weights: int, weight_bytes: float = WEIGHT_BYTES) -> Work:
    """The product of some rows with a matrix of weights, which are read once."""
    return Work(2 * rows * weights, weight_bytes * weights)


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
    on_device = partial(seconds, case.platform, case.efficiency)
    return BlockTimes(
        load=in_one_piece / link + work.row_bytes / (link * case.efficiency.row_fetch),
        attention=on_device(*work.attention),
        ffn=on_device(*work.ffn),
        prediction=on_device(*work.prediction),
        store=work.store_bytes / link,
    )


def seconds(platform: Platform, efficiency: Efficiency, *works: Work) -> float:
    """Each kernel takes as long as the slower of its arithmetic and its memory traffic."""
    flops_per_s = platform.flops_per_s * efficiency.matmul
    bytes_per_s = platform.memory_bytes_per_s * efficiency.memory
    return sum(max(work.flops / flops_per_s, work.bytes / bytes_per_s) for work in works)


def _loaded(case: Case, works: Sequence[BlockWork]) -> float:
    """Bytes that the blocks bring to the device."""
    return (
        sum(work.load_bytes + work.row_bytes for work in works) + len(works) * case.host_block_bytes
    )


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))
