"""The rate of the link: what is measured, and what is kept of it."""

import json

import pytest
import torch

from harness.results.environment import processor
from harness.speed import link_rate as rates
from harness.speed.link_rate import default_bytes_per_s, link_rate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def measured(monkeypatch):
    """Devices whose links are measured by a counter."""
    found = []
    rate_of = {CUDA: 5e10, CPU: 6.2e10}
    monkeypatch.setattr(rates, "measure_copy_rate", lambda device: found.append(device) or rate_of[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    return found


def test_each_device_is_measured_once_and_kept(tmp_path, measured):
    assert link_rate(tmp_path, CPU, 3.0) == rates.LinkRate(3e9, None), "given"
    (tmp_path / "link.json").write_text('{"other": 1e9}')
    for device in (CUDA, CPU, CUDA, CPU):
        rate = link_rate(tmp_path, device, None)
        expected = (5e10, 5e10) if device == CUDA else (1e9, 6.2e10)
        assert (rate.bytes_per_s, rate.copy_bytes_per_s) == expected
    assert measured == [CUDA, CPU]
    assert json.loads((tmp_path / "link.json").read_text()) == {
        "other": 1e9, "GPU": 5e10, f"cpu, {processor()}": 6.2e10,
    }  # fmt: skip


def test_the_default_rate_is_the_copy_rate_over_the_papers_ratio():
    assert rates.measure_copy_rate() > 1e8
    assert default_bytes_per_s(768e9) == pytest.approx(12.4e9, rel=0.01)
