"""What a method may ask of a model family: keys before their positions."""

from __future__ import annotations

import pytest
import torch
from living import FAMILIES, largest_difference, tiny

from harness.model.attach import attach


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
