"""FLOPs and bytes of one transformer block, for each way of keeping the cache.

Counted are matrix products (2 FLOPs a multiply-add), weights, cached rows and, in prefill, the score matrix of eager
attention; left out are norms, biases and activations, under 2 % of any segment. Everything is fp16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.model.shape import WEIGHT_BYTES, ModelShape
from harness.paper.costmodel.schemes import Scheme, partial_weight_ratio

INT4_SHARE = (4 + 32 / 64) / 16
"""Of fp16, with an fp16 scale and minimum per group of 64."""
DEQUANTIZE_BYTES = 13
"""Device traffic per element that FlexGen's five passes cause: both halves of a byte are shifted or masked
(0.5 read, 0.5 written) and converted (0.5 read, 1 written), then divided and added to (2 read, 2 written each)."""
EAGER_SCORE_BYTES = 12
"""Device traffic per score of eager fp16 attention: product, mask (in, out), softmax (in, out), product."""
UVM_SCORE_BYTES = 24
"""Managed memory that the artifact's uvm/selfattention.py allocates per score of the prompt: scores and weights in
fp16; ones, mask, scaled mask, masked scores and softmax in fp32."""
UVM_SCORE_PEAK_BYTES = 14
"""Of these, what lives at once: mask, masked scores and softmax in fp32, weights in fp16."""


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


class Layer(NamedTuple):
    """What tells a layer from others. exempt: it reads the full cache although others do not. rehearses: it predicts
    what the next one reads."""

    exempt: bool = False
    rehearses: bool = False


def layers_of(scheme: Scheme, shape: ModelShape) -> list[Layer]:
    """The layers of a model, first to last; one rehearses if the next is no exempt one."""
    exempt = scheme.num_exempt_layers
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
    ratio = partial_weight_ratio()
    weights = ratio * shape.hidden_size * shape.query_size
    columns = ratio * batch_size * cached
    return (
        Work(2 * batch_size * weights, WEIGHT_BYTES * weights),
        Work(2 * columns * shape.query_size, WEIGHT_BYTES * columns * shape.kv_size),
    )
