"""What is refused of a model before it runs: weights that are not all there, not finite, or quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.errors import UserError, refused
from harness.model.shape import NESTED, size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def count(what: str, described: PreTrainedConfig) -> int:
    """Weights of a model that a configuration describes, without any memory; UserError where it describes none."""
    from transformers import AutoModelForCausalLM

    with refused(f"{what}: its configuration describes no model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(described).num_parameters()


def require_filled(what: str, described: PreTrainedConfig, num_weights: int) -> None:
    """Raise UserError where files hold less than half of the weights that their configuration describes: all of them
    would be made up in memory, before anybody could say which are missing.

    A layer of any decoder holds more than hidden_size squared: so too many layers are refused without building them.
    """
    layers, hidden_size = (size(described, name) or 0 for name in ("num_hidden_layers", "hidden_size"))
    if layers * hidden_size**2 > 2 * num_weights or count(what, described) > 2 * num_weights:
        raise UserError(f"{what}: holds {num_weights} weights, far fewer than its configuration describes")


def require_floats(name: str, mapping: Mapping[str, Any]) -> None:
    """Raise UserError where a config.json says that its weights are quantized: methods compute with floats."""
    nested = mapping.get(NESTED)
    quantized = mapping.get("quantization_config") or (
        nested.get("quantization_config") if isinstance(nested, Mapping) else None
    )
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UserError(
            f"model {name}: its weights are quantized ({method}), which is not supported; choose its checkpoint in "
            "float16 or bfloat16, or a GGUF"
        )


def require_finite(name: str, model: nn.Module) -> None:
    """Raise UserError where a weight is infinite or no number, as it may be in the precision it was loaded in."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    bounds = torch.stack([torch.stack(torch.aminmax(each)).float().to(parameters[0].device) for each in parameters])
    odd = (~bounds.isfinite().all(1)).nonzero().flatten().tolist()
    if odd:
        dtype = str(parameters[odd[0]].dtype).removeprefix("torch.")
        raise UserError(f"model {name}: {len(odd)} of its weights are not finite in {dtype}, such as {names[odd[0]]}")


def require_embeddings(what: str, tokenizer: Any, model: PreTrainedModel) -> None:
    """Raise UserError where a tokenizer can give a token that the model has no embedding of."""
    highest, rows = highest_token(tokenizer), model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        raise UserError(
            f"{what} has {highest + 1} tokens, more than the model's embedding (vocab_size={rows}); give it its own "
            "tokenizer"
        )


def highest_token(tokenizer: Any) -> int:
    """The largest id among the tokens that texts are made of, and those before and after them. Tokens that were added
    may lie beyond, as those that transformers adds to a GGUF's: a text that has one is refused when it is run."""
    return max(tokenizer.vocab_size - 1, tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0)
