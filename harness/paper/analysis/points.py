"""What an analysis returns: points, each a mean over heads or layers, which become the rows of its table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Point:
    """A number of series `series` at `x`, a value of the quantity `x_name`.

    layer: None where it is of the whole model. stderr: standard error over the num_samples heads or layers that
    `value` is the mean of; None where there is but one.
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
