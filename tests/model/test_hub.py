"""Models and data sets of a hub that answers over HTTP: what is fetched, later starts, and what a refusal says."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.data.text import WIKITEXT_HUB, corpus_text
from harness.errors import UserError
from harness.model import source
from harness.model.load import load_model
from harness.results import inputs
from harness.results.record import read_records
from harness.run.cli import main
from harness.run.compose import load
from harness.settings.config import CorpusConfig, DataConfig, ModelConfig
from harness.settings.schema import CONF_DIR
from tests.hub_standin import Files, Repository, commit, status
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

ID = "meta-llama/Llama-2-7b-hf"
IDS = torch.arange(3, 35)[None]
CONFIG = ModelConfig(name="tiny", hub_id=ID, device="cpu")
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 4,
}  # fmt: skip
COPA = {"premise": "It rained", "choice1": "He stayed.", "choice2": "He left.", "question": "effect"}
TASKS = {
    "aps/super_glue": ("copa", COPA),
    "nyu-mll/glue": ("rte", {"sentence1": "It rains.", "sentence2": "It is wet."}),
}
SHORT = "prefill_len=32 seq_len=96 num_windows=1 num_samples=1"
COMMAND = "method=infinigen model=llama2-7b data=hub experiment=tasks tasks=[copa,rte] num_samples=1"


@pytest.fixture(scope="module")
def model():
    """With the shape of conf/model/llama2-7b.yaml, but for its size."""
    entry = yaml.safe_load((CONF_DIR / "model" / "llama2-7b.yaml").read_text())
    assert entry["hub_id"] == ID
    shape = entry["shape"] | SIZES
    return tiny_model(shape.pop("model_type"), **shape)


@pytest.fixture(scope="module")
def files(tmp_path_factory, model) -> Files:
    """The files of the model, as transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="400KB")
    byte_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def repository(part: str | None, rows: list[dict[str, Any]], *splits: str) -> Repository:
    """The same rows in every split."""
    found = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    configs = [{"config_name": part or "default", "data_files": found}]
    card = f"---\n{yaml.safe_dump({'configs': configs})}---\n".encode()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return Repository({"README.md": card} | {f"{split}.jsonl": lines for split in splits})


def data_set(part: str | None, row: dict[str, Any]) -> Repository:
    """Six equal rows a split but for their label."""
    rows = [{"label": number % 2, "idx": number, **row} for number in range(6)]
    return repository(part, rows, "train", "validation", "test")


def wikitext(text: str = "A line.\n") -> Repository:
    return repository(WIKITEXT_HUB[1], [{"text": text}] * 40, "test")


@pytest.fixture
def served(hub_server, files, tmp_path, monkeypatch):
    """The hub with the model and data sets, asked from an empty folder."""
    hub_server.models[ID] = Repository(dict(files))
    hub_server.datasets |= {name: data_set(*about) for name, about in TASKS.items()}
    hub_server.datasets[WIKITEXT_HUB[0]] = wikitext()
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return hub_server


def refused(hub_id: str = ID) -> str:
    """The one line with which a model is refused, which says what remains."""
    with pytest.raises(UserError) as caught:
        source.snapshot(hub_id)
    message = str(caught.value)
    assert message.startswith(f"model.hub_id={hub_id}: ") and "\n" not in message
    assert all(option in message for option in ("model.path=DIR", "model=smollm2-135m", "data=local"))
    return message


# Which files are fetched


def test_a_model_is_fetched_once_and_then_loaded_without_a_request(served, files, model, capsys):
    others = dict.fromkeys(("LICENSE", "pytorch_model.bin", "original/params.json"), b"{}")
    served.models[ID] = Repository(files | others | {"modeling_tiny.py": b"pass"})
    assert source.hub_file(ID, "config.json").read_bytes() == files["config.json"]
    assert len(served.asked(r"GET .*/resolve/")) == 1, "a shape is read from the config alone"
    loaded = load_model(CONFIG)
    assert f"{ID}: fetching from {served.url}" in capsys.readouterr().err
    assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)
    assert {path.name for path in source.snapshot(ID).iterdir()} == set(files), "only the files that transformers reads"
    assert len(served.asked(r"GET .*\.safetensors$")) > 1
    served.requests.clear()
    again = load_model(CONFIG)
    assert again.tokenizer("a b").input_ids == loaded.tokenizer("a b").input_ids
    assert torch.equal(again.model(IDS).logits, loaded.model(IDS).logits) and not served.requests
    source.snapshot(ID, with_code=True)
    assert served.asked(r"GET .*/modeling_tiny.py$") and not served.asked("safetensors"), "code only when asked"


def test_a_pickle_is_never_fetched(served, files):
    config = {"config.json": files["config.json"], "pytorch_model.bin": b"a pickle"}
    served.models[ID] = Repository(config)
    for _ in range(2):
        message = refused()
        assert "it has no model*.safetensors" in message and source.CONVERT in message
    assert not served.asked("pytorch_model.bin")


# Later starts


@pytest.mark.parametrize("lost", ["tokenizer.json", "config.json"])
def test_a_download_cut_short_goes_on_at_the_next_start(lost, served):
    served.disturb(rf"HEAD .*/{lost}$", status(404, "Entry not found", X_Error_Code="EntryNotFound"), times=1)
    assert re.search(f"the hub refused: 404 .*Entry Not Found for .*/{lost}", refused())
    served.requests.clear()
    assert load_model(CONFIG).tokenizer is not None
    assert served.asked(rf"GET .*/{lost}$")


# Refusals


def test_a_gated_model_is_refused_in_the_hubs_words_and_fetched_with_a_token(served, monkeypatch):
    served.models[ID].gated = True
    assert f"Access to model {ID} is restricted. You must have access to it. Please log in." in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert f"Visit https://huggingface.co/{ID} to ask for access." in refused()
    monkeypatch.setenv("HF_TOKEN", served.token)
    assert source.weight_files(source.snapshot(ID))


def test_other_refusals(served, monkeypatch):
    assert re.search("Repository Not Found .* make sure you are authenticated", refused("org/no"))
    served.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused() and not served.requests


# Data sets, in commands of the README


def run(command: str) -> int:
    """A command line; the shape's sizes are given with it, as those of the entry are the real model's."""
    return main([*command.split(), *(f"model.shape.{name}={size}" for name, size in SIZES.items())])


def test_tasks_from_the_hub_and_again_without_a_request(served, capfd):
    assert run(COMMAND) == 0
    shown = capfd.readouterr()
    assert all(task in shown.out for task in ("copa", "rte"))
    (record,) = read_records("outputs", "tasks")
    assert record["inputs"]["model"] == commit(served.models[ID].branches["main"])
    served.requests.clear()
    assert run(f"{COMMAND} seed=1") == 0
    assert not served.requests
    assert "cached version" not in capfd.readouterr().err


CORPUS, HUB = CorpusConfig("wikitext2"), DataConfig("hub")


def test_a_data_set_or_a_model_replaced_on_the_hub_is_another_run(served, capfd):
    """Once it is fetched anew; until then, offline too, it is what the cache holds."""
    command = f"method=full model=llama2-7b experiment=perplexity data=hub corpus=wikitext2 {SHORT}"
    assert run(command) == 0
    assert f"{WIKITEXT_HUB[0]}: fetching from " in capfd.readouterr().err
    old, weights = served.datasets[WIKITEXT_HUB[0]].branches["main"], served.models[ID].branches["main"]
    served.datasets[WIKITEXT_HUB[0]] = wikitext("Another line.\n")
    served.models[ID] = Repository(changed := weights | {"config.json": weights["config.json"] + b"\n"})
    served.requests.clear()
    assert run(command) == 0 and "finished before, skipped" in capfd.readouterr().out and not served.requests
    (record,) = read_records("outputs", "perplexity")
    assert record["inputs"]["corpus"] == commit(old)
    shutil.rmtree("datasets"), shutil.rmtree("hub")
    new = served.datasets[WIKITEXT_HUB[0]].branches["main"]
    assert run(command) == 0
    records = read_records("outputs", "perplexity")
    assert {each["inputs"]["corpus"] for each in records} == {commit(old), commit(new)}
    assert {each["inputs"]["model"] for each in records} == {commit(weights), commit(changed)}
    table = Path("outputs/tables/perplexity.md").read_text()
    assert all(f"weights={commit(each)[:8]}" in table for each in (weights, changed))


def test_rows_of_a_task_are_of_a_revision(served):
    config = load(COMMAND.split())
    before = inputs.tasks(config)
    served.requests.clear()
    assert inputs.tasks(config) == before and not served.requests
    served.datasets["aps/super_glue"] = data_set("copa", COPA | {"premise": "It snowed"})
    assert inputs.tasks(config) == before
    shutil.rmtree("datasets/aps___super_glue")
    after = inputs.tasks(config)
    assert after["rte"] == before["rte"] and after["copa"] != before["copa"]


def test_a_refused_data_set_says_what_the_hub_answered(served):
    served.disturb("/wikitext", status(503, "The hub is being updated"))
    said = rf"^data=hub: {WIKITEXT_HUB[0]} cannot be loaded \(.*503 .*being updated"
    with pytest.raises(UserError, match=said) as caught:
        corpus_text(CORPUS, HUB)
    message = str(caught.value)
    assert "data=local data.root=DIR" in message and "data=offline" in message and "\n" not in message
    served.faults.clear()
    assert corpus_text(CORPUS, HUB), "goes on"
