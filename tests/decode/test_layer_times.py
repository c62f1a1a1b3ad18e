"""When each layer selects: layers of one method that know their rows at different times, in replay and live."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
import torch
from torch.nn.functional import pad

from harness.checks.contract import CHECKS, Trial
from harness.decode.links import EmulatedLink
from harness.decode.session import LiveSession
from harness.model.attach import attach
from harness.model.calibration import calibrate
from harness.model.policies import policies_of
from methods.base import Method, Selection, State
from methods.extras import Calibrates
from methods.infinigen import InfiniGen
from methods.quest import Quest
from tests.cases import CASES, Case
from tests.living import PROMPTS, attached_with_link, largest_difference, replay, setup_of, tiny
from tests.mixed_models import mixed


@dataclass(frozen=True)
class Shared(Method):
    """As Kascade: an anchor chooses `share` of the tokens, and the layers behind it read what it chose.

    anchors: layers that read everything and choose by their true scores (anchor `kept`), or choose by the mean of their
    own query and of the keys (`own_query`).
    """

    share: float = 0.3
    anchors: tuple[int, ...] = (2,)
    anchor: str = "kept"

    when = "earlier_layer"
    title = "Shared"

    def when_of(self, layer):
        return self.anchor if layer in self.anchors else "earlier_layer"

    def tokens_read(self, row, layer):
        reads_all = layer in self.anchors and self.anchor == "kept"
        return row.cached if reads_all else max(1, int(self.share * row.cached))

    def max_tokens_read(self, row, layer):
        return self.tokens_read(row, layer)


class SharedState(State):
    """chosen: by the row's own slot, what the latest anchor chose, [batch, 1, slots]. means: of each key."""

    slot_tensors = {"means": 0.0}

    def start(self, calibration):
        self.chosen = {}

    def prompt(self, layer, query, key, value, rows):
        self.means[layer] = pad(key.mean(-1), (0, rows.num_slots - key.shape[2]))

    def append(self, layer, key, value, positions, slots):
        self.means[layer][:, :, slots] = key.mean(-1)

    def select(self, layer, rows):
        slots = rows.own_slots[0, 0].tolist()
        if layer in self.method.anchors:
            mask = self.best(layer, rows) & rows.visible()
            self.chosen |= dict(zip(slots, mask.unbind(2), strict=True))
            if self.method.anchor == "kept":
                return Selection(None, rows.positions)
        else:
            mask = torch.stack([self.chosen[slot] for slot in slots], 2)
        return Selection(mask, mask.sum(-1).double().mean(1))

    def best(self, layer, rows):
        if self.method.anchor == "kept":
            scores = rows.true_scores().mean((1, 2))
        else:
            keys = self.means[layer][..., : rows.slot_positions.shape[-1]].mean(1)
            scores = -(keys[:, None] - rows.query.mean((1, 3))[..., None]).abs()
        scores = scores.masked_fill(~rows.visible()[:, 0], -inf)
        count = (self.method.share * rows.positions.double()).long().clamp(min=1)
        least = scores.sort(-1, descending=True).values.gather(-1, count[..., None] - 1)
        return (scores >= least)[:, None]

    def fork(self, index, num_slots):
        child = super().fork(index, num_slots)
        child.chosen = {}
        return child


Shared.state = SharedState


SHARED = {
    "kept": Shared(dense_layers=2),
    "own query": Shared(anchor="own_query", dense_layers=2),
    "two anchors": Shared(anchors=(1, 3), dense_layers=1),
    "two anchors by own query": Shared(anchors=(0, 2), dense_layers=0, anchor="own_query"),
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


def model_of(name: str):
    return tiny(name) if name == "gqa" else mixed(name)


@pytest.mark.parametrize(
    ("model", "name"), [*PAIRS, ("gemma2", "no layer is dense"), ("qwen3_next", "by the step before")]
)
def test_layers_that_know_their_rows_at_different_times_keep_the_contract(model, name):
    method = SHARED[name] if name in SHARED else ROWS[name][0]
    with attach(model_of(model)) as attached, EmulatedLink(1e12) as link:
        trial = Trial(attached, link, setup_of(attached, Case(method)), PROMPTS["padded"])
        for check in CHECKS.values():
            check(trial)
        full = replay(attached, CASES["full"], PROMPTS["padded"]).logits
        changed = largest_difference(full, trial.replayed.logits)
    assert changed > 1e-2 or model != "gqa" or name in ROWS


@pytest.mark.parametrize("name", ROWS)
def test_each_layers_time_is_on_record(name):
    method, expected = ROWS[name]
    with attach(tiny("gqa")) as attached:
        policies = policies_of(attached, method)
    assert [policy.when for policy in policies if policy.kind == "method"] == expected
    assert [policy.kind for policy in policies] == ["full"] * (4 - len(expected)) + ["method"] * len(expected)
    assert [policy.number for policy in policies] == [0, 1, 2, 3]


# Calibration that compares layers


def test_true_scores_of_a_single_layer_lie_behind_no_link():
    method = Shared(anchor="true_scores")
    with attached_with_link("gqa") as (attached, link), pytest.raises(ValueError, match="placement=host: Shared"):
        LiveSession(attached, method, max_new_tokens=4, placement="host", link=link)


@dataclass(frozen=True)
class Ranked(Calibrates, Shared):
    """Measures of each layer how its mean score compares with that of the layer before."""

    def calibrate(self, query, key, geometry, earlier):
        mean = (query.mean(1).unflatten(0, (geometry.num_kv_heads, -1)).mean(1) * key.mean(1)).sum(-1)
        before = earlier[-1]["mean"] if earlier else torch.zeros_like(mean)
        return {"mean": mean, "growth": mean - before, "number": torch.tensor(len(earlier))}


@pytest.mark.parametrize("model", ["gqa", "gemma2"])
def test_a_calibration_sees_what_was_measured_of_the_layers_before(model):
    """Of the layers that see every token, in their order, whatever lies between them."""
    with attach(model_of(model)) as attached:
        found = calibrate(attached, Ranked(), list(range(3, 60)))
        geometry = attached.geometry
    assert found["number"].tolist() == [0, 1, 2, 3]
    assert found["mean"].shape == (4, geometry.num_kv_heads)
    assert torch.equal(found["growth"][0], found["mean"][0])
    assert torch.equal(found["growth"][1:], found["mean"][1:] - found["mean"][:-1])
