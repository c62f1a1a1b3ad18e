"""Calibration: the rotation is the SVD's, and is measured once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import reference as plain
import torch

from harness.errors import UserError
from harness.model.attach import attach
from harness.model.calibration import cached_calibration, calibrate
from harness.model.tiny import tiny_model
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


def test_calibration_is_kept_and_a_damaged_one_made_anew(tiny_gqa, text, tmp_path, monkeypatch):
    calls = []

    def count_call(attached, method, ids):
        calls.append(ids)
        return calibrate(attached, method, ids)

    monkeypatch.setattr("harness.model.calibration.calibrate", count_call)

    infinigen = InfiniGen()

    def rotation(ids=text, fingerprint="a" * 64, method=infinigen):
        return cached_calibration(attached, method, ids, fingerprint, tmp_path / "new" / "calibration")["rotation"]

    with attach(tiny_gqa) as attached:
        first = rotation()
        assert torch.equal(rotation(), first) and len(calls) == 1
        (file,) = (tmp_path / "new" / "calibration").iterdir()
        whole = file.read_bytes()
        for damage in (b"", b"not a tensor", whole[:-20]):
            file.write_bytes(damage)
            calls.clear()
            assert torch.equal(rotation(), first) and len(calls) == 1
            assert torch.equal(rotation(), first) and len(calls) == 1
        calls.clear()
        assert not torch.equal(rotation(ids=text[:50]), first)
        rotation(fingerprint="b" * 64)
        assert len(calls) == 2, "another text or other weights need another calibration"
        assert len(list((tmp_path / "new" / "calibration").iterdir())) == 3, "something is left lying about"
        calls.clear()
        for method in (InfiniGen(alpha=2.0, partial_weight_ratio=0.5), InfiniGen()):
            assert torch.equal(rotation(method=method), first) and not calls, "settings it does not heed make it anew"


@dataclass(frozen=True)
class Measuring(Full):
    """Measures two things, one of them by a setting."""

    power: float = 1.0
    unheeded: int = 0

    calibration_settings = ("power",)

    def calibrate(self, query, key, geometry):
        return {"rotation": key.abs().pow(self.power).mean(1), "heads": query.mean((1, 2))}


@dataclass(frozen=True)
class MeasuringToo(Measuring):
    """The same code under another name."""


def test_another_method_or_another_setting_that_it_heeds_is_another_file(tiny_gqa, text, tmp_path):
    def files() -> int:
        return len(list(tmp_path.iterdir()))

    with attach(tiny_gqa) as attached:

        def measured(method):
            return cached_calibration(attached, method, text, "a" * 64, tmp_path)

        found = measured(Measuring())
        assert {name: tuple(each.shape) for name, each in found.items()} == {"rotation": (4, 2, 16), "heads": (4, 4)}
        again = measured(Measuring(unheeded=3, num_exempt_layers=1))
        assert files() == 1 and all(torch.equal(again[name], found[name]) for name in found)
        assert not torch.equal(measured(Measuring(power=2.0))["rotation"], found["rotation"]) and files() == 2
        assert torch.equal(measured(MeasuringToo())["rotation"], found["rotation"]) and files() == 3
        assert set(measured(InfiniGen())) == {"rotation"} and files() == 4
        direct = calibrate(attached, Measuring(power=2.0), text)
        kept = measured(Measuring(power=2.0))
        assert files() == 4 and all(torch.equal(kept[name], direct[name]) for name in direct)


def test_a_calibration_that_is_not_finite_is_refused_and_not_kept(tiny_gqa, text, tmp_path):
    with attach(tiny_gqa) as attached, pytest.raises(UserError, match="^calibration: rotation of .* is not finite"):
        cached_calibration(attached, Measuring(power=float("nan")), text, "a" * 64, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_number_of_threads_leaves_no_trace(text):
    """Of a model wide enough that its products are shared among threads."""
    model = tiny_model("llama", hidden_size=512, num_key_value_heads=2, intermediate_size=1024)
    found, seen = [], []

    class Spying(InfiniGen):
        def calibrate(self, query, key, geometry):
            seen.append(torch.get_num_threads())
            return super().calibrate(query, key, geometry)

    with attach(model) as attached:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            try:
                found.append(calibrate(attached, Spying(), text * 4)["rotation"])
                assert torch.get_num_threads() == threads, "put back"
            finally:
                torch.set_num_threads(1)
    assert set(seen) == {1}
    assert all(torch.equal(each, found[0]) for each in found)
