"""How much of the cache was read: the sizes at which methods are compared.

`kv_frac` counts every element 16 bits, or its codec's bits, and averages over decode rows what a row read over all
layers, the exempt ones included, divided by the full cache at that row. Its own token and partial keys are not
counted. `kv_frac_artifact` is the x axis of the paper's Fig 11: 1 - sqrt(1 - density), density = (query, key) pairs
read over all causal pairs, prompt rows dense, mean over the non-exempt layers; times bits / 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from harness.errors import UserError


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
    (or quantized read) ran in every non-exempt layer. frac_sum: sum over rows of the share of the cache read.
    pairs_read, pairs: (query, key) pairs, own token included, mean over the non-exempt layers; prompt rows too.
    code_bits: bits of one stored element, groups' scales not counted. recall_sum: sum over rows of attention_recall.
    """

    rows: float = 0.0
    fired_rows: float = 0.0
    frac_sum: float = 0.0
    pairs_read: float = 0.0
    pairs: float = 0.0
    code_bits: int = 16
    recall_sum: float | None = None

    def __add__(self, other: ReadStats) -> ReadStats:
        recalls = [stats.recall_sum for stats in (self, other) if stats.recall_sum is not None]
        return ReadStats(
            rows=self.rows + other.rows,
            fired_rows=self.fired_rows + other.fired_rows,
            frac_sum=self.frac_sum + other.frac_sum,
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
