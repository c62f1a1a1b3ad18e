"""Whether something fits into the memory of a device, asked before it is made there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.errors import UserError
from harness.files import available_memory
from harness.model.attached import Attached

GIB = 2**30


def available_bytes(home: torch.device) -> int:
    """What a new allocation in the memory of device `home` may use, droppable caches included."""
    if home.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return torch.cuda.mem_get_info(home)[0] + unused


def require_room(what: str, num_weights: int, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
    """Raise UserError where so many weights do not fit into the free memory of all `devices` together."""
    needed, available = num_weights * dtype.itemsize, sum(map(available_bytes, devices))
    if needed <= available:
        return
    word = str(dtype).removeprefix("torch.")
    halved = ", or model.dtype=bfloat16" if dtype == torch.float32 and needed <= 2 * available else ""
    raise UserError(
        f"{what} needs {needed / GIB:.1f} GiB of {devices[0].type} memory for its weights in {word} and "
        f"{available / GIB:.1f} GiB are available; choose a smaller model{halved}"
    )


def prompt_bytes(attached: Attached, num_tokens: int) -> int:
    """At most what a layer of a dense pass over `num_tokens` tokens, all prompts', holds at once.

    Per token: four hidden states, the rotary tables, and the larger of FFN and attention activations. Attention makes
    query, key, value and output, the query once more, and the packed row and a copy.
    """
    layer, geometry = attached.layers[0], attached.geometry
    hidden = layer.call.hidden.shape[-1]
    of_attention = {id(each) for each in layer.module.parameters()}
    attention = sum(each.numel() for each in layer.module.parameters() if each.dim() == 2) // hidden
    attention += geometry.head_dim * (geometry.num_heads + 4 * geometry.num_kv_heads)
    ffn = [each for each in layer.block.parameters() if id(each) not in of_attention]
    per_token = 4 * hidden + 4 * geometry.head_dim + max(attention, _ffn_elements(ffn, hidden, attached))
    return num_tokens * per_token * attached.dtype.itemsize


def _ffn_elements(weights: Sequence[Tensor], hidden: int, attached: Attached) -> int:
    """A token's activations in an FFN: one for each matrix, and another where two matrices are one, whose product
    stays as long as its halves are used. Of a tensor of experts a token meets a few."""
    matrices = [weight for weight in weights if weight.dim() == 2]
    experts = [weight for weight in weights if weight.dim() == 3]
    num_experts = getattr(attached.decoder.stack.config, "num_experts_per_tok", None) or 1
    of_experts = num_experts * sum(max(weight.shape[1:]) for weight in experts)
    if not matrices:
        return of_experts
    fused = max(weight.shape[0] for weight in matrices) - max(weight.shape[1] for weight in matrices)
    return sum(weight.numel() for weight in matrices) // hidden + max(0, fused) + of_experts
