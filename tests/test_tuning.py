"""How timings decide how rows cross the link, what is measured, and what is kept of it."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.offload.links import open_link
from harness.offload.memory import Tuning
from harness.speed import link_rate as rates
from harness.speed import tuning as measure
from harness.speed.link_rate import link_rate
from harness.speed.tuning import CLOSE, choose_gather, choose_min_copy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024


def test_the_fewest_programs_that_are_close_to_the_fastest_are_chosen():
    seconds = {
        (32, 128 * KIB): 1.6,
        (32, 256 * KIB): 1.2,
        (64, 256 * KIB): 1.02,
        (64, 512 * KIB): 1.01,
        (128, 512 * KIB): 1.0,
    }
    assert choose_gather(seconds) == (64, 256 * KIB)
    assert choose_gather({**seconds, (128, 1024 * KIB): 0.9}) == (128, 1024 * KIB)


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 128), st.integers(1, 2**20)), st.floats(1e-6, 1.0, allow_nan=False), min_size=1
    )
)
def test_what_is_chosen_is_close_to_the_fastest(seconds):
    chosen = choose_gather(seconds)
    assert seconds[chosen] <= CLOSE * min(seconds.values())
    assert all(pair >= chosen for pair, took in seconds.items() if took <= CLOSE * min(seconds.values()))


@pytest.mark.parametrize(
    ("kernel_s", "copy_s", "expected"),
    [
        ([1, 1, 1, 1], [4, 2, 0.9, 0.8], 16),
        ([1, 1, 1, 1], [0.9, 2, 0.9, 0.8], 16),  # once was chance
        ([1, 1, 1, 1], [0.9, 0.9, 0.9, 0.9], 4),
        ([1, 1, 1, 1], [4, 2, 2, 2], 64),  # never, as far as was measured
    ],
)
def test_copies_begin_where_the_kernel_is_never_faster_again(kernel_s, copy_s, expected):
    sizes = (4, 8, 16, 32)
    by_size = (dict(zip(sizes, seconds, strict=True)) for seconds in (kernel_s, copy_s))
    assert choose_min_copy(*by_size) == expected


def test_a_tile_is_a_programs_share():
    assert Tuning(64, 256 * KIB).tile_bytes == 4 * KIB


def test_every_candidate_is_measured_by_moving_all_of_its_rows(monkeypatch):
    """On the CPU, with a clock that reads what is moved: the kernel is fastest at 64 programs, and up to 8 KiB."""
    moved = []

    def seconds(move):
        options, arguments = move.keywords, move.args
        move()
        tuning, rows = options.get("tuning"), arguments[-1]
        moved.append(rows.numel())
        if rows.shape[-1] == measure.GATHERED[-1]:
            return 1.0 + (tuning.num_programs != 64) + (tuning.tile_bytes != 4096)
        return 1.0 if tuning else 8 * KIB / (rows.shape[2] * measure.COPIED_SLOT_BYTES)

    monkeypatch.setattr(measure, "_seconds", seconds)
    monkeypatch.setattr(measure, "GATHERED", (2, 64, 144))
    monkeypatch.setattr(measure, "COPIED_BYTES", 2**18)
    assert measure.measure_tuning(CPU) == Tuning(64, 256 * KIB, 8 * KIB)
    candidates = len(measure.NUM_PROGRAMS) * len(measure.TILE_BYTES)
    assert moved == [2 * 32 * 144] * candidates + [2**18] * 2 * len(measure.PIECE_BYTES)


@pytest.fixture
def measured(monkeypatch):
    """A CUDA device whose link is measured by a counter."""
    found = []

    def measure(device):
        found.append(device)
        return 5e10, Tuning(128, 512 * KIB, 64 * KIB)

    monkeypatch.setattr(rates, "_measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    return found


def test_the_tuning_is_measured_once_and_kept_beside_the_rate(tmp_path, measured):
    found = [link_rate(tmp_path, CUDA, None) for _ in range(2)]
    assert found[0] == found[1] and found[0].tuning == Tuning(128, 512 * KIB, 64 * KIB) and len(measured) == 1
    assert json.loads((tmp_path / "link.json").read_text()) == {
        "GPU": 5e10,
        "GPU, tuning": {"num_programs": 128, "bytes_in_flight": 512 * KIB, "min_copy_bytes": 64 * KIB},
    }


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[]",
        '{"GPU": 5e10}',
        '{"GPU": 5e10, "GPU, tuning": 3}',
        '{"GPU": 5e10, "GPU, tuning": {"num_programs": 64}}',
        '{"GPU": 5e10, "GPU, tuning": {"num_programs": 0, "bytes_in_flight": 1, "min_copy_bytes": 1}}',
        '{"GPU": 5e10, "GPU, tuning": {"num_programs": 64, "bytes_in_flight": "many", "min_copy_bytes": 1}}',
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path, measured, damaged):
    (tmp_path / "link.json").write_text(damaged)
    assert link_rate(tmp_path, CUDA, None).tuning.num_programs == 128 and len(measured) == 1
    assert link_rate(tmp_path, CUDA, None).tuning.num_programs == 128 and len(measured) == 1


def test_other_devices_stay_known(tmp_path, measured):
    (tmp_path / "link.json").write_text('{"other": 1e9}')
    link_rate(tmp_path, CUDA, None)
    assert set(json.loads((tmp_path / "link.json").read_text())) == {"other", "GPU", "GPU, tuning"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_tuned_within_seconds_of_its_time_and_its_link_carries_the_tuning():
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    tuning = measure.measure_tuning(CUDA)
    end.record()
    end.synchronize()
    assert tuning.num_programs in measure.NUM_PROGRAMS and tuning.tile_bytes in measure.TILE_BYTES
    assert measure.PIECE_BYTES[0] <= tuning.min_copy_bytes <= 2 * measure.PIECE_BYTES[-1]
    with open_link(CUDA, tuning=tuning) as link:
        assert link.tuning == tuning
