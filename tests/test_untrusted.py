"""Model files that somebody else made: damaged ones end in one line or in a model, and none of them runs code."""

import json
import os
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_files import TINY_SHAPE, write_gguf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from harness import files
from harness.errors import UserError
from harness.model import source
from harness.model.load import load_model
from harness.model.tiny import tiny_model
from harness.records import inputs
from harness.settings.config import ModelConfig

IDS = torch.arange(3, 35)[None]
SIZES = {key: value for key, value in TINY_SHAPE.items() if key != "model_type"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))


def configured(path: Path, **settings) -> ModelConfig:
    return ModelConfig(**{"name": "tiny", "device": "cpu", "path": str(path), **settings})


def refused(match: str, config: ModelConfig) -> str:
    with pytest.raises(UserError, match=match) as caught:
        load_model(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_model(folder: Path) -> Path:
    """A two-layer Llama with a tokenizer, as save_pretrained leaves it."""
    tiny_model("llama", **SIZES).save_pretrained(folder)
    gguf = write_gguf(folder.parent / "tokenizer.gguf")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    gguf.unlink()
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder with a model, and a GGUF."""
    folder = tmp_path_factory.mktemp("sound")
    write_model(folder / "model")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture
def model_dir(sound, tmp_path) -> Path:
    shutil.copytree(sound / "model", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("how", ["cut", "shuffled", "of huge lengths"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tiny.gguf"])
def test_a_damaged_file_is_refused_in_a_line(name, how, sound, model_dir):
    if name.endswith(".gguf"):
        shutil.rmtree(model_dir)
        model_dir.mkdir()
        shutil.copy(sound / name, model_dir)
    content = (model_dir / name).read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        "shuffled": content[64:] + content[:64],
        "of huge lengths": content[:8] + struct.pack("<Q", 2**63 - 1) + content[16:],
    }
    (model_dir / name).write_bytes(damaged[how])
    refused("tiny|model|json|safetensors", configured(model_dir))


# what a file says, and what is loaded


def edit(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_index(folder: Path, name: str) -> Path:
    """The weights of a folder as one shard of this name."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    weights = (folder / "model.safetensors").rename(folder / name)
    with safe_open(weights, framework="np") as tensors:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.offset_keys(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def flip_last_byte(file: Path) -> None:
    """Change a weight, and nothing that a listing of the folder shows."""
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


class Payload:
    """What pickle would run: it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../outside.safetensors"])
def test_an_index_names_safetensors_of_its_folder_and_nothing_else(name, model_dir, tmp_path):
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    refused(f"says that weights lie in {name}; allowed: .safetensors files of that folder", configured(model_dir))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model-1.safetensors", "sub/weights.safetensors"])
def test_the_shards_that_are_loaded_are_the_identity(name, model_dir):
    shard, config = with_index(model_dir, name), configured(model_dir)
    before, fingerprint = inputs.model(config), load_model(config).fingerprint
    (model_dir / "beside.safetensors").write_bytes(b"never read")
    assert inputs.model(config) == before
    flip_last_byte(shard)
    assert inputs.model(config) != before and load_model(config).fingerprint != fingerprint


def test_remote_code_runs_only_where_it_is_trusted(model_dir, tmp_path):
    (model_dir / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError('seen')")
    edit(model_dir / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.Config"})
    load_model(configured(model_dir))
    assert not (tmp_path / "ran").exists()


def test_weights_that_changed_behind_the_clock_are_read_again(sound, tmp_path, monkeypatch):
    path = shutil.copy(sound / "tiny.gguf", tmp_path / "tiny.gguf")
    monkeypatch.setattr(files, "SETTLED_S", -1.0)  # so that a note of the digest is kept at once
    config = configured(path)
    first = load_model(config).model(IDS).logits
    assert torch.equal(load_model(config).model(IDS).logits, first)
    before = files.file_sha256(path)
    flip_last_byte(path)
    assert files.file_sha256(path) == files.content_sha256(path) != before


# what is refused before a run


def test_a_model_that_conf_model_does_not_describe_is_refused(model_dir, monkeypatch):
    monkeypatch.setattr(source, "snapshot", lambda hub_id, with_code=False: model_dir)
    served = ModelConfig(name="llama2-7b", hub_id="meta-llama/Llama-2-7b-hf", device="cpu", shape=TINY_SHAPE)
    assert load_model(served).max_length == TINY_SHAPE["max_position_embeddings"]
    edit(model_dir / "config.json", max_position_embeddings=64)
    said = refused("holds a model of max_position_embeddings=64, and conf/model says", served)
    assert said.startswith("model=llama2-7b: meta-llama/Llama-2-7b-hf holds") and "model.shape=null" in said
    monkeypatch.setattr(source, "hub_file", lambda hub_id, name: model_dir / name)
    assert load_model(replace(served, shape=None)).max_length == 64
    edit(model_dir / "config.json", model_type="opt")
    refused("holds a model of model_type=opt, max_position_embeddings=64, and conf/model says model_type=llama", served)


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


@pytest.mark.parametrize("odd", [float("nan"), 1e5])
def test_weights_that_are_not_finite_are_refused(odd, model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"][3] = odd
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    said = "1 of its weights are not finite in {}, such as model.norm.weight"
    if odd == 1e5:
        load_model(configured(model_dir))
    else:
        refused(said.format("float32"), configured(model_dir))
    refused(said.format("float16"), configured(model_dir, dtype="float16"))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be above 0"),
        ({"hidden_size": 2.5}, "its shape is not valid .*'hidden_size' expected int"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value"),
        ({"hidden_size": 33}, "its shape is not valid .*not a multiple"),
    ],
)
def test_sizes_that_no_model_has_are_refused(sizes, said):
    refused(said, ModelConfig(name="tiny", device="cpu", weights="random", shape={**TINY_SHAPE, **sizes}))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model_dir):
    tiny_model(
        "llama", **{key: value for key, value in TINY_SHAPE.items() if key != "model_type"} | {"vocab_size": 200}
    ).save_pretrained(model_dir)
    refused(r"has 256 tokens, more than the model's embedding \(vocab_size=200\)", configured(model_dir))
    assert load_model(configured(model_dir, weights="random")).tokenizer is None


# the cache of converted files


def test_what_a_killed_conversion_left_is_removed_by_the_next(sound, tmp_path):
    left = files.cache_dir() / "gguf" / "converting"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    source.converted(sound / "tiny.gguf")
    assert not left.exists()


def test_a_full_cache_is_named_and_keeps_nothing_half_written(sound, monkeypatch):
    def fails(model, target, **settings):
        Path(target).mkdir(parents=True)
        (Path(target) / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fails)
    said = refused("No space left on device", configured(sound / "tiny.gguf"))
    assert "KV_HARNESS_CACHE" in said and str(files.cache_dir()) in said
    assert not list((files.cache_dir() / "gguf").iterdir())
