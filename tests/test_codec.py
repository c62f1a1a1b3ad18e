"""Row codecs: exact semantics, error bounds, packed sizes, and `roundtrip` = `decode(encode)` bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.codec import CODEC_NAMES, FLOAT_DTYPES, INTEGER_BITS, ChannelCodec, Codec, SplitCodec, hadamard

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


def reference_roundtrip(x, bits, group_size):
    """The definition, one group at a time."""
    out = torch.empty_like(x)
    for row, out_row in zip(x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1]), strict=True):
        for start in range(0, len(row), group_size):
            group = row[start : start + group_size]
            lo = group.min()
            step = ((group.max() - lo) / (2**bits - 1)).half().float()
            lo = lo.half().float()
            values = lo.expand(len(group))
            if step > 0:
                values = ((group - lo) / step).round().clamp(0, 2**bits - 1) * step + lo
            out_row[start : start + group_size] = values
    return out


@settings(max_examples=60, deadline=None)
@given(integer_names, group_sizes, shapes, seeds, st.sampled_from([1e-4, 1.0, 300.0]))
def test_integer_codec_follows_its_definition(name, group_size, shape, seed, scale):
    x = rows(shape, seed, scale)
    codec = Codec(name, group_size)
    assert torch.equal(codec.roundtrip(x), reference_roundtrip(x, codec.bits, group_size))


@settings(max_examples=60, deadline=None)
@given(integer_names, group_sizes, shapes, seeds)
def test_error_is_half_a_step_plus_the_rounding_of_lo_and_step(name, group_size, shape, seed):
    x = rows(shape, seed)
    codec = Codec(name, group_size)
    error = (codec.roundtrip(x) - x).abs()
    for start in range(0, shape[-1], group_size):
        group = x[..., start : start + group_size]
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        step, levels = (high - low) / (2**codec.bits - 1), 2**codec.bits - 1
        rounding = (low - low.half()).abs() + levels * (step - step.half()).abs()
        bound = step.half().float() / 2 + rounding + 1e-6 * (1 + low.abs() + high.abs())
        assert (error[..., start : start + group_size] <= bound).all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CODEC_NAMES), group_sizes, shapes, seeds, st.sampled_from(sorted(FLOAT_DTYPES)), st.booleans())
def test_packed_rows_read_back_as_the_roundtrip(name, group_size, shape, seed, compute, turned):
    x = rows(shape, seed).to(FLOAT_DTYPES[compute])
    codec = Codec(name, group_size, "hadamard" if turned and name in INTEGER_BITS else None)
    packed = codec.encode(x)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], codec.row_bytes(shape[-1]))
    back = codec.decode(packed, shape[-1], x.dtype)
    assert back.dtype == x.dtype and torch.equal(back, codec.roundtrip(x))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_half_of_a_wider_row_and_a_strided_input_give_the_same(name):
    """K and V lie side by side in a slot, and a projection's K arrives as a transposed view."""
    codec = Codec(name)
    x = torch.randn(2, 5, 3, 96).transpose(1, 2)  # [batch, num_kv_heads, seq_len, head_dim]
    packed = codec.encode(x)
    slots = torch.cat([packed, packed], dim=-1)
    for half in slots.split(codec.row_bytes(96), dim=-1):
        assert torch.equal(codec.decode(half, 96, x.dtype), codec.roundtrip(x))
    assert torch.equal(codec.roundtrip(x), codec.roundtrip(x.contiguous()))


@pytest.mark.parametrize("name", sorted(INTEGER_BITS))
def test_a_constant_group_gives_its_value_rounded_to_fp16(name):
    x = torch.tensor([0.0, -3.14159, 1e-9, 65000.3])[:, None].expand(4, 64)
    assert torch.equal(Codec(name).roundtrip(x), x.half().float())


def test_roundtrip_leaves_its_input_alone():
    for name in CODEC_NAMES:
        x = rows((2, 3, 64), 0)
        before = x.clone()
        Codec(name).roundtrip(x)
        Codec(name).encode(x)
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("name", "head_dim", "row_bytes", "bits"),
    [
        ("fp32", 64, 256, 16),
        ("fp16", 128, 256, 16),
        ("bf16", 64, 128, 16),
        ("fp8", 64, 64, 8),
        ("int8", 64, 64 + 4, 8.5),
        ("int4", 128, 64 + 8, 4.5),
        ("int4", 32, 16 + 4, 5),
        ("int4", 96, 48 + 8, 4 + 2 / 3),  # a group of 64 and one of 32
        ("int2", 64, 16 + 4, 2.5),
        ("int1", 64, 8 + 4, 1.5),
    ],
)
def test_sizes_by_hand(name, head_dim, row_bytes, bits):
    codec = Codec(name, group_size=64)
    assert codec.row_bytes(head_dim) == row_bytes
    assert codec.bits_per_element(head_dim) == pytest.approx(bits)
    if name not in FLOAT_DTYPES:  # what is counted is what is stored
        assert codec.row_bytes(head_dim) * 8 == pytest.approx(head_dim * bits)


def test_bad_settings_name_the_setting_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"codec='int3'.*fp32, fp16, bf16, fp8, int8, int4, int2, int1"):
        Codec("int3")
    for group_size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"group_size=.*>= 1"):
            Codec("int4", group_size)
    with pytest.raises(ValueError, match="rotation=hadamard: needs an integer codec, not fp8"):
        Codec("fp8", rotation="hadamard")


@settings(max_examples=60, deadline=None)
@given(
    integer_names,
    st.sampled_from([1, 3, 4, 32]),
    st.integers(0, 3),
    st.integers(1, 100),
    seeds,
    st.sampled_from(sorted(FLOAT_DTYPES)),
    st.sampled_from([None, "hadamard"]),
)
def test_a_channel_is_coded_as_a_row_is(name, group_size, groups, head_dim, seed, compute, rotation):
    x = rows((2, 2, groups * group_size, head_dim), seed).to(FLOAT_DTYPES[compute])
    codec = ChannelCodec(name, group_size, rotation)
    packed = codec.encode(x)
    assert packed.shape == (*x.shape[:-1], codec.row_bytes(head_dim))
    assert torch.equal(codec.decode(packed, head_dim, x.dtype), codec.roundtrip(x))
    if rotation is None:
        assert torch.equal(codec.roundtrip(x), Codec(name, group_size).roundtrip(x.mT).mT)


def test_fp8_is_e4m3_that_saturates():
    x = torch.tensor([0.0, -1.0, 447.0, 449.0, -1e9, 1.0625, 2.0**-9, 2.0**-11, 464.0])
    expected = torch.tensor([0.0, -1.0, 448.0, 448.0, -448.0, 1.0, 2.0**-9, 0.0, 448.0])  # 1.0625 ties to even
    assert torch.equal(Codec("fp8").roundtrip(x), expected)
    assert SplitCodec(Codec("fp8"), Codec("fp16")).bits == 12


def sylvester(size):
    """The Hadamard matrix by its doubling rule."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize(("head_dim", "block"), [(1, 1), (16, 16), (64, 64), (128, 128), (96, 32), (80, 16), (7, 1)])
def test_the_rotation_is_the_orthonormal_hadamard_matrix_of_each_block(head_dim, block):
    x = torch.randn(5, 3, head_dim)
    expected = x.unflatten(-1, (-1, block)) @ sylvester(block).div(block**0.5)
    assert torch.allclose(hadamard(x), expected.flatten(-2), atol=1e-5)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


@pytest.mark.parametrize("name", sorted(INTEGER_BITS))
def test_a_rotated_codec_quantizes_what_is_rotated(name):
    x = rows((4, 6, 64), 3)
    plain, rotated = Codec(name, 32), Codec(name, 32, "hadamard")
    assert torch.equal(rotated.roundtrip(x), hadamard(plain.roundtrip(hadamard(x))))
    assert rotated.row_bytes(64) == plain.row_bytes(64) and rotated.bits_per_element(64) == plain.bits_per_element(64)


def test_a_rotation_tames_an_outlier():
    x = torch.randn(200, 64)
    x[:, 5] += 40
    plain, rotated = (
        float((codec.roundtrip(x) - x).norm()) for codec in (Codec("int4"), Codec("int4", 64, "hadamard"))
    )
    assert rotated < plain / 2
