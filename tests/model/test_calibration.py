"""Calibration: the rotation is the SVD's, and is measured once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.prompts import cached_calibration, calibrate
from methods.full import Full
from methods.infinigen import InfiniGen
from tests.conftest import tiny
from tests.replaying import calibrated


@pytest.fixture(scope="module")
def text() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 256, (100,), generator=generator).tolist()


@pytest.mark.parametrize("model", [tiny("gqa"), tiny("opt")], ids=["gqa", "opt"])
def test_calibration_is_the_svd_of_the_groups_queries(model, text):
    with attach(model) as attached:
        measured, seen = calibrated(attached, InfiniGen(), text)
        geometry, rotation = attached.geometry, measured["rotation"].double().numpy()
    d = geometry.head_dim
    assert rotation.shape == (geometry.num_layers, geometry.num_kv_heads, d, d)
    for layer, (query, _) in enumerate(seen):
        for head, basis in enumerate(rotation[layer]):
            queries = query[head * geometry.group : (head + 1) * geometry.group].reshape(-1, d)
            assert len(queries) == geometry.group * len(text)
            assert np.allclose(basis.T @ basis, np.eye(d), atol=1e-5)
            _, singular, vectors = np.linalg.svd(queries, full_matrices=False)
            assert (singular[:-1] - singular[1:]).min() > 1e-4 * singular[0], "too close to compare vectors"
            overlap = np.abs((vectors.T * basis).sum(0))  # equal up to sign, in the same order
            assert np.allclose(overlap, 1, atol=1e-3), f"layer {layer}: {overlap.min()}"


def test_calibration_is_kept_and_a_damaged_one_made_anew(tiny_gqa, text, tmp_path):
    folder = tmp_path / "new" / "calibration"

    def rotation(method=None, ids=text):
        return cached_calibration(attached, method or InfiniGen(), ids, folder)["rotation"]

    with attach(tiny_gqa) as attached:
        with pytest.raises(UserError, match="^calibration: rotation of .* is not finite"):
            rotation(Measuring(power=float("nan")))
        assert not folder.exists(), "not kept"
        first = rotation()
        (file,) = folder.iterdir()
        file.write_bytes(file.read_bytes()[:-20])
        assert torch.equal(rotation(), first) and torch.equal(rotation(), first)
        for unheeded in (InfiniGen(alpha=2.0, partial_weight_ratio=0.5), InfiniGen(dense_layers=1)):
            assert torch.equal(rotation(unheeded), first)
        others = [rotation(ids=text[:50]), rotation(Measuring())]
        others += [rotation(Measuring(power=2.0)), rotation(Measuring(power=2.0, unheeded=3))]
        assert not torch.equal(others[0], first) and not torch.equal(others[1], others[2])
        assert len(list(folder.iterdir())) == 4, "one file for each that differs"
        assert torch.equal(others[3], others[2])
        assert torch.equal(others[2], calibrate(attached, Measuring(power=2.0), text)["rotation"])
    with attach(tiny("few")) as attached:
        assert len(rotation()) == 3 != len(first)


@dataclass(frozen=True)
class Measuring(Full):
    """Measures two things, one of them by a setting."""

    power: float = 1.0
    unheeded: int = 0

    calibration_settings = ("power",)

    def calibrate(self, query, key, geometry, earlier):
        return {"rotation": key.abs().pow(self.power).mean(1), "heads": query.mean((1, 2))}
