"""Samples by score against a plain draw, token by token, and against what they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from methods.base import EMPTY, Geometry, QueryRows
from methods.infinigen2 import coded_distances, decoded_distances
from methods.oracle import Oracle, OracleSampled
from methods.sampling import lasting_numbers

SLOTS, COUNT, HEADS = 60, 14, 3


def rows_of(positions: list[int], tokens: Tensor) -> QueryRows:
    """Rows of one sequence at these positions, over slots that hold `tokens` [1, 1, slots]."""
    at = torch.tensor([positions])
    return QueryRows(torch.empty(1, HEADS, len(positions), 0), at, at >= 0, tokens, at[:, None], torch.empty)


def in_order(slots: int) -> Tensor:
    return torch.arange(slots).view(1, 1, -1)


def plain_sample(score: list[float], numbers: list[float], count: int) -> dict[int, float]:
    """How many times each token that is read counts."""
    ranked = sorted(range(len(score)), key=lambda token: -score[token] / numbers[token])
    border = score[ranked[count]] / numbers[ranked[count]] if count < len(ranked) else 0.0
    return {token: max(1.0, border / score[token]) for token in ranked[:count]}


# Numbers


def test_lasting_numbers_belong_to_a_token():
    """Whatever the row and the slot: even, independent within a set, other numbers in another set, layer and seed."""
    tokens = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).view(1, 1, -1)
    found = []
    for seed, layer in ((0, 0), (0, 1), (7, 0)):
        of_one = lasting_numbers(seed, layer, rows_of([3000], tokens), 2)
        again = lasting_numbers(seed, layer, rows_of([3001, 3002], in_order(3000)), 2)
        assert of_one.shape == (1, 2, 1, 3000) == again.shape
        assert torch.equal(again[..., tokens.flatten()], of_one)
        found.append(again[0, :, 0].double())
    numbers = torch.cat(found)
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    assert float((numbers.mean(-1) - 0.5).abs().max()) < 0.03
    counts = (numbers.flatten() * 16).long().bincount(minlength=16).double() / numbers.numel()
    assert float((counts * 16 - 1).abs().max()) < 0.1
    for lag in (1, 2, 3):
        assert float((numbers[:, lag:] * numbers[:, :-lag]).mean()) == pytest.approx(0.25, abs=0.01)
    assert len({tuple(row.tolist()) for row in numbers}) == len(numbers)


# In a selection


def chosen(
    method: Oracle | OracleSampled, scores: Tensor, positions: list[int], tokens: Tensor, layer: int = 0, distances=None
):
    rows = rows_of(positions, tokens)
    geometry = Geometry(1, scores.shape[1] * HEADS, scores.shape[1], 4, 0.5, "llama")
    final = torch.tensor([SLOTS + 9])
    if isinstance(method, OracleSampled):
        return method.draw(layer, scores.clone(), rows, final, distances)
    return method.choose(scores.clone(), rows, final, geometry)


def test_a_coded_distance_is_within_half_a_step():
    distances = torch.logspace(-15, 15, 400, base=2.0)
    read = decoded_distances(coded_distances(distances)) / 2**16
    assert float((read / distances).log2().abs().max()) <= 1 / 16 + 1e-5
    extremes = decoded_distances(coded_distances(torch.tensor([0.0, 1e-30, 1e30, math.inf]))) / 2**16
    assert extremes.tolist() == pytest.approx([2.0**-16, 2.0**-16, 2.0**15.875, 2.0**15.875])


@pytest.mark.parametrize("far", [False, True])
def test_a_selection_samples_by_the_sum_of_probabilities(far):
    """Of every row by itself, tokens in any slot, some of them hidden; `far`: times the distances of their values."""
    method = OracleSampled(budget=0.25, seed=5)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(SLOTS, generator=generator).view(1, 1, -1)
    tokens[..., 7] = EMPTY
    scores = 2 * torch.randn(1, 2, HEADS, 2, SLOTS, generator=generator)
    positions = [40, 41]
    codes = torch.randint(0, 30, (1, 2, SLOTS), generator=generator, dtype=torch.uint8)
    distances = decoded_distances(codes)
    got = chosen(method, scores, positions, tokens, layer=4, distances=codes if far else None)
    numbers = lasting_numbers(5, 4, rows_of(positions, tokens), 2)
    for row, position in enumerate(positions):
        visible = tokens.flatten() < position
        count = math.floor(0.25 * int(position))
        assert got.num_read[0, row] == count == got.mask[0, 0, row].sum()
        for head in range(2):
            probs = scores[0, head, :, row].masked_fill(~visible, -math.inf).softmax(-1)
            score = probs.sum(0)
            if far:
                score = score * distances[0, head]
            slots = visible.nonzero().flatten().tolist()
            of_numbers = numbers[0, head, 0]
            times = plain_sample(score[slots].tolist(), of_numbers[slots].tolist(), count)
            mask = got.mask[0, head, row]
            assert mask.nonzero().flatten().tolist() == sorted(slots[token] for token in times)
            wanted = torch.zeros(SLOTS)
            wanted[[slots[token] for token in times]] = torch.tensor([*times.values()]).log()
            bias = got.bias[0, head, 0, row]
            torch.testing.assert_close(bias, wanted, rtol=0, atol=1e-4)


def test_nothing_is_biased_where_a_row_sees_no_token():
    method = OracleSampled()
    scores = torch.randn(1, 1, HEADS, 1, 4)
    found = chosen(method, scores, [0], in_order(4))
    assert not bool(found.mask.any()) and np.array_equal(found.bias.numpy(), np.zeros(found.bias.shape))
