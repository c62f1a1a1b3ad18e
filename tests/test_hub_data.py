"""Commands of the README with a hub that answers over HTTP: real names, tiny weights, data sets of a few rows."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokens import byte_tokenizer

from harness.data.rows import revision
from harness.data.text import WIKITEXT_HUB, corpus_text
from harness.errors import UserError
from harness.launch.cli import main
from harness.model.tiny import tiny_model
from harness.records import inputs
from harness.records.record import read_records
from harness.settings.compose import load
from harness.settings.config import CorpusConfig, DataConfig
from tests.hub_standin import Files, Repository, break_off, commit, status

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 4,
}  # fmt: skip
NAME = "meta-llama/Llama-2-7b-hf"
COPA = {"premise": "It rained", "choice1": "He stayed.", "choice2": "He left.", "question": "effect"}
TASKS = {
    "aps/super_glue": ("copa", COPA),
    "nyu-mll/glue": ("rte", {"sentence1": "It rains.", "sentence2": "It is wet."}),
}
SHORT = "prefill_len=32 seq_len=96 num_windows=1 num_samples=1"
COMMAND = "method=infinigen model=llama2-7b data=hub experiment=tasks tasks=[copa,rte] num_samples=1"


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


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Files:
    """A model with its entry's shape, but for its size."""
    entry = yaml.safe_load((ROOT / "conf" / "model" / "llama2-7b.yaml").read_text())
    assert entry["hub_id"] == NAME
    folder = tmp_path_factory.mktemp("tiny")
    shape = entry["shape"] | SIZES
    tiny_model(shape.pop("model_type"), **shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def served(hub_server, weights, tmp_path, monkeypatch):
    """The hub with the models and data sets, started from an empty folder."""
    hub_server.models[NAME] = Repository(weights)
    hub_server.datasets |= {name: data_set(*about) for name, about in TASKS.items()}
    hub_server.datasets[WIKITEXT_HUB[0]] = wikitext()
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return hub_server


def run(command: str) -> int:
    """A command line; the shape's sizes are given with it, as those of the entry are the real model's."""
    return main([*command.split(), *(f"model.shape.{name}={size}" for name, size in SIZES.items())])


def test_tasks_from_the_hub_and_again_without_a_request(served, capfd):
    assert run(COMMAND) == 0
    shown = capfd.readouterr()
    assert all(task in shown.out for task in ("copa", "rte"))
    (record,) = read_records("results", "tasks")
    assert record["inputs"]["model"] == commit(served.models[NAME].branches["main"])
    served.requests.clear()
    assert run(f"{COMMAND} seed=1") == 0
    assert not served.requests
    assert "cached version" not in capfd.readouterr().err


CORPUS, HUB = CorpusConfig("wikitext2"), DataConfig("hub")
ROWS = r"GET .*/wikitext/resolve/.*/test.jsonl"


def test_a_data_set_or_a_model_replaced_on_the_hub_is_another_run(served, capfd):
    """Once it is fetched anew; until then, offline too, it is what the cache holds."""
    command = f"method=full model=llama2-7b experiment=perplexity data=hub corpus=wikitext2 {SHORT}"
    assert run(command) == 0
    assert f"{WIKITEXT_HUB[0]}: fetching from " in capfd.readouterr().err
    old, weights = served.datasets[WIKITEXT_HUB[0]].branches["main"], served.models[NAME].branches["main"]
    served.datasets[WIKITEXT_HUB[0]] = wikitext("Another line.\n")
    served.models[NAME] = Repository(changed := weights | {"config.json": weights["config.json"] + b"\n"})
    served.requests.clear()
    assert run(command) == 0 and "finished before, skipped" in capfd.readouterr().out and not served.requests
    (record,) = read_records("results", "perplexity")
    assert record["inputs"]["corpus"] == commit(old)
    shutil.rmtree("datasets"), shutil.rmtree("hub")
    new = served.datasets[WIKITEXT_HUB[0]].branches["main"]
    assert run(command) == 0
    records = read_records("results", "perplexity")
    assert {each["inputs"]["corpus"] for each in records} == {commit(old), commit(new)}
    assert {each["inputs"]["model"] for each in records} == {commit(weights), commit(changed)}
    table = Path("results/tables/perplexity.md").read_text()
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


@pytest.mark.parametrize(
    ("path", "part", "has_options", "expected"),
    [
        ("Org/CamelCase", "en", False, "22"),
        ("Org/CamelCase", None, False, "33"),
        ("Org/CamelCase", "en", True, "44"),
        ("Org/Camel", "en", False, ""),
    ],
)
def test_the_revision_is_that_of_the_newest_whole_rows(path, part, has_options, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    newest_first = ["en/0.0.0/55.incomplete", "default/0.0.0/33", "en/0.0.0/22", "en/0.0.0/11", "en-ab/0/44"]
    for age, name in enumerate(newest_first):
        rows = tmp_path / "Org___camel_case" / name
        rows.mkdir(parents=True)
        (rows / "dataset_info.json").touch()
        newest = part is None and name == "default/0.0.0/33"
        os.utime(rows, (2e9 if newest else 1e9 - age - 9 * ("-" in name),) * 2)
    fetched = []
    assert revision(path, part, lambda: fetched.append(path), has_options=has_options) == expected
    assert bool(fetched) == (not expected)


@pytest.mark.parametrize(
    ("asked", "answer", "words"),
    [
        (ROWS, break_off, "peer closed connection"),
        ("/wikitext", status(403, "Visit the page to ask for access.", X_Error_Code="GatedRepo"), "ask for access"),
        ("/wikitext", status(503, "The hub is being updated"), "503 .*being updated"),
    ],
)
def test_a_refused_data_set_says_what_the_hub_answered(asked, answer, words, served):
    served.disturb(asked, answer)
    with pytest.raises(UserError, match=rf"^data=hub: {WIKITEXT_HUB[0]} cannot be loaded \(.*{words}") as caught:
        corpus_text(CORPUS, HUB)
    message = str(caught.value)
    assert "data=local data.root=DIR" in message and "data=offline" in message and "\n" not in message
    served.faults.clear()
    assert corpus_text(CORPUS, HUB), "goes on"
