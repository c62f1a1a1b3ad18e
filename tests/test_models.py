"""Loading models: every source, the converted copy, and one clear line for each thing that can be wrong."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
import yaml
from model_files import TINY_SHAPE, write_gguf
from tokens import byte_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from harness import files
from harness.errors import UserError
from harness.model import gguf as gguf_cache
from harness.model import source
from harness.model.load import (
    config_from,
    from_memory,
    load_from,
    load_model,
    model_config,
    require_kernels,
    shape_mapping,
)
from harness.records import inputs
from harness.settings.sources import ModelConfig
from tests.hub_standin import Repository

ROOT = Path(__file__).resolve().parent.parent
MODEL_FILES = sorted((ROOT / "conf" / "model").glob("*.yaml"))

# What the authors' checkpoints hold, counted by transformers; tied weights count once.
PARAMETER_COUNTS = {
    "smollm2-135m": 134_515_008,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-7b-32k": 6_738_415_616,
    "llama3-8b-1048k": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-coder-0.5b": 494_032_768 + 151_936 * 896,  # the file holds the tied head a second time
    "phi3-mini": 3_821_079_552,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next": 79_674_391_296,  # without the layers for multi-token prediction
    "gemma3-12b": 11_766_034_176,  # the text decoder's, as below
    "mistral-small": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "phi4": 14_659_507_200,
    "glm4-9b": 9_400_279_040,
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "pythia-1.4b": 1_414_647_808,
}
MAX_LENGTHS = {
    "llama2-7b": 4096,
    "llama2-7b-32k": 32768,
    "llama3-8b-1048k": 1048576,
    "opt-13b": 2048,
    "qwen3-next": 262144,
}

IDS = torch.arange(3, 35)[None]


def configured(**settings) -> ModelConfig:
    return ModelConfig(**{"name": "tiny", "device": "cpu", **settings})


def from_yaml(path: Path) -> ModelConfig:
    return ModelConfig(**yaml.safe_load(path.read_text()))


@pytest.fixture(autouse=True)
def own_caches(request, tmp_path, monkeypatch):
    """Tiny models are cached in folders of their own; the default model's copy stays where users have it."""
    if "default_model" not in request.fixturenames:
        monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens


@pytest.fixture
def model_dir(tmp_path, tiny_gqa) -> Path:
    tiny_gqa.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tiny_gguf(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


# shapes


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_shipped_shape_has_the_published_number_of_parameters(path):
    config = from_yaml(path)
    assert config.name == path.stem
    shape = model_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    assert model.num_parameters() == PARAMETER_COUNTS[path.stem]
    assert shape.max_position_embeddings == MAX_LENGTHS.get(path.stem, shape.max_position_embeddings)


def test_long_context_shapes_keep_their_rotary_settings():
    linear = model_config(from_yaml(ROOT / "conf/model/llama2-7b-32k.yaml")).rope_parameters
    assert (linear["rope_type"], linear["factor"]) == ("linear", 8.0)
    million = model_config(from_yaml(ROOT / "conf/model/llama3-8b-1048k.yaml")).rope_parameters
    assert million["rope_theta"] == 3580165449.0


def test_shape_is_known_without_reading_weights(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"not weights")
    assert model_config(configured(path=str(model_dir))).num_key_value_heads == 2


# random weights


def test_random_weights_follow_the_seed_and_leave_torchs_generator_alone():
    state = torch.get_rng_state()
    first, again = (load_model(configured(weights="random", shape=TINY_SHAPE)) for _ in range(2))
    other = load_model(configured(weights="random", shape=TINY_SHAPE, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first.model(IDS).logits, again.model(IDS).logits)
    assert not torch.equal(first.model(IDS).logits, other.model(IDS).logits)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (first.tokenizer, first.max_length) == (None, 128)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_cpu_computes_in_what_the_settings_say(dtype, model_dir):
    loaded = load_model(configured(weights="random", shape=TINY_SHAPE, dtype=dtype))
    for each in (loaded, load_model(configured(path=str(model_dir), dtype=dtype))):
        assert {parameter.dtype for parameter in each.model.parameters()} == {getattr(torch, dtype)}
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"


# directories


def test_a_directory_loads_what_was_saved(model_dir, tiny_gqa):
    loaded = load_model(configured(path=str(model_dir), name="mine"))
    assert torch.equal(loaded.model(IDS).logits, tiny_gqa(IDS).logits)
    assert (loaded.name, loaded.tokenizer, loaded.max_length) == ("mine", None, 512)


def test_the_fingerprint_follows_the_weights(model_dir, tiny_gqa):
    before = load_model(configured(path=str(model_dir))).fingerprint
    assert load_model(configured(path=str(model_dir), name="renamed")).fingerprint == before
    tiny_gqa.model.norm.weight.mul_(2)
    try:
        tiny_gqa.save_pretrained(model_dir)
    finally:
        tiny_gqa.model.norm.weight.div_(2)
    assert load_model(configured(path=str(model_dir))).fingerprint != before


def test_a_model_is_named_by_a_string_or_given_as_it_is(model_dir, tiny_gqa):
    byte_tokenizer().save_pretrained(model_dir)
    loaded, given = load_from(str(model_dir), device="cpu"), from_memory(tiny_gqa, byte_tokenizer(), "mine")
    assert torch.equal(loaded.model(IDS).logits, given.model(IDS).logits)
    assert (loaded.name, given.name, given.max_length) == ("model", "mine", loaded.max_length)
    assert given.fingerprint == from_memory(tiny_gqa).fingerprint
    assert config_from("org/tiny") == ModelConfig(name="tiny", hub_id="org/tiny")
    assert config_from("smollm2-135m", device="cpu").shape["hidden_size"] == 576
    tiny_gqa.model.norm.weight.mul_(2)
    try:
        assert from_memory(tiny_gqa).fingerprint != given.fingerprint
    finally:
        tiny_gqa.model.norm.weight.div_(2)
    for name in ("smollm2", "a/b/c", "./none"):
        with pytest.raises(UserError, match=f"^model={re.escape(name)}: neither a folder nor organisation/name"):
            load_from(name)
    with pytest.raises(UserError, match=r"its tokenizer has 49152 tokens, .* \(vocab_size=256\)"):
        from_memory(tiny_gqa, SimpleNamespace(vocab_size=49152, bos_token_id=1, eos_token_id=None))


def refused(match: str, config: ModelConfig) -> str:
    with pytest.raises(UserError, match=match) as caught:
        load_model(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refuses_a_path_that_is_no_model(tmp_path, tiny_gguf):
    (tmp_path / "empty").mkdir()
    refused("neither a config.json nor a GGUF", configured(path=str(tmp_path / "empty")))
    (tmp_path / "second.gguf").write_bytes(tiny_gguf.read_bytes())
    refused("2 GGUF files, name one", configured(path=str(tmp_path)))


def test_refuses_missing_shards(model_dir):
    (model_dir / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    refused("not all", configured(path=str(model_dir)))


def test_refuses_truncated_safetensors(model_dir):
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused("cannot be loaded", configured(path=str(model_dir)))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 5}, {"intermediate_size": 96}], ids=["missing", "mismatched"])
def test_refuses_weights_that_do_not_fill_the_shape(model_dir, change):
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(r"lacks \d+ weights", configured(path=str(model_dir)))


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"model_type": "llama", "num_attention_heads": "many"}'])
def test_refuses_a_config_that_describes_no_model(model_dir, text):
    (model_dir / "config.json").write_text(text)
    refused("cannot be read|is not supported|is not valid", configured(path=str(model_dir)))


DECODERS = r"allowed: decoders of transformers \d+\.\d+\.\d+ \(AutoModelForCausalLM\)$"
NO_DECODERS = {
    "lama": rf"model_type=lama is not supported: did you mean 'llama' .*\? {DECODERS}",
    "t5": f"model_type=t5 is not supported: it is an encoder-decoder; {DECODERS}",
    "bart": f"model_type=bart is not supported: it is an encoder-decoder; {DECODERS}",  # though it has a class of them
    "vit": f"model_type=vit is not supported: it is no decoder; {DECODERS}",
    "bert": "is_decoder=False of model_type=bert is not supported: tokens would attend to later ones",
}


@pytest.mark.parametrize("model_type", NO_DECODERS)
def test_refuses_what_is_no_decoder_of_transformers(model_type):
    refused(NO_DECODERS[model_type], configured(weights="random", shape={"model_type": model_type}))


def test_refuses_a_decoder_whose_tokens_attend_to_later_ones():
    shape = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    refused("use_bidirectional_attention=True of model_type=gemma3_text", configured(weights="random", shape=shape))


@pytest.mark.parametrize(
    ("shape", "attention", "max_length"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96}, "sdpa", 96),
        ({"model_type": "bert", "is_decoder": True, "hidden_size": 48, "num_hidden_layers": 2}, "sdpa", 512),
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}, "eager", 2**31 - 1),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_any_decoder_of_transformers_is_loaded(shape, attention, max_length):
    loaded = load_model(configured(weights="random", shape=shape))
    assert loaded.model.config._attn_implementation == attention and loaded.max_length == max_length
    assert loaded.model(IDS).logits.isfinite().all()


# multimodal checkpoints

TEXT = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": None,
}  # fmt: skip
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def multimodal(model_type: str, folder: Path) -> PreTrainedModel:
    """A tiny image and text model with random weights, as its checkpoint lies on the hub."""
    text, vision = {"gemma3": ("gemma3_text", "siglip_vision_model"), "mistral3": ("mistral", "pixtral")}[model_type]
    window = {"sliding_window": 16} if model_type == "gemma3" else {}
    config = AutoConfig.for_model(
        model_type,
        text_config={"model_type": text, **TEXT, **window},
        vision_config={"model_type": vision, **VISION, "patch_size": 14},
        tie_word_embeddings=model_type == "gemma3",
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("model_type", "text"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
def test_of_a_multimodal_checkpoint_the_text_decoder_is_loaded(model_type, text, tmp_path):
    whole = multimodal(model_type, tmp_path / "model")
    described = configured(path=str(tmp_path / "model"), shape={"model_type": text, **TEXT, "sliding_window": 16})
    loaded = load_model(described)
    assert torch.equal(loaded.model(IDS).logits, whole(input_ids=IDS).logits)
    assert loaded.model.num_parameters() < whole.num_parameters()
    assert (loaded.model.config.model_type, loaded.max_length) == (text, 128)
    shape = shape_mapping(described)
    assert (shape["model_type"], shape["max_position_embeddings"]) == (text, 128)
    assert model_config(configured(shape=shape)).to_dict() == model_config(described).to_dict()
    refused(
        "holds a model of vocab_size=256, and conf/model says vocab_size=300; ",
        replace(described, shape={**described.shape, "vocab_size": 300}),
    )


def test_a_quantized_text_decoder_is_refused_too(tmp_path):
    multimodal("mistral3", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    mapping = json.loads(file.read_text())
    mapping["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    file.write_text(json.dumps(mapping))
    refused(r"its weights are quantized \(fp8\)", configured(path=str(tmp_path / "model")))


def test_refuses_a_model_without_any_source():
    refused("neither model.path nor model.hub_id", configured(shape=TINY_SHAPE))


def test_refuses_a_damaged_tokenizer(model_dir):
    (model_dir / "tokenizer.json").write_text('{"version": "1.0"}')
    refused("tokenizer in .* cannot be loaded", configured(path=str(model_dir)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_refuses_a_device_that_is_not_there():
    refused("model.device=cuda", configured(weights="random", shape=TINY_SHAPE, device="cuda"))


# GGUF


def test_a_gguf_is_converted_once_and_computes_the_same(tiny_gguf, monkeypatch, capsys):
    origin = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    first = load_model(configured(path=str(tiny_gguf)))
    assert torch.equal(first.model(IDS).logits, origin.eval()(IDS).logits)
    assert str(files.cache_dir()) in capsys.readouterr().err
    monkeypatch.setattr(gguf_cache, "_convert", None)  # a second conversion would fail
    again = load_model(configured(path=str(tiny_gguf.parent)))
    assert torch.equal(again.model(IDS).logits, first.model(IDS).logits)
    assert again.fingerprint == first.fingerprint == files.file_sha256(tiny_gguf)
    assert again.tokenizer.decode(again.tokenizer("abc").input_ids) == "abc"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "manifest", "missing"])
def test_a_damaged_copy_is_made_again(tiny_gguf, damage):
    expected = load_model(configured(path=str(tiny_gguf))).model(IDS).logits
    weights = gguf_cache.converted(tiny_gguf) / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(content[:1000])
    elif damage == "flipped":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    elif damage == "manifest":
        (weights.parent / gguf_cache.MANIFEST).write_text("{")
    else:
        weights.unlink()
    assert torch.equal(load_model(configured(path=str(tiny_gguf))).model(IDS).logits, expected)
    assert weights.read_bytes() == content


@pytest.mark.parametrize("keep", [0, 3, 40, 1000, 0.5, 0.999])
def test_refuses_a_truncated_gguf_and_leaves_no_copy(tiny_gguf, keep):
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    refused("damaged or truncated GGUF", configured(path=str(tiny_gguf)))
    assert not list((files.cache_dir() / "gguf").iterdir())


def test_refuses_an_unwritable_cache(tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "file"))
    refused("KV_HARNESS_CACHE", configured(path=str(tiny_gguf)))


# the default model


def test_the_default_model_equals_its_gguf_bit_for_bit(default_model, monkeypatch):
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers makes them again and again, of the same file
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    path = source.packaged_gguf()
    origin = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = (ROOT / "LICENSE").read_text()[:4000] + "\n\n  Naïve café: 12,345 × 7 ≠ 8\t\r\n<|im_end|> end"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert default_model.tokenizer(text, add_special_tokens=False).input_ids == ids
    chunk = torch.tensor([ids[:128]])
    with torch.inference_mode():
        assert torch.equal(default_model.model(chunk).logits, origin(chunk).logits)


def test_the_default_model_has_its_shipped_shape(default_model):
    shape = model_config(from_yaml(ROOT / "conf/model/smollm2-135m.yaml")).to_dict()
    loaded = default_model.model.config.to_dict()
    for key in yaml.safe_load((ROOT / "conf/model/smollm2-135m.yaml").read_text())["shape"]:
        if key == "rms_norm_eps":  # a float32 in the GGUF
            assert loaded[key] == pytest.approx(shape[key], rel=1e-6)
        else:
            assert loaded[key] == shape[key], key
    assert (default_model.name, default_model.max_length) == ("smollm2-135m", 8192)
    assert default_model.fingerprint == source.PACKAGED_SHA256


def test_refuses_to_go_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refused("weights is missing", configured(name="smollm2-135m"))
    assert source.PACKAGE_PIN in message and "model.path=DIR" in message


def test_the_pinned_package_is_the_locked_one():
    assert source.PACKAGE_PIN in (ROOT / "requirements-model.lock").read_text().splitlines()


def test_refuses_a_damaged_package(tmp_path, monkeypatch):
    (tmp_path / source.PACKAGED_FILE).write_bytes(b"GGUF")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    refused("damaged or of another version", configured(name="smollm2-135m"))


def test_importing_the_module_loads_no_torch():
    code = "import sys, harness.model.load; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# the hub


def test_an_unreachable_hub_is_said_at_once_with_what_remains(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    message = refused("unreachable", configured(hub_id="org/tiny"))
    assert waits == [], "it is not asked again"
    assert all(option in message for option in ("model.path=DIR", "model=smollm2-135m", "data=local"))


def test_refuses_a_malformed_hub_id():
    refused("expected organisation/name", configured(hub_id="a/b/c"))


def test_a_gguf_of_the_hub_is_fetched_alone_and_its_digest_is_the_models(tiny_gguf, hub_server):
    hub_server.models["org/tiny"] = Repository({"README.md": b"", "tiny.gguf": tiny_gguf.read_bytes(), "big.gguf": b""})
    config = configured(hub_id="org/tiny", gguf_file="tiny.gguf")
    loaded = load_model(config)
    assert len(hub_server.asked("GET .*/resolve/")) == 1
    assert loaded.fingerprint == load_model(configured(path=str(tiny_gguf))).fingerprint
    assert inputs.model(config) == inputs.model(configured(path=str(tiny_gguf)))
    refused(
        "model.gguf_file=tyni.gguf: org/tiny has no such file; did you mean 'tiny.gguf'",
        configured(hub_id="org/tiny", gguf_file="tyni.gguf"),
    )


def test_a_chat_template_is_part_of_a_models_identity(model_dir):
    before = inputs.model(configured(path=str(model_dir)))
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    assert inputs.model(configured(path=str(model_dir))) != before


def test_a_cached_gguf_needs_no_hub(tiny_gguf, tmp_path):
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    tiny_gguf.rename(snapshot / "tiny.gguf")
    assert (
        load_model(configured(hub_id="org/tiny", gguf_file="tiny.gguf")).max_length
        == TINY_SHAPE["max_position_embeddings"]
    )


def test_one_of_several_ggufs_in_a_folder_is_named(tiny_gguf):
    (tiny_gguf.parent / "other.gguf").write_bytes(b"not a model")
    refused("2 GGUF files, name one of them or set model.gguf_file", configured(path=str(tiny_gguf.parent)))
    assert (
        load_model(configured(path=str(tiny_gguf.parent), gguf_file="tiny.gguf")).max_length
        == TINY_SHAPE["max_position_embeddings"]
    )
    refused("model.gguf_file=no.gguf: no such file in", configured(path=str(tiny_gguf.parent), gguf_file="no.gguf"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Failed to find C compiler."),
            "RuntimeError: Failed to find C compiler.); it needs a C compiler",
        ),
        (subprocess.CalledProcessError(1, "gcc"), "it needs a C compiler, Python's headers"),
        (AssertionError("libcuda.so cannot found!"), "libcuda.so cannot found!"),
        (ModuleNotFoundError("No module named 'nothing'", name="nothing"), "needs the Python package nothing"),
    ],
)
def test_a_gpu_that_kernels_cannot_be_launched_on_is_refused_in_a_line(error, message, monkeypatch):
    class Driver:
        @property
        def active(self):
            raise error

    monkeypatch.setattr(pytest.importorskip("triton.runtime"), "driver", Driver())
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        require_kernels()
    assert str(raised.value).startswith("model.device=cuda: ") and "\n" not in str(raised.value)
