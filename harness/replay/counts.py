"""What the rows of a decode pass read, and the sums of it that a session reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.decode.reads import RowReads
from harness.model.budgets import ReadStats, code_widths, window_share
from harness.model.policies import Policy, evicts
from methods.base import Geometry, Method
from methods.codecs.split import CacheCodec


class PassCounts(RowReads):
    """Counts of the rows of a decode pass: what they read, and more sums over the layers under the
    method, fp64 [batch, rows].

    recall: share of the attention on what is read.
    With a GPU cache, rows of all KV heads: selected: rows chosen. loaded: by layer, those that
    were not on the device, and crossed the link.
    num_selecting: layers in which the method ran. errors: where they are measured, relative errors
    of attention outputs by layer under the method, fp32 [batch, rows, heads].
    """

    def __init__(
        self, cached: Tensor, geometry: Geometry, method: Method, codec: CacheCodec | None
    ) -> None:
        super().__init__(cached, geometry, method, code_widths(codec, geometry))
        self.recall = torch.zeros_like(self.read)
        self.selected = torch.zeros_like(self.read)
        self.loaded: dict[int, Tensor] = {}
        self.num_selecting = 0
        self.errors: dict[int, Tensor] = {}

    def stats(self, weights: Tensor, *, measures_recall: bool) -> ReadStats:
        """Sums over the rows, each `weights` [batch, rows] times."""
        selecting = self.geometry.num_layers - self.method.dense_layers
        stats = self.stats_of_all(weights, measures_recall=measures_recall)
        if not self.method.reads_all:
            pairs_read = float((weights * (self.read / selecting + 1)).sum())
            stats = replace(stats, pairs_read=pairs_read)
        if measures_recall:
            recall_sum = float((weights * self.recall).sum()) / selecting
            stats = replace(stats, recall_sum=recall_sum)
        if evicts(self.method):
            stats = replace(stats, evicted_sum=float((weights * self.evicted).sum()))
        return replace(
            stats,
            fired_rows=stats.rows if self.num_selecting == selecting else 0.0,
            frac_sum=float((weights * self.share).sum()),
            index_sum=float((weights * self.index_share).sum()),
        )

    def stats_of_all(self, weights: Tensor, *, measures_recall: bool) -> ReadStats:
        """The sums of rows that read the full cache."""
        rows = float(weights.sum())
        pairs = float((weights * (self.cached.double() + 1)).sum())
        local = window_share(self.whole, self.geometry)
        return ReadStats(
            rows=rows,
            fired_rows=rows,
            frac_sum=rows,
            window_sum=float((weights * local).sum()),
            pairs_read=pairs,
            pairs=pairs,
            recall_sum=rows if measures_recall else None,
        )

    def attention_errors(self, real: Tensor) -> Tensor:
        """Relative errors of the attention outputs of the rows that are `real` (bool [batch,
        rows]): fp32 [layers that see every token, real rows, heads], on the CPU. They are 0 in
        layers that read every token as it is."""
        geometry = self.geometry
        found = torch.zeros(geometry.num_layers, int(real.sum()), geometry.num_heads)
        for number, errors in self.errors.items():
            found[number] = errors[real].cpu()
        return found

    def with_link(self, stats: ReadStats, weights: Tensor, policies: Sequence[Policy]) -> ReadStats:
        """`stats`, and what crosses the link with a GPU cache. policies: of all
        layers."""
        cached, num_kv_heads = self.whole, self.geometry.num_kv_heads
        crossed = self.method.dense_layers * cached
        rows_loaded: Counter[int] = Counter()
        for policy in policies:
            if policy.kind != "method":
                continue
            number, width = policy.number, self.widths[policy.number]
            if not policy.names_rows:
                crossed = crossed + width * cached
            elif number in self.loaded:
                crossed = crossed + width * self.loaded[number] / num_kv_heads
                rows_loaded[number] = round(float((weights * self.loaded[number]).sum()))
        crossed = crossed / (self.geometry.num_layers * cached)
        missed = sum(self.loaded.values(), torch.zeros_like(self.selected))
        hits = 1 - missed / self.selected.clamp(min=1)
        return replace(
            stats,
            link_sum=float((weights * crossed).sum()),
            rows_loaded=rows_loaded,
            hit_sum=float((weights * hits).sum()),
        )
