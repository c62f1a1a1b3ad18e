"""What a model is refused for when it is attached: its own numbers are not those of our attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case
from mixed_models import SHAPES
from replaying import assert_close, run_one, token_ids
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward

from harness.errors import UserError
from harness.model import attach as checks
from harness.model.attach import Attached, attach
from harness.model.decoder import Decoder, Latent
from harness.model.tiny import tiny_model
from harness.offload.live import LiveSession
from methods.full import Full
from methods.infinigen import InfiniGen


def capped(module, query, key, value, attention_mask, scaling, **options):
    """An attention function that caps its scores, of which the model says nothing."""
    return eager_attention_forward(module, 1.5 * torch.tanh(query), key, value, attention_mask, scaling, **options)


def llama(fault: str = "") -> PreTrainedModel:
    model = tiny_model("llama", num_key_value_heads=2)
    mlp = model.model.layers[1].mlp
    if fault == "a softcap that is not told":
        AttentionInterface.register("capped", capped)
        model.config._attn_implementation = "capped"
    elif fault == "rows that mix elsewhere":
        mlp.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))
    elif fault == "weights that are no numbers":
        mlp.up_proj.weight[3, 3] = torch.nan
    return model


REFUSED = {
    "a softcap that is not told": "is not supported: under our attention its logits are off",
    "rows that mix elsewhere": "under our attention its logits are off by",
    "weights that are no numbers": "own logits are all zero or not finite; look at its weights",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_model_with_other_numbers_is_refused_in_one_line(fault):
    model = llama(fault)
    with pytest.raises(UserError, match=f"^model family 'llama'.*{REFUSED[fault]}") as refusal, attach(model):
        pass
    assert "\n" not in str(refusal.value)


# What only some runs need is refused to those alone


def test_a_wrong_early_query_is_refused_to_rehearsals_alone(monkeypatch):
    """Others choose by a layer's own query, or by none. A model is asked once, as that costs a few passes."""
    asked, check = [], checks.check_decoder
    monkeypatch.setattr(checks, "check_decoder", lambda *each: (asked.append(each), check(*each)))
    early = Attached.early_query
    monkeypatch.setattr(Attached, "early_query", lambda attached, *given: 1.1 * early(attached, *given))
    model = llama()
    expected = r"^model family 'llama' takes no method that rehearses .* a query made ahead of its layer is off by \d"
    for method in (InfiniGen(), InfiniGen(own_query_layers=1)):
        with pytest.raises(UserError, match=expected):
            run_one(model, Case(method))
        with attach(model) as attached, pytest.raises(UserError, match=expected):
            LiveSession(attached, method, max_new_tokens=2)
    for method in (InfiniGen(when="own_query"), InfiniGen(own_query_layers=2), Full()):
        run_one(model, Case(method))
    assert len(asked) == 1


class ChoosesBySign(nn.Module):
    """A query projection to which no derivative leads from a module that decides its sign."""

    def __init__(self, query: nn.Module) -> None:
        super().__init__()
        self.query, self.decides = query, nn.Linear(64, 8)

    def forward(self, hidden):
        return self.query(hidden) * (1.5 + self.decides(hidden).mean(-1, keepdim=True).detach().sign())


def test_a_query_that_is_decided_without_a_derivative_is_made_in_full():
    """The submodules that no derivative passes through are left out of rehearsals, unless the query is wrong then."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = ChoosesBySign(layer.self_attn.q_proj).requires_grad_(False)
    with attach(model) as attached:
        assert attached.decoder.no_rehearsal is None
        assert all("q_proj.decides" in layer.query_modules for layer in attached.layers)
    run_one(model, CASES["infinigen"])


# What is given up before a model is refused


def test_latents_that_do_not_stand_for_the_keys_are_stored_expanded(monkeypatch):
    """Keys and values of every head: more memory, the same numbers."""
    read = Decoder._read_latent

    def misread(*given):
        latent = read(*given)
        return Latent(1.5 * latent.to_query, latent.to_value)

    monkeypatch.setattr(Decoder, "_read_latent", misread)
    model_type, shape = SHAPES["deepseek_v3"]
    model, ids = tiny_model(model_type, **shape), token_ids(30)
    with attach(model) as attached:
        assert (attached.geometry.num_kv_heads, attached.geometry.values_in_keys) == (4, False)
    found = run_one(model, Case(Full()), ids, 11)
    with torch.inference_mode():
        assert_close(found.logits[0], model(torch.tensor([ids]), use_cache=False).logits[0, 11:])
    assert "latent_bytes" not in found.reads.sizes


# Rotary frequencies that follow the sequence's length

SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": 24, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_a_sequence_runs_up_to_the_length_at_which_frequencies_change(kind):
    model_type, shape = SCALED[kind]
    model, ids = tiny_model(model_type, num_key_value_heads=2, **shape), token_ids(25)
    with torch.inference_mode():
        of_24, of_25 = (model(torch.tensor([ids[:length]]), use_cache=False).logits[0] for length in (24, 25))
    assert float((of_24[10:] - of_25[10:24]).abs().max()) > 1e-3, "otherwise there is nothing to refuse"
    assert_close(run_one(model, Case(Full()), ids[:24], 10).logits[0], of_24[10:])
    refused = rf"^a sequence of 25 tokens: 24 is the model's length up to which {kind} rope keeps its positions; lower"
    with pytest.raises(UserError, match=refused):
        run_one(model, CASES["h2o"], ids, 10)
    prompt, real = torch.tensor([ids[:20]]), torch.ones(1, 20, dtype=torch.bool)
    with attach(model) as attached:
        session = LiveSession(attached, Full(), max_new_tokens=4)
        logits = [session.prefill(prompt, real), *(session.decode_step(torch.tensor([ids[at]])) for at in (20, 21, 22))]
        assert_close(torch.cat(logits), of_24[19:23])
        with pytest.raises(UserError, match=refused):
            LiveSession(attached, Full(), max_new_tokens=5).prefill(prompt, real)
