"""The unread tokens of a row, summed by the weights that a coded index gives them: two launches
instead of about thirty.

One program of the first serves some slots of a query row of one KV head: the softmax of its query
heads over the unread tokens, and their index, decoded in registers, summed by these weights. The
second joins the parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.base import QueryRows
from methods.kernels import coded
from methods.kernels.coded import load_half, width_of
from methods.kernels.selection import set_strides

PART = 1024
"""Slots of a program, about."""
PRODUCTS = 4
"""Products of a weight and a number of the index that a program holds at a time, as a multiple of
`coded.ELEMENTS`."""


@triton.jit(
    do_not_specialize=[
        "slots", "rows", "heads", "parts", "tiles", "scale", "tokens_batch_stride",
        "tokens_head_stride", "keys_batch_stride", "keys_head_stride", "keys_byte_stride",
    ]
)  # fmt: skip
def _rest_parts(
    scores,  # of the index, scaled
    query,
    unscored,  # the key whose product with a query the scores lack
    tokens,  # the position of each slot's token
    positions,
    read,  # bool, the slots that are read
    keys,  # packed as `methods.codecs` says
    most, total, summed,  # of each part
    scale, slots, rows, heads, parts, tiles, group,
    tokens_batch_stride, tokens_head_stride,  # strides of `tokens`
    keys_batch_stride, keys_head_stride, keys_slot_stride, keys_byte_stride,  # of `keys`
    HEAD_DIM: tl.constexpr, ELEMENTS_OF_HEAD: tl.constexpr,  # HEAD_DIM rounded up
    COLUMNS: tl.constexpr, NUMBERS: tl.constexpr,  # COLUMNS rounded up
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `group` rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = width_of(COLUMNS, BITS)
    groups: tl.constexpr = (COLUMNS + GROUP_SIZE - 1) // GROUP_SIZE
    part, row_index = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    row, head_index = row_index % rows, row_index // rows
    batch, kv_head = head_index // heads, head_index % heads
    tokens += batch * tokens_batch_stride + kv_head * tokens_head_stride
    keys += batch * keys_batch_stride + kv_head * keys_head_stride
    position = tl.load(positions + batch * rows + row)

    head = tl.arange(0, HEADS)
    is_head = head < group
    element = tl.arange(0, ELEMENTS_OF_HEAD)
    lacking = tl.load(unscored + head_index * HEAD_DIM + element, mask=element < HEAD_DIM, other=0)
    query_index = (head_index * group + head) * rows + row
    asking = tl.load(
        query + query_index[:, None] * HEAD_DIM + element[None, :],
        mask=is_head[:, None] & (element < HEAD_DIM)[None, :],
        other=0,
    )
    shift = scale * tl.sum(asking.to(tl.float32) * lacking.to(tl.float32)[None, :], 1)

    column = tl.arange(0, NUMBERS)
    byte = 4 * groups + column % width
    place = column // width * BITS
    scales = column // GROUP_SIZE * 4  # of the column's group
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, NUMBERS), tl.float32)
    for tile in range(tiles):
        slot = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        held = slot < slots
        unread = held & (tl.load(tokens + slot, mask=held, other=0) < position)
        unread &= tl.load(read + row_index * slots + slot, mask=held, other=1) == 0
        index_scores = tl.load(
            scores + query_index[:, None] * slots + slot[None, :],
            mask=is_head[:, None] & unread[None, :],
            other=float("-inf"),
        )
        shifted = index_scores + shift[:, None]
        now = tl.maximum(largest, tl.max(shifted, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing is left so far
        weight = tl.exp(shifted - base[:, None])
        fade = tl.exp(largest - base)
        at = keys + slot.to(tl.int64)[:, None] * keys_slot_stride
        known = unread[:, None] & (column < COLUMNS)[None, :]
        code = tl.load(at + byte[None, :] * keys_byte_stride, mask=known, other=0).to(tl.int32)
        code = (code >> place[None, :]) & ((1 << BITS) - 1)
        lo = load_half(at + scales[None, :] * keys_byte_stride, keys_byte_stride, known)
        step = load_half(at + (scales + 2)[None, :] * keys_byte_stride, keys_byte_stride, known)
        number = code.to(tl.float32) * step + lo
        sums = sums * fade[:, None] + tl.sum(weight[:, :, None] * number[None, :, :], 1)
        mass = mass * fade + tl.sum(weight, 1)
        largest = now

    part_index = tl.program_id(0).to(tl.int64) * group + head
    tl.store(most + part_index, largest, mask=is_head)
    tl.store(total + part_index, mass, mask=is_head)
    tl.store(
        summed + part_index[:, None] * COLUMNS + column[None, :],
        sums,
        mask=is_head[:, None] & (column < COLUMNS)[None, :],
    )


@triton.jit(do_not_specialize=["rows", "parts"])
def _rest_of_parts(
    most, total, summed, log_mass, mean, rows, parts, group,
    COLUMNS: tl.constexpr, NUMBERS: tl.constexpr,  # COLUMNS rounded up
):  # fmt: skip
    head, row_index = tl.program_id(0) % group, (tl.program_id(0) // group).to(tl.int64)
    column = tl.arange(0, NUMBERS)
    first = row_index * parts * group + head
    largest = tl.full((), float("-inf"), tl.float32)
    for part in range(parts):
        largest = tl.maximum(largest, tl.load(most + first + part * group))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    mass = tl.zeros((), tl.float32)
    sums = tl.zeros((NUMBERS,), tl.float32)
    for part in range(parts):
        at = first + part * group
        share = tl.exp(tl.load(most + at) - base)
        mass += share * tl.load(total + at)
        part_sums = tl.load(summed + at * COLUMNS + column, mask=column < COLUMNS, other=0)
        sums += share * part_sums
    found = (row_index // rows * group + head) * rows + row_index % rows
    some = tl.where(mass > 0, mass, 1.0)
    tl.store(log_mass + found, tl.where(mass > 0, base + tl.log(some), float("-inf")))
    tl.store(mean + found * COLUMNS + column, sums / some, mask=column < COLUMNS)


def index_of_rest(
    scores: Tensor, unscored: Tensor, read: Tensor, rows: QueryRows, keys: Tensor,
    *, columns: int, bits: int, group_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-mass of the visible tokens that a row does not read, the logarithm of the sum of
    exp(score), fp32 [batch, num_kv_heads, group, rows], -inf where there are none; and the mean of
    their index by these weights, fp32 [..., columns], 0 where there are none.

    scores: of the index, scaled, fp32 [batch, num_kv_heads, group, rows, slots]; they lack scale *
    the product of the query and `unscored` [batch, num_kv_heads, 1, head_dim]. read: bool [batch,
    num_kv_heads, rows, slots]. keys: uint8 [batch, num_kv_heads, slots, row bytes].
    """
    batch, heads, group, num_rows, slots = scores.shape
    head_dim, tokens = rows.query.shape[-1], rows.slot_positions
    padded, numbers = triton.next_power_of_2(group), triton.next_power_of_2(columns)
    tile = max(16, PRODUCTS * coded.ELEMENTS // (padded * numbers))
    tiles = max(1, min(PART, slots) // tile)
    parts = triton.cdiv(slots, tile * tiles)
    programs = batch * heads * num_rows * parts
    most = scores.new_empty((programs, group))
    total, summed = torch.empty_like(most), scores.new_empty((programs, group, columns))
    in_memory = keys if keys.stride(-1) == 1 else keys.mT  # the kernel is told all strides
    _rest_parts[(programs,)](
        scores.contiguous(),
        rows.query.contiguous(),
        unscored.contiguous(),
        tokens,
        rows.positions.contiguous(),
        read.contiguous(),
        in_memory,
        most,
        total,
        summed,
        scale,
        slots,
        num_rows,
        heads,
        parts,
        tiles,
        group,
        *set_strides(tokens),
        *keys.stride(),
        HEAD_DIM=head_dim,
        ELEMENTS_OF_HEAD=triton.next_power_of_2(head_dim),
        COLUMNS=columns,
        NUMBERS=numbers,
        BITS=bits,
        GROUP_SIZE=group_size,
        HEADS=padded,
        TILE=tile,
    )
    log_mass = scores.new_empty(scores.shape[:-1])
    mean = scores.new_empty((*scores.shape[:-1], columns))
    _rest_of_parts[(batch * heads * num_rows * group,)](
        most,
        total,
        summed,
        log_mass,
        mean,
        num_rows,
        parts,
        group,
        COLUMNS=columns,
        NUMBERS=numbers,
    )
    return log_mass, mean
