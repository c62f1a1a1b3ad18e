"""Kascade against plain rules: what anchors choose, what layers behind read, how anchors and heads are found."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from harness.model.attach import attach
from methods.base import Geometry, Lengths, TokenCounts
from methods.kascade import Kascade, best_anchors
from tests.cases import Case
from tests.living import calibration, setup_of, tiny
from tests.methods.test_rules import BATCH, Read, Sequence, check_output, replayed
from tests.reference import softmax
from tests.replaying import calibrated, token_ids

METHODS = {
    "one anchor": Kascade(budget=0.3, min_tokens=3, anchors=()),
    "two anchors": Kascade(budget=0.2, min_tokens=8, anchors=(2,)),
    "behind a dense layer": Kascade(budget=0.3, min_tokens=1, anchors=(1, 3), dense_layers=1),
    "from the second layer on": Kascade(budget=0.25, min_tokens=1, anchors=(), dense_layers=1),
}


def chosen_by(method: Kascade, geometry: Geometry, sequence: Sequence, prompt: int) -> Read:
    """The tokens of the largest weight, summed over the group, of each KV head and decode row of an anchor."""
    read: Read = []
    for kv, key in enumerate(sequence.key):
        group = sequence.query[kv * geometry.group : (kv + 1) * geometry.group]
        read.append([])
        for t in range(prompt, len(key)):
            weights = sum(softmax(key[: t + 1] @ query) for query in group[:, t])
            count = min(t, max(method.min_tokens, math.floor(method.budget * t)))
            read[-1].append({*sorted(range(t), key=lambda token, weights=weights: -weights[token])[:count]})
    return read


@pytest.mark.parametrize("model", ["gqa", "opt"])
@pytest.mark.parametrize("name", METHODS)
def test_layers_read_what_their_anchors_heads_chose(name, model):
    """An anchor reads every token, and attends to those that it chose; the first layer to all."""
    method = METHODS[name]
    geometry, found = replayed(tiny(model), Case(method))
    similarity = calibration(geometry.num_kv_heads, geometry.head_dim)["similarity"].numpy()
    anchor, chosen = None, {}
    for layer, sequences in found.items():
        is_anchor = layer == method.dense_layers or layer in method.anchors
        anchor = layer if is_anchor else anchor
        for at, ((prompt, length), sequence) in enumerate(zip(BATCH, sequences, strict=True)):
            every = [[{*range(t)} for t in range(prompt, length)]] * geometry.num_kv_heads
            if is_anchor:
                chosen[at] = chosen_by(method, geometry, sequence, prompt)
                wanted, attended = every, every if layer == 0 else chosen[at]
            else:
                heads = similarity[layer, anchor].argmax(-1)
                wanted = attended = [chosen[at][head] for head in heads]
            assert sequence.read == wanted, f"layer {layer}, prompt of {prompt}"
            check_output(geometry, sequence._replace(read=attended), prompt)


def test_heads_are_compared_by_the_attention_on_each_others_best_tokens():
    with attach(tiny("gqa")) as attached:
        found, seen = calibrated(attached, Kascade(), token_ids(50, 1))
        geometry = attached.geometry
    weights = np.zeros((len(seen), geometry.num_kv_heads, 25, 50))  # of the second half's rows
    for layer, (query, key) in enumerate(seen):
        for head, own in enumerate(query):
            for row in range(25):
                probs = softmax(geometry.scale * key[head // geometry.group, : row + 25] @ own[row + 25])
                weights[layer, head // geometry.group, row, : row + 25] += probs
    best = np.argsort(-weights, axis=-1)[..., : 50 // 16]
    for layer, theirs in enumerate(weights):
        for other in range(len(seen)):
            for head, own in enumerate(theirs):
                for of_other in range(geometry.num_kv_heads):
                    shares = [
                        own[row, best[other, of_other, row]].sum() / own[row, best[layer, head, row]].sum()
                        for row in range(25)
                    ]
                    wanted = np.mean(shares) if other <= layer else 0
                    assert float(found["similarity"][layer, other, head, of_other]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("first", "number"), [(0, 1), (0, 3), (2, 2), (1, 4), (3, 9)])
def test_the_best_anchors_are_those_of_trying_all(first, number):
    similarity = torch.rand(8, 8, generator=torch.Generator().manual_seed(first + 10 * number)).tolist()

    def total(anchors):
        return sum(similarity[layer][max(each for each in anchors if each <= layer)] for layer in range(first, 8))

    every = [(first, *others) for others in combinations(range(first + 1, 8), min(number, 8 - first) - 1)]
    assert best_anchors(similarity, first, number) == max(every, key=total)


def test_anchors_are_settled_by_the_calibration_and_change_no_budget():
    similarity = torch.zeros(6, 6, 2, 2)
    similarity[range(6), range(6)] = 1.0
    similarity[1, 0], similarity[3, 2], similarity[5, 4] = 0.1, 0.9, 0.8
    method = Kascade(num_anchors=4, budget=0.5, min_tokens=1)
    settled = method.settled({"similarity": similarity})
    assert settled.anchors == (0, 1, 2, 4) and settled.settled({"similarity": similarity}) is settled
    whens = ["kept", "kept", "kept", "earlier_layer", "kept", "earlier_layer"]
    assert [settled.when_of(layer) for layer in range(6)] == whens
    row = TokenCounts(100, 80, 120)
    for each in (method, settled):
        assert sum(each.tokens_read(row, layer) for layer in range(6)) == 4 * 100 + 2 * 50
    with attach(tiny("gqa")) as attached:
        of_run = setup_of(attached, Case(Kascade(num_anchors=2)))
        assert of_run.method.anchors is not None and len(of_run.method.anchors) == 2
    lengths = Lengths(torch.tensor([10]), torch.tensor([20]))
    with pytest.raises(ValueError, match=r"method\.anchors=\(0, 7\): must be layers from 0 to 5"):
        Kascade(anchors=(0, 7)).new_state(Geometry(6, 4, 2, 8, 1.0, "llama"), lengths, {"similarity": similarity})
