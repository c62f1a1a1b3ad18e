"""Formats of cached rows: floats, integer codes with a minimum and a step for each group of
elements, or TurboQuant's.

`RowCodec` is what every codec is; a codec in a file of one's own derives from it.

Integer codecs follow FlexGen's group-wise asymmetric scheme, which InfiniGen's INT4 baseline uses
(section 5.1). Per token, KV head and group of `group_size` elements along head_dim: `lo = min`,
`step = (max - lo) / (2^bits - 1)`, both rounded to fp16 before use; `code = round((x - lo) /
step)`, clamped; `value = code * step + lo` in the compute dtype. A group whose step rounds to 0
gives `lo`. The last group of a row may be shorter. A packed row is `[lo, step of each group (fp16)
| codes]`.

Codes of 1, 2, 4 or 8 bits are packed in planes. With n = 8 / bits codes per byte, byte i holds
elements i, i + width, ..., i + (n - 1) * width, the first in the lowest bits. Unpacking then writes
n contiguous blocks.

With `rotation="hadamard"` a row is rotated before it is quantized and back after, as in QuaRot's KV
cache (Ashkboos et al., NeurIPS 2024): the rotation spreads an outlier over the row. `ChannelCodec`
groups the elements of one channel over neighbouring tokens (KIVI; Liu et al., ICML 2024): the
outliers of keys lie in few channels.

`fp8` is e4m3 without a scale, saturating at +-448, as vLLM's `kv_cache_dtype=fp8` without
calibrated scales.

`turbo4`, `turbo3` and `turbo2` (`TurboCodec`) are TurboQuant's quantiser (Zandieh et al., ICLR
2026) as vLLM has it: the coordinates of a rotated row's direction, each as the nearest Lloyd-Max
centroid of a normal distribution, and the row's length.

`nvfp4` (`Nvfp4Codec`) is NVIDIA's format of 4-bit floats with scales on two levels.

Layers may have codecs of their own (`LayerCodecs`).

`roundtrip(x)` is `decode(encode(x))` bit for bit without the packing. Replay uses the first, live
decoding the others.

The rule, and where it differs (made into docs/methods.md):

**int8** to **int1**: elements in groups of `group_size` share a minimum and a step in fp16
(asymmetric). Any method can have such a codec (`codec=int4`). **fp8** has no scales and saturates
at ±448. **-hadamard** rotates keys (after their positions) and values before they are coded and
back after, at no byte more. QuaRot itself turns the query instead of turning keys back, and folds
the rotation of values into the weights. Its 4-bit cache has asymmetric codes as here, with one
group a row; the simulation beside it starts from symmetric ones (`--k_asym`, `--v_asym`) and can
clip.

**turboquant4** and **turboquant3** are vLLM's `turboquant_4bit_nc` and `turboquant_k3v4_nc`
(`vllm/model_executor/layers/quantization/turboquant`); **turboquant2** goes on in the same way. A
key, after its position, is rotated by the Hadamard matrix and divided by its length; a coordinate
of such a direction, times sqrt(head_dim), is nearly N(0, 1), and is coded as the nearest of that
distribution's 2^bits Lloyd-Max centroids (Max 1960; computed, not typed in). Beside its codes a row
has one number in fp16, with which it reads back with its own length: `norm_correction` there, which
corrects when it reads. A value is coded as an integer codec codes it, one group a row. Bytes at
head_dim 64: a key 2 + 32, 24 or 16, a value 4 + 32 (4 + 16 with `turboquant2`). The paper's second
stage (QJL, 1 bit) is left out, as in vLLM. vLLM leaves the first two and the last two layers alone;
here `num_exempt_layers=2` is the default of these three, and `codec_layers=[28-:fp16]` names last
layers. Where head_dim is no power of two the rotation is in blocks, and coordinates are less
normal. `codec=turbo4`, `turbo3` and `turbo2`
are the key's format for any method, for values too where `value_codec` gives no other. No kernel
codes it: on a GPU it takes plain torch operations.

**nvfp4**: an element is an E2M1 number (0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 or ±6), 16 elements along
head_dim share a scale in E4M3, and a tensor has a scale in fp32. With s = the tensor's largest
magnitude / (6 · 448), a block's scale is its largest magnitude / 6 / s in E4M3; an element is the
E2M1 number nearest to x / (scale · s), of two the even one; it reads back as number · (scale · s),
with one rounding. The tensor is a row here, one token's key or value in one KV head: a cache grows,
so that a scale of the whole has to be guessed from a prompt or calibrated (vLLM reads it from the
checkpoint, or takes 1), and rows would depend on what lies beside them. Bytes at head_dim 64: 4 + 4
+ 32, which are 5 bits an element, 4.75 at 128; with one scale for a whole layer they would be 4.5.
No kernel codes it: on a GPU it takes plain torch operations.

**kivi**: keys share minimum and step per channel over `group_size` (32) consecutive tokens, values
per token over 32 channels; scales take 3 bits per element at 2 bits, 5 at 4. The values of the last
`residual` (128) tokens are exact. Keys stay exact until 128 are there, and are coded after the step
that completes them. Its parts can be set apart, with methods that read all: `codec=int4
value_codec=int2 key_groups=channel residual=128`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats to compute in."""
STORED_DTYPES = FLOAT_DTYPES | {"fp8": torch.float8_e4m3fn}
INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
TURBO_BITS = {"turbo4": 4, "turbo3": 3, "turbo2": 2}
NVFP4 = "nvfp4"
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a float of 1 bit of sign, 2 of exponent and 1 of mantissa, by code."""
NVFP4_BLOCK = 16
"""Elements that share an E4M3 scale."""
CODEC_NAMES = (*STORED_DTYPES, *INTEGER_BITS)
Rotation = Literal["hadamard"]
Count = TypeVar("Count", int, Tensor)
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
GROUP_META_BYTES = 4  # lo and step, fp16 each


class RowCodec:
    """A storage format of cached rows, for keys, for values or for both. A row is one token's in
    one KV head.

    A subclass says `bits`, `row_bytes`, `encode` and `decode`. A row is coded by itself, whatever
    lies beside it.

    name: one of `FLOAT_DTYPES` if rows are stored so; any other word means nothing.
    """

    name: str = "own"
    residual: ClassVar[int] = 0
    """Number of last tokens that are kept exact; see `SplitCodec`."""

    @property
    def bits(self) -> float:
        """Bits that an element counts in `size_artifact`, without what a row has once; sizes count
        all of a row."""
        raise NotImplementedError

    @property
    def keys(self) -> RowCodec:
        return self

    @property
    def values(self) -> RowCodec:
        return self

    @property
    def span(self) -> int:
        """Consecutive tokens that are coded together."""
        return 1

    def stored(self, cached: Count) -> Count:
        """Number of the `cached` tokens that are read as stored: all."""
        return cached

    def bits_per_element(self, head_dim: int) -> float:
        """Bits that an element counts in size: by default those that are stored."""
        return 8 * self.row_bytes(head_dim) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a packed row of head_dim elements; even, so that fp16 values stay aligned in any
        slot."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> Tensor:
        """Packs `x` [..., head_dim], of any float dtype, into uint8 [..., row_bytes(head_dim)]."""
        raise NotImplementedError

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Rows [..., head_dim] in `dtype` from `packed`, uint8 [..., row_bytes(head_dim)] with
        stride 1 last."""
        raise NotImplementedError

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` [..., head_dim] as it reads back from storage, in its own dtype."""
        return self.decode(self.encode(x), x.shape[-1], x.dtype)


@dataclass(frozen=True)
class Codec(RowCodec):
    """Floats and integers.

    name: one of CODEC_NAMES. group_size: elements that share lo and step. rotation: applied to a
    row before it is quantized. Both are for integer codecs only.
    Raises ValueError for an unknown name, a group_size below 1, or a rotation of floats.
    """

    name: str
    group_size: int = 64
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        if self.name not in CODEC_NAMES:
            raise ValueError(f"codec={self.name!r}: must be one of {', '.join(CODEC_NAMES)}")
        if type(self.group_size) is not int or self.group_size < 1:
            raise ValueError(f"group_size={self.group_size!r}: must be an integer >= 1")
        if self.rotation is not None and self.is_float:
            raise ValueError(f"rotation={self.rotation}: needs an integer codec, not {self.name}")

    @property
    def is_float(self) -> bool:
        """True if elements are stored as floating-point numbers, without groups."""
        return self.name in STORED_DTYPES

    @property
    def bits(self) -> int:
        """Bits that an element counts, without lo and step: those stored, and 16 for any float but
        fp8."""
        return 16 if self.name in FLOAT_DTYPES else INTEGER_BITS.get(self.name, 8)

    def num_groups(self, head_dim: int) -> int:
        """Groups in a row of head_dim elements; 0 for float codecs."""
        return 0 if self.is_float else -(-head_dim // self.group_size)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits that an element counts in size: `bits`, and 32 for each group (lo and step)."""
        return self.bits + 32 * self.num_groups(head_dim) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a packed row of head_dim elements; even, so that fp16 values stay aligned in any
        slot."""
        if self.is_float:
            return -(-head_dim * STORED_DTYPES[self.name].itemsize // 2) * 2
        return self._meta_bytes(head_dim) + plane_width(head_dim, self.bits)

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` [..., head_dim] as it reads back from storage, in its own dtype; may be `x`
        itself."""
        if self.is_float:
            return self._as_float(x).to(x.dtype)
        codes, lo, step = self._quantize(x)
        return self._values(codes.to(self._working(x.dtype)), lo, step, x.shape).to(x.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Packs `x` [..., head_dim] into uint8 [..., row_bytes(head_dim)]."""
        head_dim = x.shape[-1]
        if self.is_float:
            packed = self._as_float(x).contiguous().view(torch.uint8)
            missing = self.row_bytes(head_dim) - packed.shape[-1]
            return pad(packed, (0, missing)) if missing else packed
        codes, lo, step = self._quantize(x)
        packed = _pack_planes(self._ungrouped(codes, x.shape), self.bits)
        return torch.cat([self._pack_meta(lo, step), packed], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Rows [..., head_dim] in `dtype` from `packed`, uint8 [..., row_bytes(head_dim)] with
        stride 1 last.

        A float codec whose dtype is `dtype` gives a view of `packed`, not a copy.
        """
        if self.is_float:
            stored = STORED_DTYPES[self.name]
            return packed[..., : head_dim * stored.itemsize].view(stored).to(dtype)
        codes, lo, step = self.unpack(packed, head_dim, self._working(dtype))
        return self._values(self._grouped(codes), lo, step, codes.shape).to(dtype)

    def unpack(
        self, packed: Tensor, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of integer rows in `dtype`, [..., head_dim], and lo and step of their groups,
        fp16 [..., num_groups, 1]. Arguments as in `decode`."""
        meta_bytes = self._meta_bytes(head_dim)
        lo, step = self._unpack_meta(packed[..., :meta_bytes], head_dim)
        return _unpack_planes(packed[..., meta_bytes:], self.bits, head_dim, dtype), lo, step

    def _as_float(self, x: Tensor) -> Tensor:
        # The cast turns numbers beyond e4m3's range into NaN; deployed kernels saturate.
        return (x.clamp(-_FP8_MAX, _FP8_MAX) if self.name == "fp8" else x).to(
            STORED_DTYPES[self.name]
        )

    def _working(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute values in: fp32 if they are rotated back, so that they are rounded
        once."""
        return dtype if self.rotation is None else torch.float32

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., head_dim] cut into groups. A shorter last group repeats its last element: same min
        and max."""
        head_dim = rows.shape[-1]
        group = max(1, min(self.group_size, head_dim))
        missing = -head_dim % group
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
        return rows.unflatten(-1, (rows.shape[-1] // group, group))

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        return groups.flatten(-2)[..., : shape[-1]]

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """codes [..., num_groups, group], lo and step [..., num_groups, 1], rounded to fp16; all
        fp32."""
        rows = x.float() if self.rotation is None else hadamard(x.float())
        grouped = self._grouped(rows)
        levels = 2**self.bits - 1
        minimum = grouped.amin(-1, keepdim=True)
        intervals = minimum.new_full(
            (), levels
        )  # by a plain number CUDA does not divide: it multiplies by 1 / levels
        step = grouped.amax(-1, keepdim=True).sub_(minimum).div_(intervals).half().float()
        lo = minimum.half().float()
        divisor = step.masked_fill(step == 0, 1.0)  # code * 0 + lo is lo, whatever the code
        return (grouped - lo).div_(divisor).round_().clamp_(0, levels), lo, step

    def _values(self, codes: Tensor, lo: Tensor, step: Tensor, shape: torch.Size) -> Tensor:
        """Rows of `shape`; overwrites `codes`. Two separate roundings, so that no kernel may fuse
        them."""
        rows = self._ungrouped(codes.mul_(step.to(codes.dtype)).add_(lo.to(codes.dtype)), shape)
        return rows if self.rotation is None else hadamard(rows)

    def _meta_bytes(self, head_dim: int) -> int:
        return GROUP_META_BYTES * self.num_groups(head_dim)

    def _pack_meta(self, lo: Tensor, step: Tensor) -> Tensor:
        """[..., num_groups, 1] each, as bytes [..., meta bytes]."""
        return torch.cat([lo, step], dim=-1).flatten(-2).half().view(torch.uint8)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """lo and step, fp16 [..., num_groups, 1], from bytes [..., meta bytes]."""
        meta = packed.view(torch.float16).unflatten(-1, (self.num_groups(head_dim), 2))
        return meta[..., :1], meta[..., 1:]


@dataclass(frozen=True)
class ChannelCodec(Codec):
    """An integer codec whose groups are `group_size` consecutive tokens of a channel.

    Rows are [..., tokens, head_dim], groups are counted from the first token. `encode` and `decode`
    take whole groups; in `roundtrip` the last one may be shorter. A group's 4 * head_dim bytes of
    lo and step are dealt out to its rows, so that all rows have the same length. Raises ValueError
    as Codec, and for floats, which have no groups.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_float:
            raise ValueError(f"key_groups=channel: needs an integer codec, not {self.name}")

    @property
    def span(self) -> int:
        return self.group_size

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / self.group_size

    def _meta_bytes(self, head_dim: int) -> int:
        return -(-GROUP_META_BYTES * head_dim // (2 * self.group_size)) * 2

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., tokens, head_dim] as [..., head_dim, groups, tokens of a group]."""
        return super()._grouped(rows.mT)

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        return groups.flatten(-2)[..., : shape[-2]].mT

    def _pack_meta(self, lo: Tensor, step: Tensor) -> Tensor:
        """[..., head_dim, groups, 1] each, as bytes [..., tokens, meta bytes]."""
        width = self._meta_bytes(lo.shape[-3])
        of_group = torch.cat([lo, step], -1).transpose(-3, -2).flatten(-2).half().view(torch.uint8)
        dealt = pad(of_group, (0, self.group_size * width - of_group.shape[-1]))
        return dealt.unflatten(-1, (self.group_size, width)).flatten(-3, -2)

    def _unpack_meta(self, packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        groups = packed.shape[-2] // self.group_size
        of_group = packed.unflatten(-2, (groups, self.group_size)).flatten(-2)[
            ..., : GROUP_META_BYTES * head_dim
        ]
        meta = (
            of_group.contiguous().view(torch.float16).unflatten(-1, (head_dim, 2)).transpose(-3, -2)
        )
        return meta[..., :1], meta[..., 1:]


@dataclass(frozen=True)
class TurboCodec(RowCodec):
    """TurboQuant's quantiser of the squared error: a direction by Lloyd-Max centroids, and a
    length.

    With u the row's direction after the Hadamard rotation, sqrt(head_dim) * u_j is nearly N(0, 1):
    code_j is the number of the nearest of that distribution's 2^bits centroids c (Max 1960). A
    packed row is `[scale (fp16) | codes]`, with scale = |row| / |c_codes|: a row reads back with
    its own length, as vLLM's `norm_correction` does when it reads. Codes of 3 bits are packed as
    their two low bits and then their high bit.

    name: one of TURBO_BITS. Raises ValueError for another.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in TURBO_BITS:
            raise ValueError(f"codec={self.name!r}: must be one of {', '.join(TURBO_BITS)}")

    @property
    def bits(self) -> int:
        return TURBO_BITS[self.name]

    def bits_per_element(self, head_dim: int) -> float:
        """`bits`, and 16 for the row's scale."""
        return self.bits + 16 / head_dim

    def row_bytes(self, head_dim: int) -> int:
        return 2 + code_bytes(head_dim, self.bits)

    def roundtrip(self, x: Tensor) -> Tensor:
        return self._values(*self._quantize(x), x.dtype)

    def encode(self, x: Tensor) -> Tensor:
        codes, scale = self._quantize(x)
        return torch.cat([scale.half().view(torch.uint8), pack_codes(codes, self.bits)], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        scale = packed[..., :2].view(torch.float16).float()
        codes = unpack_codes(packed[..., 2:], self.bits, head_dim)
        return self._values(codes, scale, dtype)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """codes, int32 [..., head_dim], and scale [..., 1], rounded to fp16, in fp32."""
        rows = hadamard(x.float())
        centroids, boundaries = _normal_levels(self.bits, x.device)
        length = _total(rows.square()).sqrt_()
        normal = rows * (rows.shape[-1] ** 0.5 / length.masked_fill(length == 0, 1.0))
        codes = torch.bucketize(normal.contiguous(), boundaries, out_int32=True)
        return codes, length.div_(_total(centroids[codes].square()).sqrt_()).half().float()

    def _values(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        centroids, _ = _normal_levels(self.bits, codes.device)
        return hadamard(centroids[codes].mul_(scale)).to(dtype)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits centroids of N(0, 1) with the least expected squared error (Lloyd 1982; Max 1960),
    ascending.

    A boundary lies midway between two centroids; a centroid is the mean of its interval, (pdf(a) -
    pdf(b)) / (cdf(b) - cdf(a)). Both are repeated until nothing moves by more than 1e-12.
    """

    def pdf(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def cdf(x: float) -> float:
        return math.erf(x / math.sqrt(2)) / 2

    half = 2 ** (bits - 1)  # the others mirror it
    positive, moved = [4 * (number + 0.5) / half for number in range(half)], math.inf
    while moved > 1e-12:
        midways = [(low + high) / 2 for low, high in zip(positive, positive[1:], strict=False)]
        edges = [0.0, *midways, math.inf]
        means = [
            (pdf(a) - pdf(b)) / (cdf(b) - cdf(a)) for a, b in zip(edges, edges[1:], strict=False)
        ]
        moved = max(abs(after - before) for after, before in zip(means, positive, strict=True))
        positive = means
    return (*(-level for level in reversed(positive)), *positive)


@cache
def _normal_levels(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centroids and the boundaries between them, fp32 on a device, to which they are copied
    once."""
    centroids = torch.tensor(lloyd_max(bits), dtype=torch.float32, device=device)
    return centroids, (centroids[1:] + centroids[:-1]) / 2


def _total(x: Tensor) -> Tensor:
    """The sum along the last axis, [..., 1], by halves: its order, and so its rounding, follows
    from no layout."""
    while x.shape[-1] > 1:
        x = pad(x, (0, 1)) if x.shape[-1] % 2 else x
        first, second = x.chunk(2, -1)
        x = first + second
    return x


@dataclass(frozen=True)
class Nvfp4Codec(RowCodec):
    """NVIDIA's NVFP4, a row being a tensor: E2M1 numbers, an E4M3 scale for each block of
    `NVFP4_BLOCK` elements, and an fp32 scale.

    A packed row is `[fp32 scale | E4M3 scales | padding to an even number | codes]`. A code's high
    bit is its sign.
    """

    name: str = NVFP4
    bits: ClassVar[int] = 4

    def bits_per_element(self, head_dim: int) -> float:
        """4, and 8 for each block and 32 for the row."""
        return self.bits + (8 * self._num_blocks(head_dim) + 32) / head_dim

    def row_bytes(self, head_dim: int) -> int:
        return self._first_code(head_dim) + plane_width(head_dim, self.bits)

    def roundtrip(self, x: Tensor) -> Tensor:
        return self._values(*self._quantize(x), x.dtype)

    def encode(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        codes, scales, row_scale = self._quantize(x)
        meta = torch.cat([row_scale.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
        missing = self._first_code(head_dim) - meta.shape[-1]
        return torch.cat([pad(meta, (0, missing)), _pack_planes(codes, self.bits)], dim=-1)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        # A copy, since a slot may begin anywhere.
        row_scale = packed[..., :4].clone(memory_format=torch.contiguous_format)
        scales = packed[..., 4 : 4 + self._num_blocks(head_dim)].contiguous()
        of_codes = packed[..., self._first_code(head_dim) :]
        codes = _unpack_planes(of_codes, self.bits, head_dim, torch.int32)
        return self._values(
            codes, scales.view(torch.float8_e4m3fn), row_scale.view(torch.float32), dtype
        )

    def _num_blocks(self, head_dim: int) -> int:
        return -(-head_dim // NVFP4_BLOCK)

    def _first_code(self, head_dim: int) -> int:
        """Bytes before the codes; even."""
        return 4 + -(-self._num_blocks(head_dim) // 2) * 2

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """codes, int32 [..., head_dim]; scales of the blocks, e4m3 [..., blocks]; scale of the row,
        fp32 [..., 1]."""
        rows = x.float()
        head_dim = rows.shape[-1]
        blocks = self._in_blocks(rows)
        largest = blocks.abs().amax(-1)  # [..., blocks]
        # By a tensor: by a plain number CUDA multiplies by the inverse.
        most_code = largest.new_full((), E2M1_LEVELS[-1])
        row_scale = largest.amax(-1, keepdim=True).div(most_code * _FP8_MAX)
        divisor = row_scale.masked_fill(row_scale == 0, 1.0)
        scales = largest.div(most_code).div_(divisor).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn)
        step = (scales.float() * row_scale).unsqueeze(-1)
        is_empty = step == 0
        normal = blocks.div(step.masked_fill(is_empty, 1.0)).masked_fill_(is_empty, 0.0)
        _, boundaries = _e2m1(x.device)
        codes = torch.bucketize(normal.abs().contiguous(), boundaries, out_int32=True)
        codes += 8 * (normal < 0).int()
        return codes.flatten(-2)[..., :head_dim], scales, row_scale

    def _values(
        self, codes: Tensor, scales: Tensor, row_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        levels, _ = _e2m1(codes.device)
        step = (scales.float() * row_scale).unsqueeze(-1)
        of_elements = step.expand(*step.shape[:-1], NVFP4_BLOCK).flatten(-2)
        return levels[codes].mul_(of_elements[..., : codes.shape[-1]]).to(dtype)

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """[..., head_dim] as [..., blocks, NVFP4_BLOCK], the last one filled up with zeros."""
        missing = -rows.shape[-1] % NVFP4_BLOCK
        padded = pad(rows, (0, missing)) if missing else rows
        return padded.unflatten(-1, (-1, NVFP4_BLOCK))


@cache
def _e2m1(device: torch.device) -> tuple[Tensor, Tensor]:
    """The value of each of the 16 codes, and the largest magnitude that goes to each code but the
    last, fp32 on a device.

    A magnitude midway between two codes goes to the even one: down at the first boundary, up at the
    second, and so on.
    """
    levels = torch.tensor(E2M1_LEVELS)
    boundaries = (levels[1:] + levels[:-1]) / 2
    boundaries[1::2] = boundaries[1::2].nextafter(torch.tensor(0.0))
    return torch.cat([levels, -levels]).to(device), boundaries.to(device)


@dataclass(frozen=True)
class NoCodec(Codec):
    """Codec of keys that are not stored, because the method holds them (`Method.holds_keys`): rows
    of no bytes."""

    name: str = "none"
    bits: ClassVar[int] = 0

    def __post_init__(self) -> None:
        pass  # users cannot give this name

    def bits_per_element(self, head_dim: int) -> float:
        return 0.0

    def row_bytes(self, head_dim: int) -> int:
        return 0

    def roundtrip(self, x: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        return packed.to(dtype)


@dataclass(frozen=True)
class SplitCodec:
    """Keys and values stored in different formats, the last tokens exact; sizes are means of the
    two.

    residual: number of last tokens whose values are exact, KIVI's R; 0 codes all. Their keys are
    exact too, unless keys are coded in groups of tokens: then R keys are coded at a time, after the
    step that completes them. Raises ValueError if R is no multiple of a group.
    """

    keys: RowCodec
    values: RowCodec
    residual: int = 0

    def __post_init__(self) -> None:
        if self.residual % self.keys.span or (self.keys.span > 1 and not self.residual):
            allowed = f"a multiple of the {self.keys.span} tokens of a group"
            raise ValueError(f"residual={self.residual}: must be {allowed}")

    @property
    def name(self) -> str:
        return f"{self.keys.name}/{self.values.name}"

    @property
    def bits(self) -> float:
        return (self.keys.bits + self.values.bits) / 2

    def bits_per_element(self, head_dim: int) -> float:
        return (self.keys.bits_per_element(head_dim) + self.values.bits_per_element(head_dim)) / 2

    def coded_values(self, cached: Count) -> Count:
        """Number of the first `cached` tokens whose values a row reads coded."""
        return (cached - self.residual) * (cached > self.residual)

    def coded_keys(self, cached: Count) -> Count:
        """Number of the first `cached` tokens whose keys a row reads coded."""
        if self.residual and self.keys.span > 1:
            return cached - cached % self.residual
        return self.coded_values(cached)

    def stored(self, cached: Count) -> Count:
        """Number of tokens that are read as stored: the values and the keys of their whole group
        are coded."""
        coded = self.coded_values(cached)
        return coded - coded % self.keys.span


AnyCodec = RowCodec | SplitCodec
"""Of a layer."""


class NamedLayers(NamedTuple):
    """Layers `first` to `last`, as methods count, and their codec. last: None for all that follow.
    words: how the user named them."""

    first: int
    last: int | None
    codec: AnyCodec
    words: str = ""

    def holds(self, layer: int) -> bool:
        """True if `layer` is one of them."""
        return self.first <= layer and (self.last is None or layer <= self.last)


@dataclass(frozen=True)
class LayerCodecs:
    """A codec for each layer: that of `named` layers, which do not overlap, else `others`."""

    others: AnyCodec
    named: tuple[NamedLayers, ...]

    @property
    def residual(self) -> int:
        """The most last tokens that a layer keeps exact."""
        return max(codec.residual for codec in every_codec(self))

    def of_layer(self, layer: int) -> AnyCodec:
        """The codec of a layer, as methods count."""
        for layers in self.named:
            if layers.holds(layer):
                return layers.codec
        return self.others


CacheCodec = AnyCodec | LayerCodecs
"""Of all layers under a method."""


def codec_at(codec: CacheCodec, layer: int) -> AnyCodec:
    """The codec of a layer, as methods count."""
    return codec.of_layer(layer) if isinstance(codec, LayerCodecs) else codec


def every_codec(codec: CacheCodec) -> list[AnyCodec]:
    """The codec, or those of all layers."""
    if not isinstance(codec, LayerCodecs):
        return [codec]
    return [codec.others, *(layers.codec for layers in codec.named)]


def mean_bits(codec: CacheCodec, layers: Sequence[int]) -> float:
    """Mean over the layers of the bits that an element counts without scales."""
    if not isinstance(codec, LayerCodecs):
        return codec.bits
    return fmean(codec.of_layer(layer).bits for layer in layers)


def without_keys(codec: CacheCodec | None) -> CacheCodec:
    """The codec of a cache that holds values only; None stores them as fp32, which is exact."""
    if isinstance(codec, LayerCodecs):
        named = []
        for layers in codec.named:
            named.append(layers._replace(codec=_values_alone(layers.codec)))
        return LayerCodecs(_values_alone(codec.others), tuple(named))
    return _values_alone(codec or Codec("fp32"))


def _values_alone(codec: AnyCodec) -> SplitCodec:
    return SplitCodec(NoCodec(), codec.values)


def plane_width(head_dim: int, bits: int) -> int:
    """Bytes of a row's codes, which is also the number of elements in a bit plane; even."""
    return -(-head_dim * bits // 16) * 2


def _planes(bits: int) -> tuple[int, ...]:
    """The bits of a code that are packed together, the low ones first."""
    return (2, 1) if bits == 3 else (bits,)


def code_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of 1, 2, 3, 4 or 8 bits, as `pack_codes` packs them."""
    return sum(plane_width(count, of_plane) for of_plane in _planes(bits))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Integer codes [..., count] as uint8 [..., `code_bytes`]; codes of 3 bits as their two low
    bits and then their high bit."""
    parts = []
    for of_plane in _planes(bits):
        parts.append(_pack_planes(codes & (2**of_plane - 1), of_plane))
        codes = codes >> of_plane
    return torch.cat(parts, dim=-1)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes in bytes of `pack_codes`: int32 [..., count]."""
    codes = packed.new_zeros((*packed.shape[:-1], count), dtype=torch.int32)
    begin, shift = 0, 0
    for of_plane in _planes(bits):
        end = begin + plane_width(count, of_plane)
        codes += _unpack_planes(packed[..., begin:end], of_plane, count, torch.int32) << shift
        begin, shift = end, shift + of_plane
    return codes


def _pack_planes(codes: Tensor, bits: int) -> Tensor:
    """fp32 codes [..., head_dim] as bytes [..., plane width]."""
    head_dim, per_byte = codes.shape[-1], 8 // bits
    width = plane_width(head_dim, bits)
    padded = pad(codes, (0, width * per_byte - head_dim)).to(torch.uint8)
    planes = padded.unflatten(-1, (per_byte, width))
    packed = planes[..., 0, :]
    for plane in range(1, per_byte):
        packed = packed | (planes[..., plane, :] << (plane * bits))
    return packed


def _unpack_planes(packed: Tensor, bits: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Bytes [..., plane width] as codes [..., head_dim] in `dtype`."""
    width = packed.shape[-1]
    codes = torch.empty(*packed.shape[:-1], head_dim, dtype=dtype, device=packed.device)
    for plane, start in enumerate(range(0, head_dim, width)):
        block = codes[..., start : start + width]
        shifted = packed >> (plane * bits) if plane else packed
        if (plane + 1) * bits < 8:  # else nothing lies above these bits
            shifted = shifted & (2**bits - 1)
        block.copy_(shifted[..., : block.shape[-1]])
    return codes


def hadamard(x: Tensor) -> Tensor:
    """`x` [..., head_dim] times the orthonormal Hadamard matrix in Sylvester's order, which is its
    own inverse.

    If head_dim is no power of two: in blocks of the largest power of two that divides it. Computed
    by butterflies, so that a row's bits do not depend on the rows beside it, as they may in a
    product of matrices.
    """
    block = x.shape[-1] & -x.shape[-1]
    rotated, half = x.unflatten(-1, (-1, block)), 1
    while half < block:
        first, second = rotated.unflatten(-1, (-1, 2, half)).unbind(-2)
        rotated = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return rotated.mul(block**-0.5).flatten(-2)
