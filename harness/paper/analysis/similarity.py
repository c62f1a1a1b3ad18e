"""Figure 4: cosine similarity of attention weights to the full cache's, token by token, under a method that evicts and
under the oracle (the paper's "Optimal"), which picks as many tokens anew from the whole history at every step.

Queries and keys are the full cache's own, so the choice of tokens alone is compared. Leaving tokens out of a softmax
scales the weights of the rest alike; with a the full cache's weights and S what is read, own token included, the
cosine is therefore sqrt(sum over S of a^2 / sum of a^2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.errors import UserError
from harness.paper.analysis.dense import Block, observe
from harness.paper.analysis.points import Point, binned, mean_point
from harness.paper.analysis.subject import Subject
from methods.base import Geometry, Lengths, Method, PromptRows, Row, Rows
from methods.oracle import Oracle

PAPER_LAYERS = (0, 8, 16, 24)
"""The paper shows several layers of 32, layer 0 among them; which others is not known."""
MAX_BINS = 100


class Similarity:
    """Observer: `cosines`, fp32 [heads, tokens], of a layer under `method`, which starts with the first token."""

    def __init__(self, method: Method, geometry: Geometry, ids: Tensor) -> None:
        self.num_tokens = ids.shape[1]
        final = torch.tensor([self.num_tokens], device=ids.device)
        self.state = method.new_state(geometry, Lengths(torch.ones_like(final), final))
        self.cosines = torch.ones(geometry.num_heads, self.num_tokens)

    def __call__(self, block: Block) -> None:
        """Select for the block's rows and compare."""
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
        mask = self.state.select(block.layer, _rows(block, own, scores)).mask
        assert mask is not None, "a method that evicts names what it reads"
        read = mask.clone()
        read.diagonal(first, -2, -1).fill_(True)
        squares = scores.softmax(-1).square()
        cosines = ((squares * read.unsqueeze(2)).sum(-1) / squares.sum(-1)).sqrt()
        self.cosines[:, first : block.stop] = cosines.flatten(1, 2)[0].cpu()


def _rows(block: Block, own: Tensor, scores: Tensor) -> Rows:
    """The rows `own` of a block as a method takes them: a slot is a token's position."""
    return Rows(
        query=block.query[:, :, -len(own) :],
        positions=own[None],
        real=torch.ones_like(own, dtype=torch.bool)[None],
        slot_positions=torch.arange(block.stop, device=own.device)[None, None],
        own_slots=own[None, None],
        true_scores=lambda: scores,
    )


def measure(subject: Subject) -> list[Point]:
    """Both series of each layer; UserError where `analysis.kept_frac` of the text is too small for the method."""
    method, oracle = _compared(subject)
    geometry = subject.attached.geometry
    observers = {
        layer: [Similarity(each, geometry, subject.ids) for each in (method, oracle)]
        for layer in subject.layers(PAPER_LAYERS)
    }
    observe(subject.attached, subject.ids, observers)
    names = [each.title for each in (method, oracle)]
    return [
        point
        for layer, pair in observers.items()
        for name, similarity in zip(names, pair, strict=True)
        for point in _points(layer, name, similarity.cosines)
    ]


def _compared(subject: Subject) -> tuple[Method, Oracle]:
    """The run's method at `analysis.kept_frac`, and the oracle that reads as many tokens."""
    kept, num_tokens = subject.config.analysis.kept_frac, subject.num_tokens
    method = subject.config.method.with_size(kept)
    budget = method.tokens_read(Row(num_tokens, 1, num_tokens), method.num_exempt_layers)
    if not budget:
        raise UserError(f"analysis.kept_frac={kept}: keeps none of {num_tokens} tokens; raise one of them")
    return method, Oracle(fixed_fetch=int(budget))


def _points(layer: int, series: str, cosines: Tensor) -> Iterator[Point]:
    for x, heads in binned(cosines[:, 1:], 1, MAX_BINS):
        yield mean_point(heads, series=series, metric="cosine_similarity", x_name="token", x=x, layer=layer)
