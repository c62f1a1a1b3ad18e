"""FLOPs and bytes of one transformer block, for each way of keeping the cache.

Counted are matrix products (2 FLOPs a multiply-add), weights, cached rows and, in prefill, the score matrix of eager
attention; left out are norms, biases and activations, under 2 % of any segment. Everything is fp16.

A label is a `Scheme`: where the cache lies, what of it is read, in which format it crosses the link, and how much of
the transfer hides. The overlaps are those of the published systems. FlexGen schedules attention and FFN as two
stages and loads the cache of the next attention during the FFN. InfiniGen's artifact gathers on the host behind a
device sync (speedup/infinigen/infinigen/kv_selection_controller.py), so nothing hides. A page fault stalls as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from harness.paper.costmodel.hardware import WEIGHT_BYTES, ModelShape
from harness.paper.costmodel.timeline import Overlap

NUM_EXEMPT_LAYERS = 2
"""The first layers read the full cache, for every method that selects or quantizes, as everywhere in the harness."""
PARTIAL_WEIGHT_RATIO = 0.3
MAX_FETCH_FRAC = 0.2
HEAVY_FRAC = RECENT_FRAC = 0.1
INT4_SHARE = (4 + 32 / 64) / 16
"""Of fp16, with an fp16 scale and minimum per group of 64."""
DEQUANTIZE_BYTES = 13
"""Device traffic per element that FlexGen's five passes cause: both halves of a byte are shifted or masked
(0.5 read, 0.5 written) and converted (0.5 read, 1 written), then divided and added to (2 read, 2 written each)."""
EAGER_SCORE_BYTES = 12
"""Device traffic per score of eager fp16 attention: product, mask (in, out), softmax (in, out), product."""
PAPER_LENGTHS, PAPER_COUNTS = (512, 1024, 1536, 2048), (37.0, 60.0, 66.0, 73.0)
"""Mean tokens above the threshold by length, OPT-13B (paper, section 5.3). The model takes straight lines in between
and constants outside, capped like any selection."""
UVM_SCORE_BYTES = 24
"""Managed memory that the artifact's uvm/selfattention.py allocates per score of the prompt: scores and weights in
fp16; ones, mask, scaled mask, masked scores and softmax in fp32."""
UVM_SCORE_PEAK_BYTES = 14
"""Of these, what lives at once: mask, masked scores and softmax in fp32, weights in fp16."""


@dataclass(frozen=True)
class Scheme:
    """What a label stands for. reads: which cached tokens a decode row reads, in non-exempt layers."""

    placement: Literal["device", "pinned", "pageable", "managed"]
    reads: Literal["all", "h2o", "infinigen"] = "all"
    int4: bool = False
    overlap: Overlap = "ffn"

    @property
    def method(self) -> str:
        """The harness's name of what is read."""
        return "int4" if self.int4 else {"all": "full"}.get(self.reads, self.reads)


SCHEMES = {
    "uvm": Scheme("managed", overlap="none"),
    "uvm+h2o": Scheme("managed", reads="h2o", overlap="none"),
    "offload": Scheme("pinned"),
    "offload-pageable": Scheme("pageable", overlap="none"),
    "offload+int4": Scheme("pinned", int4=True),
    "offload+h2o": Scheme("pinned", reads="h2o"),
    "infinigen": Scheme("pinned", reads="infinigen", overlap="none"),
    "ideal": Scheme("device"),
}


class Work(NamedTuple):
    """One kernel, or several that one resource bounds alike."""

    flops: float
    bytes: float


class BlockWork(NamedTuple):
    """A block's kernels by segment, and the bytes that cross the link to and from the device.

    row_bytes: cached tokens fetched one by one; load_bytes: what comes in one piece.
    """

    attention: tuple[Work, ...]
    ffn: tuple[Work, ...]
    prediction: tuple[Work, ...] = ()
    load_bytes: float = 0.0
    row_bytes: float = 0.0
    store_bytes: float = 0.0


def tokens_read(scheme: Scheme, cached: int, final_len: int, counts: float | None = None) -> float:
    """Cached tokens that a decode row reads in a non-exempt layer, out of `cached`, T = `final_len`.

    counts: InfiniGen's measured mean at this step; None takes the paper's.
    """
    if scheme.reads == "h2o":
        return min(cached, max(1, int(HEAVY_FRAC * final_len) + int(RECENT_FRAC * final_len)))
    if scheme.reads == "infinigen":
        above = np.interp(cached, PAPER_LENGTHS, PAPER_COUNTS) if counts is None else counts
        return min(max(float(above), 1.0), max(1, int(MAX_FETCH_FRAC * cached)))
    return cached


class Layer(NamedTuple):
    """What tells a layer from others. exempt: it reads the full cache although others do not. rehearses: it predicts
    what the next one reads."""

    exempt: bool = False
    rehearses: bool = False


def layers_of(scheme: Scheme, shape: ModelShape) -> list[Layer]:
    """The layers of a model, first to last; one rehearses if the next is no exempt one."""
    exempt = NUM_EXEMPT_LAYERS if scheme.reads != "all" or scheme.int4 else 0
    rehearsing = range(exempt - 1, shape.num_layers - 1) if scheme.reads == "infinigen" else ()
    return [Layer(exempt=at < exempt, rehearses=at in rehearsing) for at in range(shape.num_layers)]


def decode_block(
    scheme: Scheme, shape: ModelShape, layer: Layer, *, batch_size: int, cached: int, read: float, paged: bool = False
) -> BlockWork:
    """One row per sequence through a block, with `cached` tokens before it, of which a non-exempt layer reads `read`.

    paged: managed memory that does not fit, where every page a block touches comes in and evicts another.
    """
    tokens = batch_size * (cached if layer.exempt else read)
    quantized = scheme.int4 and not layer.exempt
    attention = [
        _matmul(batch_size, shape.attention_weights),
        Work(4 * shape.query_size * (tokens + batch_size), shape.token_bytes * (tokens + batch_size)),
    ]
    if quantized:
        attention.append(Work(0, DEQUANTIZE_BYTES * 2 * shape.kv_size * tokens))
    fetched = tokens * shape.token_bytes * (INT4_SHARE if quantized else 1)
    by_rows = scheme.reads == "infinigen" and not layer.exempt
    own = batch_size * shape.token_bytes
    if scheme.placement == "device":
        load, store = 0.0, 0.0
    elif scheme.placement == "managed":
        load = store = paged * (fetched + shape.block_bytes)
    else:
        load, store = fetched, own * (INT4_SHARE if quantized else 1)
    return BlockWork(
        attention=tuple(attention),
        ffn=(_matmul(batch_size, shape.ffn_weights),),
        prediction=_rehearsal(shape, batch_size, cached) if layer.rehearses else (),
        load_bytes=0.0 if by_rows else load,
        row_bytes=load if by_rows else 0.0,
        store_bytes=store,
    )


def prefill_block(
    scheme: Scheme,
    shape: ModelShape,
    layer: Layer,
    *,
    batch_size: int,
    prompt_len: int,
    kept: float,
    paged: bool = False,
) -> BlockWork:
    """The prompt through a block, dense; of its tokens a non-exempt layer writes `kept` to the host.

    Managed memory takes its first touch of a page for one crossing of the link, and where it does not fit (`paged`)
    brings in the weights too and writes as much back.
    """
    rows = batch_size * prompt_len
    scores = batch_size * shape.num_heads * prompt_len**2
    attention = (
        _matmul(rows, shape.attention_weights),
        Work(4 * shape.head_dim * scores, EAGER_SCORE_BYTES * scores),
    )
    load, store = 0.0, 0.0
    if scheme.placement == "managed":
        load = UVM_SCORE_BYTES * scores + paged * shape.block_bytes
        store = paged * load
    elif scheme.placement != "device":
        tokens = batch_size * (prompt_len if layer.exempt else kept)
        store = tokens * shape.token_bytes * (INT4_SHARE if scheme.int4 and not layer.exempt else 1)
    return BlockWork(attention=attention, ffn=(_matmul(rows, shape.ffn_weights),), load_bytes=load, store_bytes=store)


def managed_bytes(shape: ModelShape, *, batch_size: int, tokens: Sequence[float], prompt_len: int) -> float:
    """What managed memory must hold at once: weights, the cache (`tokens` of a sequence in each layer), and in prefill
    the attention scores of `prompt_len` rows (0 in decode)."""
    scores = batch_size * shape.num_heads * prompt_len**2
    return shape.weight_bytes + batch_size * sum(tokens) * shape.token_bytes + UVM_SCORE_PEAK_BYTES * scores


def _matmul(rows: int, weights: int) -> Work:
    return Work(2 * rows * weights, WEIGHT_BYTES * weights)


def _rehearsal(shape: ModelShape, batch_size: int, cached: int) -> tuple[Work, ...]:
    """The partial query projection, and its product with the partial keys of every cached token."""
    weights = PARTIAL_WEIGHT_RATIO * shape.hidden_size * shape.query_size
    columns = PARTIAL_WEIGHT_RATIO * batch_size * cached
    return (
        Work(2 * batch_size * weights, WEIGHT_BYTES * weights),
        Work(2 * columns * shape.query_size, WEIGHT_BYTES * columns * shape.kv_size),
    )
