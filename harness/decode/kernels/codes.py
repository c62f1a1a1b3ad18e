"""Rows of integer codes in Triton: packed by one kernel instead of some thirty launches, and
attended to by two instead of some sixty. Exact rows are attended to likewise, where an estimate
stands for the tokens that are not read: the fused call does not tell its denominator. So are those
of a GPU cache, of which the fused call loads all, and the kernel those that are read.

The codes of a row are bytes [segments, segment], a segment being what lies in one group and one bit
plane; its elements are [planes, segments, segment] in that order, each axis rounded up to a power
of two. Rows are packed and decoded as `methods.codecs` says, bit for bit.

Attention: a program serves one query head and one of the parts into which the rows are split. It
decodes a tile of rows in registers and attends to it; each row of the tile has a running softmax of
its own, so nothing is reduced over rows before the last tile. A second kernel joins the parts with
the step's own row, which is exact, and with the estimate. Query heads of a group decode the same
rows, from the cache, each for itself. How many rows there are is not known at compile time, and the
number of parts does not depend on it. With TRITON_INTERPRET=1 set before the import the kernels run
on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.base import Rest
from methods.codecs.integers import IntegerCodec
from methods.kernels.coded import pack_row, width_of

ELEMENTS = 4096
"""Keys or values that an attention program has in registers at a time."""
PROGRAMS = 1024
"""Least number of attention programs, unless that takes more than MAX_SPLITS parts."""
MAX_SPLITS = 32
EXACT = tl.constexpr(0)
"""In place of BITS: rows are elements of the compute dtype."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Where a running maximum begins: finite, so that its differences are numbers."""


@triton.constexpr_function
def segment_of(head_dim: int, bits: int, group_size: int) -> int:
    """Elements that lie in one group and one bit plane."""
    segment, rest = width_of(head_dim, bits), group_size
    while rest:  # math.gcd is unknown to the compiler
        segment, rest = rest, segment % rest
    return segment


@triton.jit
def element_of_lane(HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Which element of a row each lane of it holds, [planes, segments, segment], of exact rows
    [1, 1, elements]; HEAD_DIM for none."""
    if BITS == EXACT:
        element = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, None, :]
        return tl.minimum(element, HEAD_DIM)
    else:
        width: tl.constexpr = width_of(HEAD_DIM, BITS)
        segment: tl.constexpr = segment_of(HEAD_DIM, BITS, GROUP_SIZE)
        segments: tl.constexpr = triton.next_power_of_2(width // segment)
        plane = tl.arange(0, 8 // BITS)[:, None, None]
        first = tl.arange(0, segments)[None, :, None] * segment
        at = tl.arange(0, triton.next_power_of_2(segment))[None, None, :]
        element = plane * width + first + at
        held = (at < segment) & (first < width) & (element < HEAD_DIM)
        return tl.where(held, element, HEAD_DIM)


@triton.jit
def decoded(
    packed,
    seen,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys or values in fp32, rounded as the codec rounds them in DTYPE: [rows, lanes].

    packed, seen: where each row's begin, and whether it is read.
    """
    if BITS == EXACT:
        at = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
        elements = packed.to(tl.pointer_type(DTYPE))[:, None] + at
        return tl.load(elements, mask=seen[:, None] & (at < HEAD_DIM), other=0).to(tl.float32)
    else:
        width: tl.constexpr = width_of(HEAD_DIM, BITS)
        segment: tl.constexpr = segment_of(HEAD_DIM, BITS, GROUP_SIZE)
        segments: tl.constexpr = triton.next_power_of_2(width // segment)
        meta_bytes: tl.constexpr = 4 * ((HEAD_DIM + GROUP_SIZE - 1) // GROUP_SIZE)
        packed, seen = packed[:, None, None, None], seen[:, None, None, None]
        plane = tl.arange(0, 8 // BITS)[None, :, None, None]
        first = tl.arange(0, segments)[None, None, :, None] * segment
        at = tl.arange(0, triton.next_power_of_2(segment))[None, None, None, :]
        held = seen & (at < segment) & (first < width)
        codes = tl.load(packed + meta_bytes + first + at, mask=held, other=0)
        codes = ((codes.to(tl.int32) >> plane * BITS) & ((1 << BITS) - 1)).to(tl.float32)
        group = (plane * width + first) // GROUP_SIZE * 2
        meta = packed.to(tl.pointer_type(tl.float16))
        used = seen & (first < width) & (plane * width + first < HEAD_DIM)
        lo = tl.load(meta + group, mask=used, other=0).to(tl.float32).to(DTYPE).to(tl.float32)
        step = tl.load(meta + group + 1, mask=used, other=0).to(tl.float32).to(DTYPE).to(tl.float32)
        values = ((codes * step).to(DTYPE).to(tl.float32) + lo).to(DTYPE).to(tl.float32)
        return values.reshape(values.shape[0], values.numel // values.shape[0])


@triton.jit(do_not_specialize=["num_rows"])
def _pack_rows(
    keys,
    values,
    packed,
    num_kv_heads,
    num_rows,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, head, batch = (
        program % num_rows,
        program // num_rows % num_kv_heads,
        program // num_rows // num_kv_heads,
    )
    keys += batch * key_batch_stride + head * key_head_stride + row * key_row_stride
    values += batch * value_batch_stride + head * value_head_stride + row * value_row_stride
    packed += program * SLOT_BYTES
    pack_row(keys, packed, HEAD_DIM, BITS, GROUP_SIZE)
    pack_row(values, packed + KEY_BYTES, HEAD_DIM, BITS, GROUP_SIZE)


def pack(keys: Tensor, values: Tensor, codec: IntegerCodec, slot_bytes: int) -> Tensor:
    """K and V [batch, num_kv_heads, n, head_dim] as rows [batch, num_kv_heads, n, slot_bytes]."""
    keys, values = _in_rows(keys), _in_rows(values)
    packed = torch.empty((*keys.shape[:3], slot_bytes), dtype=torch.uint8, device=keys.device)
    if packed.numel():
        _pack_rows[(keys.shape[:3].numel(),)](
            *(keys, values, packed, *keys.shape[1:3]),
            *keys.stride()[:3],
            *values.stride()[:3],
            HEAD_DIM=keys.shape[3],
            BITS=codec.bits,
            GROUP_SIZE=codec.group_size,
            KEY_BYTES=codec.row_bytes(keys.shape[3]),
            SLOT_BYTES=slot_bytes,
            num_warps=1,
        )
    return packed


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "head_stride",
        "visible_batch_stride",
        "visible_head_stride",
        "visible_group_stride",
        "bias_batch_stride",
        "bias_head_stride",
        "bias_group_stride",
    ]
)
def _attend_to_parts(
    query,
    packed,
    visible,  # None: all rows are
    bias,  # None: none
    best_scores,
    weights,
    sums,
    scale,
    num_rows,
    head_stride,  # of `packed`, in rows
    heads,
    group,
    query_batch_stride,
    query_head_stride,
    visible_batch_stride,
    visible_head_stride,
    visible_group_stride,
    bias_batch_stride,
    bias_head_stride,
    bias_group_stride,
    SLOT_BYTES: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    split, head = program % SPLITS, program // SPLITS
    batch, of_batch = (head // heads).to(tl.int64), head % heads
    kv_head, member = of_batch // group, of_batch % group
    element = element_of_lane(HEAD_DIM, BITS, GROUP_SIZE)
    element = element.reshape(element.numel)
    at_query = query + batch * query_batch_stride + of_batch * query_head_stride + element
    asked = tl.load(at_query, mask=element < HEAD_DIM, other=0).to(tl.float32) * scale
    packed += (batch * (heads // group) + kv_head) * head_stride * SLOT_BYTES
    if visible is not None:
        visible += (
            batch * visible_batch_stride
            + kv_head * visible_head_stride
            + member * visible_group_stride
        )
    if bias is not None:
        bias += batch * bias_batch_stride + kv_head * bias_head_stride + member * bias_group_stride

    rows = tl.cdiv(tl.cdiv(num_rows, SPLITS), TILE) * TILE
    end = tl.minimum((split + 1) * rows, num_rows)
    best = tl.full((TILE,), LOWEST, tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, element.numel), tl.float32)
    for start in range(split * rows, end, TILE):
        row = start + tl.arange(0, TILE)
        seen = row < end
        if visible is not None:
            seen = seen & (tl.load(visible + row, mask=seen, other=0) != 0)
        at = packed + row.to(tl.int64) * SLOT_BYTES
        keys = decoded(at, seen, HEAD_DIM, BITS, GROUP_SIZE, query.dtype.element_ty)
        scores = tl.sum(keys * asked[None, :], 1)
        if bias is not None:
            scores += tl.load(bias + row, mask=seen, other=0)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, scores)
        share, kept = tl.exp(scores - higher), tl.exp(best - higher)
        values = decoded(at + KEY_BYTES, seen, HEAD_DIM, BITS, GROUP_SIZE, query.dtype.element_ty)
        total = total * kept[:, None] + share[:, None] * values
        weight = weight * kept + share
        best = higher
    highest = tl.max(best, 0)
    kept = tl.exp(best - highest)
    tl.store(best_scores + program, highest)
    tl.store(weights + program, tl.sum(weight * kept, 0))
    at_sums = sums + program.to(tl.int64) * HEAD_DIM + element
    tl.store(at_sums, tl.sum(total * kept[:, None], 0), mask=element < HEAD_DIM)


@triton.jit
def _join_parts(
    query,
    own_key,
    own_value,
    best_scores,
    weights,
    sums,
    output,
    log_mass,  # of what was not read; None: nothing stands for it
    rest,  # its mean value
    scale,
    heads,
    group,
    query_batch_stride,
    query_head_stride,
    key_batch_stride,
    key_head_stride,
    value_batch_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    batch, of_batch = (head // heads).to(tl.int64), head % heads
    kv_head = of_batch // group
    element = tl.arange(0, LANES)
    held = element < HEAD_DIM
    at_query = query + batch * query_batch_stride + of_batch * query_head_stride + element
    at_key = own_key + batch * key_batch_stride + kv_head * key_head_stride + element
    at_value = own_value + batch * value_batch_stride + kv_head * value_head_stride + element
    asked = tl.load(at_query, mask=held, other=0).to(tl.float32) * scale
    own_score = tl.sum(asked * tl.load(at_key, mask=held, other=0).to(tl.float32), 0)
    part = head * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(best_scores + part)
    highest = tl.maximum(tl.max(best, 0), own_score)
    if log_mass is not None:
        of_rest = tl.load(log_mass + head)
        highest = tl.maximum(highest, of_rest)
    kept, own_weight = tl.exp(best - highest), tl.exp(own_score - highest)
    weight = tl.sum(tl.load(weights + part) * kept, 0) + own_weight
    at_sums = sums + part.to(tl.int64)[:, None] * HEAD_DIM + element[None, :]
    total = tl.sum(tl.load(at_sums, mask=held[None, :], other=0) * kept[:, None], 0)
    total += own_weight * tl.load(at_value, mask=held, other=0).to(tl.float32)
    if log_mass is not None:
        rest_weight = tl.exp(of_rest - highest)
        at_rest = rest + head.to(tl.int64) * HEAD_DIM + element
        total += rest_weight * tl.load(at_rest, mask=held, other=0).to(tl.float32)
        weight += rest_weight
    tl.store(output + head.to(tl.int64) * HEAD_DIM + element, total / weight, mask=held)


def attend(
    query: Tensor,
    rows: Tensor,
    own: tuple[Tensor, Tensor],
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    codec: IntegerCodec | None,
    rest: Rest | None = None,
) -> Tensor:
    """Attention of one row over cached rows and its own.

    query: [batch, heads, 1, head_dim]; rows: the cached ones, packed, uint8 [batch, num_kv_heads,
    n, slot_bytes], contiguous in a head; own: key and value [batch, num_kv_heads, 1, head_dim];
    visible: bool [batch, 1 or num_kv_heads, 1 or group, 1, n], None for all; bias: added to the
    scores, fp32 alike. codec: of the rows; None: they are elements of the query's dtype. rest: what
    stands for the tokens that are not read, with a log-mass. Returns [batch, num_kv_heads, group,
    1, head_dim].
    """
    query, own_key, own_value = _in_rows(query), _in_rows(own[0]), _in_rows(own[1])
    (batch, heads, _, head_dim), (num_kv_heads, num_rows, slot_bytes) = query.shape, rows.shape[1:]
    assert rows[0, 0].is_contiguous()
    assert batch == 1 or rows.stride(0) == num_kv_heads * rows.stride(1)
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, batch * heads)))
    best_scores, weights = query.new_empty((2, batch * heads, splits), dtype=torch.float32)
    sums = query.new_empty((batch * heads, splits, head_dim), dtype=torch.float32)
    group, lanes = heads // num_kv_heads, triton.next_power_of_2(head_dim)
    sizes = (heads, group, *query.stride()[:2])
    of_rows = (batch, num_kv_heads, group)
    log_mass, of_rest = None, None
    if rest is not None:
        assert rest.log_mass is not None
        log_mass = rest.log_mass.contiguous()
        of_rest = rest.value.expand(*of_rows, 1, head_dim).contiguous()
    key_bytes = head_dim * query.element_size() if codec is None else codec.row_bytes(head_dim)
    row_of = {
        "HEAD_DIM": head_dim,
        "BITS": EXACT.value if codec is None else codec.bits,
        "GROUP_SIZE": 1 if codec is None else codec.group_size,
    }
    _attend_to_parts[(batch * heads * splits,)](
        query,
        rows,
        visible,
        bias,
        best_scores,
        weights,
        sums,
        scale,
        num_rows,
        rows.stride(1) // slot_bytes,
        *sizes,
        *_strides(visible, *of_rows),
        *_strides(bias, *of_rows),
        SLOT_BYTES=slot_bytes,
        KEY_BYTES=key_bytes,
        **row_of,
        SPLITS=splits,
        TILE=max(1, ELEMENTS // lanes),
    )
    output = query.new_empty((*of_rows, 1, head_dim))
    _join_parts[(batch * heads,)](
        query,
        own_key,
        own_value,
        best_scores,
        weights,
        sums,
        output,
        log_mass,
        of_rest,
        scale,
        *sizes,
        *own_key.stride()[:2],
        *own_value.stride()[:2],
        HEAD_DIM=head_dim,
        LANES=lanes,
        SPLITS=splits,
    )
    return output


def _in_rows(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _strides(
    of_rows: Tensor | None, batch: int, num_kv_heads: int, group: int
) -> tuple[int, int, int]:
    """From one batch element, KV head and query head of a group to the next, in [batch, 1 or
    num_kv_heads, 1 or group, 1, n], 0 along what is shared."""
    if of_rows is None:
        return 0, 0, 0
    assert of_rows.stride(-1) == 1
    of_batch, of_head, of_member, *_ = of_rows.expand(batch, num_kv_heads, group, 1, -1).stride()
    return of_batch, of_head, of_member
