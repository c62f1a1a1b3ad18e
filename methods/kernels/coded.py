"""Rows of integer codes: one launch instead of about twenty. One program packs a row.

Scores on coded keys: one launch instead of about fifteen. One program serves some slots of one
head, and multiplies their codes in registers with all its query rows.

Products with coded projections: one launch instead of about twelve. One program serves a row of one
head, and multiplies it with all codes of the head's projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.packing import plane_width

TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Adding this rounds a number below 2^22 to a whole one, halves to the even neighbour."""
HALF_MAX = tl.constexpr(torch.finfo(torch.float16).max)
ELEMENTS = 1024
"""Slots or scores that a program of any kernel holds in registers at a time."""
MOST_ROWS = 64
"""Rows of a KV head that kernels of a step take; of more, torch makes products."""


# Coded rows

width_of = triton.constexpr_function(plane_width)


@triton.jit
def pack_row(states, packed, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    groups: tl.constexpr = (HEAD_DIM + GROUP_SIZE - 1) // GROUP_SIZE
    width: tl.constexpr = width_of(HEAD_DIM, BITS)
    group = tl.arange(0, triton.next_power_of_2(groups))
    member = tl.arange(0, triton.next_power_of_2(GROUP_SIZE))
    element = group[:, None] * GROUP_SIZE + member[None, :]
    held = (member[None, :] < GROUP_SIZE) & (element < HEAD_DIM)
    least = tl.min(tl.load(states + element, mask=held, other=float("inf")).to(tl.float32), 1)
    most = tl.max(tl.load(states + element, mask=held, other=float("-inf")).to(tl.float32), 1)
    step = tl.minimum(tl.div_rn(most - least, 2.0**BITS - 1), HALF_MAX).to(tl.float16)
    lo = tl.minimum(tl.maximum(least, -HALF_MAX), HALF_MAX).to(tl.float16)
    meta = packed.to(tl.pointer_type(tl.float16)) + group * 2
    tl.store(meta, lo, mask=group < groups)
    tl.store(meta + 1, step, mask=group < groups)
    lo = lo.to(tl.float32)
    divisor = tl.where(step == 0, 1.0, step.to(tl.float32))  # code * 0 + lo is lo

    at = tl.arange(0, triton.next_power_of_2(width))
    codes = tl.zeros((triton.next_power_of_2(width),), tl.int32)
    for plane in tl.static_range(8 // BITS):
        element = plane * width + at
        held = (at < width) & (element < HEAD_DIM)
        group_index = tl.where(held, element // GROUP_SIZE, 0)
        above = tl.load(states + element, mask=held, other=0).to(tl.float32) - tl.gather(
            lo, group_index, 0
        )
        level = tl.div_rn(above, tl.gather(divisor, group_index, 0))
        level = tl.minimum(tl.maximum(level, 0.0), 2.0**BITS - 1) + TO_WHOLE - TO_WHOLE
        codes |= tl.where(held, level, 0.0).to(tl.int32) << plane * BITS
    tl.store(packed + 4 * groups + at, codes.to(tl.uint8), mask=at < width)


@triton.jit
def _pack(
    states,
    packed,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pack_row(states + row * HEAD_DIM, packed + row * ROW_BYTES, HEAD_DIM, BITS, GROUP_SIZE)


def encode(x: Tensor, bits: int, group_size: int) -> Tensor:
    """As `IntegerCodec.encode` without a rotation: rows [..., head_dim] as uint8 [..., row
    bytes]."""
    head_dim = x.shape[-1]
    row_bytes = 4 * triton.cdiv(head_dim, group_size) + plane_width(head_dim, bits)
    packed = x.new_empty((*x.shape[:-1], row_bytes), dtype=torch.uint8)
    if packed.numel():
        _pack[(x.shape[:-1].numel(),)](
            x.contiguous(),
            packed,
            HEAD_DIM=head_dim,
            BITS=bits,
            GROUP_SIZE=group_size,
            ROW_BYTES=row_bytes,
            num_warps=1,
        )
    return packed


# Scores on coded keys


@triton.jit(
    do_not_specialize=["slots", "rows", "heads", "batch_stride", "head_stride", "byte_stride"]
)
def _coded_scores(
    query,
    keys,  # packed as `methods.codecs` says
    scores, slots, rows, heads,
    batch_stride, head_stride, slot_stride, byte_stride,  # of `keys`
    COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # `rows` rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = width_of(COLUMNS, BITS)
    groups: tl.constexpr = (COLUMNS + GROUP_SIZE - 1) // GROUP_SIZE
    tiles = tl.cdiv(slots, TILE)  # one axis for all: a GPU takes 65,535 programs of the others
    head = (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    held = slot < slots
    keys += head // heads * batch_stride + head % heads * head_stride
    keys += slot.to(tl.int64) * slot_stride
    row = tl.arange(0, ROWS)
    query += (head * rows + row) * COLUMNS
    total = tl.zeros((ROWS, TILE), tl.float32)
    for group in tl.static_range(groups):
        sums = tl.zeros((ROWS,), tl.float32)
        products = tl.zeros((ROWS, TILE), tl.float32)
        for column in range(group * GROUP_SIZE, min(COLUMNS, (group + 1) * GROUP_SIZE)):
            query_element = tl.load(query + column, mask=row < rows, other=0).to(tl.float32)
            byte = 4 * groups + column % width
            code = tl.load(keys + byte * byte_stride, mask=held, other=0).to(tl.int32)
            code = (code >> column // width * BITS) & ((1 << BITS) - 1)
            sums += query_element
            products += query_element[:, None] * code.to(tl.float32)[None, :]
        lo = load_half(keys + 4 * group * byte_stride, byte_stride, held)
        step = load_half(keys + (4 * group + 2) * byte_stride, byte_stride, held)
        total += products * step[None, :] + sums[:, None] * lo[None, :]
    found = scores + (head * rows + row)[:, None] * slots + slot[None, :]
    tl.store(found, total, mask=(row < rows)[:, None] & held[None, :])


@triton.jit
def load_half(low, byte_stride, held):
    """The fp16 number whose low byte lies at `low`, in fp32."""
    word = tl.load(low, mask=held, other=0).to(tl.uint16)
    word |= tl.load(low + byte_stride, mask=held, other=0).to(tl.uint16) << 8
    return word.to(tl.float16, bitcast=True).to(tl.float32)


def coded_scores(query: Tensor, keys: Tensor, bits: int, group_size: int) -> Tensor:
    """As `methods.projection.coded_scores`, for at most `MOST_ROWS` rows."""
    batch, heads, rows, columns = query.shape
    slots = keys.shape[2]
    scores = query.new_empty((batch, heads, rows, slots), dtype=torch.float32)
    padded = triton.next_power_of_2(rows)
    tile = max(1, ELEMENTS // padded)
    in_memory = keys if keys.stride(-1) == 1 else keys.mT  # the kernel is told all strides
    _coded_scores[(batch * heads * triton.cdiv(slots, tile),)](
        query.contiguous(),
        in_memory,
        scores,
        slots,
        rows,
        heads,
        *keys.stride(),
        COLUMNS=columns,
        BITS=bits,
        GROUP_SIZE=group_size,
        ROWS=padded,
        TILE=tile,
    )
    return scores


# Products with coded projections


@triton.jit(do_not_specialize=["rows", "heads", "row_stride", "batch_stride", "head_stride"])
def _coded_product(
    states,
    side,  # packed as `methods.codecs` says, one group a row
    products, rows, heads, row_stride,
    batch_stride, head_stride, element_stride,  # of `side`
    HEAD_DIM: tl.constexpr, ELEMENTS_OF_HEAD: tl.constexpr,  # HEAD_DIM rounded up
    COLUMNS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,  # bytes of codes, rounded up
):  # fmt: skip
    width: tl.constexpr = width_of(COLUMNS, BITS)
    head, row = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    element = tl.arange(0, ELEMENTS_OF_HEAD)
    held = element < HEAD_DIM
    side += head // heads * batch_stride + head % heads * head_stride + element * element_stride
    number = tl.load(states + (head * rows + row) * row_stride + element, mask=held, other=0)
    number = number.to(tl.float32)
    base = tl.sum(number * load_half(side, 1, held), 0)
    scaled = number * load_half(side + 2, 1, held)
    byte = tl.arange(0, WIDTH)
    codes = tl.load(
        side[:, None] + 4 + byte[None, :],
        mask=held[:, None] & (byte < width)[None, :],
        other=0,
    ).to(tl.int32)
    products += (head * rows + row) * COLUMNS
    for plane in tl.static_range(8 // BITS):
        code = (codes >> plane * BITS) & ((1 << BITS) - 1)
        plane_sums = tl.sum(scaled[:, None] * code.to(tl.float32), 0) + base
        column = plane * width + byte
        tl.store(products + column, plane_sums, mask=(byte < width) & (column < COLUMNS))


def coded_product(states: Tensor, side: Tensor, bits: int, columns: int) -> Tensor:
    """As `methods.infinigen2.coded_product`."""
    batch, heads, rows, head_dim = states.shape
    products = states.new_empty((batch, heads, rows, columns), dtype=torch.float32)
    _coded_product[(batch * heads * rows,)](
        states.contiguous(),
        side,
        products,
        rows,
        heads,
        head_dim,
        *side.stride()[:3],
        HEAD_DIM=head_dim,
        ELEMENTS_OF_HEAD=triton.next_power_of_2(head_dim),
        COLUMNS=columns,
        BITS=bits,
        WIDTH=triton.next_power_of_2(plane_width(columns, bits)),
    )
    return products
