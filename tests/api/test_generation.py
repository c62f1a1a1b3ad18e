"""One model folder, one greedy answer: transformers' `generate`, `HFLM`, and every way to generate here.

A model's own generation_config.json holds in each of them, with the full cache.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from harness.api.cached_model import CachedModel
from harness.api.method_lm import MethodLM
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.generation import ENDLESS, Draft, GenerationRule
from harness.model.load import Resources, from_memory
from harness.replay.session import Setup
from harness.run.compose import load
from harness.run.runner import Run
from harness.scoring.perplexity import FULL, decode_freely
from harness.settings.config import GREEDY, RunConfig, SamplingConfig
from harness.speed.generate import Generated, run_generate
from methods.full import Full
from tests.conftest import refused
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT = "What is a cache?\n\nQ: who?\nA:"
IDS = TOKENIZER(PROMPT)["input_ids"]
NEW = 24
FREE = {"eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A tiny model with one token a character."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama", num_key_value_heads=2, vocab_size=len(TOKENIZER), max_position_embeddings=256)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(weights, tmp_path):
    """The model with a generation_config.json of these values."""

    def with_file(values: dict[str, Any]) -> Path:
        made = tmp_path / "model"
        made.mkdir()
        for file in weights.iterdir():
            (made / file.name).symlink_to(file)
        (made / "generation_config.json").unlink()
        (made / "generation_config.json").write_text(json.dumps(FREE | values))
        return made

    return with_file


@pytest.fixture(scope="module")
def free(weights) -> list[int]:
    """The greedy answer of the model alone."""
    model = AutoModelForCausalLM.from_pretrained(weights)
    return by_transformers(model, eos_token_id=None, max_new_tokens=NEW)


def by_transformers(model: Any, **settings: Any) -> list[int]:
    """The new tokens of transformers' own `generate`."""
    ids = torch.tensor([IDS])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    return made[0, len(IDS) :].tolist()


def shown(tokens: list[int]) -> list[int]:
    """Without the special token that ended them: transformers shows an end that is an ordinary token."""
    return tokens[:-1] if tokens[-1] in TOKENIZER.all_special_ids else tokens


@cache
def config_of(kind: str) -> RunConfig:
    settings = {"generate": [f"prompt='{PROMPT}'", "placement=device"], "tasks": ["prefill=dense"]}
    return load([f"experiment={kind}", "method=full", *settings[kind]])


def generated(model: Any, max_new_tokens: int | None = None) -> Generated:
    """`experiment=generate`."""
    config = replace(config_of("generate"), max_new_tokens=max_new_tokens)
    return run_generate(config, from_memory(model, TOKENIZER), lambda piece: None)


def lm_of(model: Any) -> MethodLM:
    """`harness.lm`."""
    return MethodLM(config_of("tasks"), from_memory(model, TOKENIZER))


def answer_of(lm: Any, **settings: Any) -> str:
    """lm-eval's answer to the prompt."""
    request = Instance("generate_until", {}, (PROMPT, settings), 0, metadata=("task", 0, 1))
    return lm.generate_until([request])[0]


# Files: of the free answer's tokens, so that each of them changes it.
FILES = {
    "several ends": lambda free: {"eos_token_id": [2, free[5]]},
    "repetition_penalty": lambda free: {"repetition_penalty": 1.3},
    "min_new_tokens": lambda free: {"eos_token_id": free[1], "min_new_tokens": 9},
    "suppress_tokens": lambda free: {"suppress_tokens": free[:2]},
    "exponential_decay": lambda free: {"exponential_decay_length_penalty": [3, 3.0], "eos_token_id": 7},
    "max_new_tokens": lambda free: {"max_new_tokens": 7},
    "max_length": lambda free: {"max_length": len(IDS) + 7},
}
OF_LENGTH = ("max_new_tokens", "max_length")


@pytest.mark.parametrize("name", FILES)
def test_one_folder_one_greedy_answer(name, folder, free):
    path = folder(FILES[name](free))
    network = AutoModelForCausalLM.from_pretrained(path)
    lengths = {} if name in OF_LENGTH else {"max_new_tokens": NEW}
    expected = by_transformers(network, **lengths)
    assert expected != free, "the file changes nothing"

    made = generated(network, **lengths)
    assert made.text == TOKENIZER.decode(shown(expected))
    assert made.num_tokens == len(shown(expected))
    with attach(network) as attached, CachedModel(attached, Setup(Full(), None, None), max_length=256) as cached:
        assert by_transformers(network, **lengths) == expected
        assert cached.usage.steps == len(expected) - 1

    of_task = {"until": [], "max_gen_toks": NEW}
    theirs = answer_of(HFLM(pretrained=network, tokenizer=TOKENIZER, max_length=256), **of_task)
    assert answer_of(lm_of(network), **of_task) == theirs
    if name != "max_length":  # which HFLM sets itself
        assert theirs == TOKENIZER.decode(expected, skip_special_tokens=True)


def test_stop_strings_of_a_file_end_a_text(folder, free):
    stop = TOKENIZER.decode(free[6:8])
    network = AutoModelForCausalLM.from_pretrained(folder({"stop_strings": [stop]}))
    expected = by_transformers(network, max_new_tokens=NEW, tokenizer=TOKENIZER)
    assert 1 < len(expected) < NEW
    assert generated(network, max_new_tokens=NEW).text == TOKENIZER.decode(expected)
    assert answer_of(lm_of(network), until=[], max_gen_toks=NEW) == TOKENIZER.decode(expected)
    with pytest.raises(UserError, match="generation_config.json says stop_strings=.*tokenizer"):
        GenerationRule(network, IDS, max_new_tokens=NEW)


def test_a_files_length_ends_at_the_models_limit(folder):
    network = AutoModelForCausalLM.from_pretrained(folder({"max_new_tokens": 1000}))
    made = generated(network)
    assert made.num_prompt_tokens + made.num_tokens == 256


def test_a_long_text_follows_the_file_and_does_not_end(folder, free):
    """`long_decode`: replay of drafts that no token ends."""
    values = {"eos_token_id": [free[5]], "repetition_penalty": 1.2, "max_new_tokens": 3}
    network = AutoModelForCausalLM.from_pretrained(folder(values))
    rule = GenerationRule(network, IDS, max_new_tokens=NEW, **GREEDY, **ENDLESS)
    with attach(network) as attached:
        tokens, _, _ = decode_freely(attached, FULL, [IDS], [Draft(IDS, rule)])
    assert tokens[0].tolist() == by_transformers(network, max_new_tokens=NEW, eos_token_id=None)


def test_a_drawn_text_is_of_transformers_distribution(folder):
    """The file's `top_p` and `min_p` hold, and transformers' `top_k` of 50."""
    network = AutoModelForCausalLM.from_pretrained(folder({"top_p": 0.8, "min_p": 0.05}))
    logits = 2 * torch.randn(len(TOKENIZER), generator=torch.Generator().manual_seed(0))
    rule = GenerationRule(network, IDS, max_new_tokens=NEW, **SamplingConfig(0.7).rule())
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
    )
    ids = torch.tensor(IDS)
    assert torch.equal(rule.scores(ids, logits), warpers(ids[None], logits[None])[0])
    own = GenerationRule(network, IDS, max_new_tokens=NEW, **SamplingConfig(0.7, top_p=1.0, top_k=3).rule())
    assert int(own.scores(ids, logits).isfinite().sum()) <= 3


def test_what_chooses_tokens_in_another_way_is_refused_where_the_file_says_it(folder):
    network = AutoModelForCausalLM.from_pretrained(folder({"guidance_scale": 1.5}))

    def by_attach():
        with attach(network) as attached, CachedModel(attached, Setup(Full(), None, None)):
            by_transformers(network, max_new_tokens=2)

    by_task = {"until": [], "max_gen_toks": 2}
    for ask in (by_attach, lambda: generated(network, 2), lambda: answer_of(lm_of(network), **by_task)):
        with refused("guidance_scale=1.5.*set it to 1 in"):
            ask()


def test_a_changed_file_is_another_run(weights):
    """Of a model in memory too, whose weights are the same."""
    network = AutoModelForCausalLM.from_pretrained(weights)
    resources = Resources(from_memory(network, TOKENIZER))

    def path_of(kind: str) -> Path:
        return Run.of(load([f"experiment={kind}", "method=full"]), resources).path

    before = {kind: path_of(kind) for kind in ("long_decode", "perplexity")}
    network.generation_config.repetition_penalty = 1.3
    assert path_of("long_decode") != before["long_decode"]
