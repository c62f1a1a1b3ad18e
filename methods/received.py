"""Attention that the tokens of a prompt received, chunk by chunk: what H2O, TOVA and SnapKV begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.base import Softmax

PROMPT_CHUNK = 256
"""Prompt rows whose probabilities are held at once."""
PROMPT_BYTES = 2**28
"""Of them, so of few sequences where these are long; a sequence's own are held whatever they take."""


def received_attention(query: Tensor, key: Tensor, real: Tensor, softmax: Softmax, first: int = 0) -> Tensor:
    """Attention that each prompt token received from the rows `first` on, summed over them and the group, fp32.

    query: [batch, heads, prompt, head_dim]; key: [batch, num_kv_heads, prompt, head_dim]; real: [batch, prompt];
    returns [batch, num_kv_heads, prompt].
    """
    of_sequence = query.shape[1] * PROMPT_CHUNK * key.shape[2] * torch.float32.itemsize
    at_once = max(1, PROMPT_BYTES // max(1, of_sequence))  # there may be no prompt
    parts = zip(query.split(at_once), key.split(at_once), real.split(at_once), strict=True)
    return torch.cat([_received_attention(*part, softmax, first) for part in parts])


def _received_attention(query: Tensor, key: Tensor, real: Tensor, softmax: Softmax, first: int) -> Tensor:
    batch, num_kv_heads, prompt, _ = key.shape
    total = torch.zeros(batch, num_kv_heads, prompt, device=key.device)
    column = torch.arange(prompt, device=key.device)
    for start in range(first, prompt, PROMPT_CHUNK):
        stop = min(start + PROMPT_CHUNK, prompt)
        scores = softmax.scores(query[:, :, start:stop], key[:, :, :stop])
        hidden = (column[:stop] > column[start:stop, None]) | ~real[:, None, None, None, :stop]
        probs = softmax.weights(scores.masked_fill_(hidden, float("-inf")))
        rows = real[:, None, None, start:stop, None].to(probs.dtype)
        total[:, :, :stop] += probs.nan_to_num_().mul_(rows).sum((2, 3))
    return total
