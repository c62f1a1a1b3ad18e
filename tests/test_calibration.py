"""Calibration: the rotation is the SVD's, and is measured once."""

from __future__ import annotations

import numpy as np
import pytest
import reference as plain
import torch

from harness.model.attach import attach
from harness.model.calibration import cached_calibration, calibrate
from methods.base import Geometry
from methods.full import Full
from methods.infinigen import InfiniGen


@pytest.fixture(scope="module")
def text() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 256, (100,), generator=generator).tolist()


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_gqa", "tiny_opt", "tiny_qwen3", "tiny_phi3", "tiny_gpt_neox"])
def test_calibration_is_the_svd_of_the_groups_queries(fixture, text, request):
    model = request.getfixturevalue(fixture)
    with attach(model) as attached:
        rotation = calibrate(attached, InfiniGen(), text[:-1])["rotation"].double().numpy()
        geometry = attached.geometry
    reference = plain.Reference(model, Full(), final_length=len(text), prefill_len=len(text) - 1)
    with torch.inference_mode():
        reference.run(text)
    d = geometry.head_dim
    assert rotation.shape == (geometry.num_layers, geometry.num_kv_heads, d, d)
    for layer, heads in enumerate(reference.heads):
        for basis, head in zip(rotation[layer], heads, strict=True):
            queries = np.array([query for row in head.prompt_queries for query in row])
            assert len(queries) == geometry.group * (len(text) - 1)
            assert np.allclose(basis.T @ basis, np.eye(d), atol=1e-5)
            _, singular, vectors = np.linalg.svd(queries, full_matrices=False)
            assert (singular[:-1] - singular[1:]).min() > 1e-4 * singular[0], "too close to compare vectors"
            overlap = np.abs((vectors.T * basis).sum(0))  # equal up to sign, in the same order
            assert np.allclose(overlap, 1, atol=1e-3), f"layer {layer}: {overlap.min()}"
            keys = np.array(head.keys)
            skewed = (queries @ basis) @ (keys @ basis).T
            assert np.abs(skewed - queries @ keys.T).max() < 1e-4, "skewing changes the full scores"


def test_a_text_shorter_than_head_dim_still_gives_a_rotation(tiny_llama, text):
    with attach(tiny_llama) as attached:
        rotation = calibrate(attached, InfiniGen(), text[:5])["rotation"]  # 5 queries of 16 elements
    identity = torch.eye(16).expand_as(rotation)
    assert torch.allclose(rotation.transpose(-1, -2) @ rotation, identity, atol=1e-5)


def test_calibration_is_kept_and_a_damaged_one_made_anew(tiny_gqa, text, tmp_path, monkeypatch):
    calls = []

    def count_call(attached, method, ids):
        calls.append(ids)
        return calibrate(attached, method, ids)

    monkeypatch.setattr("harness.model.calibration.calibrate", count_call)

    def rotation(ids=text, fingerprint="a" * 64, method=InfiniGen()):
        return cached_calibration(attached, method, ids, fingerprint, tmp_path / "new" / "calibration")["rotation"]

    with attach(tiny_gqa) as attached:
        first = rotation()
        assert torch.equal(rotation(), first) and len(calls) == 1
        (file,) = (tmp_path / "new" / "calibration").iterdir()
        for damage in (b"", b"not a tensor", file.read_bytes()[:-20]):
            file.write_bytes(damage)
            calls.clear()
            assert torch.equal(rotation(), first) and len(calls) == 1
            assert torch.equal(rotation(), first) and len(calls) == 1
        calls.clear()
        assert not torch.equal(rotation(ids=text[:50]), first)
        rotation(fingerprint="b" * 64)
        assert len(calls) == 2, "another text or other weights need another calibration"
        assert len(list((tmp_path / "new" / "calibration").iterdir())) == 3, "something is left lying about"
