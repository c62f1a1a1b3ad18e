"""DeepSeek sparse attention: the model's own indexers select (DeepSeek-V3.2, 2025, section 2.1).

A layer's indexer makes one index key k_s of each token, and of a row t several index queries q_t,j
with weights w_t,j. The row attends to the tokens with the largest

    I_t,s = sum over j of w_t,j ReLU(q_t,j . k_s / sqrt d),

its own among the candidates. A model names how many (`index_topk`). Some models run the indexer in
some layers only, and the other layers reuse the indices chosen last (IndexCache, Bai et al., 2026,
arXiv 2603.12201).

The indexer is run by the model's own code in transformers, over index keys that the state keeps.

The rule, and where it differs (made into docs/methods.md):

**dsa** runs a model with DeepSeek sparse attention as it is: a row reads the `index_topk` tokens
that the layer's own indexer scores highest. The row's current token competes, so a row that does
not choose it does not read it. The prompt's rows attend so too, under every method. `method=full`
does the same on such a model, since the model itself never reads more. The index keys lie on the
device, one of `index_head_dim` elements for each token and layer that chooses, in the compute
dtype. DeepSeek stores them in FP8, with which 2.6 % of the chosen tokens were others
([parity](../benchmarks/PARITY.md)). A step reads all index keys of such a layer. Layers that share
indices in the model share them here, and their rows cross the link while the layer before computes.
`every=2` lets further layers reuse them, as training-free IndexCache does: of the layers with an
indexer, every second chooses. `layers=[0,3,7]` names those that choose; the first always does. Both
change decode rows alone, where IndexCache also skips indexers in the prefill. A model without an
indexer is refused. Other methods replace the indexers in decode rows, and need
`dense_layers=0`: no layer of such a model reads every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.base import (
    Calibration,
    Geometry,
    IndexShape,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    TokenCounts,
    When,
    require,
)
from methods.extras import FitsModel, HandsOn, ReadsIndexer
from methods.settings import least, setting

NO_SLOT = -1
"""Stands for no slot in a list of slots."""


def mask_of(slots: Tensor, num_slots: int) -> Tensor:
    """Lists of slots as a mask: int [batch, rows, n] to bool [batch, rows, num_slots]. Numbers that
    are no slot are left out."""
    is_slot = (slots >= 0) & (slots < num_slots)
    index = torch.where(is_slot, slots, num_slots).long()
    mask = torch.zeros(*slots.shape[:2], num_slots + 1, dtype=torch.bool, device=slots.device)
    return mask.scatter_(-1, index, True)[..., :num_slots]


class DsaState(HandsOn):
    """keys: by layer that chooses, the index keys, [batch, 1, slots, head_dim].

    chosen: by slot of the row's current token, what the last choosing layer chose for that row, int
    [batch, top_k], `NO_SLOT` for nothing; kept where the next layer reuses it.
    """

    slot_tensors: ClassVar[Mapping[str, float]] = {"keys": 0.0}
    handed_on = ("chosen",)
    keys: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.last = -1  # the layer that selected last

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        if not self.method.chooses(layer):
            return
        assert rows.index_keys is not None, "a layer that chooses has an indexer"
        batch, prompt, head_dim = rows.index_keys.shape
        keys = rows.index_keys.new_zeros(batch, 1, rows.num_slots, head_dim)
        keys[:, 0, :prompt] = rows.index_keys
        self.keys[layer] = keys

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """No slot is freed, so the block's current tokens are in the last slots that it looks
        at."""
        num_slots, num_rows = rows.slot_positions.shape[-1], rows.positions.shape[1]
        first_own = num_slots - num_rows
        seen = rows.visible()[:, 0].clone()
        seen.diagonal(first_own, -2, -1).fill_(True)
        side = None
        if self.method.chooses(layer):
            slots = self._choose(layer, rows, first_own, seen)
            side = self._index_read(rows.positions)
        else:
            slots = torch.stack([self.chosen[own] for own in range(first_own, num_slots)], 1)
        self.last = layer
        mask = mask_of(slots, num_slots) & seen
        own = mask.diagonal(first_own, -2, -1).clone()
        mask.diagonal(first_own, -2, -1).fill_(False)
        return Selection(mask[:, None], mask.sum(-1), side, own=own)

    def _choose(self, layer: int, rows: QueryRows, first_own: int, seen: Tensor) -> Tensor:
        """Run the layer's indexer: slots int [batch, rows, top_k]."""
        keys = self.keys[layer][:, 0, : seen.shape[-1]]

        def keep(fresh: Tensor) -> Tensor:
            keys[:, first_own:] = fresh
            return keys

        assert rows.index is not None, "a layer that chooses has an indexer"
        slots = rows.index(keep, seen)
        slots = pad(slots, (0, self.method.index.top_k - slots.shape[-1]), value=NO_SLOT)
        if self.last != layer:  # the first block: earlier rows' choices are no longer needed
            self.chosen = {}
        following = layer + 1
        if following < self.geometry.num_layers and not self.method.chooses(following):
            for row, of_row in enumerate(slots.unbind(1)):
                self.chosen[first_own + row] = of_row
        return slots

    def _index_read(self, positions: Tensor) -> Tensor:
        """Index keys of the cached tokens, in tokens of a KV head: fp64 [batch, rows]."""
        token = self.geometry.num_kv_heads * self.geometry.elements
        return positions.double() * (self.method.index.head_dim / token)


@dataclass(frozen=True)
class Dsa(FitsModel, ReadsIndexer):
    """Reads what the model's own indexers choose.

    Source: DeepSeek-V3.2 (2025), IndexCache (2026)
    Keeps: every token; index keys of the model's own
    Reads: what the model's own indexer chooses; on models that have one
    """

    every: int = setting(
        1, "of the layers with an indexer, every n-th chooses; the others reuse", least(1)
    )
    layers: tuple[int, ...] | None = setting(
        None, "layers that choose, beside the first; null: by every"
    )

    title = "DSA"
    state = DsaState
    when = "own_query"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_alone = self.layers is None or self.every == 1
        require(is_alone, "every", self.every, "1 with method.layers, which names the layers")

    def fitted(self, geometry: Geometry) -> Method:
        index = geometry.index
        if index is None:
            raise ValueError(
                f"method=dsa: model family {geometry.family!r} has no indexer of its own; allowed: "
                "models with DeepSeek sparse attention (results/families.md)"
            )
        allowed = [layer for layer, has_own in enumerate(index.own) if has_own]
        if self.layers is not None:
            require(
                set(self.layers) <= set(allowed),
                "layers",
                list(self.layers),
                f"layers with an indexer, which are {allowed}",
            )
        return FittedDsa(
            every=self.every,
            layers=self.layers,
            dense_layers=self.dense_layers,
            index=index,
        )

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        """Where the current token is chosen, one less than `max_tokens_read`: the data decides."""
        return None

    def with_budget(self, frac: float) -> Self:
        raise ValueError(
            "method dsa has no budget to set: it reads the model's index_topk tokens; "
            f"budget=nearest:{frac:g} runs it as it is"
        )


@dataclass(frozen=True)
class FittedDsa(Dsa):
    """`Dsa` on a model. index: the model's indexers."""

    index: IndexShape = setting(IndexShape(0, 0, ()), "the model's own indexers")

    def fitted(self, geometry: Geometry) -> Method:
        return self

    def chooses(self, layer: int) -> bool:
        """True if a layer runs its indexer in decode rows."""
        if not self.index.own[layer]:
            return False
        if self.layers is not None:
            return layer == 0 or layer in self.layers
        return sum(self.index.own[:layer]) % self.every == 0

    def when_of(self, layer: int) -> When:
        return "own_query" if self.chooses(layer) else "earlier_layer"

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return counts.cached if counts.cached < self.index.top_k else None

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        return min(counts.cached, self.index.top_k)
