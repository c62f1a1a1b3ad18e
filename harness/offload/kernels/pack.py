"""Packing rows of integer codes by one Triton kernel instead of some thirty launches: `KVStore.pack`, bit for bit.

A program packs the key and the value of one token and KV head. With TRITON_INTERPRET=1 set before Triton is imported it
runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.offload.kernels.codes import width_of
from methods.codec import Codec

TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""What is less than 2^22 has no fraction after this is added to it: it was rounded, halves to the even neighbour."""


@triton.jit
def _pack_half(  # type: ignore[no-untyped-def]
    states,
    packed,
    HEAD_DIM: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals
    BITS: tl.constexpr,  # noqa: N803
    GROUP_SIZE: tl.constexpr,  # noqa: N803
):
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
    lo, divisor = lo.to(tl.float32), tl.where(step == 0, 1.0, step.to(tl.float32))  # code * 0 + lo is lo

    at = tl.arange(0, triton.next_power_of_2(width))
    codes = tl.zeros((triton.next_power_of_2(width),), tl.int32)
    for plane in tl.static_range(8 // BITS):
        element = plane * width + at
        held = (at < width) & (element < HEAD_DIM)
        of_group = tl.where(held, element // GROUP_SIZE, 0)
        above = tl.load(states + element, mask=held, other=0).to(tl.float32) - tl.gather(lo, of_group, 0)
        level = tl.div_rn(above, tl.gather(divisor, of_group, 0))
        level = tl.minimum(tl.maximum(level, 0.0), 2.0**BITS - 1) + TO_WHOLE - TO_WHOLE
        codes |= tl.where(held, level, 0.0).to(tl.int32) << plane * BITS
    tl.store(packed + 4 * groups + at, codes.to(tl.uint8), mask=at < width)


@triton.jit(do_not_specialize=["num_rows"])
def _pack_rows(  # type: ignore[no-untyped-def]
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
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    KEY_BYTES: tl.constexpr,  # noqa: N803
    SLOT_BYTES: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    row, head, batch = program % num_rows, program // num_rows % num_kv_heads, program // num_rows // num_kv_heads
    keys += batch * key_batch_stride + head * key_head_stride + row * key_row_stride
    values += batch * value_batch_stride + head * value_head_stride + row * value_row_stride
    packed += program * SLOT_BYTES
    _pack_half(keys, packed, HEAD_DIM, BITS, GROUP_SIZE)
    _pack_half(values, packed + KEY_BYTES, HEAD_DIM, BITS, GROUP_SIZE)
    if SLOT_BYTES > 2 * KEY_BYTES:
        rest = packed + 2 * KEY_BYTES + tl.arange(0, 2)  # both halves are even, a slot is a multiple of 4
        tl.store(rest, tl.zeros((2,), tl.uint8))


def pack(keys: Tensor, values: Tensor, codec: Codec, slot_bytes: int) -> Tensor:
    """K and V [batch, num_kv_heads, n, head_dim] as rows [batch, num_kv_heads, n, slot_bytes]."""
    keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (keys, values))
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
