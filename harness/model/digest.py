"""The identity of a model in memory: whatever is derived of it is keyed by this.

Weights in memory change: by training, pruning, a merge. No counter of torch's notes a write through
`.data`, so their content is read, at several GB/s. Some changes touch no tensor, such as an adapter
that is switched on, or a hook: they show in the logits, whichever mechanism makes them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from harness.model.passes import one_thread

NUM_TOKENS = 8


def probe(device: torch.device) -> Tensor:
    """The tokens by which models are compared, int [1, NUM_TOKENS]."""
    return torch.arange(3, 3 + NUM_TOKENS, device=device)[None]


@torch.inference_mode()
def model_digest(model: Any) -> str:
    """The digest of a model as it is now, 32 hex digits: of its configurations, its parameters and
    buffers with their devices, and its own logits of the `probe`.

    model: in evaluation mode, and not attached.
    """
    with one_thread():
        logits = model(probe(model.device), use_cache=False).logits
    digest = xxh3_128(model.config.to_json_string(use_diff=False).encode())
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        digest.update(generation.to_json_string(use_diff=False, ignore_metadata=True).encode())
    held = chain(model.named_parameters(), model.named_buffers())
    for name, tensor in (*held, ("logits", logits)):
        digest.update(f"{name} {tensor.device} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
