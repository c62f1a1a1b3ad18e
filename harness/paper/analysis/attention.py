"""Statistics of attention weights: similarity under a smaller cache (Fig 4), key tokens (Fig 5), sparsity (Fig 20)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from harness.errors import UserError
from harness.paper.analysis.dense import Block, Observer, Point, Subject, binned, mean_point, observe
from methods.base import Geometry, Lengths, Method, PromptRows, Row, Rows
from methods.infinigen import Oracle

SIMILARITY_LAYERS = (0, 8, 16, 24)
"""The paper shows several layers of 32, layer 0 among them; it does not say which others."""
SIMILARITY_BINS = 100
MASS = 0.9
KEY_TOKENS_LAYERS = (0, 18)
QUERIES = (500, 998, 999, 1000, 1001, 1002, 1500, 2000)
"""Queries whose numbers the paper gives, as far as the text goes."""
HISTOGRAM_BINS = 64
SMALL = 0.01
"""Share of the keys that counts as few."""
SPARSITY_LAYERS = (0, 12, 24, 30)
WATCHED_LAYER = (18,)
PAPER_HEAD, PAPER_NUM_HEADS = 30, 32
MIN_LENGTH = 256
NUM_SAMPLED, NUM_SHOWN = 64, 4
WATCHED_BINS = 128


def similarity(subject: Subject) -> list[Point]:
    """Figure 4: cosine similarity of attention weights to the full cache's, token by token, under a method that evicts
    and under the oracle (the paper's "Optimal"), which picks as many tokens anew from the whole history at every step.

    Queries and keys are the full cache's own, so only the choice of tokens is compared. Leaving tokens out of a softmax
    scales the remaining weights alike; with a the full cache's weights and S the tokens read, own token included, the
    cosine is therefore sqrt(sum over S of a^2 / sum of a^2).

    Raises UserError where `analysis.kept_frac` of the text is too small for the method.
    """
    kept, num_tokens = subject.config.analysis.kept_frac, subject.num_tokens
    method = subject.config.method.with_size(kept)
    budget = method.tokens_read(Row(num_tokens, 1, num_tokens), method.num_exempt_layers)
    if not budget:
        raise UserError(f"analysis.kept_frac={kept}: keeps none of {num_tokens} tokens; raise one of them")
    methods, geometry = (method, Oracle(fixed_fetch=int(budget))), subject.attached.geometry
    observers = {
        layer: [Similarity(each, geometry, subject.ids) for each in methods]
        for layer in subject.layers(SIMILARITY_LAYERS)
    }
    observe(subject.attached, subject.ids, observers)
    return [
        mean_point(
            heads, series=each.title, metric="cosine_similarity", x_name="token", x=x, layer=layer
        )
        for layer, pair in observers.items()
        for each, seen in zip(methods, pair, strict=True)
        for x, heads in binned(seen.cosines[:, 1:], 1, SIMILARITY_BINS)
    ]  # fmt: skip


class Similarity:
    """Observer: `cosines`, fp32 [heads, tokens], of a layer under `method`, which starts with the first token."""

    def __init__(self, method: Method, geometry: Geometry, ids: Tensor) -> None:
        self.num_tokens = ids.shape[1]
        final = torch.tensor([self.num_tokens], device=ids.device)
        self.state = method.new_state(geometry, Lengths(torch.ones_like(final), final))
        self.cosines = torch.ones(geometry.num_heads, self.num_tokens)

    def __call__(self, block: Block) -> None:
        """Select for the block's queries and compare."""
        if block.start == 0:  # the first token has nothing to leave out: it is the prompt
            real = torch.ones(1, 1, dtype=torch.bool, device=block.query.device)
            prompt = PromptRows(real, self.num_tokens)
            query, key, value = (part[:, :, :1] for part in (block.query, block.key, block.value))
            self.state.prompt(block.layer, query, key, value, prompt)
        first = max(block.start, 1)
        if first == block.stop:
            return
        scores = block.scores[:, :, :, first - block.start :]
        own = torch.arange(first, block.stop, device=scores.device)
        rows = Rows(  # a slot is a token's position
            query=block.query[:, :, -len(own) :],
            positions=own[None],
            real=torch.ones_like(own, dtype=torch.bool)[None],
            slot_positions=torch.arange(block.stop, device=own.device)[None, None],
            own_slots=own[None, None],
            true_scores=lambda: scores,
        )
        mask = self.state.select(block.layer, rows).mask
        assert mask is not None, "a method that evicts names what it reads"
        read = mask.clone()
        read.diagonal(first, -2, -1).fill_(True)
        squares = scores.softmax(-1).square()
        cosines = ((squares * read.unsqueeze(2)).sum(-1) / squares.sum(-1)).sqrt()
        self.cosines[:, first : block.stop] = cosines.flatten(1, 2)[0].cpu()


def key_tokens(subject: Subject) -> list[Point]:
    """Figure 5: how many key tokens hold 0.9 of a query's attention weight, own token included.

    A histogram over all queries and heads, and the mean over heads at single queries: the number differs by layer,
    head and query, even from one query to the next.
    """
    heads = subject.attached.geometry.num_heads
    counters = {layer: KeyTokens(heads, subject.num_tokens) for layer in subject.layers(KEY_TOKENS_LAYERS)}
    observe(subject.attached, subject.ids, {layer: [counter] for layer, counter in counters.items()})
    width = 2 ** max(0, (subject.num_tokens // HISTOGRAM_BINS).bit_length() - 1)
    points = []
    for layer, counter in counters.items():
        series = f"layer {layer}"
        for index, share in enumerate(histogram(counter.counts, width).unbind(-1)):
            x = index * width
            points.append(
                mean_point(share, series=series, metric="share_of_queries", x_name="key_tokens", x=x, layer=layer)
            )
        for query in (query for query in QUERIES if query < subject.num_tokens):
            of_heads, metric = counter.counts[:, query], f"key_tokens_for_{MASS:g}"
            points.append(
                mean_point(of_heads, series=series, metric=metric, x_name="query_token", x=query, layer=layer)
            )
    return points


class KeyTokens:
    """Observer: `counts`, int32 [heads, tokens], `tokens_for_mass` of every query of a layer."""

    def __init__(self, num_heads: int, num_tokens: int) -> None:
        self.counts = torch.zeros(num_heads, num_tokens, dtype=torch.int32)

    def __call__(self, block: Block) -> None:
        """Count for the block's queries."""
        self.counts[:, block.start : block.stop] = tokens_for_mass(block.probs()).int()


def tokens_for_mass(probs: Tensor, mass: float = MASS) -> Tensor:
    """The fewest key tokens that hold `mass` of each query's attention.

    probs: [..., keys], summing to 1 along the last axis; returns int64 [...] on the CPU.
    """
    ascending = np.sort(probs.cpu().numpy(), axis=-1)  # vectorised, unlike torch's on the CPU
    dropped = np.cumsum(ascending, axis=-1, dtype=np.float64) <= 1 - mass
    return torch.from_numpy(ascending.shape[-1] - dropped.sum(-1))


def histogram(counts: Tensor, width: int) -> Tensor:
    """Share of each head's queries by bin of `width` counts: fp64 [heads, bins], at least two bins.

    counts: int [heads, tokens]; bin i holds the counts in [i width, (i + 1) width).
    """
    bins = max(2, int(counts.max()) // width + 1)
    rows = [torch.bincount(head // width, minlength=bins) for head in counts]
    return torch.stack(rows).double() / counts.shape[-1]


def sparsity(subject: Subject) -> list[Point]:
    """Figure 20: longer sequences attend to a smaller share of their keys, and the important keys change.

    (a) By layer and length, the share of queries that need less than 1 % of the keys for 0.9 of their attention weight
    (as in Fig 5). A sequence's first tokens are those of a longer one, so one pass gives all lengths.
    (b) Attention weight of sampled keys over the last quarter of the queries, in the layer and head at the place of the
    paper's.
    """
    num_tokens, geometry = subject.num_tokens, subject.attached.geometry
    counters = {layer: KeyTokens(geometry.num_heads, num_tokens) for layer in subject.layers(SPARSITY_LAYERS)}
    observers: dict[int, list[Observer]] = {layer: [counter] for layer, counter in counters.items()}
    watched_layer = subject.layers(WATCHED_LAYER)[-1]
    first = num_tokens - max(1, num_tokens // 4)
    generator = torch.Generator().manual_seed(subject.config.seed)
    keys = torch.randperm(first, generator=generator)[:NUM_SAMPLED].sort().values
    watched = WatchedKeys(PAPER_HEAD * geometry.num_heads // PAPER_NUM_HEADS, keys, first, num_tokens)
    observers.setdefault(watched_layer, []).append(watched)
    observe(subject.attached, subject.ids, observers)
    lengths = [num_tokens]
    while lengths[0] // 2 >= MIN_LENGTH:
        lengths.insert(0, lengths[0] // 2)
    points = []
    for layer, counter in counters.items():
        few = counter.counts < SMALL * torch.arange(1, num_tokens + 1)
        for length in lengths:
            shares, series = few[:, :length].double().mean(-1), f"layer {layer}"
            metric = "share_of_sparse_queries"
            points.append(mean_point(shares, series=series, metric=metric, x_name="seq_len", x=length, layer=layer))
    return points + list(_watched_points(watched_layer, watched))


class WatchedKeys:
    """Observer: `weights`, fp32 [keys, queries from `first`], the weights that one head gives to some keys.

    keys: int [n], in ascending order, all below `first`.
    """

    def __init__(self, head: int, keys: Tensor, first: int, num_tokens: int) -> None:
        self.head, self.keys, self.first = head, keys, first
        self.weights = torch.zeros(len(keys), num_tokens - first)

    def __call__(self, block: Block) -> None:
        """Take the keys' weights in the block's queries."""
        begin = max(block.start, self.first)
        if begin < block.stop:
            probs = block.probs()[self.head, begin - block.start :].cpu()
            self.weights[:, begin - self.first : block.stop - self.first] = probs[:, self.keys].T


def _watched_points(layer: int, watched: WatchedKeys) -> Iterator[Point]:
    """The sampled keys whose weight varies most."""
    varying = watched.weights.std(-1, correction=0).argsort(descending=True)[:NUM_SHOWN].sort().values
    for x, means in binned(watched.weights[varying], watched.first, WATCHED_BINS):
        for key, mean in zip(watched.keys[varying].tolist(), means.tolist(), strict=True):
            yield Point(f"key {key}", "attention_weight", mean, "query_token", x, layer)
