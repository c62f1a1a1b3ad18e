"""The Triton kernels without a GPU: their machine code, compiled for several of them, and their values, interpreted."""

import importlib.util

import pytest
import torch
from aot import ARCHITECTURES, Binary, Launches, compile_launches
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import COUNTS, launch_lists, launch_narrow_moves, launch_wide_moves

from harness.offload import fetch as compact
from harness.offload.memory import Tuning

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels(name: str):
    """A module of kernels; conftest has them interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    return importlib.import_module(f"harness.offload.kernels.{name}")


# Machine code


def by_launch(binaries: list[Binary]) -> list[Binary]:
    """One binary of each architecture and launch, which every pair of `COUNTS` must share."""
    assert len(binaries) % len(COUNTS) == 0
    starts = range(0, len(binaries), len(COUNTS))
    for start in starts:
        digests = {binary.digest for binary in binaries[start : start + len(COUNTS)]}
        assert len(digests) == 1, f"{binaries[start].kernel}: compiled anew for other counts"
    return [binaries[start] for start in starts]


def check_registers(binary: Binary) -> None:
    assert binary.registers <= 64 and binary.spill_bytes == 0, binary


def check_moves(binaries: list[Binary], width: int) -> None:
    """Those of one architecture and row width: a gather, one by place and a scatter, first as they are warmed."""
    warmed, later = binaries[:3], binaries[3:]
    assert [binary.digest for binary in later] == [binary.digest for binary in warmed] * len(COUNTS), "compiled anew"
    for binary in warmed:
        check_registers(binary)
        assert binary.offset_bits == [64], binary
        lists = {"load 8"}  # the index, and the places
        assert set(binary.accesses) == {f"load {width}", f"store {width}"} | lists, binary


@pytest.fixture(scope="module")
def compiled() -> dict[Launches, list[Binary]]:
    """By one process."""
    kernels("rows")
    kernels("rows")
    return compile_launches({launch_wide_moves: ARCHITECTURES, launch_narrow_moves: (90,), launch_lists: (80,)})


def test_rows_are_moved_16_bytes_at_once_by_binaries_compiled_at_the_start(compiled):
    binaries = compiled[launch_wide_moves]
    each = len(binaries) // len(ARCHITECTURES)
    for start in range(0, len(binaries), each):
        check_moves(binaries[start : start + each], 16)
    wanted = Tuning().tile_bytes // (16 * 128)  # of a thread, under way at once
    assert {binary.accesses["load 16"] for binary in binaries} == {wanted}


def test_rows_of_other_widths_are_moved_8_or_4_bytes_at_once(compiled):
    binaries = compiled[launch_narrow_moves]
    half = len(binaries) // 2
    check_moves(binaries[:half], 8)
    check_moves(binaries[half:], 4)


def test_lists_are_made_by_one_binary_of_few_registers(compiled):
    binaries = by_launch(compiled[launch_lists])
    assert [binary.kernel for binary in binaries] == ["_list_slots", "_list_missing"]
    for binary in binaries:
        check_registers(binary)


# Values


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
@given(masks_and_residents(), st.sampled_from([4, 1024]))
def test_lists_are_those_of_the_cpu(case, block):
    module = kernels("rows")
    mask, resident = case
    room = resident.shape[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        assert torch.equal(module.indices(mask.to(DEVICE), room).cpu(), compact.indices(mask, room))
        missing, free, after = module.missing_rows(mask.to(DEVICE), resident.to(DEVICE))
    expected, expected_after = compact.missing_rows(mask, resident)
    assert torch.equal(missing.cpu(), expected.slots) and torch.equal(after.cpu(), expected_after)
    fetched = missing >= 0
    assert torch.equal(free[fetched].cpu(), expected.targets[fetched.cpu()])


def test_lists_take_a_mask_of_any_strides():
    module = kernels("rows")
    mask = (torch.rand(3, 40, 2) < 0.3).transpose(1, 2)
    assert torch.equal(module.indices(mask.to(DEVICE), 40).cpu(), compact.indices(mask, 40))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the address space of a file is the host's")
def test_rows_beyond_two_to_the_31_words_are_found(tmp_path):
    """Of a sparse file, which takes no memory: the last slots of either of two heads of 6 GiB. A word's number that
    wrapped at 32 bits would fall into the 8 GiB before."""
    capacity, slot_bytes, before = 6 * 2**30 // 512, 512, 8 * 2**30
    size = before + 2 * capacity * slot_bytes
    file = torch.from_file(str(tmp_path / "slots"), shared=True, size=size, dtype=torch.uint8)
    slots = file[before:].view(1, 2, capacity, slot_bytes)
    rows = torch.randint(256, (1, 2, 2, slot_bytes), dtype=torch.uint8)
    index = torch.tensor([[[capacity - 1, 0], [5, capacity - 1]]])
    module, back = kernels("rows"), torch.zeros_like(rows)
    module.scatter_rows(slots, index, rows, Tuning())
    module.gather_rows(slots, index, back, None, Tuning())
    assert torch.equal(back, rows)
    assert torch.equal(slots[0, 1, capacity - 1], rows[0, 1, 1])
