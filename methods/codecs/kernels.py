"""Integer codes in Triton: one kernel packs rows instead of some twenty launches, bit for bit as
`methods.codecs.integers` packs them. With TRITON_INTERPRET=1 set before the import it runs on CPU
tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.codecs.base import plane_width
from methods.codecs.integers import IntegerCodec

TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Adding this rounds a number below 2^22 to a whole one, halves to the even neighbour."""

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
    lo, step = least.to(tl.float16), tl.div_rn(most - least, 2.0**BITS - 1).to(tl.float16)
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
        of_group = tl.where(held, element // GROUP_SIZE, 0)
        above = tl.load(states + element, mask=held, other=0).to(tl.float32) - tl.gather(
            lo, of_group, 0
        )
        level = tl.div_rn(above, tl.gather(divisor, of_group, 0))
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


def encode(x: Tensor, codec: IntegerCodec) -> Tensor:
    """As `IntegerCodec.encode` without a rotation: rows [..., head_dim] as uint8 [..., row
    bytes]."""
    head_dim = x.shape[-1]
    packed = x.new_empty((*x.shape[:-1], codec.row_bytes(head_dim)), dtype=torch.uint8)
    if packed.numel():
        _pack[(x.shape[:-1].numel(),)](
            x.contiguous(),
            packed,
            HEAD_DIM=head_dim,
            BITS=codec.bits,
            GROUP_SIZE=codec.group_size,
            ROW_BYTES=packed.shape[-1],
            num_warps=1,
        )
    return packed
