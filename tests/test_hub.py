"""Models from a hub that answers over HTTP: the files that are fetched, later starts, and what a refusal says."""

import re
import time

import pytest
import torch
from tokens import byte_tokenizer

from harness.errors import UserError
from harness.model import source
from harness.model.load import load_model
from harness.settings.config import ModelConfig
from tests.hub_standin import Files, Repository, break_off, commit, hang, stall, status

ID = "org/tiny"
IDS = torch.arange(3, 35)[None]
CONFIG = ModelConfig(name="tiny", hub_id=ID, device="cpu")
API, TREE, FILE = rf"GET /api/models/{ID}$", rf"GET /api/models/{ID}/tree", r"GET .*/model-00001.*"


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_gqa) -> Files:
    """The files of the tiny model, as transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_gqa.save_pretrained(folder, max_shard_size="400KB")
    byte_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def test_a_model_is_fetched_once_and_then_loaded_without_a_request(served, files, tiny_gqa, capsys):
    others = dict.fromkeys(("LICENSE.txt", "training_args.json", "original/params.json"), b"{}")
    served.models[ID] = Repository(files | others | {"modeling_tiny.py": b"pass"})
    assert source.hub_file(ID, "config.json").read_bytes() == files["config.json"]
    assert len(served.asked(r"GET .*/resolve/")) == 1, "a shape is read from the config alone"
    loaded = load_model(CONFIG)
    assert f"{ID}: fetching from {served.url}, revision " in capsys.readouterr().err
    assert torch.equal(loaded.model(IDS).logits, tiny_gqa(IDS).logits)
    assert {path.name for path in source.snapshot(ID).iterdir()} == set(files), "only the files that transformers reads"
    assert len(served.asked(r"GET .*\.safetensors$")) > 1
    served.requests.clear()
    again = load_model(CONFIG)
    assert again.tokenizer("a b").input_ids == loaded.tokenizer("a b").input_ids
    assert again.fingerprint == loaded.fingerprint and not served.requests
    source.snapshot(ID, with_code=True)
    assert served.asked(r"GET .*/modeling_tiny.py$") and not served.asked("safetensors"), "code only when asked"


def test_a_pickle_is_never_fetched_but_the_conversion_bots_branch(served, files):
    config = {"config.json": files["config.json"], "pytorch_model.bin": b"a pickle"}
    served.models[ID] = Repository(config | {"README.md": b"main"})
    message = refused()
    assert "save_pretrained" in message and source.CONVERT in message
    served.models[ID].add_pull_request(3, source.CONVERTED_TITLE, "somebody", files)
    assert "no model*.safetensors" in refused()
    assert not served.asked(r"GET .*/resolve/")
    served.models[ID].add_pull_request(7, source.CONVERTED_TITLE, source.CONVERTED_AUTHOR, files)
    assert source.snapshot(ID).name == commit(files)
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


@pytest.mark.parametrize(
    ("asked", "answer", "words"),
    [
        (API, status(401, "Invalid credentials in header"), "401 .*Invalid credentials"),
        (TREE, status(403, "Forbidden by your organisation"), "403 .*Forbidden by your organisation"),
        (FILE, status(429, "We had to rate limit you"), "429 .*We had to rate limit you"),
        (API, status(500), "500 .*Internal Server Error"),
        (FILE, break_off, "peer closed connection"),
        (FILE, stall, "timed out"),
        (API, hang, "timed out"),
    ],
)
def test_a_refusal_says_what_the_hub_answered(asked, answer, words, served, monkeypatch):
    if answer in (stall, hang):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    served.disturb(asked, answer)
    message = refused()
    assert re.search(words, message)
    assert len(served.asked(asked)) <= 14, "given up"


def test_other_refusals(served, monkeypatch):
    assert re.search("Repository Not Found .* make sure you are authenticated", refused("org/no"))
    assert "Repo id must" in refused("a/b/c")
    served.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in refused() and not served.requests
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    began = time.monotonic()
    assert "the connection to http://127.0.0.1:9 failed" in refused() and time.monotonic() - began < 5


# Transfers


def test_a_busy_hub_and_a_broken_transfer_are_tried_again(served, files):
    served.disturb(r"HEAD .*/config.json$", status(429, Retry_After="1"), times=2)
    served.disturb(FILE, break_off, times=2)
    assert {path.name: path.read_bytes() for path in source.snapshot(ID).iterdir()} == files
