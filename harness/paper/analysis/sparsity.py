"""Figure 20: longer sequences attend to a smaller share of their keys, and to which of them changes.

(a) Share of the queries of a sequence that need less than 1 % of the keys for 0.9 of their attention weight (as in
Fig 5), by length. A sequence's first tokens are those of a longer one, so one pass gives all lengths.
(b) Attention weight of sampled keys in one head, over the last quarter of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.paper.analysis.dense import Block, Observer, observe
from harness.paper.analysis.key_tokens import KeyTokens
from harness.paper.analysis.points import Point, binned, mean_point
from harness.paper.analysis.subject import Subject

SMALL = 0.01
"""Share of the keys that counts as few."""
PAPER_LAYERS = (0, 12, 24, 30)
PAPER_WATCHED_LAYER = (18,)
PAPER_HEAD, PAPER_NUM_HEADS = 30, 32
MIN_LENGTH = 256
NUM_SAMPLED, NUM_SHOWN = 64, 4
MAX_BINS = 128


class WatchedKeys:
    """Observer: `weights`, fp32 [keys, queries from `first`], what one head gives to some keys.

    keys: int [n], in ascending order, all below `first`.
    """

    def __init__(self, head: int, keys: Tensor, first: int, num_tokens: int) -> None:
        self.head, self.keys, self.first = head, keys, first
        self.weights = torch.zeros(len(keys), num_tokens - first)

    def __call__(self, block: Block) -> None:
        """Take the keys' weights in the block's rows."""
        begin = max(block.start, self.first)
        if begin < block.stop:
            probs = block.probs()[self.head, begin - block.start :].cpu()
            self.weights[:, begin - self.first : block.stop - self.first] = probs[:, self.keys].T


def measure(subject: Subject) -> list[Point]:
    """(a) for each layer, (b) for the layer and head at the place of the paper's."""
    num_tokens, geometry = subject.num_tokens, subject.attached.geometry
    counters = {layer: KeyTokens(geometry.num_heads, num_tokens) for layer in subject.layers(PAPER_LAYERS)}
    watched_layer = subject.layers(PAPER_WATCHED_LAYER)[-1]
    head = PAPER_HEAD * geometry.num_heads // PAPER_NUM_HEADS
    first = num_tokens - max(1, num_tokens // 4)
    watched = WatchedKeys(head, _sampled(first, subject.config.seed), first, num_tokens)
    observers: dict[int, list[Observer]] = {layer: [counter] for layer, counter in counters.items()}
    observers.setdefault(watched_layer, []).append(watched)
    observe(subject.attached, subject.ids, observers)
    points = [point for layer, counter in counters.items() for point in _shares(layer, counter.counts)]
    return points + list(_weights(watched_layer, watched))


def _sampled(stop: int, seed: int) -> Tensor:
    """Keys drawn from those below `stop`, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(stop, generator=generator)[:NUM_SAMPLED].sort().values


def _shares(layer: int, counts: Tensor) -> Iterator[Point]:
    few = counts < SMALL * torch.arange(1, counts.shape[-1] + 1)
    for length in _lengths(counts.shape[-1]):
        yield mean_point(
            few[:, :length].double().mean(-1),
            series=f"layer {layer}", metric="share_of_sparse_queries", x_name="seq_len", x=length, layer=layer,
        )  # fmt: skip


def _lengths(num_tokens: int) -> list[int]:
    """`num_tokens` and its halves down to `MIN_LENGTH`, ascending."""
    lengths = [num_tokens]
    while lengths[0] // 2 >= MIN_LENGTH:
        lengths.insert(0, lengths[0] // 2)
    return lengths


def _weights(layer: int, watched: WatchedKeys) -> Iterator[Point]:
    """The sampled keys whose weight varies most."""
    varying = watched.weights.std(-1, correction=0).argsort(descending=True)[:NUM_SHOWN].sort().values
    for x, means in binned(watched.weights[varying], watched.first, MAX_BINS):
        for key, mean in zip(watched.keys[varying].tolist(), means.tolist(), strict=True):
            yield Point(f"key {key}", "attention_weight", mean, "query_token", x, layer)
