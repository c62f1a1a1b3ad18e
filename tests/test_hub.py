"""Models from a hub that answers over HTTP: the files that are fetched, later starts, and what a refusal says."""

import json
import re
import time
from collections.abc import Callable

import pytest
import torch
from tokens import byte_tokenizer
from transformers.utils import logging

from harness.errors import UserError
from harness.model import source
from harness.model.load import load_model
from harness.records import inputs
from harness.settings.config import ModelConfig
from tests.hub_standin import Files, Repository, break_off, commit, hang, stall, status

ID = "org/tiny"
IDS = torch.arange(3, 35)[None]
CONFIG = ModelConfig(name="tiny", hub_id=ID, device="cpu")
API, TREE, FILE = rf"GET /api/models/{ID}$", rf"GET /api/models/{ID}/tree", r"(GET|HEAD) .*/model.safetensors$"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_gqa) -> Callable[..., Files]:
    """The files of the tiny model, as transformers saves it."""

    def save(**options) -> Files:
        folder = tmp_path_factory.mktemp("saved")
        tiny_gqa.save_pretrained(folder, **options)
        byte_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return save


@pytest.fixture(scope="module")
def files(saved) -> Files:
    return saved()


@pytest.fixture
def served(hub_server, files):
    """The hub, with the tiny model on it."""
    hub_server.models[ID] = Repository(dict(files))
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


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "sharded"])
def test_a_model_is_fetched_once_and_then_loaded_without_a_request(options, hub_server, saved, tiny_gqa):
    files = saved(**options)
    others = dict.fromkeys(("LICENSE.txt", "training_args.json", "original/params.json", "modeling_tiny.py"), b"{}")
    hub_server.models[ID] = Repository(files | others)
    loaded = load_model(CONFIG)
    assert torch.equal(loaded.model(IDS).logits, tiny_gqa(IDS).logits)
    assert {path.name for path in source.snapshot(ID).iterdir()} == set(files), "only the files that transformers reads"
    assert (len(hub_server.asked(r"GET .*\.safetensors$")) > 1) == bool(options)
    asked = len(hub_server.requests)
    again = load_model(CONFIG)
    assert again.tokenizer("a b").input_ids == loaded.tokenizer("a b").input_ids
    assert again.fingerprint == loaded.fingerprint and len(hub_server.requests) == asked


def test_a_pickle_is_never_fetched_but_the_conversion_bots_branch(served, files):
    pickled = {name.replace("model.safetensors", "pytorch_model.bin"): content for name, content in files.items()}
    served.models[ID] = Repository(pickled | {"README.md": b"main"})
    message = refused()
    assert "save_pretrained" in message and source.CONVERT in message
    served.models[ID].add_pull_request(3, source.CONVERTED_TITLE, "somebody", files)
    assert "no model*.safetensors" in refused()
    assert not served.asked(r"GET .*/resolve/")
    served.models[ID].add_pull_request(7, source.CONVERTED_TITLE, source.CONVERTED_AUTHOR, files)
    assert source.snapshot(ID).name == commit(files)
    assert not served.asked("pytorch_model.bin")


def test_code_is_fetched_only_when_asked_and_then_alone(served, files):
    served.models[ID] = Repository(files | {"modeling_tiny.py": b"pass"})
    first = source.snapshot(ID)
    assert not served.asked("modeling_tiny.py")
    served.requests.clear()
    assert source.snapshot(ID, with_code=True) == first
    assert served.asked(r"GET .*/modeling_tiny.py$") == served.asked(r"GET .*/resolve/")


def test_a_shape_is_read_from_the_config_alone(served, files):
    assert source.hub_file(ID, "config.json").read_bytes() == files["config.json"]
    assert len(served.asked(r"GET .*/resolve/")) == 1
    served.requests.clear()
    source.hub_file(ID, "config.json")
    assert not served.requests
    source.snapshot(ID)
    assert served.asked(r"GET .*/model.safetensors")


# Later starts


@pytest.mark.parametrize("lost", ["tokenizer.json", "model.safetensors", "config.json", "generation_config.json"])
def test_a_download_cut_short_goes_on_at_the_next_start(lost, served):
    served.disturb(rf"HEAD .*/{lost}$", status(404, "Entry not found", X_Error_Code="EntryNotFound"), times=1)
    assert f"the hub answered 404 to /{ID}/resolve/" in (message := refused()) and f"/{lost}: Entry" in message
    served.requests.clear()
    assert load_model(CONFIG).tokenizer is not None
    assert served.asked(rf"GET .*/{lost}$")


def test_a_cache_of_another_program_is_completed_where_it_lacks_a_tokenizer(served):
    from huggingface_hub import _tree_cache

    snapshot = source.snapshot(ID)
    for listing in snapshot.parents[1].glob("trees/*"):  # other programs leave no list of the hub's files
        listing.unlink()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    served.requests.clear()
    assert source.snapshot(ID) == snapshot and not served.requests, "it has a tokenizer"
    (snapshot / "tokenizer.json").unlink()
    served.disturb(API, status(403), times=1)
    assert source.snapshot(ID) == snapshot and not (snapshot / "tokenizer.json").is_file(), "all that can be had"
    assert (source.snapshot(ID) / "tokenizer.json").is_file()
    assert served.asked(r"/tokenizer.json$") and not served.asked("safetensors")


def test_a_model_replaced_on_the_hub_is_another_model_once_it_is_fetched(served, files):
    from huggingface_hub import snapshot_download

    before = inputs.model(CONFIG)
    assert before == {"model": commit(files)}
    changed = files | {"tokenizer_config.json": json.dumps({"model_max_length": 7}).encode()}
    served.models[ID] = Repository(changed)
    assert inputs.model(CONFIG) == before, "what is cached stays"
    snapshot_download(ID)
    assert inputs.model(CONFIG) == {"model": commit(changed)}


# Refusals


def test_a_gated_model_is_refused_in_the_hubs_words_and_fetched_with_a_token(served, monkeypatch):
    served.models[ID].gated = True
    message = refused()
    assert f"Access to model {ID} is restricted." in message and "hf auth login" in message
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert f"Visit https://huggingface.co/{ID} to ask for access." in refused()
    monkeypatch.setenv("HF_TOKEN", served.token)
    assert source.weight_files(source.snapshot(ID))


@pytest.mark.parametrize("asked", [API, TREE, FILE])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(401, "Invalid credentials in header"), "answered 401 to .* Invalid credentials .*HF_TOKEN="),
        (status(403, "Forbidden by your organisation"), "answered 403 to .*: Forbidden by your organisation"),
        (status(429, "We had to rate limit you"), "answered 429 to .*: We had to rate limit you"),
        (status(500), "answered 500 to .*: Internal Server Error"),
    ],
)
def test_a_refusal_says_what_the_hub_answered(asked, answer, words, served):
    served.disturb(asked, answer)
    message = refused()
    assert re.search(words, message) and "unreachable" not in message


def test_other_refusals(served, files, monkeypatch):
    assert "no such repository, or a private one (the hub answered 401 to /api/models/org/no:" in refused("org/no")
    served.models["org/odd"] = Repository(
        files | {"model.safetensors.index.json": b'{"weight_map": {"a": "other.safetensors"}}'}
    )
    assert "its weights are not all in files named model*.safetensors" in refused("org/odd")
    with pytest.raises(UserError, match="^model.hub_id=a/b/c: not a repository id; expected organisation/name"):
        source.snapshot("a/b/c")
    served.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refused() and not served.requests
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    began = time.monotonic()
    assert "http://127.0.0.1:9 is unreachable" in refused() and time.monotonic() - began < 5


# Transfers


def test_a_busy_hub_and_a_broken_transfer_are_tried_again(served, files):
    served.disturb(r"HEAD .*/config.json$", status(429, Retry_After="1"), times=2)
    served.disturb(r"GET .*/model.safetensors$", break_off, times=2)
    assert (source.snapshot(ID) / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize(
    ("asked", "fault", "words"),
    [
        (r"GET .*/model.safetensors$", break_off, "peer closed connection"),
        (r"GET .*/model.safetensors$", stall, "gave no answer in time"),
        (API, hang, "gave no answer in time"),
    ],
)
def test_a_transfer_that_never_ends_is_given_up(asked, fault, words, served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    served.disturb(asked, fault)
    assert words in refused()
    assert len(served.asked(asked)) <= 7


def test_a_download_shows_its_progress(served, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    load_model(CONFIG)
    shown = capsys.readouterr().err
    assert f"{ID}: fetching from {served.url}, revision " in shown and "100%" in shown
    assert not logging.is_progress_bar_enabled() or "Loading" not in shown
    source.snapshot(ID)
    assert capsys.readouterr().err == ""
