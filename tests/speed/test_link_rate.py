"""The rate of the link and how rows cross it: what timings decide, what is measured, and what is kept of it."""

import json

import pytest
import torch

from harness.decode.links import open_link
from harness.decode.memory import Tuning
from harness.results.environment import processor
from harness.speed import link_rate as rates
from harness.speed.link_rate import choose_gather, choose_min_copy, default_bytes_per_s, link_rate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024
TUNING = {"num_programs": 128, "bytes_in_flight": 512 * KIB, "min_copy_bytes": 64 * KIB}


def test_the_fewest_programs_that_are_close_to_the_fastest_are_chosen():
    pairs = [(32, 128 * KIB), (32, 256 * KIB), (64, 256 * KIB), (64, 512 * KIB), (128, 512 * KIB)]
    seconds = dict(zip(pairs, (1.6, 1.2, 1.02, 1.01, 1.0), strict=True))
    assert choose_gather(seconds) == (64, 256 * KIB)
    assert choose_gather({**seconds, (128, 1024 * KIB): 0.9}) == (128, 1024 * KIB)


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
    by_budget = (dict(zip((4, 8, 16, 32), seconds, strict=True)) for seconds in (kernel_s, copy_s))
    assert choose_min_copy(*by_budget) == expected


@pytest.fixture
def measured(monkeypatch):
    """Devices whose links are measured by a counter."""
    found = []
    rate_of = {CUDA: 5e10, CPU: 6.2e10}
    monkeypatch.setattr(rates, "measure_copy_rate", lambda device: found.append(device) or rate_of[device])
    monkeypatch.setattr(rates, "measure_tuning", lambda device: Tuning(**TUNING))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    return found


def test_each_device_is_measured_once_and_kept(tmp_path, measured):
    assert link_rate(tmp_path, CPU, 3.0) == rates.LinkRate(3e9, None), "given"
    (tmp_path / "link.json").write_text('{"other": 1e9}')
    for device in (CUDA, CPU, CUDA, CPU):
        rate = link_rate(tmp_path, device, None)
        expected = (5e10, 5e10, Tuning(**TUNING)) if device == CUDA else (1e9, 6.2e10, Tuning())
        assert (rate.bytes_per_s, rate.copy_bytes_per_s, rate.tuning) == expected
    assert measured == [CUDA, CPU]
    assert json.loads((tmp_path / "link.json").read_text()) == {
        "other": 1e9, "GPU": 5e10, "GPU, tuning": TUNING, f"cpu, {processor()}": 6.2e10,
    }  # fmt: skip


def test_the_default_rate_is_the_copy_rate_over_the_papers_ratio():
    assert rates.measure_copy_rate() > 1e8
    assert default_bytes_per_s(768e9) == pytest.approx(12.4e9, rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_tuned_and_its_link_carries_the_tuning():
    assert rates.measure_copy_rate(CUDA) > 1e9
    tuning = rates.measure_tuning(CUDA)
    assert tuning.num_programs in rates.NUM_PROGRAMS and tuning.tile_bytes in rates.TILE_BYTES
    assert rates.PIECE_BYTES[0] <= tuning.min_copy_bytes <= 2 * rates.PIECE_BYTES[-1]
    with open_link(CUDA, tuning=tuning) as link:
        assert link.tuning == tuning
