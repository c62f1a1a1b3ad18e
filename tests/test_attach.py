"""Attaching to a model: refusals, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CASES, Case
from replaying import (
    LENGTH,
    PROMPT,
    assert_close,
    every_model,
    open_session,
    pad,
    run,
    run_one,
    run_ragged,
    token_ids,
)
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from harness import replay as passes
from harness.errors import UserError
from harness.model.attach import Attached, attach
from harness.model.tiny import tiny_model

# Order of calls, refusals


def test_decode_before_prefill_and_a_second_prefill_raise(tiny_gqa):
    ids, valid = pad([token_ids(5)], left=True)
    with attach(tiny_gqa) as attached:
        session = open_session(attached, CASES["full"], [20], 20)
        with pytest.raises(RuntimeError, match="prefill first"):
            session.decode(ids, valid)
        session.prefill(ids, valid)
        with pytest.raises(RuntimeError, match="once"):
            session.prefill(ids, valid)


@pytest.mark.parametrize("name", [name for name in CASES if name != "full"])
def test_a_method_that_leaves_no_layer_is_refused(tiny_gqa, name):
    method = replace(CASES[name].method, num_exempt_layers=4)
    message = r"num_exempt_layers=4: must be .*4 layers"
    with attach(tiny_gqa) as attached, pytest.raises(ValueError, match=message):
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


def test_a_family_that_does_not_use_the_attention_interface_is_refused():
    shape = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **shape))
    message = r"^model family 'bloom' is not supported: its decoder is given no positions$"
    with pytest.raises(UserError, match=message), attach(model):
        pass


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
    with attach(model) as attached, pytest.raises(ArithmeticError):
        run(attached, CASES["infinigen"], [token_ids(LENGTH)], [PROMPT])
    assert fingerprint(model) == before
    with pytest.raises(ArithmeticError), attach(model) as attached:
        run(attached, CASES["infinigen"], [token_ids(LENGTH)], [PROMPT])
    assert fingerprint(model) == before
    monkeypatch.undo()
    run_ragged(model, CASES["infinigen"])
    assert fingerprint(model) == before


@every_model
def test_a_forward_outside_a_session_raises(model):
    with attach(model), pytest.raises(RuntimeError, match=r"Attached\.forward"), torch.inference_mode():
        model(torch.tensor([token_ids(12)]))


def test_two_models_are_attached_at_once(tiny_gqa, tiny_opt):
    alone = [run_one(model, CASES["h2o"]).logits[0] for model in (tiny_gqa, tiny_opt)]
    with attach(tiny_gqa) as one, attach(tiny_opt) as other:
        for attached, expected in zip((one, other), alone, strict=True):
            got = run(attached, CASES["h2o"], [token_ids(LENGTH)], [PROMPT]).logits[0]
            assert torch.equal(got, expected)
