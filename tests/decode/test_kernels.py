"""The Triton kernels against the torch code, interpreted where there is no GPU, and compiled for several GPUs."""

from contextlib import closing

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness.decode import store
from harness.decode.gpu_cache import missing_rows
from harness.decode.step import attend_by_scores
from harness.decode.store import KeyValue, RowFormat
from harness.model.attached import Attached
from harness.model.attention import with_rest
from methods import compiled as switch
from methods.attention import Softmax
from methods.base import Rest
from methods.codecs.base import FLOAT_DTYPES
from methods.codecs.floats import FloatCodec
from methods.codecs.integers import ChannelCodec, IntegerCodec
from methods.codecs.split import SplitCodec
from tests import aot
from tests.aot import ARCHITECTURES, COUNTS, Binary, Launches, compile_launches
from tests.cases import CASES, Case
from tests.living import TOLERANCE, attached_with_link, force, open_live

pytest.importorskip("triton")
from harness.decode.kernels import codes, rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = settings(max_examples=12, phases=(Phase.explicit, Phase.generate))  # the interpreter is too slow to shrink in
CODECS = (IntegerCodec("int4"), IntegerCodec("int2"))
DTYPES = [torch.float32, torch.float16]
if DEVICE.type == "cuda":  # the interpreter cuts numbers off where a GPU rounds them
    DTYPES.append(torch.bfloat16)

shapes = st.fixed_dictionaries(
    {
        "codec": st.builds(
            IntegerCodec, st.sampled_from(["int8", "int4", "int2", "int1"]), st.sampled_from([64, 32, 16, 5])
        ),
        "head_dim": st.sampled_from([64, 128, 96, 80, 17]),
        "dtype": st.sampled_from(DTYPES),
        "batch": st.integers(1, 2),
        "num_kv_heads": st.integers(1, 2),
        "group": st.sampled_from([1, 3]),
        "seed": st.integers(0, 2**31),
    }
)


@pytest.fixture
def by_kernels(monkeypatch):
    """The kernels serve the tensors of these tests, in few programs."""
    monkeypatch.setattr(switch, "COMPILED", {DEVICE.type})
    monkeypatch.setattr(codes, "PROGRAMS", 4)


def make(case, num_rows: int, dtype: torch.dtype) -> tuple[RowFormat, KeyValue]:
    """A format, and random rows of it, the heads behind the tokens as a projection gives them."""
    torch.manual_seed(case["seed"])
    batch, heads, head_dim = (case[name] for name in ("batch", "num_kv_heads", "head_dim"))
    states = 3 * torch.randn(2, batch, num_rows, heads, head_dim, device=DEVICE).to(dtype)
    states[:, :, :1] = states[:, :, :1, :, :1]  # a row of one value: its step is 0
    return RowFormat(case["codec"], head_dim, dtype), KeyValue(*states.transpose(2, 3))


@QUICK
@given(case=shapes, num_rows=st.integers(0, 3))
def test_rows_are_packed_as_by_torch(case, num_rows):
    row_format, states = make(case, num_rows, case["dtype"])
    codec = row_format.codec
    expected = row_format.pack(*(each.cpu() for each in states))
    expected_keys = codec.encode(states.keys.cpu())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "COMPILED", {DEVICE.type})
        assert torch.equal(row_format.pack(*states).cpu(), expected)
        assert torch.equal(codec.encode(states.keys).cpu(), expected_keys)
        other = ChannelCodec(codec.name)  # its groups lie along other axes
        assert not other.is_plain


@QUICK
@given(
    case=shapes,
    num_rows=st.sampled_from([0, 1, 7, 33, 50]),
    programs=st.sampled_from([1, 3, 8]),
    hidden=st.sampled_from([None, "some", "heads", "all"]),
    biased=st.booleans(),
    estimated=st.booleans(),
    exact=st.booleans(),
)
def test_attention_is_that_of_the_torch_code(case, num_rows, programs, hidden, biased, estimated, exact):
    if exact:
        name = next(name for name, dtype in FLOAT_DTYPES.items() if dtype == case["dtype"])
        case = {**case, "codec": FloatCodec(name)}
    row_format, states = make(case, num_rows + 1, case["dtype"])
    batch, heads, group = (case[name] for name in ("batch", "num_kv_heads", "group"))
    query = torch.randn(batch, 1, heads * group, case["head_dim"], device=DEVICE).to(case["dtype"]).transpose(1, 2)
    visible = None
    if hidden is not None:
        of_heads = heads if hidden == "heads" else 1
        visible = torch.rand(batch, of_heads, 1, num_rows, device=DEVICE) < (0 if hidden == "all" else 0.5)
    bias = torch.randn(batch, heads, group, 1, num_rows, device=DEVICE) if biased else None
    packed = row_format.pack(*states)
    cached, own = packed[:, :, :num_rows], KeyValue(*(each[:, :, num_rows:] for each in states))
    softmax, rest, shares = Softmax(0.1), None, []
    if estimated:
        log_mass = torch.randn(batch, heads, group, 1, device=DEVICE)
        log_mass[:1] = -torch.inf  # of no token
        rest = Rest(None, torch.randn(batch, heads, 1, 1, case["head_dim"], device=DEVICE), log_mass)

    def edit(scores):
        if bias is not None:
            scores[..., :num_rows] += bias
        if rest is not None:
            shares.append(rest.beside(softmax.log_total(scores)))

    expected = attend_by_scores(query, [row_format.unpack(cached)], own, visible, softmax, edit)
    expected = with_rest(expected, *(shares or [None]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "ELEMENTS", 2048)
        patch.setattr(codes, "PROGRAMS", programs)
        of_group = None if visible is None else visible.unsqueeze(2)
        got = codes.attend(query, cached, own, of_group, bias, 0.1, None if exact else case["codec"], rest)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}[case["dtype"]]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_formats_that_the_kernels_do_not_know_are_for_torch():
    def known(codec, device="cuda", **shape) -> bool:
        return RowFormat(codec, 64, torch.float16, **shape).has_kernels(torch.device(device))

    assert known(IntegerCodec("int4")) and known(IntegerCodec("int4"), value_dim=64)
    assert not known(IntegerCodec("int4"), "cpu") and not known(IntegerCodec("int4"), value_dim=32)
    others = (
        FloatCodec("fp16"),
        IntegerCodec("int8", rotation="hadamard"),
        ChannelCodec("int4", 4),
        SplitCodec(*CODECS),
    )
    assert not any(map(known, others))


def decoded(attached: Attached, case: Case, **options) -> torch.Tensor:
    """Logits of few steps after short prompts."""
    with closing(open_live(attached, case, 2, **options)) as session:
        return force(session, (6, 4), 2)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs the session on the CPU")
def test_live_decoding_by_the_kernels(by_kernels, monkeypatch):
    """With selections and a bias."""
    case, served, attend = Case(CASES["biased"].method, IntegerCodec("int4")), [], codes.attend
    monkeypatch.setattr(codes, "attend", lambda *args: served.append(1) or attend(*args))
    with attached_with_link("few") as (attached, link):
        on_host = decoded(attached, case, placement="host", link=link)
        calls = len(served)
        on_device = decoded(attached, case, placement="device")
        assert len(served) == 2 * calls > 0 and torch.equal(on_host, on_device)
        monkeypatch.setattr(switch, "COMPILED", set())
        expected = decoded(attached, case, placement="device")
    torch.testing.assert_close(on_host, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs the session on the CPU")
def test_a_gpu_cache_is_attended_to_by_the_kernels(by_kernels, monkeypatch):
    served, attend = [], codes.attend
    monkeypatch.setattr(codes, "attend", lambda *args: served.append(1) or attend(*args))
    with attached_with_link("few") as (attached, link):
        options = {"placement": "host", "link": link, "gpu_cache": 1.5}
        got = decoded(attached, CASES["infinigen"], **options)
        assert served
        monkeypatch.setattr(switch, "COMPILED", set())
        expected = decoded(attached, CASES["infinigen"], **options)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@st.composite
def masks_and_residents(draw):
    """A mask [batch, 1 or heads, slots], at most `room` of each head, and what is in its kept buffer."""
    batch, heads, slots, room = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 3), (1, 40), (1, 20)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shared = draw(st.booleans())
    ranks = torch.rand(batch, 1 if shared else heads, slots, generator=generator).argsort(-1).argsort(-1)
    mask = ranks < torch.randint(0, room + 1, (*ranks.shape[:2], 1), generator=generator)
    there = torch.rand(batch, heads, slots, generator=generator).argsort(-1)
    there = torch.nn.functional.pad(there, (0, room), value=-1)[..., :room]
    resident = there.masked_fill(torch.rand(there.shape, generator=generator) < 0.3, -1)
    return mask.expand(-1, heads, -1), resident


@settings(max_examples=20)
@given(masks_and_residents(), st.sampled_from([4, 1024]), st.sampled_from([1, 3]))
def test_lists_are_those_of_the_cpu(case, block, parts):
    mask, resident = case
    room = resident.shape[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK", block)
        patch.setattr(rows, "parts_of", lambda *_: parts)
        listed, number = rows.indices(mask.to(DEVICE), room)
        expected, num_listed = store.indices(mask, room)
        assert torch.equal(listed.cpu(), expected) and int(number.sum()) == num_listed
        age = torch.rand(resident.shape, generator=torch.Generator().manual_seed(int(mask.sum()))).argsort(-1)
        tokens = torch.arange(mask.shape[-1], 0, -1).int().expand(len(mask), 1, -1)
        most = max(1, int(mask.sum(-1).max()))
        given = mask, tokens, resident, age, torch.tensor([5])
        there = [each.clone().to(DEVICE) for each in given]
        missing, targets, present, number = rows.missing_rows(*there, most)
    expected, expected_targets, expected_present, num_missing = missing_rows(*given, most)
    assert torch.equal(missing.cpu(), expected) and int(number.sum()) == num_missing
    assert torch.equal(present.cpu(), expected_present)
    assert all(torch.equal(each.cpu(), other) for each, other in zip(there, given, strict=True))
    fetched = missing >= 0
    assert torch.equal(targets[fetched].cpu(), expected_targets[fetched.cpu()])


# Machine code, compiled by one process


@pytest.fixture(scope="module")
def compiled() -> dict[Launches, list[Binary]]:
    one_each = {
        aot.launch_narrow_moves: 90,
        aot.launch_lists: 80,
        aot.launch_attention: 89,
        aot.launch_methods: 90,
        aot.launch_long_rows: 90,
        aot.launch_samples: 80,
        aot.launch_rest: 90,
    }
    asked = {launches: (arch,) for launches, arch in one_each.items()}
    return compile_launches({aot.launch_wide_moves: ARCHITECTURES} | asked)


def check_moves(binaries: list[Binary]) -> None:
    """Those of one architecture and row width: a gather, one by place and a scatter, for each number of rows."""
    first = binaries[:3]
    assert [binary.digest for binary in binaries] == [binary.digest for binary in first] * len(COUNTS), "compiled anew"
    assert all(binary.offset_bits == [64] for binary in first), "a host's cache has more bytes than 32 bits count"


def test_rows_are_moved_by_the_binaries_of_the_first_step(compiled):
    each = 3 * len(COUNTS)
    for launches, times in ((aot.launch_wide_moves, len(ARCHITECTURES)), (aot.launch_narrow_moves, 2)):
        assert len(compiled[launches]) == times * each
        for start in range(0, times * each, each):
            check_moves(compiled[launches][start : start + each])


@pytest.mark.parametrize(
    ("launches", "times", "kinds"),
    [
        (aot.launch_lists, 2 * len(COUNTS), 2),
        (aot.launch_attention, 9, 5),
        (aot.launch_methods, 16, 8),
        (aot.launch_long_rows, 24, 12),
        (aot.launch_samples, 17, 8),
        (aot.launch_rest, 8, 4),
    ],
)
def test_the_kernels_are_compiled_once_for_all_numbers(compiled, launches, times, kinds):
    binaries = compiled[launches]
    assert len(binaries) == times
    assert len({(binary.kernel, binary.digest) for binary in binaries}) == kinds


def test_every_kernel_that_is_launched_is_compiled(compiled):
    names = {binary.kernel for binaries in compiled.values() for binary in binaries}
    assert names == aot.launched_kernels() and len(names) >= 17
