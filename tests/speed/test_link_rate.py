"""The rate of the link: what is measured, and what is kept of it."""

import json

import pytest
import torch

from harness.results.environment import processor
from harness.speed import link_rate as rates
from harness.speed.link_rate import link_rate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_device_is_measured_once_and_kept(tmp_path, monkeypatch):
    """The emulated link has 12.4 of 768 GB/s, the paper's ratio of link to memory."""
    measured = []
    rate_of = {CUDA: 5e10, CPU: 6.2e10}
    monkeypatch.setattr(rates, "measure_copy_rate", lambda device: measured.append(device) or rate_of[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    assert link_rate(tmp_path, CPU, 3.0) == rates.LinkRate(3e9, None), "given"
    (tmp_path / "link.json").write_text('{"other": 1e9}')
    for device in (CUDA, CPU, CUDA, CPU):
        expected = (5e10, 5e10) if device == CUDA else (pytest.approx(6.2e10 * 12.4 / 768, rel=0.01), 6.2e10)
        rate = link_rate(tmp_path, device, None)
        assert (rate.bytes_per_s, rate.copy_bytes_per_s) == expected
    assert measured == [CUDA, CPU]
    kept = json.loads((tmp_path / "link.json").read_text())
    assert kept == {"other": 1e9, "GPU": 5e10, f"cpu, {processor()}": 6.2e10}


def test_the_copy_rate_is_measured():
    assert rates.measure_copy_rate() > 1e8
    if torch.cuda.is_available():
        assert rates.measure_copy_rate(CUDA) > 1e9
