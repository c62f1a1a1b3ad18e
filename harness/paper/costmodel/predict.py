"""Counts the FLOPs and bytes of every transformer block, turns them into seconds, and walks compute and link.

Counted are matrix products (2 FLOPs a multiply-add), weights, cached tokens and, in prefill, the score matrix of eager
attention. Norms, biases and activations are left out: under 2 % of any segment. Everything is fp16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from harness.model.shape import WEIGHT_BYTES, ModelShape
from harness.paper.costmodel.case import Case, Overlap, partial_weight_ratio

INT4_SHARE = (4 + 32 / 64) / 16
"""Of fp16, with an fp16 scale and minimum per group of 64."""
DEQUANTIZE_BYTES = 13
"""Device traffic per element of FlexGen's five passes: both halves of a byte are shifted or masked (0.5 read, 0.5
written) and converted (0.5 read, 1 written), then divided and added to (2 read, 2 written each)."""
EAGER_SCORE_BYTES = 12
"""Device traffic per score of eager fp16 attention: product, mask (in, out), softmax (in, out), product."""
UVM_SCORE_BYTES = 24
"""Managed memory that the artifact's uvm/selfattention.py allocates per score of the prompt: scores and weights in
fp16; ones, mask, scaled mask, masked scores and softmax in fp32."""
UVM_SCORE_PEAK_BYTES = 14
"""The part of it that lives at once: mask, masked scores and softmax in fp32, weights in fp16."""


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
    """exempt: reads the full cache although others do not. predicts: chooses the tokens of the next layer."""

    exempt: bool = False
    predicts: bool = False


class BlockTimes(NamedTuple):
    """Seconds of one block when nothing waits. load: the input of its attention over the link; store: its output over
    the link; prediction: of the next block's tokens; other: the output head, which follows the last block."""

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


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a run.

    step_s: seconds of each decode step. block: seconds of one non-exempt block in the last step by segment; transfer
    is the time that compute waits. h2d_bytes, d2h_bytes: prefill included. size: share of the full cache that a decode
    step reads, as `harness.sizes` counts it.
    """

    case: Case
    prefill_s: float
    step_s: tuple[float, ...]
    block: dict[str, float]
    exposed_transfer_s: float
    link_bytes_per_s: float | None
    h2d_bytes: float
    d2h_bytes: float
    size: float

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the total, as the paper counts them."""
        return self.case.batch_size * self.case.gen_len / self.total_s

    def row(self, experiment: str) -> dict[str, Any]:
        """A row of the latency table; None is what the model does not know."""
        case, system = self.case, self.case.scheme.system
        return {
            "experiment": experiment,
            "platform": case.platform.name,
            "source": "modelled",
            "model": case.shape.name,
            "method": system.codec or system.method,
            "label": case.label,
            "batch_size": case.batch_size,
            "prompt_len": case.prompt_len,
            "gen_len": case.gen_len,
            "prefill_s": self.prefill_s,
            "decode_s": sum(self.step_s),
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "step_p50_s": median(self.step_s),
            "step_p95_s": float(np.percentile(self.step_s, 95)),
            "h2d_bytes": round(self.h2d_bytes),
            "d2h_bytes": round(self.d2h_bytes),
            "exposed_transfer_s": self.exposed_transfer_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "peak_device_bytes": None,
            "size": self.size,
            "run_id": "",
        } | {f"{segment}_s": seconds for segment, seconds in self.block.items()}


def predict(case: Case) -> Prediction:
    """Seconds and bytes of `case`: prefill, then gen_len - 1 decode steps, one walk each."""
    num_layers, overlap = case.shape.num_layers, case.scheme.overlap
    vocabulary = _matmul(case.batch_size, case.shape.vocab_size * case.shape.hidden_size)
    head_s = _seconds(case, (vocabulary,))
    # Of each decode step: the cached tokens, and how many of them a non-exempt layer reads.
    steps = [(at, case.scheme.tokens_read(at, case.final_len)) for at in range(case.prompt_len, case.final_len - 1)]
    prompt, rows = _prefill_work(case), _decode_work(case, steps)
    distinct = {work: _times(case, work) for work in set(rows)}  # most layers of a step are alike
    times = [distinct[work] for work in rows]
    times[num_layers - 1 :: num_layers] = [last._replace(other=head_s) for last in times[num_layers - 1 :: num_layers]]
    ends = block_ends(times, overlap)
    loaded, link_s = _loaded(case, rows), sum(block.load for block in times)
    segments = {name: getattr(times[-2], name) for name in ("attention", "ffn", "prediction", "other")}
    exempt = mean(layer.exempt for layer in layers_of(case))
    width = INT4_SHARE if case.scheme.int4 else 1.0
    return Prediction(
        case=case,
        prefill_s=block_ends([_times(case, work) for work in prompt], overlap)[-1] + head_s,
        step_s=tuple(np.diff([0.0, *ends[num_layers - 1 :: num_layers]]).tolist()),
        block=segments | {"transfer": _exposed(ends[-2] - ends[-3], times[-2:-1])},
        exposed_transfer_s=_exposed(ends[-1], times),
        link_bytes_per_s=loaded / link_s if link_s else None,
        h2d_bytes=_loaded(case, prompt) + loaded,
        d2h_bytes=sum(work.store_bytes for work in (*prompt, *rows)),
        size=mean(exempt + (1 - exempt) * width * read / cached for cached, read in steps),
    )


def layers_of(case: Case) -> list[Layer]:
    """The layers of a model, first to last. A layer predicts if the next one is not exempt."""
    exempt, num_layers = case.scheme.num_exempt_layers, case.shape.num_layers
    predicting = range(exempt - 1, num_layers - 1) if case.scheme.predicts else ()
    return [Layer(exempt=at < exempt, predicts=at in predicting) for at in range(num_layers)]


def decode_block(case: Case, layer: Layer, cached: int, read: float, *, paged: bool = False) -> BlockWork:
    """One token per sequence through a block, with `cached` tokens before it, of which a non-exempt layer reads `read`.

    paged: managed memory that does not fit: every page a block touches comes in and evicts another.
    """
    scheme, shape, batch_size = case.scheme, case.shape, case.batch_size
    tokens = batch_size * (cached if layer.exempt else read)
    quantized = scheme.int4 and not layer.exempt
    attention = [
        _matmul(batch_size, shape.attention_weights),
        Work(4 * shape.query_size * (tokens + batch_size), shape.token_bytes * (tokens + batch_size)),
    ]
    if quantized:
        attention.append(Work(0, DEQUANTIZE_BYTES * 2 * shape.kv_size * tokens))
    fetched = tokens * shape.token_bytes * (INT4_SHARE if quantized else 1)
    load, store = fetched, batch_size * shape.token_bytes * (INT4_SHARE if quantized else 1)
    if scheme.placement == "device":
        load, store = 0.0, 0.0
    elif scheme.placement == "managed":
        load = store = paged * (fetched + shape.block_bytes)
    by_rows = scheme.predicts and not layer.exempt
    return BlockWork(
        attention=tuple(attention),
        ffn=(_matmul(batch_size, shape.ffn_weights),),
        prediction=_prediction(shape, batch_size, cached) if layer.predicts else (),
        load_bytes=0.0 if by_rows else load,
        row_bytes=load if by_rows else 0.0,
        store_bytes=store,
    )


def prefill_block(case: Case, layer: Layer, kept: float, *, paged: bool = False) -> BlockWork:
    """The prompt through a block, dense; a non-exempt layer writes `kept` of its tokens to the host.

    With managed memory each first touch of a page crosses the link once. Where the memory does not fit (`paged`) the
    weights come in too, and as much is written back.
    """
    scheme, shape, prompt_len = case.scheme, case.shape, case.prompt_len
    rows = case.batch_size * prompt_len
    scores = rows * shape.num_heads * prompt_len
    load, store = 0.0, 0.0
    if scheme.placement == "managed":
        load = UVM_SCORE_BYTES * scores + paged * shape.block_bytes
        store = paged * load
    elif scheme.placement != "device":
        tokens = case.batch_size * (prompt_len if layer.exempt else kept)
        store = tokens * shape.token_bytes * (INT4_SHARE if scheme.int4 and not layer.exempt else 1)
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
    """When the compute of each block ends, in seconds; blocks of successive steps follow one another.

    A task starts when its resource (compute or link) is free and the one task it waits for has ended. A block's
    attention waits for its own transfer; the first block's transfer has nothing to hide behind. With overlap `none`
    every task waits for the one before it.
    """
    ends = []
    if overlap == "none":
        now = 0.0
        for block in blocks:
            for seconds in (block.load, block.prediction, block.attention, block.store, block.ffn + block.other):
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


def _prefill_work(case: Case) -> list[BlockWork]:
    kept = case.scheme.tokens_kept(case.prompt_len, case.final_len)
    paged = _managed_bytes(case, case.prompt_len, kept, scores_of=case.prompt_len) > case.platform.device_bytes
    return [prefill_block(case, layer, kept, paged=paged) for layer in layers_of(case)]


def _decode_work(case: Case, steps: Sequence[tuple[int, float]]) -> list[BlockWork]:
    """The blocks of all decode steps, one step after the other."""
    kept = case.scheme.tokens_kept(case.final_len, case.final_len)
    paged = _managed_bytes(case, case.final_len, kept) > case.platform.device_bytes
    layers = layers_of(case)
    blocks: list[BlockWork] = []
    for cached, read in steps:
        distinct = {layer: decode_block(case, layer, cached, read, paged=paged) for layer in set(layers)}
        blocks += [distinct[layer] for layer in layers]
    return blocks


def _managed_bytes(case: Case, exempt_tokens: int, kept: int, scores_of: int = 0) -> float:
    """Bytes that managed memory must hold at once: weights, the cache (tokens of a sequence in exempt and other
    layers), and in prefill the attention scores of `scores_of` tokens."""
    shape = case.shape
    tokens = sum(exempt_tokens if layer.exempt else kept for layer in layers_of(case))
    scores = case.batch_size * shape.num_heads * scores_of**2
    return shape.weight_bytes + case.batch_size * tokens * shape.token_bytes + UVM_SCORE_PEAK_BYTES * scores


def _matmul(rows: int, weights: int) -> Work:
    return Work(2 * rows * weights, WEIGHT_BYTES * weights)


def _prediction(shape: ModelShape, batch_size: int, cached: int) -> tuple[Work, ...]:
    """The partial query projection, and its product with the partial keys of every cached token."""
    ratio = partial_weight_ratio()
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
    return sum(work.load_bytes + work.row_bytes for work in works) + len(works) * case.host_block_bytes


def _exposed(elapsed: float, blocks: Sequence[BlockTimes]) -> float:
    """Seconds in which compute had nothing to do; rounding may not make it negative."""
    return max(0.0, elapsed - math.fsum(block.compute for block in blocks))
