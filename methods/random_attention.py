"""Random Attention (arXiv 2609.03430): keep the prompt, and evict generated tokens at random.

It computes no score at all, so it is the control of every method that evicts while it generates: a
score is as good as what it adds to a draw of the same size.

The rule, and where it differs (made into docs/methods.md):

**random**: after every `divide_length` (128) generated tokens, each KV head goes back to
`kept_tokens` (2,048), or with null to floor(`budget` · T) tokens. The prompt stays and counts in
the budget (`protect_prompt`). Of the generated tokens each KV head of each layer keeps others,
drawn anew at each compression, all with equal chance; so an old token has survived more draws than
a late one. Draws are hashes of `seed`, layer, KV head, number of cached tokens and token, so replay
and live decoding draw the same, in any batch. Written by the abstract alone. The schedule is that
of R-KV and TriAttention, so that nothing but the score differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.periodic import Held, Periodic, PeriodicState
from methods.sampling import mixed
from methods.settings import least, setting


class RandomState(PeriodicState):
    """A token's score is a number drawn for it."""

    def score(self, layer: int, held: Held) -> Tensor:
        """A number from 0 to 2^24 - 1 for each token."""
        heads = torch.arange(held.tokens.shape[1], device=held.tokens.device)
        head_hash = mixed(mixed(heads + layer * 2**16) + self.method.seed)
        draw_hash = mixed(head_hash + held.cached[:, None])
        return (mixed(draw_hash.unsqueeze(-1) + held.tokens) >> 8).float()


@dataclass(frozen=True)
class RandomAttention(Periodic):
    """The prompt stays; the default budget is TriAttention's.

    Source: Random Attention (2026)
    Keeps: the prompt, and generated tokens drawn at random
    """

    kept_tokens: int | None = 2048
    protect_prompt: bool = True
    seed: int = setting(0, "of the draws", least(0))

    title = "Random Attention"
    state = RandomState
