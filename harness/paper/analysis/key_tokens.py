"""Figure 5: how many key tokens hold 0.9 of a query's attention weight, own token included.

A histogram over all queries and heads, and the mean over heads at single queries: it differs by layer, head and
query, even from one query to the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from harness.paper.analysis.dense import Block, observe
from harness.paper.analysis.points import Point, mean_point
from harness.paper.analysis.subject import Subject

MASS = 0.9
PAPER_LAYERS = (0, 18)
QUERIES = (500, 998, 999, 1000, 1001, 1002, 1500, 2000)
"""Those whose numbers the paper gives, as far as the text goes."""
MAX_BINS = 64


def tokens_for_mass(probs: Tensor, mass: float = MASS) -> Tensor:
    """The fewest key tokens that hold `mass` of each query's attention.

    probs: [..., keys], summing to 1 along the last axis; returns int64 [...] on the CPU.
    """
    ascending = np.sort(probs.cpu().numpy(), axis=-1)  # vectorised, unlike torch's on the CPU
    dropped = np.cumsum(ascending, axis=-1, dtype=np.float64) <= 1 - mass
    return torch.from_numpy(ascending.shape[-1] - dropped.sum(-1))


class KeyTokens:
    """Observer: `counts`, int32 [heads, tokens], `tokens_for_mass` of every query of a layer."""

    def __init__(self, num_heads: int, num_tokens: int) -> None:
        self.counts = torch.zeros(num_heads, num_tokens, dtype=torch.int32)

    def __call__(self, block: Block) -> None:
        """Count for the block's rows."""
        self.counts[:, block.start : block.stop] = tokens_for_mass(block.probs()).int()


def measure(subject: Subject) -> list[Point]:
    """Histogram and single queries of each layer."""
    heads = subject.attached.geometry.num_heads
    counters = {layer: KeyTokens(heads, subject.num_tokens) for layer in subject.layers(PAPER_LAYERS)}
    observe(subject.attached, subject.ids, {layer: [counter] for layer, counter in counters.items()})
    return [point for layer, counter in counters.items() for point in _points(layer, counter.counts)]


def _points(layer: int, counts: Tensor) -> Iterator[Point]:
    series = f"layer {layer}"
    num_tokens = counts.shape[-1]
    width = 2 ** max(0, (num_tokens // MAX_BINS).bit_length() - 1)
    for index, share in enumerate(histogram(counts, width).unbind(-1)):
        x = index * width
        yield mean_point(share, series=series, metric="share_of_queries", x_name="key_tokens", x=x, layer=layer)
    for query in QUERIES:
        if query < num_tokens:
            of_heads, metric = counts[:, query], f"key_tokens_for_{MASS:g}"
            yield mean_point(of_heads, series=series, metric=metric, x_name="query_token", x=query, layer=layer)


def histogram(counts: Tensor, width: int) -> Tensor:
    """Share of each head's queries by bin of `width` counts: fp64 [heads, bins], at least two bins.

    counts: int [heads, tokens]; bin i holds the counts in [i width, (i + 1) width).
    """
    bins = max(2, int(counts.max()) // width + 1)
    rows = [torch.bincount(head // width, minlength=bins) for head in counts]
    return torch.stack(rows).double() / counts.shape[-1]
