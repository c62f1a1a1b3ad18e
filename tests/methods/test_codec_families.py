"""llama.cpp's cache types byte for byte, KVarN's tiles and Block-GTQ's keys: each rule a second time, plainly."""

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
from methods.codecs.base import FLOAT_DTYPES, hadamard
from methods.codecs.blockgtq import BlockGtqCodec, allocated
from methods.codecs.ggml import GGML_BITS, GgmlCodec
from methods.codecs.kvarn import KvarnCodec
from methods.codecs.split import SplitCodec
from methods.codecs.turbo import lloyd_max
from tests.cases import CASES
from tests.living import Crossed, attached_with_link, force, open_live

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(sorted(FLOAT_DTYPES))


def rows(shape, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Gaussian rows with a large channel, a large token, a constant row and a row of zeros."""
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., shape[-1] // 3] += 20 * scale
    x[..., shape[-2] // 2, :] *= 9
    x[..., 0, :] = 0.7 * scale
    x[..., 1, :] = 0
    return x


# llama.cpp's cache types


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(GGML_BITS)), st.integers(1, 4), seeds, st.sampled_from([1e-4, 1.0, 300.0]))
def test_bytes_and_numbers_are_those_of_gguf(name, blocks, seed, scale):
    x, codec, kind = rows((3, 5, 32 * blocks), seed, scale), GgmlCodec(name), GGMLQuantizationType[name.upper()]
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


def test_a_tiles_bytes_cross_the_link_once_it_is_full():
    """Of 24 to 33 cached tokens the last 0 to 7 stay on the device; keys and values leave it 8 tokens at a time."""
    cached = range(24, 34)
    stored = [24] * 8 + [32] * 2
    heads, exact_slot = 2, 2 * 16 * 4
    coded_slot = 48  # a key 8 + 72 / 4, a value 8 + 48 / 4, filled up to a multiple of 4
    with (
        attached_with_link("gqa") as (attached, link),
        closing(open_live(attached, CASES["kvarn"], placement="host", link=link)) as session,
        Crossed() as crossed,
    ):
        force(session, (24,), 10)
        loaded = exact_slot * sum(cached) + coded_slot * sum(stored)
        assert int(session.traffic.loaded.num_bytes) == heads * 2 * loaded
        session.drain()
        assert crossed.written.total() == heads * 2 * (exact_slot * 34 + coded_slot * 32)
        on_device = [2 * (n - s) / n / 4 for s, n in zip(stored, cached, strict=True)]
        assert session.reads.device_frac - session.reads.budget == pytest.approx(np.mean(on_device))


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
