"""Every argument of transformers' `generate` inside `harness.attach`: the bare model's tokens, or a refusal whose
remedy works."""

import inspect
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from harness.api.cached_model import CachedModel
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.generation import GenerationRule
from harness.replay.session import Setup
from harness.settings.config import GREEDY
from methods.full import Full
from tests.tiny_models import tiny_model
from tests.tokens import byte_tokenizer

TOKENIZER = byte_tokenizer()
IDS = torch.tensor([TOKENIZER("What is a cache?")["input_ids"]])
NEW = 6
FULL = Setup(Full(), None, None)
PLAIN = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": NEW, "do_sample": False}


def model_of(**of_file: Any) -> Any:
    model = tiny_model("llama", num_key_value_heads=2, vocab_size=len(TOKENIZER), max_position_embeddings=128)
    model.generation_config = GenerationConfig(pad_token_id=0, **of_file)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def new_tokens(model: Any, **asked: Any) -> list[list[int]]:
    """The sequences of a call, whatever it returns, by random numbers of one seed."""
    torch.manual_seed(0)
    ids = asked.pop("ids", IDS)
    made = model.generate(*([] if ids is None else [ids]), **(PLAIN | asked))
    return (made if isinstance(made, torch.Tensor) else made.sequences).tolist()


@contextmanager
def attached(model: Any) -> Iterator[CachedModel]:
    with attach(model) as of_model, CachedModel(of_model, FULL, max_length=128) as cached:
        yield cached


SAMPLED = {"do_sample": True}
TAKEN: dict[str, Any] = {
    "inputs": {"ids": None, "inputs": IDS},
    "input_ids": {"ids": None, "input_ids": IDS},
    "attention_mask": torch.tensor([[0, 0, *[1] * (IDS.shape[1] - 2)]]),
    "tokenizer": {"tokenizer": TOKENIZER, "stop_strings": ["zz"]},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=1.5)},
    "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([94, 93])]),
    "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(IDS.shape[1] + 2)]),
    "max_length": {"max_length": IDS.shape[1] + 3, "max_new_tokens": None},
    "max_new_tokens": 3,
    "stop_strings": {"tokenizer": TOKENIZER, "stop_strings": "y"},
    "do_sample": True,
    "num_return_sequences": SAMPLED | {"num_return_sequences": 2},
    "position_ids": None,
}
"""Arguments, and the values that they are called with: a dict is the call's own."""
PASSED_ON = [
    "trust_remote_code", "prefix_allowed_tokens_fn", "streamer", "min_new_tokens", "early_stopping", "max_time",
    "temperature", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "output_scores", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "disable_compile",
    "encoder_repetition_penalty", "watermarking_config", "output_logits", "eos_token_id",
    "compile_config", "min_length", "top_p",
    "diversity_penalty", "continuous_batching_config", "low_memory", "transformers_version", "_from_model_config",
]  # fmt: skip
"""Arguments that transformers alone looks at, as at some of the above. A new one has to be looked at here."""
REFUSED: dict[str, Any] = {
    "inputs_embeds": torch.zeros(1, 4, 64),
    "past_key_values": DynamicCache(),
    "assistant_model": object(),
    "assistant_tokenizer": TOKENIZER,
    "custom_generate": "transformers-community/dola",
    "synced_gpus": True,
    "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": torch.ones_like(IDS),
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "token_healing": True,
    "is_assistant": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 99,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "speculation_type": "dflash",
    "use_mtp": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


def test_every_argument_is_known():
    named = {name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")}
    known = TAKEN.keys() | REFUSED.keys() | set(PASSED_ON)
    assert named | vars(GenerationConfig()).keys() <= known
    assert not TAKEN.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_that_is_taken_gives_the_bare_models_tokens(name, model):
    value = TAKEN[name]
    asked = value if isinstance(value, dict) else {name: value}
    expected = new_tokens(model, **asked)
    with attached(model):
        assert new_tokens(model, **asked) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_refused_says_what_to_do(name, model):
    expected = new_tokens(model)
    ids = {"ids": None} if name == "inputs_embeds" else {}
    with attached(model):
        with pytest.raises(UserError, match=rf"^{name}=") as error:
            new_tokens(model, **{name: REFUSED[name]}, **ids)
        assert "\n" not in str(error.value)
        _, _, allowed = str(error.value).partition("allowed: ")
        for word in allowed.split(" or ") if allowed else ["None"]:
            assert new_tokens(model, **{name: literal_eval(word)}) == expected


CACHE_OF_A_FILE = {
    "cache_implementation": "hybrid",
    "prompt_lookup_num_tokens": 3,
}


@pytest.mark.parametrize("name", CACHE_OF_A_FILE)
def test_what_a_models_own_file_says_of_its_cache_plays_no_part(name):
    """Gemma 2 and 3 say `cache_implementation: hybrid`."""
    expected = new_tokens(model_of())
    model = model_of()
    setattr(model.generation_config, name, CACHE_OF_A_FILE[name])
    with attached(model):
        assert new_tokens(model) == expected
        repeated = GenerationConfig(**{name: CACHE_OF_A_FILE[name]})  # as a pipeline's copy of it does
        assert new_tokens(model, generation_config=repeated) == expected
        with pytest.raises(UserError, match=f"^{name}="):
            new_tokens(model, **{name: CACHE_OF_A_FILE[name]})
    assert GenerationRule(model, IDS[0].tolist(), **GREEDY, max_new_tokens=3).is_plain
