"""The models of `conf/model`: published sizes, and a miniature of each that runs in transformers."""

from collections import Counter

import pytest
import torch

from harness.model.load import load_model
from harness.model.shape import as_config, count_weights
from harness.settings.sources import ModelConfig
from tests.tiny_presets import PRESETS, kinds_of_layer, preset_shape, shrunk, tiny_preset

# Billions of parameters that the authors name, for their text decoder without layers for multi-token prediction.
PUBLISHED = {
    "gemma3-12b": 11.77, "glm4-9b": 9.4, "gpt-oss-20b": 20.9, "llama3.1-8b": 8.03, "mistral-small": 23.6,
    "olmo3-7b": 7.3, "phi4": 14.7, "qwen3-30b-a3b": 30.5, "qwen3-8b": 8.2, "qwen3-next": 79.7, "smollm3-3b": 3.08,
}  # fmt: skip
LAYERS = {
    "gemma3-12b": {"sliding_attention": 40, "full_attention": 8},
    "gpt-oss-20b": {"sliding_attention": 12, "full_attention": 12},
    "olmo3-7b": {"sliding_attention": 24, "full_attention": 8},
    "qwen3-8b": {"full_attention": 36},
    "qwen3-next": {"linear_attention": 36, "full_attention": 12},
    "smollm3-3b": {"full_attention": 36},
}
IDS = torch.arange(3, 43)[None]  # longer than the window of a miniature
WINDOWED = ("gemma3-12b", "gpt-oss-20b", "olmo3-7b", "phi3-mini")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    found = count_weights(name, as_config(name, preset_shape(name)))
    assert found / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_a_preset_has_the_published_layers(name):
    assert Counter(as_config(name, preset_shape(name)).layer_types) == LAYERS[name]


def test_every_fourth_layer_of_smollm3_has_no_positions():
    assert as_config("smollm3-3b", preset_shape("smollm3-3b")).no_rope_layers == [1, 1, 1, 0] * 9


@pytest.mark.parametrize("name", PRESETS)
def test_a_miniature_runs_and_is_causal(name):
    model = tiny_preset(name)
    assert model.num_parameters() < 1_000_000
    with torch.inference_mode():
        logits, of_fewer = model(IDS).logits, model(IDS[:, :20]).logits
    assert logits.shape == (1, 40, 256) and logits.isfinite().all() and logits.std() > 0.1
    torch.testing.assert_close(logits[:, :20], of_fewer)


@pytest.mark.parametrize("name", PRESETS)
def test_a_miniature_keeps_what_is_special(name):
    full, small = (as_config(name, shape).to_dict() for shape in (preset_shape(name), shrunk(preset_shape(name))))
    assert [*kinds_of_layer(small)] == [*kinds_of_layer(full)]
    assert min(map(len, kinds_of_layer(small).values())) >= 2
    assert special(small) == special(full)
    assert size_of_heads(small) == pytest.approx(size_of_heads(full), rel=0.05)


def size_of_heads(shape: dict) -> float:
    """Of all query heads, as a share of hidden_size."""
    return shape["num_attention_heads"] * shape["head_dim"] / shape["hidden_size"] if shape.get("head_dim") else 1


def special(shape: dict) -> dict:
    """What a miniature has in common with its model."""
    heads, rope = shape["num_attention_heads"], shape.get("rope_parameters") or {}
    rotary = {kind: each.get("rope_type") for kind, each in rope.items() if isinstance(each, dict)}
    return {
        "model_type": shape["model_type"],
        "shares KV heads": shape.get("num_key_value_heads", heads) < heads,
        "experts": bool(shape.get("num_experts") or shape.get("num_local_experts")),
        "window": shape.get("sliding_window") is not None,
        "tied": shape.get("tie_word_embeddings"),
        "rotary": rotary or rope.get("rope_type"),
    }


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_of_a_miniature_hides_tokens(name):
    model = tiny_preset(name)
    changed = IDS.clone()
    changed[0, 0] = 99
    with torch.inference_mode():
        model.model.layers = model.model.layers[:1]  # the first is a sliding one
        model.config.num_hidden_layers = 1
        hidden, other = (model.model(ids).last_hidden_state for ids in (IDS, changed))
    assert not torch.equal(hidden[:, 15], other[:, 15]) and torch.equal(hidden[:, 16:], other[:, 16:])


@pytest.mark.parametrize("name", PRESETS)
def test_a_miniature_is_loaded_as_it_was_saved(name, tmp_path):
    saved = tiny_preset(name)
    saved.save_pretrained(tmp_path / "model")
    shape = shrunk(preset_shape(name))
    loaded = load_model(ModelConfig(name=name, path=str(tmp_path / "model"), device="cpu", shape=shape))
    assert loaded.max_length == 512
    for each in (saved, loaded.model):
        each.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, saved(IDS).logits)
