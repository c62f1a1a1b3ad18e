"""What a method's size is, once, for replay, live decoding and the cost model; and how a method is set to a size.

`kv_frac` counts every element 16 bits, or its codec's bits, and averages over decode rows what a row read over all
layers, the exempt ones included, divided by the full cache at that row. Its own token is not counted; what was read of
an index to choose (partial keys, page bounds), or of rows that stay on the device, is `index_frac`, in the same unit.
`kv_frac_artifact` is the x axis of the paper's Fig 11: 1 - sqrt(1 - density), density = (query, key) pairs read over
all causal pairs, prompt rows dense, mean over the non-exempt layers; times bits / 16.

Methods are compared at equal kv_frac, not at equal settings: `sized` finds the settings that land on a given one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.errors import UserError
from methods.base import Method, Row

TOLERANCE = 0.01


def share_of_cache(cached: Tensor, read: Tensor, width: float, num_exempt: int, num_layers: int) -> Tensor:
    """Elements read / elements of the full cache, per row.

    cached: tokens t of each row; read: tokens read, summed over the non-exempt layers (mean over KV heads), both of
    one shape; width: bits of a stored element / 16.
    """
    return (num_exempt * cached.double() + width * read) / (num_layers * cached.double())


@dataclass(frozen=True)
class ReadStats:
    """Sums over decode rows; add two to merge them.

    rows: decode rows, each counted once per sequence it belongs to. fired_rows: those on which the method's selection
    (or quantized read) ran in every non-exempt layer. frac_sum, index_sum: sums over rows of the shares of the cache
    read, and read of an index. pairs_read, pairs: (query, key) pairs, own token included, mean over the non-exempt
    layers; prompt rows too. code_bits: bits of one stored element, groups' scales not counted. recall_sum: sum over
    rows of attention_recall.
    """

    rows: float = 0.0
    fired_rows: float = 0.0
    frac_sum: float = 0.0
    index_sum: float = 0.0
    pairs_read: float = 0.0
    pairs: float = 0.0
    code_bits: float = 16
    recall_sum: float | None = None

    def __add__(self, other: ReadStats) -> ReadStats:
        recalls = [stats.recall_sum for stats in (self, other) if stats.recall_sum is not None]
        return ReadStats(
            rows=self.rows + other.rows,
            fired_rows=self.fired_rows + other.fired_rows,
            frac_sum=self.frac_sum + other.frac_sum,
            index_sum=self.index_sum + other.index_sum,
            pairs_read=self.pairs_read + other.pairs_read,
            pairs=self.pairs + other.pairs,
            code_bits=min(self.code_bits, other.code_bits),
            recall_sum=sum(recalls) if recalls else None,
        )

    @property
    def kv_frac(self) -> float:
        """What is read / the full cache, mean over decode rows."""
        return self.frac_sum / self.rows

    @property
    def index_frac(self) -> float:
        """What is read of an index / the full cache, mean over decode rows."""
        return self.index_sum / self.rows

    @property
    def kv_frac_artifact(self) -> float:
        """The artifact's relative KV cache size."""
        density = min(1.0, self.pairs_read / self.pairs)
        return (1 - math.sqrt(1 - density)) * self.code_bits / 16

    @property
    def attention_recall(self) -> float | None:
        """Share of the attention on what was read and the own token; None where it was not measured."""
        return None if self.recall_sum is None else self.recall_sum / self.rows

    def check_fired(self) -> None:
        """UserError where the method ran on no decode row, or not on all: such a score is the full cache's."""
        if self.rows == 0 or self.fired_rows < self.rows:
            raise UserError(
                f"the method ran on {self.fired_rows:g} of {self.rows:g} decode rows: nothing was measured; "
                "check prefill, prefill_len and method.num_exempt_layers"
            )


def kv_frac(method: Method, rows: Mapping[Row, int], num_layers: int, width: float = 1.0) -> float:
    """The size that `method` will report over `rows`, from its closed form; rows without cached tokens count nothing.

    rows: how many requests each row occurs in. width: bits of a stored element / 16.
    Raises ValueError where the method's reads depend on the data.
    """
    exempt = min(method.num_exempt_layers, num_layers)
    total = weight = 0.0
    for row, multiplicity in rows.items():
        if not row.cached:
            continue
        reads = [method.tokens_read(row, layer) for layer in range(exempt, num_layers)]
        if None in reads:
            raise ValueError("the size of this method depends on the data")
        read = sum(each for each in reads if each is not None)
        total += multiplicity * (exempt + width * read / row.cached) / num_layers
        weight += multiplicity
    return total / weight


def sized(method: Method, rows: Sequence[Row], num_layers: int, target: float, width: float = 1.0) -> Method:
    """`method` with the setting whose reported kv_frac over `rows` is nearest to `target`.

    Bisection over the one number that sizes it; the reported size grows with that number in steps.
    Raises UserError where nothing lands within `TOLERANCE`, ValueError where the method has no size to set, or allows
    none at these lengths.
    """
    counted = Counter(rows)

    def size_of(number: float) -> float:
        return kv_frac(method.with_size(number), counted, num_layers, width)

    least = max(method.min_size(row) for row in counted)
    low, high = least, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if size_of(middle) < target else (low, middle)
    best = min((low, high), key=lambda number: abs(size_of(number) - target))
    if abs(size_of(best) - target) > TOLERANCE:
        raise UserError(
            f"target_kv_frac={target}: the nearest size is {size_of(best):.3f}; allowed here: {size_of(least):.3f} to "
            f"{size_of(1.0):.3g} ({method.num_exempt_layers} of {num_layers} layers read the full cache)"
        )
    return method.with_size(best)
