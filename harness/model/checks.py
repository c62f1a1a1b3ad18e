"""What is refused of a model before it runs: weights without room, or not finite, or quantized; foreign token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.errors import UserError
from harness.files import available_memory
from harness.model.checkpoint import num_elements
from harness.model.described import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GIB = 2**30


def available_bytes(home: torch.device) -> int:
    """What a new allocation in the memory of device `home` may use, droppable caches included."""
    if home.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused


def require_room(name: str, num_weights: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError where so many weights do not fit into the free memory of `device`."""
    needed, available = num_weights * dtype.itemsize, available_bytes(device)
    if needed > available:
        halved = ", or model.dtype=bfloat16" if dtype == torch.float32 else ""
        raise UserError(
            f"model {name}: its weights need {needed / GIB:.1f} GiB of {device.type} memory in {_word(dtype)} and "
            f"{available / GIB:.1f} GiB are available; choose a smaller model{halved}"
        )


def require_filled(name: str, described: PreTrainedConfig, files: Sequence[Path]) -> int:
    """How many weights the files hold; UserError where they are not half of those that the configuration describes,
    which would be made up in memory before anybody could say which are missing."""
    held = num_elements(files)
    if shape_of(name, described).num_weights > 2 * held or _count(described) > 2 * held:
        raise UserError(f"model {name}: {files[0].parent} holds {held} weights, its config.json describes many more")
    return held


def require_floats(name: str, mapping: Mapping[str, Any]) -> None:
    """Raise UserError where a config.json says that its weights are quantized: methods compute with floats."""
    quantized = mapping.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UserError(
            f"model {name}: its weights are quantized ({method}), which is not supported; choose its checkpoint in "
            "float16 or bfloat16, or a GGUF"
        )


def require_finite(name: str, model: nn.Module) -> None:
    """Raise UserError where a weight is infinite or no number, as it may be in the precision it was loaded in."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    bounds = torch.stack([torch.stack(torch.aminmax(each)).float() for each in parameters])
    odd = (~bounds.isfinite().all(1)).nonzero().flatten().tolist()
    if odd:
        dtype = _word(parameters[odd[0]].dtype)
        raise UserError(f"model {name}: {len(odd)} of its weights are not finite in {dtype}, such as {names[odd[0]]}")


def fits(tokenizer: Any, model: PreTrainedModel) -> bool:
    """Whether the model has an embedding of every token that texts are made of, and of those before and after them.

    A tokenizer may have others, which nobody asks for: transformers adds one for unknown text to a GGUF's.
    """
    around = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    highest = max(tokenizer.vocab_size - 1, *(token or 0 for token in around))
    return highest < model.get_input_embeddings().num_embeddings


def _count(described: PreTrainedConfig) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(described).num_parameters()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
