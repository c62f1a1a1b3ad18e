"""TriAttention's calibration: the planes in which positions turn a head, and the centres of queries in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.model.attach import attach
from harness.model.policies import new_state
from harness.model.prompts import calibrate
from methods.base import Lengths
from methods.triattention import TriAttention, magnitude, planes, turned
from tests.conftest import tiny
from tests.replaying import calibrated, token_ids
from tests.tiny_models import tiny_model

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MODELS = {
    "llama": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "rope_parameters": HALF},  # half of a head is turned
    "glm": {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5},  # and in pairs of neighbours
    "gpt_neox": {},
    "gemma3_text": {  # local layers turn by other angles
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
    },
}


@pytest.mark.parametrize("family", MODELS)
def test_planes_turn_a_head_as_the_model_does(family):
    """At any position, in each layer that a method governs."""
    with attach(tiny_model(family, **MODELS[family])) as attached:
        geometry = attached.geometry
        states = torch.randn(1, 3, 1, geometry.head_dim, generator=torch.Generator().manual_seed(2))
        for layer in range(geometry.num_layers):
            partner, turn = planes(geometry, layer, states)
            assert torch.equal(partner[partner], torch.arange(geometry.head_dim)) and bool(turn.any())
            for position in (0, 1, 37, 300):
                placed = geometry.rotate(states, torch.tensor([[position]]), layer=layer)
                found = turned(states.double(), states[..., partner].double(), turn * position)
                assert (found - placed).abs().max() < 1e-4, (layer, position)
                lengths = magnitude(placed, partner) - magnitude(states, partner)
                assert lengths.abs().max() < 1e-5, "a position changes no plane's length"


def test_centres_and_spreads_are_means_of_complex_queries_without_positions():
    with attach(tiny("gqa")) as attached:
        found, seen = calibrated(attached, TriAttention(), token_ids(40, seed=3))
        geometry = attached.geometry
    half = geometry.head_dim // 2
    angle = 10000 ** -(np.arange(half) / half)
    for layer, (queries, _) in enumerate(seen):
        for head, rows in enumerate(queries):
            turned_back = [(row[:half] + 1j * row[half:]) * np.exp(-1j * angle * t) for t, row in enumerate(rows)]
            mean, size = np.mean(turned_back, 0), np.mean(np.abs(turned_back), 0)
            centre, spread = found["centre"][layer, head].numpy(), found["spread"][layer, head].numpy()
            assert np.allclose(centre, [*mean.real, *mean.imag], atol=1e-5)
            assert np.allclose(spread, [*(size - np.abs(mean)), *[0] * half], atol=1e-5)
        assert torch.allclose(found["turn"][layer], torch.tensor([*-angle, *angle]), rtol=1e-6)


def test_a_model_without_rotary_positions_is_refused_in_one_line():
    method = TriAttention()
    lengths = Lengths(torch.tensor([20]), torch.tensor([200]))
    with attach(tiny("opt")) as attached:
        measured = calibrate(attached, method, token_ids(30))
        with pytest.raises(ValueError) as refusal:
            new_state(attached, method, lengths, measured)
    line = "method.offset_max_length=65536: must be used with rotary positions, which turn the centres: model family "
    assert str(refusal.value) == f"{line}'opt' has none in layers that see all tokens"
