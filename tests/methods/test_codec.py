"""Codecs: each rule a second time, plainly; packed sizes; `roundtrip` = `decode(encode)` bit for bit."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.replay.setup import codec_of
from harness.run.compose import load
from harness.settings.codecs import codec_named
from methods.codecs.base import FLOAT_DTYPES, RowCodec, hadamard
from methods.codecs.blockgtq import BlockGtqCodec, allocated
from methods.codecs.floats import STORED_DTYPES, FloatCodec, Nvfp4Codec
from methods.codecs.ggml import GGML_BITS, GgmlCodec
from methods.codecs.integers import INTEGER_BITS, ChannelCodec, IntegerCodec, PairCodec, has_pairs
from methods.codecs.kvarn import KvarnCodec
from methods.codecs.split import SplitCodec, in_pairs
from methods.codecs.turbo import TURBO_BITS, TurboCodec, lloyd_max
from tests.cases import CASES
from tests.living import Crossed, attached_with_link, force, open_live
from tests.reference import plain_hadamard

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 200))
seeds = st.integers(0, 2**31)
integer_names = st.sampled_from(sorted(INTEGER_BITS))
group_sizes = st.sampled_from([1, 3, 8, 32, 64])


def rows(shape, seed, scale=1.0):
    """Gaussian rows around a random offset, a tenth of the rows constant."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale + torch.randn(1, generator=generator) * scale
    constant = torch.rand(*shape[:-1], 1, generator=generator) < 0.1
    return torch.where(constant, x[..., :1], x)


def coded(group: np.ndarray, bits: int) -> np.ndarray:
    """float32 numbers that share a minimum and a step, as they read back: the definition."""
    low = group.min()
    step = np.float32(np.float16((group.max() - low) / np.float32(2**bits - 1)))
    low = np.float32(np.float16(low))
    codes = np.clip(np.round((group - low) / (step or np.float32(1))), 0, 2**bits - 1)
    return codes * step + low


def per_token(row: np.ndarray, bits: int, size: int) -> np.ndarray:
    return np.concatenate([coded(row[at : at + size], bits) for at in range(0, len(row), size)])


@settings(max_examples=30, deadline=None)
@given(integer_names, group_sizes, shapes, seeds, st.sampled_from([1e-4, 1.0, 300.0]))
def test_integer_codec_follows_its_definition(name, group_size, shape, seed, scale):
    x = rows(shape, seed, scale)
    codec = IntegerCodec(name, group_size)
    expected = [per_token(row, codec.bits, group_size) for row in x.flatten(0, -2).numpy()]
    assert torch.equal(codec.roundtrip(x), torch.tensor(np.stack(expected)).view(shape))


def makers() -> list[RowCodec]:
    """Every codec, with groups that divide a row and that do not, rotated and not."""
    of_rows = [
        codec_named(name, group_size=size, rotation=rotation)
        for name in (*STORED_DTYPES, *INTEGER_BITS)
        for size in (1, 3, 8, 64)
        for rotation in (None, "hadamard")
    ]
    of_channels = [
        ChannelCodec(name, size, rotation)
        for name in INTEGER_BITS
        for size in (1, 4)
        for rotation in (None, "hadamard")
    ]
    of_blocks = [
        half
        for name in GGML_BITS
        for rotation in (None, "hadamard")
        for half in (GgmlCodec(name, rotation).keys, GgmlCodec(name, rotation).values)
    ]
    of_tiles = [
        KvarnCodec("kvarn4", 6),
        KvarnCodec("kvarn4", 6).values,
        KvarnCodec("kvarn2", 16).values,
        BlockGtqCodec("gtq3", 6),
        BlockGtqCodec("gtq2", 16),
    ]
    others = [Nvfp4Codec(), *(TurboCodec(name) for name in TURBO_BITS)]
    return [*of_rows, *of_channels, *of_blocks, *of_tiles, *others]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(makers()), shapes, seeds, st.sampled_from(sorted(FLOAT_DTYPES)))
def test_packed_rows_read_back_as_the_roundtrip(codec, shape, seed, compute):
    sets, tokens, head_dim = shape
    has_tiles = isinstance(codec, KvarnCodec | BlockGtqCodec)
    if has_tiles:
        head_dim += head_dim % 2  # pairs of channels
    x = rows((2, sets, tokens * codec.span, head_dim), seed)
    x[..., head_dim // 3] += 20  # a large channel and a row of zeros
    x[..., 0, :] = 0
    x = x.to(FLOAT_DTYPES[compute])
    before = x.clone()
    packed = codec.encode(x)
    assert packed.dtype == torch.uint8 and packed.shape == (*x.shape[:-1], codec.row_bytes(head_dim))
    back = codec.decode(packed, head_dim, x.dtype)
    assert back.dtype == x.dtype and torch.equal(back, codec.roundtrip(x)) and torch.equal(x, before)
    strided = torch.cat([x, x], -1)[..., :head_dim].transpose(0, 1)  # the same rows, laid out otherwise
    assert torch.equal(codec.encode(strided), packed.transpose(0, 1))
    first = 4 if isinstance(codec, FloatCodec) else 2  # where a value may begin in a slot
    behind = torch.cat([packed.new_zeros(*x.shape[:-1], first), packed], -1)[..., first:]
    assert torch.equal(codec.decode(behind, head_dim, x.dtype), back)
    one = slice((tokens - 1) * codec.span, None)  # the last group alone
    assert torch.equal(codec.encode(x[1:, :1, one]), packed[1:, :1, one])
    if has_tiles:
        unfinished = x[..., : codec.span - 1, :]
        assert torch.equal(codec.roundtrip(torch.cat([x, unfinished], -2))[..., x.shape[-2] :, :], unfinished)
        assert torch.equal(codec.roundtrip(unfinished), unfinished)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.sampled_from([4, 8, 32, 64]), st.integers(0, 3), seeds, st.sampled_from([1e-7, 1.0, 1e6]))
def test_pairs_read_back_as_int4(groups, group_size, tokens, seed, scale):
    head_dim = groups * group_size
    x = rows((2, 3, tokens, head_dim), seed, scale)
    plain, pairs = IntegerCodec("int4", group_size), PairCodec("int4", group_size)
    assert has_pairs(plain, head_dim)
    packed = pairs.encode(x)
    assert packed.shape == (*x.shape[:-1], plain.row_bytes(head_dim))
    expected = plain.decode(plain.encode(x), head_dim, torch.float32)
    assert torch.equal(pairs.decode(packed, head_dim, torch.float32), expected)
    behind = torch.cat([packed, packed], -1)[..., packed.shape[-1] :]
    assert torch.equal(pairs.decode(behind, head_dim, torch.float32), expected)


def test_rows_without_whole_pairs_stay_as_they_are():
    rotated = IntegerCodec("int4", rotation="hadamard")
    for codec in (IntegerCodec("int8"), rotated, ChannelCodec("int4"), FloatCodec("fp32")):
        assert not has_pairs(codec, 64)
    assert has_pairs(IntegerCodec("int4", 128), 64) and has_pairs(IntegerCodec("int4", 64), 128)
    assert not has_pairs(IntegerCodec("int4", 64), 96) and not has_pairs(IntegerCodec("int4", 2), 64)
    plain, pairs = IntegerCodec("int4", 64), PairCodec("int4", 64)
    assert in_pairs(plain, 64, 64) == pairs and in_pairs(plain, 64, 96) == plain
    split = SplitCodec(FloatCodec("fp32"), plain, residual=8)
    assert in_pairs(split, 96, 64) == SplitCodec(FloatCodec("fp32"), pairs, residual=8)


FOUR, KVARN4, KVARN2 = IntegerCodec("int4", 64), KvarnCodec("kvarn4"), KvarnCodec("kvarn2")
SIZES = [
    # A float counts as 16 bits at least
    (FloatCodec("fp32"), 64, 256, 16), (FloatCodec("bf16"), 64, 128, 16), (FloatCodec("fp8"), 64, 64, 8),
    # Two numbers of two bytes a group: of 96 elements groups of 64 and 32
    (IntegerCodec("int8", 64), 64, 64 + 4, 8.5), (FOUR, 128, 64 + 8, 4.5), (FOUR, 96, 48 + 8, 4 + 2 / 3),
    (IntegerCodec("int2", 64), 64, 16 + 4, 2.5), (IntegerCodec("int1", 64), 64, 8 + 4, 1.5),
    # vLLM's: a key of head_dim * bits / 8 + 2 bytes, a value of head_dim * bits / 8 + 4
    (TurboCodec("turbo4"), 128, 2 + 64, 4.125), (TurboCodec("turbo3"), 96, 2 + 24 + 12, 3 + 1 / 6),
    (TurboCodec("turbo2"), 128, 2 + 32, 2.125), (IntegerCodec("int4", 128), 128, 64 + 4, 4.25),
    # A scale of 4 bytes, one byte for 16 elements, filled up to an even number, and half a byte an element
    (Nvfp4Codec(), 128, 4 + 8 + 64, 4.75), (Nvfp4Codec(), 16, 4 + 2 + 8, 6.5),
    # Of a block of 32: a scale, in q5_1 a minimum too, in fp16, and 8, 5 or 4 bits an element; a whole last block
    (GgmlCodec("q8_0"), 64, 2 * 34, 8.5), (GgmlCodec("q5_1"), 64, 2 * 24, 6), (GgmlCodec("q4_0"), 64, 2 * 18, 4.5),
    (GgmlCodec("q4_0"), 80, 3 * 18, 5.4),
    # Two numbers for each channel of keys or token of values and one for the other side, over 128 rows
    (KVARN4, 64, 32 + 4, 4.5), (KVARN4.values, 64, 32 + 6, 4.75), (KVARN2.values, 128, 32 + 6, 2.375),
    # A part of the tile's widths, a length of each width, codes
    (BlockGtqCodec("gtq2"), 64, 2 + 10 + 16, 3.5), (BlockGtqCodec("gtq3"), 128, 2 + 12 + 48, 3.875),
]  # fmt: skip


def test_sizes_by_hand():
    for codec, head_dim, row_bytes, bits in SIZES:
        assert codec.row_bytes(head_dim) == row_bytes, (codec, head_dim)
        assert codec.bits_per_element(head_dim) == pytest.approx(bits), (codec, head_dim)


def test_fp8_is_e4m3_that_saturates():
    x = torch.tensor([0.0, -1.0, 447.0, 449.0, -1e9, 1.0625, 2.0**-9, 2.0**-11, 464.0])
    expected = torch.tensor([0.0, -1.0, 448.0, 448.0, -448.0, 1.0, 2.0**-9, 0.0, 448.0])  # 1.0625 ties to even
    assert torch.equal(FloatCodec("fp8").roundtrip(x), expected)
    assert SplitCodec(FloatCodec("fp8"), FloatCodec("fp16")).bits == 12


@pytest.mark.parametrize(("head_dim", "block"), [(1, 1), (16, 16), (64, 64), (96, 32), (80, 16), (7, 1)])
def test_the_rotation_is_the_orthonormal_hadamard_matrix_of_each_block(head_dim, block):
    x, matrix = torch.randn(5, 3, head_dim), torch.tensor(plain_hadamard(head_dim)).float()
    assert torch.allclose(hadamard(x), x @ matrix, atol=1e-5)
    assert int((matrix[0] != 0).sum()) == block
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


def test_a_rotated_codec_quantizes_what_is_rotated():
    x = rows((4, 6, 64), 3)
    plain, rotated = IntegerCodec("int4", 32), IntegerCodec("int4", 32, "hadamard")
    assert torch.equal(rotated.roundtrip(x), hadamard(plain.roundtrip(hadamard(x))))
    assert rotated.row_bytes(64) == plain.row_bytes(64) and rotated.bits_per_element(64) == plain.bits_per_element(64)


# TurboQuant

MAX_1960 = {
    2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}  # fmt: skip
"""Max, Quantizing for Minimum Distortion (1960), table I: the positive outputs for 4, 8 and 16 levels."""


@pytest.mark.parametrize("bits", MAX_1960)
def test_the_centroids_are_those_that_max_published(bits):
    centroids, positive = lloyd_max(bits), MAX_1960[bits]
    assert centroids == pytest.approx([*(-each for each in reversed(positive)), *positive], abs=5e-4)


def turbo_row(row: np.ndarray, bits: int) -> np.ndarray:
    """One row as it reads back, by the rule: rotate, take the nearest centroids of the direction, keep the length."""
    size, turn = len(row), plain_hadamard(len(row))
    centroids = np.array(lloyd_max(bits))
    length = np.sqrt((row * row).sum())
    direction = turn @ row / (length or 1)
    near = centroids[np.abs(np.sqrt(size) * direction[:, None] - centroids).argmin(1)]
    return turn @ (near * length / np.sqrt((near * near).sum()))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(TURBO_BITS)), shapes, seeds, st.sampled_from([1e-2, 1.0, 300.0]))
def test_turboquant_follows_its_definition(name, shape, seed, scale):
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    expected = np.stack([turbo_row(row, TURBO_BITS[name]) for row in x.flatten(0, -2).double().numpy()])
    found = TurboCodec(name).roundtrip(x).flatten(0, -2).double().numpy()
    lengths = np.sqrt((expected**2).sum(-1))
    off = np.sqrt(((found - expected) ** 2).sum(-1))
    assert (off > 2e-3 * lengths + 1e-6).sum() <= 1  # a coordinate midway between two centroids may fall to either side
    assert np.allclose(np.sqrt((found**2).sum(-1)), lengths, rtol=2e-3, atol=1e-6)


# NVFP4

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E4M3 = [mantissa * 2.0**-9 for mantissa in range(8)]
E4M3 += [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
E4M3.pop()  # not a number


def nearest_code(number: float, levels) -> int:
    """Of two levels as near as one another the one with the even code."""
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - number), code % 2))


def nvfp4_row(row: np.ndarray) -> list[np.float32]:
    """One row as it reads back, by the rule, an element at a time in float32."""
    one_row, six = np.float32(np.abs(row).max()), np.float32(6)
    tensor_scale = one_row / np.float32(6 * 448)
    back = []
    for begin in range(0, len(row), 16):
        block = row[begin : begin + 16]
        wanted = np.float32(np.abs(block).max()) / six / (tensor_scale or np.float32(1))
        step = np.float32(E4M3[nearest_code(float(min(wanted, np.float32(448))), E4M3)]) * tensor_scale
        for number in block:
            code = nearest_code(float(np.abs(number) / step), E2M1) if step else 0
            back.append(np.copysign(np.float32(E2M1[code]) * step, number))
    return back


@settings(max_examples=30, deadline=None)
@given(shapes, seeds, st.sampled_from([1e-30, 1e-3, 1.0, 300.0]))
def test_nvfp4_follows_its_definition(shape, seed, scale):
    x = rows(shape, seed, scale)
    x[..., ::7] *= 100  # blocks of unequal sizes
    x[0, 0] = 0
    expected = np.array([nvfp4_row(row) for row in x.flatten(0, -2).numpy()], np.float32)
    assert torch.equal(Nvfp4Codec().roundtrip(x), torch.tensor(expected).view(shape))


def test_a_number_midway_between_two_levels_goes_to_the_even_one():
    """The largest element of each block is 6, so that all steps are 1."""
    halves = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0.76])
    expected = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 1.0])
    assert torch.allclose(Nvfp4Codec().roundtrip(halves), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 6e4, 1e5, 3e38])
def test_rows_beyond_fp16_read_back_as_finite_numbers(scale, dtype):
    """The numbers of a group saturate: nothing is NaN, packed or not."""
    for codec in makers():
        x = rows((2, 2, 2 * codec.span, 64), seed=7).clamp(-1, 1).mul(scale).to(dtype)
        x[..., 0], x[..., 1] = -scale, scale
        back = codec.roundtrip(x)
        assert back.isfinite().all(), codec
        assert torch.equal(codec.decode(codec.encode(x), 64, dtype), back), codec


# llama.cpp's cache types


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(GGML_BITS)), st.integers(1, 4), seeds, st.sampled_from([1e-4, 1.0, 300.0]))
def test_bytes_and_numbers_are_those_of_gguf(name, blocks, seed, scale):
    x, codec, kind = rows((3, 5, 32 * blocks), seed, scale), GgmlCodec(name), GGMLQuantizationType[name.upper()]
    x[..., 0, :], x[..., 1, :9] = 0, 20 * scale
    packed = codec.encode(x)
    expected = quants.quantize(x.numpy(), kind)
    assert torch.equal(packed, torch.from_numpy(expected)) and packed.shape[-1] == codec.row_bytes(32 * blocks)
    back = torch.from_numpy(quants.dequantize(expected, kind))
    assert torch.equal(codec.decode(packed, 32 * blocks, torch.float32), back) and torch.equal(codec.roundtrip(x), back)


@pytest.mark.parametrize(
    ("head_dim", "of_keys", "of_values"),
    [(64, 64, 64), (128, 128, 64), (192, 64, 64), (256, 256, 64), (96, 1, 1), (80, 1, 1)],
)
def test_keys_are_rotated_as_a_whole_and_values_in_blocks_of_64(head_dim, of_keys, of_values):
    """PR ggml-org/llama.cpp#21038: only where 64 divides the size of a head."""
    x = torch.randn(4, 6, head_dim)
    plain, rotated = GgmlCodec("q4_0"), GgmlCodec("q4_0", "hadamard")
    for half, block in ((rotated.keys, of_keys), (rotated.values, of_values)):
        expected = hadamard(plain.roundtrip(hadamard(x, at_most=block)), at_most=block)
        assert torch.equal(half.roundtrip(x), expected)


def test_a_method_of_llama_cpp_rotates_keys_and_values():
    codec = codec_of(load(["method=q4_0"]))
    assert codec.keys == GgmlCodec("q4_0", "hadamard") and codec.values == GgmlCodec("q4_0", "hadamard", True)
    split = codec_of(load(["method=full", "codec=q8_0", "value_codec=q4_0", "rotation=hadamard"]))
    assert split == SplitCodec(GgmlCodec("q8_0", "hadamard"), GgmlCodec("q4_0", "hadamard", True))
    assert codec_of(load(["method=full", "codec=q8_0"])).rotation is None


# KVarN


def balanced(tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of the columns and of the rows, in logarithms as the authors add them."""

    def imbalance(current: np.ndarray) -> float:
        spread = [current.std(axis, ddof=1) for axis in (0, 1)]
        return sum(each.max() / max(each.min(), 1e-8) for each in spread)

    of_columns, of_rows = np.zeros((1, tile.shape[1])), np.zeros((tile.shape[0], 1))
    best = (imbalance(tile), of_columns, of_rows)
    current = tile
    for _ in range(16):
        deviation = np.clip(current.std(0, ddof=1, keepdims=True), 1e-3, 1e3)
        of_columns = np.clip(of_columns + np.log(deviation), -0.3, 10)
        current = tile / np.exp(of_columns) / np.exp(of_rows)
        deviation = np.clip(current.std(1, ddof=1, keepdims=True), 1e-3, 1e3)
        of_rows = np.clip(of_rows + np.log(deviation), -0.3, 10)
        current = tile / np.exp(of_columns) / np.exp(of_rows)
        if imbalance(current) <= best[0]:
            best = (imbalance(current), of_columns, of_rows)
    return np.exp(best[1]), np.exp(best[2])


def kvarn_tile(tile: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile whose rows have a minimum and a step, as it reads back, and the step of each element."""
    of_columns, of_rows = balanced(tile)
    even = tile / of_columns / of_rows
    low = even.min(1, keepdims=True)
    step = np.maximum((even.max(1, keepdims=True) - low) / (2**bits - 1), 1e-10)
    codes = np.clip(np.round((even - low) / step), 0, 2**bits - 1)
    half = [np.float64(np.float16(each)) for each in (of_rows * step, of_rows * low, of_columns)]
    return (codes * half[0] + half[1]) * half[2], step * of_rows * of_columns


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["kvarn4", "kvarn2"]), st.booleans(), st.sampled_from([8, 16, 30]), st.integers(2, 40), seeds)
def test_kvarn_follows_its_definition(name, of_values, size, head_dim, seed):
    x = torch.randn(2, 3 * size, head_dim, generator=torch.Generator().manual_seed(seed))
    x[..., head_dim // 2] *= 12
    x[..., size + 1, :] *= 30
    codec = KvarnCodec(name, size, of_values)
    found = hadamard(codec.roundtrip(x)).unflatten(1, (3, size)).flatten(0, 1).double().numpy()
    turned = hadamard(x).unflatten(1, (3, size)).flatten(0, 1).double().numpy()
    for tile, back in zip(turned, found, strict=True):
        oriented = tile if of_values else tile.T
        expected, step = kvarn_tile(oriented, codec.bits)
        off = np.abs((back if of_values else back.T) - expected)
        # A number midway between two codes may fall to either side.
        assert (off > 0.02 * step + 2e-3 * np.abs(expected)).mean() < 0.02


# Block-GTQ


def greedy(energy: np.ndarray, mean_bits: int, most_bits: int) -> np.ndarray:
    bits = np.ones(len(energy), int)
    for _ in range(len(energy) * (mean_bits - 1)):
        gains = np.where(bits < most_bits, energy * 4.0**-bits, -1)
        bits[gains.argmax()] += 1
    return bits


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3]), st.integers(1, 40), seeds)
def test_the_next_bit_goes_to_the_largest_gain(mean_bits, pairs, seed):
    energy = torch.randn(3, pairs, generator=torch.Generator().manual_seed(seed)).mul(4).exp()
    found = allocated(energy, mean_bits, mean_bits + 3)
    expected = [greedy(each.numpy().astype(np.float64), mean_bits, mean_bits + 3) for each in energy]
    assert np.array_equal(found.numpy(), expected) and (found.sum(-1) == mean_bits * pairs).all()


def test_blockgtq_follows_its_definition():
    """One tile, a width at a time: gather its channels, rotate them, nearest centroids of the direction, the length."""
    scale = torch.tensor([20.0, 7, 3, 1.5, 1, 0.7, 0.5, 0.3, 0.2]).repeat(2)
    x = torch.randn(16, 18, generator=torch.Generator().manual_seed(1)) * scale
    energy = x.square().unflatten(-1, (2, 9)).sum((0, 1))
    widths = greedy(energy.numpy().astype(np.float64), 3, 6)
    assert len(set(widths)) > 2
    expected = torch.zeros_like(x)
    for width in set(widths):
        pairs = np.flatnonzero(widths == width)
        channels = np.stack([pairs, pairs + 9], 1).ravel()
        power = 2 ** int(np.log2(len(channels)))
        turned = x[:, channels].clone()
        turned[:, :power] = hadamard(turned[:, :power])
        if power < len(channels):
            turned[:, -power:] = hadamard(turned[:, -power:])
        length = turned.norm(dim=1, keepdim=True)
        centroids = torch.tensor(lloyd_max(int(width)))
        normal = turned / length * len(channels) ** 0.5
        near = centroids[(normal.unsqueeze(-1) - centroids).abs().argmin(-1)]
        back = near * (length / near.norm(dim=1, keepdim=True)).half()
        if power < len(channels):
            back[:, -power:] = hadamard(back[:, -power:])
        back[:, :power] = hadamard(back[:, :power])
        expected[:, channels] = back
    found = BlockGtqCodec("gtq3", 16).roundtrip(x)
    assert ((found - expected).abs() > 2e-3 * x.abs().amax()).float().mean() < 0.02


# What crosses the link (test_rules.py has what the rows read)

GROUPED = {
    # Keys per channel in groups of 4 tokens, the last 8 tokens exact: codes, and 4 groups of 4 bytes
    "kivi": ([16, 16, 16, 16, 20, 20, 20, 20, 24, 24], 2 * (16 * 4 // 8 + 16)),
    # Tiles of 8 tokens: a key 8 + 72 / 4, a value 8 + 48 / 4, filled up to a multiple of 4
    "kvarn": ([24] * 8 + [32] * 2, 48),
}
"""By codec, the tokens that are stored of 24 to 33 cached ones, and bytes of a coded key and value."""


@pytest.mark.parametrize("name", GROUPED)
def test_groups_leave_the_device_as_a_whole(name):
    stored, coded_slot = GROUPED[name]
    cached, heads, exact_slot = range(24, 34), 2, 2 * 16 * 4
    with (
        attached_with_link("gqa") as (attached, link),
        closing(open_live(attached, CASES[name], placement="host", link=link)) as session,
        Crossed() as crossed,
    ):
        force(session, (24,), 10)
        loaded = exact_slot * sum(cached) + coded_slot * sum(stored)
        assert int(session.traffic.loaded.num_bytes) == heads * 2 * loaded
        written = exact_slot * 10 + coded_slot * (stored[-1] - stored[0])
        assert int(session.traffic.written.num_bytes) == heads * 2 * written
        session.drain()  # the last rows may be under way
        assert crossed.written.total() == heads * 2 * (exact_slot * 34 + coded_slot * stored[-1])
        on_device = [2 * (n - s) / n / 4 for s, n in zip(stored, cached, strict=True)]
        assert session.reads.device_frac - session.reads.budget == pytest.approx(np.mean(on_device))
        if name == "kivi":
            width = (4 + 32 / 4) / 16
            of_link = [(2 + 2 * width * s / n) / 4 for s, n in zip(stored, cached, strict=True)]
            assert session.reads.budget == pytest.approx(np.mean(of_link))
            ring = heads * (8 + 4 + 1) * (exact_slot + coded_slot)
            assert [cache.device_bytes for cache in session.caches] == [0, 0, ring, ring]
