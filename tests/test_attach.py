"""Attaching to a model: refusals, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CASES, Case
from living import FAMILIES, largest_difference, tiny
from replaying import (
    LENGTH,
    PROMPT,
    assert_close,
    every_model,
    open_session,
    run,
    run_one,
    run_ragged,
    token_ids,
)
from transformers import AttentionInterface, AttentionMaskInterface

from harness import replay as passes
from harness.contract import open_replay, token_batch
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.calibration import calibrate
from harness.model.families import tiny_family
from harness.model.tiny import tiny_model
from harness.setup import Setup
from methods.prompt_evicting import ExpectedAttention
from methods.shadowkv import ShadowKV

# Order of calls, refusals


@pytest.mark.parametrize("name", ["h2o", "infinigen"])
def test_a_method_that_leaves_no_layer_is_refused(tiny_gqa, name):
    method = replace(CASES[name].method, num_exempt_layers=4)
    with attach(tiny_gqa) as attached, pytest.raises(ValueError, match=r"num_exempt_layers=4: must be .*4 layers"):
        open_session(attached, Case(method, CASES[name].codec), [20], 20)


@pytest.mark.parametrize("name", ["full", "h2o", "infinigen", "infinigen-union"])
def test_only_the_layers_that_select_by_a_rehearsal_are_rehearsed(tiny_gqa, name, monkeypatch):
    method, asked = CASES[name].method, []
    with attach(tiny_gqa):
        original = Attached.early_query  # the check of a model at its first use asks for each layer's
    monkeypatch.setattr(Attached, "early_query", lambda *a: (asked.append(a[1]), original(*a))[1])
    run_one(tiny_gqa, CASES[name])
    assert asked == (list(range(method.num_exempt_layers, 4)) if method.when == "previous_layer" else [])


def test_a_window_shorter_than_the_sequence_is_refused():
    model = tiny_model("mistral", num_key_value_heads=2, sliding_window=16)
    with attach(model) as attached:
        session = open_session(attached, CASES["full"], [16], 16)
        ids = torch.tensor([token_ids(16)])
        got = attached.logits(session.prefill(ids, torch.ones_like(ids, dtype=torch.bool)))
        with pytest.raises(UserError, match="17 tokens: 16 is .* sliding window"):
            open_session(attached, CASES["full"], [17], 17)
        with pytest.raises(UserError, match="17 tokens: 16 is .* sliding window"):  # the rows come by a fork
            open_session(attached, CASES["full"], [17], 10)
        # Padding is no token: sequences that fit may be padded beyond the window.
        run(attached, CASES["full"], [token_ids(16), token_ids(16, 1)], [12, 2])
    with torch.inference_mode():
        assert_close(got, model(ids).logits)


# Nothing is left behind


def fingerprint(model) -> dict:
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "hooks": [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
        "methods": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "attention": set(AttentionInterface()._global_mapping),
        "mask": set(AttentionMaskInterface()._global_mapping),
        "logits": model(torch.tensor([token_ids(12)])).logits.tolist(),
    }


@every_model
def test_attaching_leaves_nothing_behind_even_after_an_error(model, monkeypatch):
    before = fingerprint(model)

    def fail(*arguments):
        raise ArithmeticError

    monkeypatch.setattr(passes.DecodePass, "attention", fail)
    with pytest.raises(ArithmeticError), attach(model) as attached:
        run(attached, CASES["infinigen"], [token_ids(LENGTH)], [PROMPT])
    assert fingerprint(model) == before
    monkeypatch.undo()
    with attach(model):
        run_ragged(model, CASES["infinigen"])
        with pytest.raises(RuntimeError, match=r"Attached\.forward"), torch.inference_mode():
            model(torch.tensor([token_ids(12)]))
    assert fingerprint(model) == before


# Rotary positions: keys before and after them


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_come_off_and_on_again(family):
    """Scores of placed queries and keys depend on the distance alone, and at position 0 nothing changes."""
    with attach(tiny(family)) as attached:
        geometry = attached.geometry
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, geometry.num_kv_heads, 7, geometry.head_dim, generator=generator)
    positions = torch.randint(0, 300, (2, 7), generator=generator)
    placed = geometry.rotate(states, positions)
    assert largest_difference(geometry.rotate(placed, positions, inverse=True), states) < 1e-5
    assert torch.equal(placed, states) == (family == "opt")
    assert torch.allclose(geometry.rotate(states, 0 * positions), states)
    query, key = torch.randn(2, 1, 1, 1, geometry.head_dim, generator=generator)

    def score(at: int, of: int) -> torch.Tensor:
        return (geometry.rotate(query, torch.tensor([[at]])) * geometry.rotate(key, torch.tensor([[of]]))).sum()

    assert largest_difference(score(90, 70), score(31, 11)) < 1e-4
    assert (largest_difference(score(90, 70), score(90, 60)) > 1e-3) == (family != "opt")


@pytest.mark.parametrize(
    "method", [ExpectedAttention(num_exempt_layers=0), ShadowKV(read_frac=0.4, num_exempt_layers=0)]
)
def test_each_layer_has_its_own_positions(method, monkeypatch):
    """SmolLM3 has layers without any: here the second and the fourth."""
    rotate, asked = Attached._rotate, {}

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
