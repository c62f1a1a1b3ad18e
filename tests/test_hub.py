"""Models from a hub that answers over HTTP: what is fetched, what is asked again, and what a refusal says."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokens import byte_tokenizer
from transformers.utils import logging

from harness.errors import UserError
from harness.model import hub
from harness.model.checkpoint import weight_files
from harness.model.load import load_model
from harness.records import inputs
from harness.settings.sources import ModelConfig
from tests.hub_standin import Files, Repository, break_off, commit, hang, stall, status

ID = "org/tiny"
IDS = torch.arange(3, 35)[None]
CONFIG = ModelConfig(name="tiny", hub_id=ID, device="cpu")
WHAT_REMAINS = ("model.path=DIR", "model=smollm2-135m", "data=local")


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
    """The one line with which a model is refused."""
    with pytest.raises(UserError) as caught:
        hub.snapshot(hub_id)
    message = str(caught.value)
    assert message.startswith(f"model.hub_id={hub_id}: ") and "\n" not in message
    return message


# What is fetched


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "sharded"])
def test_what_is_cached_is_loaded_without_a_request(options, hub_server, saved, tiny_gqa):
    files = saved(**options)
    hub_server.models[ID] = Repository(files)
    loaded = load_model(CONFIG)
    assert torch.equal(loaded.model(IDS).logits, tiny_gqa(IDS).logits)
    asked = len(hub_server.requests)
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(hub_server.asked(r"GET .*\.safetensors$")) == len(shards) and (len(shards) > 1) == bool(options)
    again = load_model(CONFIG)
    assert again.tokenizer("a b").input_ids == loaded.tokenizer("a b").input_ids
    assert again.fingerprint == loaded.fingerprint
    assert len(hub_server.requests) == asked


def pickled(files: Files) -> Files:
    return {name.replace("model.safetensors", "pytorch_model.bin"): content for name, content in files.items()}


def test_a_pickle_is_never_fetched_and_the_way_out_is_named(served, files):
    served.models[ID] = Repository(pickled(files))
    message = refused()
    assert "save_pretrained" in message and hub.CONVERT in message
    served.models[ID].add_pull_request(3, hub.CONVERTED_TITLE, "somebody", files)
    assert "no model*.safetensors" in refused()
    assert not served.asked(r"GET .*/resolve/")


def test_the_conversion_bots_branch_is_taken_where_there_is_one(served, files):
    served.models[ID] = Repository(pickled(files) | {"README.md": b"main"})
    served.models[ID].add_pull_request(7, hub.CONVERTED_TITLE, hub.CONVERTED_AUTHOR, files)
    assert hub.snapshot(ID).revision == commit(files)
    assert not served.asked("pytorch_model.bin")


def test_code_is_fetched_only_when_asked_and_then_alone(served, files):
    served.models[ID] = Repository(files | {"modeling_tiny.py": b"pass"})
    first = hub.snapshot(ID)
    assert not served.asked("modeling_tiny.py")
    served.requests.clear()
    assert hub.snapshot(ID, with_code=True) == first
    assert served.asked(r"GET .*/modeling_tiny.py$") == served.asked(r"GET .*/resolve/")


def test_a_shape_is_read_from_the_config_alone(served, files):
    assert (hub.config_directory(ID) / "config.json").read_bytes() == files["config.json"]
    assert len(served.asked(r"GET .*/resolve/")) == 1
    served.requests.clear()
    hub.config_directory(ID)
    assert not served.requests
    hub.snapshot(ID)
    assert served.asked(r"GET .*/model.safetensors")


def test_only_what_transformers_reads_is_fetched_or_missed(served, files):
    others = dict.fromkeys(("LICENSE.txt", "training_args.json", "original/params.json", "onnx/config.json"), b"{}")
    served.models[ID] = Repository(files | others)
    snapshot = hub.snapshot(ID).directory
    assert {path.name for path in snapshot.iterdir()} == set(files)
    served.requests.clear()
    hub.snapshot(ID)
    assert not served.requests


# What another start does


@pytest.mark.parametrize("lost", ["tokenizer.json", "model.safetensors", "config.json", "generation_config.json"])
def test_a_download_cut_short_goes_on_at_the_next_start(lost, served):
    served.disturb(rf"HEAD .*/{lost}$", status(404, "Entry not found", X_Error_Code="EntryNotFound"), times=1)
    assert f"the hub answered 404 to /{ID}/resolve/" in (message := refused()) and f"/{lost}: Entry" in message
    served.requests.clear()
    assert load_model(CONFIG).tokenizer is not None
    assert served.asked(rf"GET .*/{lost}$")


def unlist(directory: Path) -> None:
    """Forget what the hub listed, as other programs do."""
    from huggingface_hub import _tree_cache

    for listing in directory.parents[1].glob("trees/*"):
        listing.unlink()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def test_a_cache_of_another_program_without_tokenizer_is_completed_once(served):
    snapshot = hub.snapshot(ID).directory
    unlist(snapshot)
    served.requests.clear()
    assert hub.snapshot(ID).directory == snapshot and not served.requests, "it has a tokenizer"
    (snapshot / "tokenizer.json").unlink()
    assert (hub.snapshot(ID).directory / "tokenizer.json").is_file()
    assert served.asked(r"/tokenizer.json$") and not served.asked("safetensors")


def test_a_model_without_tokenizer_is_asked_for_once(served, files, monkeypatch):
    served.models[ID] = Repository({name: files[name] for name in ("config.json", "model.safetensors")})
    snapshot = hub.snapshot(ID)
    served.requests.clear()
    assert hub.snapshot(ID) == snapshot and not served.requests
    unlist(snapshot.directory)
    served.disturb("", status(503))
    assert hub.snapshot(ID) == snapshot, "all that can be had"


def test_a_model_replaced_on_the_hub_is_another_model_once_it_is_fetched(served, files):
    before = inputs.model(CONFIG)
    assert before == {"model": commit(files)}
    changed = files | {"tokenizer_config.json": json.dumps({"model_max_length": 7}).encode()}
    served.models[ID] = Repository(changed)
    assert inputs.model(CONFIG) == before, "what is cached stays"
    from huggingface_hub import snapshot_download

    snapshot_download(ID)
    assert inputs.model(CONFIG) == {"model": commit(changed)}


# Refusals


def test_a_gated_model_is_refused_in_the_hubs_words_and_fetched_with_a_token(served, monkeypatch):
    served.models[ID].gated = True
    message = refused()
    assert f"Access to model {ID} is restricted." in message and "hf auth login" in message
    assert all(option in message for option in WHAT_REMAINS)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    message = refused()
    assert f"the hub answered 403 to /{ID}/resolve/" in message
    assert f"Visit https://huggingface.co/{ID} to ask for access." in message
    monkeypatch.setenv("HF_TOKEN", served.token)
    assert weight_files(hub.snapshot(ID).directory)


API, FILE = rf"GET /api/models/{ID}$", r"(GET|HEAD) .*/model.safetensors$"


@pytest.mark.parametrize("asked", [API, FILE, rf"GET /api/models/{ID}/tree"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            status(401, "Invalid credentials in Authorization header"),
            "answered 401 to .* Invalid credentials .*HF_TOKEN=",
        ),
        (status(403, "Forbidden by your organisation"), "answered 403 to .*: Forbidden by your organisation"),
        (
            status(429, "We had to rate limit you", Retry_After="600"),
            "answered 429 .* rate limit you; .* again in 600 s",
        ),
        (status(500), "answered 500 to .*: Internal Server Error"),
        (status(503, "The hub is being updated"), "answered 503 to .*: The hub is being updated"),
    ],
)
def test_a_refusal_says_what_the_hub_answered(asked, answer, words, served):
    served.disturb(asked, answer)
    message = refused()
    assert re.search(words, message) and "unreachable" not in message


def test_an_unknown_repository(served):
    message = refused("org/none")
    assert "no such repository, or a private one (the hub answered 401 to /api/models/org/none: Invalid user" in message


def test_offline_by_the_users_own_setting(served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    assert not served.requests


def test_weights_under_other_names(served, files):
    served.models[ID] = Repository(
        files | {"model.safetensors.index.json": b'{"weight_map": {"a": "other.safetensors"}}'}
    )
    assert "its weights are not all in files named model*.safetensors" in refused()


@pytest.mark.parametrize("asked", [API, FILE, r"HEAD .*/config.json$"])
def test_a_busy_hub_is_asked_again(asked, served):
    served.disturb(asked, status(429, Retry_After="1"), times=2)
    assert weight_files(hub.snapshot(ID).directory)


def test_a_hub_that_stays_busy_is_given_up(served):
    served.disturb(API, status(429, Retry_After="1"))
    assert "answered 429" in refused()
    assert len(served.asked(API)) == 3


# Transfers


def test_a_broken_transfer_goes_on(served, files):
    served.disturb(r"GET .*/model.safetensors$", break_off, times=2)
    assert (hub.snapshot(ID).directory / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_transfer_that_breaks_off_again_and_again(served):
    served.disturb(r"GET .*/model.safetensors$", break_off)
    assert "peer closed connection" in refused()


@pytest.mark.parametrize(
    ("asked", "fault"), [(r"GET .*/model.safetensors$", stall), (r"HEAD .*/model.safetensors$", hang), (API, hang)]
)
def test_a_transfer_that_never_ends_is_given_up(asked, fault, served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    served.disturb(asked, fault)
    assert f"{served.url} gave no answer in time" in refused()
    assert len(served.asked(asked)) <= 7


def test_a_download_shows_its_progress(served, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    logging.disable_progress_bar()  # as loading a model does
    hub.snapshot(ID)
    shown = capsys.readouterr().err
    size = len(served.models[ID].branches["main"]["model.safetensors"])
    assert f"{ID}: fetching " in shown and f"from {served.url}, revision " in shown
    assert "Downloading" in shown and "100%" in shown and size > 100_000
    hub.snapshot(ID)
    assert capsys.readouterr().err == ""
