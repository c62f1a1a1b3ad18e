"""Models that change in memory: whatever is derived of a model is that of the model as it is now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.checks.families import tiny_family
from harness.files import cache_dir
from harness.model.attach import attach
from harness.model.prompts import PromptPass, cached_calibration
from harness.results import inputs
from harness.results.record import read_all
from methods.infinigen import InfiniGen
from methods.loki import Loki
from tests.tiny_models import tiny_ids, tiny_model
from tests.tokens import byte_tokenizer

IDS = torch.tensor([tiny_ids("A cache keeps what is read again.")])
SHORT = {"num_windows": 1, "seq_len": 64, "prefill_len": 32}


class Adapted(nn.Module):
    """A matrix with an adapter, as peft makes one for transformers: to switch it touches no tensor."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.is_on = False
        self.added = nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, states: Tensor) -> Tensor:
        output = self.base(states)
        if self.is_on:
            output = output + self.added(states)
        return output


def adapted(model: Any) -> Any:
    """The model with an adapter on every matrix of its attention, all of them off."""
    torch.manual_seed(1)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "attn" in name:
            model.set_submodule(name, Adapted(module))
    return model.requires_grad_(False)


def adapters(model: Any) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


# Ways to change a model


def write_data(model: Any) -> None:
    """torch counts no such write (`_version`)."""
    for weight in model.parameters():
        weight.data.mul_(1 + 0.5 * torch.rand(weight.shape).to(weight))


def switch(model: Any) -> None:
    for each in adapters(model):
        each.is_on = True


def change_a_word(model: Any) -> None:
    """One that the probe of a model has not."""
    model.get_input_embeddings().weight.data[IDS[0, 1:]] *= 3


WAYS = (write_data, switch, change_a_word)


# What is derived of it


def gqa() -> Any:
    return tiny_model("llama", num_key_value_heads=2)


def logits_of(model: Any) -> Tensor:
    with attach(model) as attached:
        hidden = attached.forward(IDS, torch.arange(IDS.shape[1])[None], PromptPass(attached))
        return attached.logits(hidden)


def calibrations_of(model: Any) -> Tensor:
    folder = cache_dir() / "calibration"
    with attach(model) as attached:
        found = [cached_calibration(attached, method, IDS[0].tolist(), folder) for method in (InfiniGen(), Loki())]
    return torch.cat([tensor.flatten() for tensors in found for tensor in tensors.values()])


DERIVED: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "latents": (lambda: tiny_family("deepseek_v3"), logits_of),
    "calibrations": (gqa, calibrations_of),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thing", DERIVED)
def test_what_is_derived_is_that_of_the_model_as_it_is_now(way, thing):
    make, measure = DERIVED[thing]
    model = adapted(make())
    before = measure(model)
    way(model)
    model.eval().requires_grad_(False).zero_grad()
    changed = copy.deepcopy(model)  # of which nothing is kept
    now = measure(model)
    assert not torch.allclose(now, before, rtol=1e-2, atol=1e-2)
    assert torch.equal(now, measure(changed))


def test_a_model_of_files_is_theirs_until_it_changes(tmp_path):
    """Its runs are those of the command line, and after a change no longer, nor is it compared with its old logits."""
    gqa().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    mine = harness.load(tmp_path / "model", results_dir="results", **SHORT)

    def perplexity() -> float:
        return float(mine.perplexity(methods=["full"], quiet=True).perplexity[0])

    whole = perplexity()
    write_data(mine.loaded.model)
    damaged = perplexity()
    assert damaged != whole and perplexity() == damaged
    digests = [record["inputs"]["model"] for record in read_all("results")]
    assert len(digests) == 2 and inputs.model(mine.configured({}, {}).model)["model"] in digests
    mine.loaded.model.generation_config.repetition_penalty = 1.3
    assert perplexity() == damaged and len(list(read_all("results"))) == 3, "a part of the model's files, too"
    streaming = {"methods": ["streaming"], "budget": "nearest:0.5", "quiet": True}
    other = harness.load(mine.loaded.model, byte_tokenizer(), results_dir="others", **SHORT)
    assert mine.perplexity(**streaming).kl_nats[0] == other.perplexity(**streaming).kl_nats[0]
