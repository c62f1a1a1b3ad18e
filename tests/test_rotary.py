"""What a method may ask of a model family: keys before their positions."""

from __future__ import annotations

import pytest
import torch
from living import FAMILIES, largest_difference, tiny

from harness.contract import open_replay, token_batch
from harness.model.attach import Attached, attach
from harness.model.calibration import calibrate
from harness.model.families import tiny_family
from harness.setup import Setup
from methods.prompt_evicting import ExpectedAttention
from methods.shadowkv import ShadowKV
from methods.streaming import DuoAttention


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_come_off_and_on_again(family):
    with attach(tiny(family)) as attached:
        geometry = attached.geometry
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, geometry.num_kv_heads, 7, geometry.head_dim, generator=generator)
    positions = torch.randint(0, 300, (2, 7), generator=generator)
    placed = geometry.rotate(states, positions)
    assert largest_difference(geometry.rotate(placed, positions, inverse=True), states) < 1e-5
    assert torch.equal(placed, states) == (family == "opt")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_they_are_the_models_own(family):
    """Scores of placed queries and keys depend on the distance alone, and at position 0 nothing changes."""
    with attach(tiny(family)) as attached:
        geometry = attached.geometry
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(2, 1, 1, 1, geometry.head_dim, generator=generator)

    def score(at: int, of: int) -> torch.Tensor:
        return (geometry.rotate(query, torch.tensor([[at]])) * geometry.rotate(key, torch.tensor([[of]]))).sum()

    assert largest_difference(score(90, 70), score(31, 11)) < 1e-4
    assert largest_difference(score(90, 70), score(90, 60)) > 1e-3
    assert torch.allclose(geometry.rotate(query, torch.tensor([[0]])), query)


ASKS = {
    "duo": DuoAttention(sparsity=0.5, num_sinks=1, num_recent=4, num_exempt_layers=0),
    "expected": ExpectedAttention(num_exempt_layers=0),
    "shadowkv": ShadowKV(read_frac=0.4, num_exempt_layers=0),
}


@pytest.mark.parametrize("name", ASKS)
def test_each_layer_has_its_own_positions(name, monkeypatch):
    """SmolLM3 has layers without any: here the second and the fourth."""
    rotate, method, asked = Attached._rotate, ASKS[name], {}

    def listen(self, states, positions, inverse=False, layer=0):
        turned = rotate(self, states, positions, inverse, layer)
        asked[layer] = asked.get(layer, False) or not torch.equal(turned, states)
        return turned

    monkeypatch.setattr(Attached, "_rotate", listen)
    ids, real = token_batch((60,), 6)
    with attach(tiny_family("smollm3")) as attached:
        calibration = calibrate(attached, method, ids[0].tolist()) if method.needs_calibration else None
        session = open_replay(attached, Setup(method, None, calibration), real)
        session.prefill(ids[:, :60], real[:, :60])
        session.decode(ids[:, 60:], real[:, 60:])
    assert asked == {0: True, 1: False, 2: True, 3: False}
