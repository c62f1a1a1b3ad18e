"""Attaching to a model: what is refused, what is given up before that, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward

from harness.checks.families import tiny_family
from harness.checks.two_ways import token_batch
from harness.decode.session import LiveSession
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.attached import Attached
from harness.model.prompts import PromptPass, calibrate
from harness.replay import decode_pass as passes
from harness.replay.setup import Setup
from methods.full import Full
from methods.infinigen import InfiniGen
from methods.prompt_evicting import ExpectedAttention
from methods.shadowkv import ShadowKV
from tests.cases import CASES, Case
from tests.living import FAMILIES, largest_difference, tiny
from tests.replaying import LENGTH, PROMPT, assert_close, every_model, open_session, run, run_one, run_ragged, token_ids
from tests.tiny_models import tiny_model

FAR_SCALES = CONFIG_MAPPING["ministral3"]().rope_parameters
"""Of queries, by their position."""

# A model with other numbers is refused


def llama(**shape: Any) -> PreTrainedModel:
    return tiny_model("llama", num_key_value_heads=2, **shape)


def cap_scores(model: PreTrainedModel) -> None:
    """Scores are capped by an attention function of which the model says nothing."""

    def capped(module, query, *others, **options):
        return eager_attention_forward(module, 1.5 * torch.tanh(query), *others, **options)

    AttentionInterface.register("capped", capped)
    model.config._attn_implementation = "capped"


def mix_rows(model: PreTrainedModel) -> None:
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


def spoil_a_weight(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan


OFF = "^model family 'llama' is not supported: under our attention its logits are off by"
NO_NUMBERS = r"^.* not finite; look at its weights, .* in its configuration \(rope_parameters, eps"


@pytest.mark.parametrize(
    ("change", "shape", "words"),
    [
        (cap_scores, {}, OFF),
        (mix_rows, {}, OFF),
        (spoil_a_weight, {}, NO_NUMBERS),
        (id, {"rms_norm_eps": float("nan")}, NO_NUMBERS),
        (id, {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, NO_NUMBERS),
    ],
)
def test_a_model_with_other_numbers_is_refused_in_one_line(change, shape, words):
    model = llama(**shape)
    change(model)
    with pytest.raises(UserError, match=words) as refusal, attach(model):
        pass
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("shape", [("gemma3_text", {"use_bidirectional_attention": True}), ("bert", {})])
def test_a_model_whose_tokens_see_later_ones_is_refused(shape):
    family, settings = shape
    with (
        pytest.raises(UserError, match="a layer sees neither all earlier tokens"),
        attach(tiny_model(family, **settings)),
    ):
        pytest.fail("refused")


def test_a_model_on_several_devices_is_refused_in_one_line():
    model = tiny_model("llama")
    model.lm_head.to("meta")  # where accelerate leaves weights of the host or a disk
    with pytest.raises(UserError, match=r"the model lies on several devices \(cpu, meta\), and a method's cache"):
        attach(model).__enter__()


def test_a_token_without_an_embedding_is_refused_with_both_sizes(tiny_gqa):
    ids = torch.tensor([[3, 300, 5]])
    with attach(tiny_gqa) as attached, pytest.raises(UserError, match=r"token 300, .* embedding has 256 tokens"):
        attached.forward(ids, torch.arange(3)[None], handler=None)


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "olmo2", "phi3", "gpt2"])
def test_a_query_made_directly_is_that_of_the_modules_own_code(family, monkeypatch):
    """In a pass over several rows, and in a step behind them."""
    early, compared = Attached.early_query, []

    def both(attached: Attached, index: int, hidden: torch.Tensor) -> torch.Tensor:
        layer, query = attached.layers[index], early(attached, index, hidden)
        made = None if layer.positions is None else attached._made[layer.positions]
        known = {"position_embeddings": made, "position_ids": attached._positions}
        own = attached._query_of(index, layer.rerun(hidden, attached._cache, **known))
        compared.append(layer.direct is not None and torch.equal(query, own))
        return query

    monkeypatch.setattr(Attached, "early_query", both)
    run_one(tiny_family(family), Case(InfiniGen(dense_layers=1)), token_ids(14), 8, calls=(5,))
    assert all(compared) and len(compared) >= 3


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("olmo", {"clip_qkv": 20.0}),  # cuts large numbers off
        ("ministral3", {"rope_parameters": {**FAR_SCALES, "original_max_position_embeddings": 64}}),
        ("gpt_neox", {}),  # the key of a head lies behind its query
    ],
)
def test_a_module_that_does_more_to_a_query_makes_it_itself(family, settings):
    with attach(tiny_family(family, **settings)) as attached:
        assert all(layer.direct is None for layer in attached.layers)


def test_a_wrong_early_query_is_refused_to_predictions_alone(monkeypatch):
    """Others choose by a layer's own query, or by none."""
    early = Attached.early_query
    monkeypatch.setattr(Attached, "early_query", lambda attached, *given: 1.1 * early(attached, *given))
    model = llama()
    expected = r"^model family 'llama' takes no method that predicts .* a query made ahead of its layer is off by \d"
    with pytest.raises(UserError, match=expected):
        run_one(model, Case(InfiniGen()))
    with attach(model) as attached, pytest.raises(UserError, match=expected):
        LiveSession(attached, InfiniGen(), max_new_tokens=2)
    for method in (InfiniGen(when="own_query"), Full()):
        run_one(model, Case(method))


# Feed-forward networks


def test_feed_forward_networks_take_some_rows_at_a_time():
    model, seen = llama(), []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    ids = torch.tensor([token_ids(20), token_ids(20, 1)])
    with attach(model) as attached:
        assert [type(each).__name__ for each in attached.decoder.row_wise] == ["LlamaMLP"] * len(model.model.layers)
        positions = torch.arange(20).expand(2, -1)
        whole = attached.forward(ids, positions, PromptPass(attached))
        attached.decoder.rows_at_once = 14
        del seen[:]
        parts = attached.forward(ids, positions, PromptPass(attached))
    assert seen == [(2, 7), (2, 7), (2, 6)]
    assert_close(parts, whole)


def test_a_network_that_takes_no_part_of_the_rows_takes_all():
    """It gives each row the same number however many come, but for those of two rows at once."""
    model = llama()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) * (1.5 if hidden.shape[1] == 2 else 1)
    with attach(model) as attached:
        assert not attached.decoder.row_wise


# Sequences that are too long


def test_a_window_shorter_than_the_sequence_is_refused():
    model = tiny_model("mistral", num_key_value_heads=2, sliding_window=16)
    with attach(model) as attached:
        session = open_session(attached, CASES["full"], [16], 16)
        ids = torch.tensor([token_ids(16)])
        got = attached.logits(session.prefill(ids, torch.ones_like(ids, dtype=torch.bool)))
        for num_columns in (17, 10):  # 10: the rows come by a fork
            with pytest.raises(UserError, match="17 tokens: 16 is .* sliding window"):
                open_session(attached, CASES["full"], [17], num_columns)
        # Padding is no token: sequences that fit may be padded beyond the window.
        run(attached, CASES["full"], [token_ids(16), token_ids(16, 1)], [12, 2])
    with torch.inference_mode():
        assert_close(got, model(ids).logits)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
SCALED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dynamic": ("llama", {"max_position_embeddings": 24}, {"rope_type": "dynamic", "factor": 4.0}),
    "longrope": ("phi3", {"original_max_position_embeddings": 24}, LONGROPE),
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_sequence_runs_up_to_the_length_at_which_rotary_frequencies_change(kind):
    model_type, shape, rope = SCALED[kind]
    model = tiny_model(model_type, num_key_value_heads=2, **shape, rope_parameters=rope | {"rope_theta": 1e4})
    ids = token_ids(25)
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


# Order of calls, and nothing left behind


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
    run_ragged(model, CASES["infinigen"])
    with attach(model):
        with pytest.raises(UserError, match=r"attached already: it takes one"), attach(model):
            pytest.fail("refused")
        with pytest.raises(UserError, match=r"the model is attached .* cannot be called by itself"):
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


@pytest.mark.parametrize("method", [ExpectedAttention(dense_layers=0), ShadowKV(budget=0.4, dense_layers=0)])
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
        session = Setup(method, None, calibration).replay(attached, real.sum(-1), real.shape[1])
        session.prefill(ids[:, :60], real[:, :60])
        session.decode(ids[:, 60:], real[:, 60:])
    assert asked == {0: True, 1: False, 2: True, 3: False}
