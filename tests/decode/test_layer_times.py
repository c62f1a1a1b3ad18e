"""When each layer selects: layers of one method that know their rows at different times, in replay and live."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from harness.checks.contract import CHECKS
from harness.checks.two_ways import Trial
from harness.decode.links import EmulatedLink
from harness.decode.session import LiveSession
from harness.model.attach import attach
from harness.model.policies import policies_of
from harness.model.prompts import calibrate
from methods.full import Full
from methods.infinigen import InfiniGen
from methods.kascade import Kascade
from methods.quest import Quest
from tests.cases import Case, Following
from tests.living import PROMPTS, attached_with_link, setup_of, tiny
from tests.tiny_models import mixed

SHARED = {
    "kept": Kascade(budget=0.3, min_tokens=1, anchors=(), dense_layers=2),
    "own query": Following(budget=0.3, page_size=3, anchors=(2,), dense_layers=2),
    "two anchors": Kascade(budget=0.3, min_tokens=1, anchors=(3,), dense_layers=1),
    "two anchors by own query": Following(budget=0.3, page_size=3, anchors=(0, 2), dense_layers=0),
}
ROWS = {  # and methods whose layers select at several times, with these times
    "no layer is dense": (InfiniGen(dense_layers=0), ["own_query", *["previous_layer"] * 3]),
    "all by their own query": (InfiniGen(dense_layers=1, when="own_query"), ["own_query"] * 3),
    "by the step before": (InfiniGen(dense_layers=0, when="previous_step"), ["previous_step"] * 4),
    "quest": (Quest(page_size=3, dense_layers=0, when="previous_layer"), ["own_query", *["previous_layer"] * 3]),
}
BETWEEN = ["gemma2", "gpt_oss", "qwen3_next", "deepseek_v3"]
"""Models in which other kinds of layer lie between."""
PAIRS = [*(("gqa", name) for name in (*SHARED, *ROWS)), *zip(BETWEEN, SHARED, strict=True)]


@pytest.mark.parametrize(
    ("model", "name"), [*PAIRS, ("gemma2", "no layer is dense"), ("qwen3_next", "by the step before")]
)
def test_layers_that_know_their_rows_at_different_times_keep_the_contract(model, name):
    method = SHARED[name] if name in SHARED else ROWS[name][0]
    with attach(tiny(model) if model == "gqa" else mixed(model)) as attached, EmulatedLink(1e12) as link:
        trial = Trial(attached, link, setup_of(attached, Case(method)), PROMPTS["padded"])
        for check in CHECKS.values():
            check(trial)


@pytest.mark.parametrize("name", ROWS)
def test_each_layers_time_is_on_record(name):
    method, expected = ROWS[name]
    with attach(tiny("gqa")) as attached:
        policies = policies_of(attached, method)
    assert [policy.when for policy in policies if policy.kind == "method"] == expected
    assert [policy.kind for policy in policies] == ["full"] * (4 - len(expected)) + ["method"] * len(expected)
    assert [policy.number for policy in policies] == [0, 1, 2, 3]


class ByTrueScores(Following):
    def when_of(self, layer):
        return "true_scores" if layer in self.anchors else "earlier_layer"


def test_true_scores_of_a_single_layer_lie_behind_no_link():
    with attached_with_link("gqa") as (attached, link), pytest.raises(ValueError, match="placement=host: "):
        LiveSession(attached, ByTrueScores(), max_new_tokens=4, placement="host", link=link)


@dataclass(frozen=True)
class Ranked(Full):
    """Measures of each layer how its mean key compares with that of the layer before."""

    def calibrate(self, query, key, geometry, earlier):
        mean = key.mean((1, 2))
        before = earlier[-1]["mean"] if earlier else torch.zeros_like(mean)
        return {"mean": mean, "growth": mean - before}


def test_a_calibration_sees_what_was_measured_of_the_layers_before():
    """Of the layers that see every token, in their order, whatever lies between them."""
    with attach(mixed("gemma2")) as attached:
        found = calibrate(attached, Ranked(), list(range(3, 60)))
        assert found["mean"].shape == (4, attached.geometry.num_kv_heads)
    assert torch.equal(found["growth"], found["mean"].diff(dim=0, prepend=torch.zeros_like(found["mean"][:1])))
