"""Loading models: every source, the converted copy, the shipped shapes, and one clear line for each fault."""

import json
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from harness import files
from harness.checks.families import families
from harness.data.text import start_ids
from harness.errors import UserError
from harness.model import gguf_copy, source
from harness.model.gguf_copy import Metadata, converted, follow_metadata, with_metadata
from harness.model.load import (
    Resources,
    _tokenizer,
    from_memory,
    load_model,
    model_config,
    shape_mapping,
)
from harness.model.shape import as_config, count_weights, read_yaml
from harness.results import inputs
from harness.settings.config import ModelConfig
from harness.settings.schema import CONF_DIR, options
from tests.hub_standin import Repository
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.tokens import byte_tokenizer

# Parameters of the authors' checkpoints, counted by transformers; tied weights count once. The text decoder's alone.
PARAMETER_COUNTS = {
    "smollm2-135m": 134_515_008, "opt-125m": 125_239_296, "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "qwen2.5-coder-0.5b": 494_032_768 + 151_936 * 896,  # the files hold the tied head a second time
    "qwen2.5-coder-1.5b": 1_543_714_304 + 151_936 * 1536, "gemma3-270m": 268_098_176,
    "llama3.1-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}  # fmt: skip
LAYERS = {
    "gemma3-270m": {"sliding_attention": 15, "full_attention": 3},
    "qwen3-8b": {"full_attention": 36},
}
PRESETS = options("model")
IDS = torch.arange(3, 43)[None]
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip
TINY_SHAPE = {"model_type": "llama", **SIZES}


def preset_shape(name: str) -> dict[str, Any]:
    """The published shape in `conf/model/<name>.yaml`."""
    return dict(read_yaml(CONF_DIR / "model" / f"{name}.yaml")["shape"])


def configured(path: Path | str | None = None, **settings) -> ModelConfig:
    return ModelConfig(**{"name": "tiny", "device": "cpu", "path": path and str(path), **settings})


@pytest.fixture(autouse=True)
def own_caches(request, tmp_path, monkeypatch):
    """Tiny models are cached in folders of their own; the default model's copy stays where users have it."""
    if "default_model" not in request.fixturenames:
        monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens


@pytest.fixture
def tiny_gguf(tmp_path) -> Path:
    """A two-layer Llama in float16 with a byte-level tokenizer, as llama.cpp's converter would write it."""
    (tmp_path / "gguf").mkdir()
    return write_tiny_gguf(tmp_path / "gguf" / "tiny.gguf")


def write_tiny_gguf(path: Path, extra: Mapping[str, Any] = {}, tensors: Mapping[str, list[float]] = {}) -> Path:
    """extra: more metadata, by whole key. tensors: more tensors, of fp32."""
    shape = TINY_SHAPE
    hidden, ffn, head_dim = shape["hidden_size"], shape["intermediate_size"], 16
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": shape["num_hidden_layers"], "context_length": shape["max_position_embeddings"],
        "embedding_length": hidden, "feed_forward_length": ffn, "head_count": shape["num_attention_heads"],
        "head_count_kv": shape["num_key_value_heads"], "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": VOCAB_SIZE, "tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "bos_token_id": 1,
        "eos_token_id": 2,
    }.items():  # fmt: skip
        if f"llama.{name}" not in extra and f"{name.replace('_', '.ggml.', 1)}" not in extra:
            getattr(writer, f"add_{name}")(value)
    alphabet = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    alphabet += [chr(256 + i) for i in range(VOCAB_SIZE - len(alphabet))]
    alphabet[-2:] = "abc", "ab"  # no merge makes the first
    for key, value in extra.items():
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for name, numbers in tensors.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    writer.add_token_list(alphabet)
    writer.add_token_merges(["a b"])
    of_layer = {
        "attn_q": (hidden, hidden), "attn_k": (head_dim, hidden), "attn_v": (head_dim, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    vocabulary = (VOCAB_SIZE, hidden)
    outside = {"token_embd": vocabulary, "output": vocabulary, "output_norm": (hidden,)}
    write_random_weights(writer, outside, of_layer, shape["num_hidden_layers"])
    return path


Sizes = dict[str, tuple[int, ...]]


def write_random_weights(writer: gguf.GGUFWriter, outside: Sizes, of_layer: Sizes, num_layers: int) -> None:
    """Write the file: its metadata, the weights outside of layers and those of each layer."""
    draw = np.random.default_rng(0)
    tensors = dict(outside)
    for layer in range(num_layers):
        for name, size in of_layer.items():
            tensors[f"blk.{layer}.{name}"] = size
    for name, size in tensors.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.1, size).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gemma_gguf(tmp_path) -> Path:
    """A Gemma 3 of six layers with the metadata of the 270M model's file, and no output head."""
    path, hidden, ffn, heads, head_dim, vocab_size = tmp_path / "gemma.gguf", 32, 64, 2, 16, 64
    writer = gguf.GGUFWriter(path, "gemma3")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *map(chr, range(33, 33 + 58)), "\u2581I"]
    for name, value in {
        "block_count": 6, "context_length": 128, "embedding_length": hidden, "feed_forward_length": ffn,
        "head_count": heads, "head_count_kv": 1, "key_length": head_dim, "value_length": head_dim,
        "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e6, "sliding_window": 8,
        "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": pieces,
        "token_scores": [-1000.0] * vocab_size, "token_types": [3] * 4 + [1] * (vocab_size - 4),
        "bos_token_id": 2, "eos_token_id": 1, "unk_token_id": 3, "pad_token_id": 0, "add_bos_token": True,
        "add_eos_token": False, "add_space_prefix": False,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    of_layer = {
        "attn_q": (heads * head_dim, hidden), "attn_k": (head_dim, hidden), "attn_v": (head_dim, hidden),
        "attn_output": (hidden, heads * head_dim), "attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,),
        "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn), "attn_norm": (hidden,),
        "ffn_norm": (hidden,), "post_attention_norm": (hidden,), "post_ffw_norm": (hidden,),
    }  # fmt: skip
    write_random_weights(writer, {"token_embd": (vocab_size, hidden), "output_norm": (hidden,)}, of_layer, 6)
    return path


@pytest.fixture
def model_dir(tmp_path, tiny_gguf) -> Path:
    """A two-layer Llama with a tokenizer, as save_pretrained leaves it."""
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class Payload:
    """What pickle would run: it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def refused(match: str, config: ModelConfig) -> str:
    with pytest.raises(UserError, match=match) as caught:
        load_model(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Shapes


@pytest.mark.parametrize("name", PRESETS)
def test_a_shipped_shape_is_the_published_one(name):
    described = as_config(name, preset_shape(name))
    assert count_weights(name, described) == PARAMETER_COUNTS[name]
    assert described.model_type in families(), "whose tiny model runs in test_families.py or the command"
    assert name not in LAYERS or Counter(described.layer_types) == LAYERS[name]


DECODERS = r"allowed: decoders of transformers \d+\.\d+\.\d+ \(AutoModelForCausalLM\)$"


def test_refuses_a_shape_of_no_causal_decoder():
    for name, said in (("lama", "did you mean 'llama' .*\\?"), ("bart", "it is an encoder-decoder;")):
        config = configured(weights="random", shape={"model_type": name})
        refused(f"model_type={name} is not supported: {said} {DECODERS}", config)


def test_a_decoder_without_fused_attention_is_loaded_and_takes_any_length():
    shape = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
    loaded = load_model(configured(weights="random", shape=shape))
    assert (loaded.model.config._attn_implementation, loaded.max_length) == ("eager", 2**31 - 1)


def test_a_softcap_is_not_left_to_the_fused_attention(monkeypatch):
    """Also of a transformers that says that its fused attention will do, as up to 5.20."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    logits = {}
    for softcap, attention in ((0.01, "eager"), (None, "sdpa")):
        shape = TEXT | {"model_type": "gemma2", "attn_logit_softcapping": softcap, "initializer_range": 0.5}
        model = load_model(configured(weights="random", shape=shape)).model
        assert model.config._attn_implementation == attention
        logits[softcap] = model(IDS).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(logits[softcap], model(IDS).logits, atol=1e-4, rtol=1e-4)
    assert (logits[0.01] - logits[None]).abs().max() > 0.01, "a softcap changes these numbers"


TEXT = {
    "model_type": "gemma3_text", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "sliding_window": 16,
}  # fmt: skip


VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def test_of_a_multimodal_checkpoint_the_text_decoder_is_loaded(tmp_path):
    config = AutoConfig.for_model("gemma3", text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "model")
    described = configured(tmp_path / "model", shape=TEXT)
    loaded = load_model(described)
    assert torch.equal(loaded.model(IDS).logits, whole(input_ids=IDS).logits)
    assert loaded.model.num_parameters() < whole.num_parameters()
    assert (loaded.model.config.model_type, loaded.max_length) == ("gemma3_text", 128)
    assert model_config(configured(shape=shape_mapping(described))).to_dict() == model_config(described).to_dict()
    other = replace(described, shape={**described.shape, "vocab_size": 300})
    refused("holds a model of vocab_size=256, and conf/model says vocab_size=300; ", other)
    edit(tmp_path / "model" / "config.json", text_config=TEXT | {"quantization_config": {"quant_method": "fp8"}})
    refused(r"its weights are quantized \(fp8\)", configured(tmp_path / "model"))


# Sources


def test_random_weights_follow_the_seed_and_leave_torchs_generator_alone():
    state = torch.get_rng_state()
    first, again = (load_model(configured(weights="random", shape=TINY_SHAPE)) for _ in range(2))
    other = load_model(configured(weights="random", shape=TINY_SHAPE, seed=1, dtype="bfloat16"))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first.model(IDS).logits, again.model(IDS).logits)
    assert (first.tokenizer, first.max_length) == (None, 128)
    for each, dtype in ((first, torch.float32), (other, torch.bfloat16)):
        assert {parameter.dtype for parameter in each.model.parameters()} == {dtype}
        assert not each.model.training and not any(p.requires_grad for p in each.model.parameters())
        assert each.model.config._attn_implementation == "sdpa"


def test_a_model_is_loaded_from_a_folder_or_given_as_it_is(model_dir):
    model, config = tiny_model("llama", **SIZES), configured(model_dir)
    byte_tokenizer().save_pretrained(model_dir)
    loaded = load_model(config)
    given = from_memory(model, byte_tokenizer())
    assert torch.equal(loaded.model(IDS).logits, given.model(IDS).logits)
    assert {p.dtype for p in load_model(replace(config, dtype="bfloat16")).model.parameters()} == {torch.bfloat16}
    assert (loaded.name, given.name, given.max_length) == ("tiny", "llama", loaded.max_length)
    identity = inputs.model(config)
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    assert inputs.model(config) != identity, "a chat template is part of a model's identity"


def only(shard: str) -> dict[str, str | None]:
    """Changes of a folder after which its weights lie in this file."""
    return {"model.safetensors": None, "model.safetensors.index.json": json.dumps({"weight_map": {"a": shard}})}


DAMAGE = {
    "no model at all": ({"config.json": None, "model.safetensors": None}, "neither a config.json nor a GGUF"),
    "a missing layer": ({"config.json": {"num_hidden_layers": 5}}, r"lacks \d+ weights"),
    "a pickle as a shard": (only("pytorch_model.bin"), "lie in pytorch_model.bin, no .safetensors file that is here"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused(name, model_dir, tmp_path):
    changes, message = DAMAGE[name]
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    for file, content in ((model_dir / name, content) for name, content in changes.items()):
        if content is None:
            file.unlink()
        elif isinstance(content, str):
            file.write_text(content)
        else:
            edit(file, **content)
    refused(message, configured(model_dir))
    assert not (tmp_path / "ran").exists()
    refused("neither model.path nor model.hub_id", configured(shape=TINY_SHAPE))


# GGUF


def test_a_gguf_is_converted_once_and_computes_the_same(tiny_gguf, monkeypatch, capsys):
    left = files.cache_dir() / "gguf" / "converting"  # by a killed conversion
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    origin = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    first = load_model(configured(tiny_gguf))
    assert torch.equal(first.model(IDS).logits, origin.eval()(IDS).logits)
    assert str(files.cache_dir()) in capsys.readouterr().err and not left.exists()
    monkeypatch.setattr(gguf_copy, "_convert", None)  # a second conversion would fail
    again = load_model(configured(tiny_gguf.parent))
    assert torch.equal(again.model(IDS).logits, first.model(IDS).logits)
    assert again.tokenizer.decode(again.tokenizer("abc").input_ids) == "abc"


def test_one_of_several_ggufs_is_named(tiny_gguf, hub_server):
    repository = Repository({"README.md": b"", "tiny.gguf": tiny_gguf.read_bytes(), "big.gguf": b""})
    hub_server.models["org/tiny"] = repository
    config = configured(hub_id="org/tiny", gguf_file="tiny.gguf")
    loaded = load_model(config)
    assert loaded.max_length == TINY_SHAPE["max_position_embeddings"]
    assert inputs.model(config) == inputs.model(configured(tiny_gguf))
    assert len(hub_server.asked("GET .*/resolve/")) == 1, "fetched alone, and once"
    (tiny_gguf.parent / "other.gguf").write_bytes(b"not a model")
    folder = configured(tiny_gguf.parent)
    refused("2 GGUF files, name one of them or set model.gguf_file", folder)
    assert torch.equal(load_model(replace(folder, gguf_file="tiny.gguf")).model(IDS).logits, loaded.model(IDS).logits)


def test_a_gguf_of_gemma_has_windows_two_ropes_and_a_start_token(gemma_gguf):
    """Its file says neither which layers have windows nor their rope; both are the family's, as in conf/model."""
    loaded = load_model(configured(gemma_gguf))
    config, shipped = loaded.model.config, as_config("gemma3-270m", preset_shape("gemma3-270m"))
    assert config.layer_types == shipped.layer_types[:6] and config.sliding_window == 8
    for kind in ("sliding_attention", "full_attention"):
        assert config.rope_parameters[kind] == shipped.rope_parameters[kind], kind
    for name in ("tie_word_embeddings", "hidden_activation", "rms_norm_eps", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == pytest.approx(getattr(shipped, name)), name
    assert start_ids(loaded.tokenizer) == [2] and loaded.tokenizer("I I").input_ids == [2, 4 + 41, 63]
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    (file,) = (files.cache_dir() / "gguf").glob("*/model.safetensors")
    weights, written = load_file(file), gguf.GGUFReader(gemma_gguf)
    for tensor in written.tensors:
        if tensor.name == "blk.5.attn_q_norm.weight":
            plain = torch.tensor(tensor.data).float()
    assert torch.equal(weights["model.layers.5.self_attn.q_norm.weight"], plain - 1), "Gemma's norms multiply by 1 + it"
    with torch.inference_mode():
        logits = loaded.model(IDS[:, :40]).logits
    assert logits.isfinite().all() and logits.std() > 0.01
    spaced = Metadata(gemma_gguf, "gemma3", {}, {"model": "llama"}, 0)
    with pytest.raises(UserError, match="tokenizer.ggml.add_space_prefix=True, which transformers' tokenizer of it"):
        follow_metadata(loaded.tokenizer, spaced)


SPLIT_TEXT = "It's 12345'LL\n\n9 caf\xe9Time, (x)\n  y=$2;\t\u092c\u093eab"
PIECES = {
    "gpt-2": "It|'s| 12345|'|LL|\n|\n|9| caf\xe9Time|,| (|x|)|\n | y|=$|2|;|\t|\u092c|\u093e|ab",
    "smollm": "It|'s| |1|2|3|4|5|'|LL|\n\n|9| caf\xe9Time|,| (|x|)|\n | y|=$|2|;|\t|\u092c|\u093e|ab",
    "qwen2": "It|'s| |1|2|3|4|5|'LL|\n\n|9| caf\xe9Time|,| (|x|)\n| | y|=$|2|;|\t\u092c|\u093eab",
}
"""How `SPLIT_TEXT` is split, by a name of each split. Its last letters are Devanagari, the second a vowel sign."""


@pytest.mark.parametrize("pre", PIECES)
def test_a_gguf_splits_texts_as_it_says(pre, tmp_path):
    folder = converted(write_tiny_gguf(tmp_path / "split.gguf", {"tokenizer.ggml.pre": pre}))
    edit(folder / "config.json", model_type="qwen2")  # whose own class of tokenizer knows one split
    tokenizer = _tokenizer(folder, configured(folder), VOCAB_SIZE)
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)
    assert "|".join(SPLIT_TEXT[first:last] for _, (first, last) in found) == PIECES[pre]
    assert start_ids(tokenizer) == []
    is_composed = tokenizer("e\u0301").input_ids == tokenizer("\xe9").input_ids
    assert is_composed == (pre == "qwen2"), "as in Qwen's own tokenizer"


def test_a_gguf_says_whether_texts_start_with_a_token(tmp_path):
    says = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": True}
    assert start_ids(load_model(configured(write_tiny_gguf(tmp_path / "starting.gguf", says))).tokenizer) == [1]


def test_the_tokens_that_end_a_turn_end_an_answer(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    loaded = load_model(configured(write_tiny_gguf(tmp_path / "eot.gguf", ends)))
    assert loaded.model.generation_config.eos_token_id == [2, 7]


@pytest.mark.parametrize(
    ("extra", "tensors", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.type=yarn, which transformers leaves out"),
        ({}, {"rope_freqs.weight": [1.0] * 8}, "such as weights and factors of rotary frequencies, and the llama that"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count=8, which transformers leaves out"),
        ({"general.name": "mistral"}, {}, "general.architecture=llama, and transformers takes it as mistral; choose"),
        ({"llama.attention.sliding_window": 8}, {}, "sliding_window=8, which transformers' configuration of llama"),
        ({}, {"blk.0.attn_q.bias": [0.0] * 64}, r"its tensors hold [\d,]+ numbers, .* and the llama that transformers"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, {}, "tokenizer.ggml.pre=llama-bpe, and a text is split as by gpt-2,"),
    ],
)  # fmt: skip
def test_what_a_gguf_says_and_transformers_leaves_out_is_refused(extra, tensors, words, tmp_path):
    refused(words, configured(write_tiny_gguf(tmp_path / "odd.gguf", extra, tensors)))


@pytest.mark.parametrize(
    ("family", "key", "field", "value"),
    [
        ("phi3", "attention.sliding_window", "sliding_window", 2047),
        ("phi3", "attention.sliding_window", "sliding_window", 0),
        ("gemma2", "final_logit_softcapping", "final_logit_softcapping", 20.0),
    ],
)
def test_a_window_and_a_softcap_are_the_files(family, key, field, value):
    plain = AutoConfig.for_model(family)
    found = with_metadata(plain, Metadata(Path("x.gguf"), family, {key: value}, {}, 0))
    assert getattr(found, field) == (value or None)


def test_the_default_model_has_its_shipped_shape(default_model):
    shipped, loaded = preset_shape("smollm2-135m"), default_model.model.config.to_dict()
    for key, value in as_config("smollm2-135m", shipped).to_dict().items():
        if key in shipped:
            assert loaded[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert (default_model.name, default_model.max_length) == ("smollm2-135m", 8192)
    assert source.PACKAGE_PIN in Path("requirements-model.lock").read_text().splitlines()


# Model files that somebody else made: damaged ones end in one line, and none of them runs code


def test_a_truncated_gguf_is_refused_in_a_line(tiny_gguf):
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[: len(content) // 2])
    refused("damaged or truncated GGUF", configured(tiny_gguf))
    assert not list((files.cache_dir() / "gguf").glob("*"))


# What a file says, and what is loaded


def flip_last_byte(file: Path) -> None:
    """Change a weight, and nothing that a listing of the folder shows."""
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["model-1.safetensors", "sub/weights.safetensors"])
def test_the_shards_that_are_loaded_are_the_identity(name, model_dir):
    (model_dir / name).parent.mkdir(exist_ok=True)
    shard, config = (model_dir / "model.safetensors").rename(model_dir / name), configured(model_dir)
    with safe_open(shard, framework="np") as tensors:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.offset_keys(), name)}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    before = inputs.model(config)
    (model_dir / "beside.safetensors").write_bytes(b"never read")
    assert inputs.model(config) == before
    flip_last_byte(shard)
    assert inputs.model(config) != before


def test_remote_code_runs_only_where_it_is_trusted(model_dir, tmp_path):
    (model_dir / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError('seen')")
    edit(model_dir / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.Config"})
    load_model(configured(model_dir))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_changed_behind_the_clock_is_read_again(tiny_gguf, monkeypatch):
    monkeypatch.setattr(files, "SETTLED_S", -1.0)  # so that a note of the digest is kept at once
    before = files.file_sha256(tiny_gguf)
    flip_last_byte(tiny_gguf)
    assert files.file_sha256(tiny_gguf) == files.content_sha256(tiny_gguf) != before


# What is refused before a run


def test_a_model_that_conf_model_does_not_describe_is_refused(model_dir, monkeypatch):
    monkeypatch.setattr(source, "snapshot", lambda hub_id, with_code=False: model_dir)
    served = ModelConfig(name="llama2-7b", hub_id="meta-llama/Llama-2-7b-hf", device="cpu", shape=TINY_SHAPE)
    assert load_model(served).max_length == TINY_SHAPE["max_position_embeddings"]
    edit(model_dir / "config.json", max_position_embeddings=64)
    said = refused("holds a model of max_position_embeddings=64, and conf/model says", served)
    assert said.startswith("model=llama2-7b: meta-llama/Llama-2-7b-hf holds") and "model.shape=null" in said
    monkeypatch.setattr(source, "hub_file", lambda hub_id, name: model_dir / name)
    assert load_model(replace(served, shape=None)).max_length == 64


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_weights_that_do_not_fit_are_refused_with_the_amounts(weights, model_dir, monkeypatch):
    config = configured(model_dir, weights=weights)
    needed = tiny_model("llama", **SIZES).num_parameters() * 4
    monkeypatch.setattr(files, "available_memory", lambda: needed)
    load_model(config)
    monkeypatch.setattr(files, "available_memory", lambda: needed - 4)
    said = refused("model tiny needs 0.0 GiB of cpu memory for its weights in float32 and 0.0 GiB are", config)
    assert "or model.dtype=bfloat16" in said
    load_model(replace(config, dtype="bfloat16"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model_dir):
    tiny_model("llama", **SIZES | {"vocab_size": 200}).save_pretrained(model_dir)
    refused(r"has 256 tokens, more than the model's embedding \(vocab_size=200\)", configured(model_dir))


# What runs share


def test_a_model_is_loaded_once_for_equal_settings_and_takes_what_depends_on_it_along(monkeypatch):
    loads, resources, one, other = [], Resources(), ModelConfig("one"), ModelConfig("other")
    monkeypatch.setattr(
        "harness.model.load.load_model", lambda config: loads.append(config.name) or SimpleNamespace(name=config.name)
    )
    first = resources.model(one)
    resources.references.get("window", lambda: 1)
    assert resources.model(ModelConfig("one")) is first
    assert resources.references.get("window", lambda: 2) == 1
    assert resources.model(other).name == "other" and loads == ["one", "other"]
    assert resources.references.get("window", lambda: 2) == 2
