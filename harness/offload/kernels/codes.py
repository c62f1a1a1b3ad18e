"""Integer codes in the registers of a Triton kernel.

The codes of a row are bytes [segments, segment], a segment being what lies in one group and one bit plane; its elements
are [planes, segments, segment] in that order, each axis rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from methods.codec import plane_width

width_of = triton.constexpr_function(plane_width)


@triton.constexpr_function
def segment_of(head_dim: int, bits: int, group_size: int) -> int:
    """Elements that lie in one group and one bit plane."""
    segment, rest = width_of(head_dim, bits), group_size
    while rest:
        segment, rest = rest, segment % rest
    return segment


@triton.jit
def element_of_lane(  # type: ignore[no-untyped-def]
    HEAD_DIM: tl.constexpr,  # noqa: N803 - compile-time constants are written in capitals
    BITS: tl.constexpr,  # noqa: N803
    GROUP_SIZE: tl.constexpr,  # noqa: N803
):
    """Which element of a row each lane of it holds, [planes, segments, segment]; HEAD_DIM for none."""
    width: tl.constexpr = width_of(HEAD_DIM, BITS)
    segment: tl.constexpr = segment_of(HEAD_DIM, BITS, GROUP_SIZE)
    plane = tl.arange(0, 8 // BITS)[:, None, None]
    first = tl.arange(0, triton.next_power_of_2(width // segment))[None, :, None] * segment
    at = tl.arange(0, triton.next_power_of_2(segment))[None, None, :]
    element = plane * width + first + at
    return tl.where((at < segment) & (first < width) & (element < HEAD_DIM), element, HEAD_DIM)


@triton.jit
def decoded(  # type: ignore[no-untyped-def]
    packed,
    seen,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
):
    """Keys or values in fp32, rounded as the codec rounds them in DTYPE: [rows, lanes].

    packed, seen: where each row's begin, and whether it is read.
    """
    width: tl.constexpr = width_of(HEAD_DIM, BITS)
    segment: tl.constexpr = segment_of(HEAD_DIM, BITS, GROUP_SIZE)
    meta_bytes: tl.constexpr = 4 * ((HEAD_DIM + GROUP_SIZE - 1) // GROUP_SIZE)
    packed, seen = packed[:, None, None, None], seen[:, None, None, None]
    plane = tl.arange(0, 8 // BITS)[None, :, None, None]
    first = tl.arange(0, triton.next_power_of_2(width // segment))[None, None, :, None] * segment
    at = tl.arange(0, triton.next_power_of_2(segment))[None, None, None, :]
    codes = tl.load(packed + meta_bytes + first + at, mask=seen & (at < segment) & (first < width), other=0)
    codes = ((codes.to(tl.int32) >> plane * BITS) & ((1 << BITS) - 1)).to(tl.float32)
    group = (plane * width + first) // GROUP_SIZE * 2
    meta, used = packed.to(tl.pointer_type(tl.float16)), seen & (first < width) & (plane * width + first < HEAD_DIM)
    lo = tl.load(meta + group, mask=used, other=0).to(tl.float32).to(DTYPE).to(tl.float32)
    step = tl.load(meta + group + 1, mask=used, other=0).to(tl.float32).to(DTYPE).to(tl.float32)
    values = ((codes * step).to(DTYPE).to(tl.float32) + lo).to(DTYPE).to(tl.float32)
    return values.reshape(values.shape[0], values.numel // values.shape[0])
