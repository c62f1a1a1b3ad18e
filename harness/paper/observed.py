"""The dense pass that statistics of attention look at, and the points that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.attached import Attached
from harness.model.attention import ROWS, SCORES_PER_CHUNK
from harness.model.dense_prompts import LayerPrompt
from harness.model.load import LoadedModel
from harness.model.prompts import PromptPass
from harness.settings.config import RunConfig
from methods.attention import Softmax


@dataclass(frozen=True)
class Point:
    """A number of series `series` at `x`, a value of the quantity `x_name`: one row of an analysis
    table.

    layer: None for the whole model. stderr: standard error over the num_samples heads or layers of
    which `value` is the mean; None for a single one.
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
    """Query tokens `start` to `stop` of a layer, over the keys before `stop`. Valid during the call
    only.

    query: [1, heads, tokens, head_dim], before the softmax scale; key, value: [1, num_kv_heads,
    stop, head_dim]; scores: scaled, fp32 [1, num_kv_heads, group, tokens, stop], -inf for later
    keys; read-only.
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


Observer = Callable[[Block], None]
"""Gathers a statistic of one layer from its blocks, which come in order."""


@dataclass(frozen=True)
class Subject:
    """An attached model with a text, ids [1, num_tokens] on the model's device. Valid while
    `attached` is."""

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
        return self.config.analysis.layers_of(
            self.attached.geometry.num_layers, paper_layers, self.loaded.name
        )

    def run(self, keep: Callable[[int, Tensor, Tensor, Tensor], None] | None = None) -> None:
        """One dense pass. keep: takes the number, query, key and value of each layer that sees
        every token, the layers that methods number."""

        def numbered(layer: int, prompt: LayerPrompt) -> None:
            number = self.attached.numbers[layer]
            if keep is not None and number is not None:
                keep(number, prompt.query, prompt.key, prompt.value)

        positions = torch.arange(self.num_tokens, device=self.ids.device)[None]
        self.attached.forward(self.ids, positions, PromptPass(self.attached, keep=numbered))

    def observe(self, observers: Mapping[int, Sequence[Observer]]) -> None:
        """One dense pass that shows the layers in `observers` to them, block by block."""
        softmaxes = {
            self.attached.numbers[at]: layer.softmax
            for at, layer in enumerate(self.attached.layers)
        }

        def show(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
            heads, tokens = query.shape[1:3]
            size = max(1, min(ROWS, SCORES_PER_CHUNK // (heads * tokens)))
            for start in range(0, tokens if layer in observers else 0, size):
                stop = min(start + size, tokens)
                rows, seen = query[:, :, start:stop], key[:, :, :stop]
                scores = softmaxes[layer].scores(rows, seen)
                column = torch.arange(stop, device=scores.device)
                later = (
                    column[start:] > column[start:, None]
                )  # keys before `start` are visible to the whole block
                scores[..., start:].masked_fill_(later, float("-inf"))
                block = Block(
                    layer, start, stop, rows, seen, value[:, :, :stop], scores, softmaxes[layer]
                )
                for see in observers[layer]:
                    see(block)

        self.run(show)
