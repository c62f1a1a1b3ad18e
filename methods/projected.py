"""Scores on a few numbers a key: what InfiniGen, Double Sparsity, Loki and SparQ have in common.

Every key is kept a second time on the device as its product with a projection: a choice of columns, a rotation cut
short, or all of it; exact, or in a few bits. A query is scored on these numbers alone. Queries and keys may have a
projection each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from methods.base import Geometry, Lengths, PromptRows, Rows, State
from methods.checks import require, require_fraction
from methods.codec import INTEGER_BITS, Codec
from methods.retrieving import Retrieving, RetrievingState


@dataclass(frozen=True)
class Projected(Retrieving):
    """Reads the tokens that score best on `rank` · head_dim numbers a key.

    rank: a share, so that it fits any model; rounded up. index_bits: in so many bits the numbers are kept, with scales
    as in `methods.codec`; None keeps them as the keys are.
    """

    rank: float = 0.25
    index_bits: int | None = None

    page_size: ClassVar[int] = 1  # type: ignore[misc]  # every token has a score of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("rank", self.rank)
        require_index_bits(self.index_bits)

    def num_columns(self, head_dim: int) -> int:
        """Numbers of a key that are scored."""
        return math.ceil(self.rank * head_dim)


def require_index_bits(bits: int | None) -> None:
    """Raise ValueError unless an integer codec has so many."""
    allowed = sorted(INTEGER_BITS.values(), reverse=True)
    require(bits is None or bits in allowed, "index_bits", bits, f"one of {', '.join(map(str, allowed))}, or null")


class ProjectedState(State):
    """Partial keys and the projections that make them; `projections` says which.

    query_projection[layer], key_projection[layer]: [batch, num_kv_heads, head_dim, columns]; partial_keys[layer]:
    [batch, num_kv_heads, slots, columns], or of coded ones their bytes.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ("query_projection", "key_projection")
    slot_tensors = {"partial_keys": 0}
    query_projection: dict[int, Tensor]
    key_projection: dict[int, Tensor]
    partial_keys: dict[int, Tensor]

    def __init__(self, method: Any, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        self.codec = None if method.index_bits is None else Codec(f"int{method.index_bits}")

    def projections(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, [batch, num_kv_heads, head_dim, columns] each, given the prompt's query and key."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Choose the projections and store the prompt's partial keys."""
        of_query, of_key = self.projections(layer, query, key, rows)
        self.query_projection[layer], self.key_projection[layer] = of_query, of_key
        columns, dtype = of_key.shape[-1], key.dtype
        width, dtype = (columns, dtype) if self.codec is None else (self.codec.row_bytes(columns), torch.uint8)
        slots = rows.num_slots + self.spare_slots
        self.partial_keys[layer] = key.new_empty((*key.shape[:2], slots, width), dtype=dtype)
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice) -> None:
        """Keep the projection of the keys that enter `slots`."""
        projection, entering = self.key_projection[layer], self.partial_keys[layer][:, :, slots]
        if self.codec is None:
            torch.matmul(key, projection, out=entering)
        else:
            entering.copy_(self.codec.encode(key @ projection))

    def partial_scores(self, layer: int, rows: Rows) -> Tensor:
        """Scaled scores of `rows.query` on the projection: fp32 [batch, num_kv_heads, group, rows, all slots]."""
        query, slots = self.partial_query(layer, rows.query), rows.slot_positions.shape[-1]
        keys = self.partial_keys[layer][:, :, :slots]
        if self.codec is not None:
            keys = self.codec.decode(keys, self.key_projection[layer].shape[-1], query.dtype)
        return (query @ keys.mT).view(*query.shape[:2], self.geometry.group, -1, slots).float()

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """The projection of `query` [batch, heads, rows, head_dim], scaled: [batch, num_kv_heads, group * rows,
        columns]."""
        projection = self.query_projection[layer]
        return query.reshape(*projection.shape[:2], -1, query.shape[-1]) @ (projection * self.geometry.scale)

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """What the scores of `positions` [batch, rows] tokens read, in tokens of 2 * head_dim elements."""
        head_dim, columns = self.key_projection[layer].shape[-2:]
        width = 1.0 if self.codec is None else self.codec.bits_per_element(columns) / 16
        return positions.double() * width * columns / (2 * head_dim)


class FixedProjectionState(ProjectedState, RetrievingState):
    """One projection of queries and keys alike, known before any prompt."""

    def __init__(self, method: Projected, geometry: Geometry, lengths: Lengths, projection: Tensor) -> None:
        """projection: [num_layers, num_kv_heads, head_dim, columns]."""
        super().__init__(method, geometry, lengths)
        self.projection = projection

    def projections(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> tuple[Tensor, Tensor]:
        """The layer's, of every sequence."""
        shared = self.projection[layer].to(key).expand(len(key), -1, -1, -1)
        return shared, shared

    def scores(self, layer: int, rows: Rows) -> Tensor:
        """On the projection."""
        return self.partial_scores(layer, rows)
