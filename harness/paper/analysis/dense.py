"""One dense pass of a model over a text, which shows attention scores to observers, and the points made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.model.load import LoadedModel
from harness.model.prompt import PromptPass
from harness.replay import MAX_CHUNK, SCORES_PER_CHUNK
from harness.settings.config import RunConfig
from methods.attention import Softmax


@dataclass(frozen=True)
class Subject:
    """An attached model with a text, ids [1, num_tokens] on the model's device. Valid while `attached` is."""

    config: RunConfig
    loaded: LoadedModel
    attached: Attached
    ids: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1]

    def layers(self, paper_layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers to look at, `paper_layers` unless set; see `AnalysisConfig.layers_of`."""
        return self.config.analysis.layers_of(self.attached.geometry.num_layers, paper_layers, self.loaded.name)


@dataclass(frozen=True)
class Point:
    """A number of series `series` at `x`, a value of the quantity `x_name`: one row of an analysis table.

    layer: None for the whole model. stderr: standard error over the num_samples heads or layers of which `value` is
    the mean; None for a single one.
    """

    series: str
    metric: str
    value: float
    x_name: str | None = None
    x: float | None = None
    layer: int | None = None
    stderr: float | None = None
    num_samples: int = 1


def mean_point(
    values: Tensor,
    *,
    series: str,
    metric: str,
    x_name: str | None = None,
    x: float | None = None,
    layer: int | None = None,
) -> Point:
    """The mean of `values` [heads or layers] as a point."""
    known = values.double()
    stderr = float(known.std()) / math.sqrt(len(known)) if len(known) > 1 else None
    return Point(series, metric, float(known.mean()), x_name, x, layer, stderr, len(known))


def binned(values: Tensor, first: int, num_bins: int) -> Iterator[tuple[float, Tensor]]:
    """Means over at most `num_bins` runs of tokens: the middle token of each, and the means [n].

    values: [n, tokens], of the tokens from `first` on.
    """
    width = -(-values.shape[-1] // num_bins)
    for index, part in enumerate(values.split(width, -1)):
        yield first + index * width + (part.shape[-1] - 1) / 2, part.double().mean(-1)


class Block(NamedTuple):
    """Query tokens `start` to `stop` of a layer, over the keys before `stop`. Valid during the call only.

    query: [1, heads, tokens, head_dim], before the softmax scale; key, value: [1, num_kv_heads, stop, head_dim];
    scores: scaled, fp32 [1, num_kv_heads, group, tokens, stop], -inf for later keys; read-only.
    """

    layer: int
    start: int
    stop: int
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    softmax: Softmax

    def probs(self) -> Tensor:
        """Attention weights by query head: fp32 [heads, tokens, stop]."""
        return self.softmax.weights(self.scores.clone()).flatten(1, 2)[0]


class Observer(Protocol):
    """Gathers a statistic of one layer."""

    def __call__(self, block: Block) -> None:
        """Take in the next block; blocks come in order."""


def observe(attached: Attached, ids: Tensor, observers: Mapping[int, Sequence[Observer]]) -> None:
    """Run `ids` [1, tokens] densely and show the layers in `observers` to them. Layers are numbered as methods number
    them: only those that see every token."""

    def show(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        number = attached.numbers[layer]
        if number is None or number not in observers:
            return
        heads, tokens = query.shape[1:3]
        size = max(1, min(MAX_CHUNK, SCORES_PER_CHUNK // (heads * tokens)))
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            softmax, seen = attached.softmaxes[layer], key[:, :, :stop]
            scores = softmax.scores(query[:, :, start:stop], seen)
            column = torch.arange(stop, device=scores.device)
            later = column[start:] > column[start:, None]  # keys before `start` are visible to the whole block
            scores[..., start:].masked_fill_(later, float("-inf"))
            block = Block(
                number, start, stop, query[:, :, start:stop], seen, value[:, :, :stop], scores, softmax
            )  # fmt: skip
            for see in observers[number]:
                see(block)

    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    attached.forward(ids, positions, PromptPass(attached, keep=show))
