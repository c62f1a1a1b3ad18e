"""Kascade (Deshmukh et al., 2025, arXiv 2512.16391): a few anchor layers choose tokens for the
layers behind them.

Similarity of head h of layer l to head g of layer a: the attention of h on the best tokens of g,
over that on its own best tokens; mean over rows. Of all anchors, those are taken that make the sum
over layers, mean over heads, of the similarity to the best head of the layer's anchor largest.

Official code: github.com/microsoft/kascade, `src/strategies/DecodeOnlyKascadeStrategy.py` (the
choice) and `src/runners/stats_runner.py` (similarity, anchors, heads).

The rule, and where it differs (made into docs/methods.md):

**kascade**: an anchor reads every token, adds up the attention of each KV head's group, and chooses
the best max(`min_tokens`, floor(`budget` · cached)), 128 and 0.1. It attends to these alone;
layer 0, always an anchor, attends to all. The layers up to the next anchor read what it chose:
known a layer ahead, so their rows cross the link while other layers compute. Each of their KV heads
takes the tokens of the anchor's head that is most similar on the calibration text: the share of its
attention that it finds there, of that on its own best 64 tokens. `anchors=[2,8,13,14]` names
anchors beside the first layer; by default a dynamic program takes the `num_anchors` (5) with the
largest sum of similarities. An anchor counts whole in `budget=`, so that 5 of 30 layers are
17 % before anything else is read, and 28 % of 1,024 tokens with `min_tokens`, which that leaves as
it is. The [official code](https://github.com/microsoft/kascade) takes the least similarity of a
prompt's tiles of 32 rows, mean over 1,000 prompts, where this takes the mean over rows of one text;
it compares the 32 best tokens before a tile, and the tile itself; it weighs layers by what
attention adds to the hidden state; and its prefill is sparse too, which is dense here. There the
row's current token competes for the anchor's choice, and a layer behind reads it only if it was
chosen; here it is read always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.base import (
    Calibration,
    Geometry,
    Lengths,
    Method,
    QueryRows,
    Selection,
    State,
    TokenCounts,
    When,
    floor_frac,
    require,
)
from methods.selection import largest
from methods.settings import least, setting, share

NUM_BEST, SHARE_OF_TEXT = 64, 16
"""Best tokens that are compared: as many as in the official code, where half of them are the row's
own tile; on a short text at most a sixteenth of it."""
NUM_ROWS = 128
"""Rows of the calibration text, at even distances in its second half, that are compared."""
UNSEEN = torch.finfo(torch.float32).min / 2
"""Added to the score of a token that is not attended to, where all rows are there: its weight
becomes 0."""


class KascadeState(State):
    """chosen: by slot of the row's current token, what the last anchor chose for that row, bool
    [batch, num_kv_heads, slots].

    heads: by layer that is no anchor, the anchor's head that each KV head takes its tokens from,
    int [num_kv_heads].
    """

    replayable = True

    def start(self, calibration: Calibration | None) -> None:
        assert calibration is not None, "new_state refuses what is not calibrated"
        self.chosen: dict[int, Tensor] = {}
        self.last = -1  # the layer that selected last
        self.heads: dict[int, Tensor] = {}
        anchor = self.method.dense_layers
        for layer in range(anchor, self.geometry.num_layers):
            if self.method.is_anchor(layer):
                anchor = layer
            else:
                self.heads[layer] = calibration["similarity"][layer, anchor].argmax(-1)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """No slot is freed, so the block's current tokens are in the last slots that it looks
        at."""
        num_slots = rows.slot_positions.shape[-1]
        own = range(num_slots - rows.positions.shape[1], num_slots)
        count = self.method.num_chosen(rows.positions)
        if layer in self.heads:
            self.last = layer
            chosen = [self.chosen[slot] for slot in own]
            masks = [pad(mask, (0, num_slots - mask.shape[-1])) for mask in chosen]
            return Selection(torch.stack(masks, 2).index_select(1, self.heads[layer]), count)
        weights = self.geometry.softmax(layer).weights(rows.true_scores().clone()).sum(2)
        mask = largest(weights.masked_fill_(~rows.visible(), -math.inf), count)
        if self.last != layer:  # the first block: earlier rows need their choice no longer
            self.chosen = {}
        self.last = layer
        if layer + 1 in self.heads:
            self.chosen |= dict(zip(own, mask.unbind(2), strict=True))
        unseen = None if layer == 0 else torch.where(mask, 0.0, UNSEEN).unsqueeze(2)
        return Selection(None, rows.positions, bias=unseen)


@dataclass(frozen=True)
class Kascade(Method):
    """Anchors read every token. Other layers read max(`min_tokens`, floor(`budget` * cached)).
    The first layer under the method always is an anchor.

    Source: Kascade (2025)
    Keeps: every token
    Reads: all in anchor layers, which choose the best by exact attention; in the layers behind,
        what the anchor chose
    """

    budget: float = setting(0.1, "share of the cached tokens that other layers read", share())
    min_tokens: int = setting(128, "tokens that other layers read at least", least(1))
    anchors: tuple[int, ...] | None = setting(
        None, "layers that read every token; null: the best num_anchors by the calibration"
    )
    num_anchors: int = setting(5, "number of anchors, the first layer counted", least(1))

    title = "Kascade"
    state = KascadeState
    when = "earlier_layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = self.anchors is None or all(layer >= 0 for layer in self.anchors)
        require(rising, "anchors", self.anchors, "a list of layers >= 0, or null")

    def is_anchor(self, layer: int) -> bool:
        """True for an anchor. Without `anchors` the first `num_anchors` layers stand for those that
        the calibration will choose."""
        first = self.dense_layers
        others = range(first, first + self.num_anchors) if self.anchors is None else self.anchors
        return layer == first or layer in others

    def when_of(self, layer: int) -> When:
        return "kept" if self.is_anchor(layer) else "earlier_layer"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """similarity: of this layer's heads to those of each layer up to it, fp32 [num_layers,
        num_kv_heads, num_kv_heads], 0 for later layers. best: int [num_kv_heads, rows, n], each
        row's best tokens."""
        num_tokens, layer = key.shape[1], len(earlier)
        first, last = num_tokens // 2, num_tokens - 1
        rows = torch.linspace(first, last, min(NUM_ROWS, num_tokens - first)).long()
        softmax = geometry.softmax(layer)
        scores = softmax.scores(query[None, :, rows.to(query.device)], key[None])
        # The current token does not compete: every row reads it.
        cached = torch.arange(num_tokens, device=key.device) < rows.to(key.device)[:, None]
        weights = softmax.weights(scores.masked_fill_(~cached, -math.inf)).nan_to_num_()[0].sum(1)
        best = weights.topk(max(1, min(NUM_BEST, num_tokens // SHARE_OF_TEXT))).indices
        most = weights.gather(-1, best).sum(-1)
        similarity = weights.new_zeros(geometry.num_layers, len(key), len(key))
        best_of_layers = [calibration["best"] for calibration in earlier]
        for number, theirs in enumerate((*best_of_layers, best)):
            for head, tokens in enumerate(theirs):
                found = weights.gather(-1, tokens.expand(len(key), -1, -1)).sum(-1)
                similarity[number, :, head] = (found / most.clamp(min=1e-30)).mean(-1)
        return {"similarity": similarity, "best": best}

    def settled(self, calibration: Calibration) -> Self:
        if self.anchors is not None:
            return self
        similarities = calibration["similarity"].amax(-1).mean(-1).tolist()
        anchors = best_anchors(similarities, self.dense_layers, self.num_anchors)
        return replace(self, anchors=anchors)

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        last = geometry.num_layers - 1
        exists = self.anchors is None or max(self.anchors, default=0) <= last
        require(exists, "anchors", self.anchors, f"layers from 0 to {last}")

    def tokens_read(self, counts: TokenCounts, layer: int) -> float:
        return self.max_tokens_read(counts, layer)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        chosen = max(self.min_tokens, int(self.budget * counts.cached))
        return counts.cached if self.is_anchor(layer) else min(counts.cached, chosen)

    def with_budget(self, frac: float) -> Self:
        """Set by the share that is chosen. `min_tokens` holds: a layer that reads next to nothing
        breaks all."""
        return replace(self, budget=frac)

    def num_chosen(self, positions: Tensor) -> Tensor:
        """Tokens that an anchor chooses for rows at `positions`, int alike."""
        wanted = floor_frac(self.budget, positions).clamp(min=self.min_tokens)
        return torch.minimum(wanted, positions)


def best_anchors(similarity: Sequence[Sequence[float]], first: int, number: int) -> tuple[int, ...]:
    """The `number` anchors, `first` among them, with the largest sum of similarities.

    similarity[layer][anchor]: of a layer to an earlier one. The program goes over the layers:
    `best[end]` is the best sum of the layers before `end` with so many anchors, and the anchors.
    """
    num_layers = len(similarity)
    best: dict[int, tuple[float, tuple[int, ...]]] = {first: (0.0, ())}
    for _ in range(min(number, num_layers - first)):
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for anchor, (total, anchors) in best.items():
            for end in range(anchor + 1, num_layers + 1):
                total += similarity[end - 1][anchor]
                if end not in further or total > further[end][0]:
                    further[end] = total, (*anchors, anchor)
        best = further
    return best[num_layers][1]
