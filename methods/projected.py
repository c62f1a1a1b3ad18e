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

from methods.base import Geometry, Lengths, PromptRows, Rows, State, product
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


def right_vectors(rows: Tensor) -> Tensor:
    """Right singular vectors of `rows` [..., n, head_dim] as columns by falling singular value, [..., head_dim,
    head_dim]."""
    few = rows.shape[-2] < rows.shape[-1]  # then the reduced V would not be square
    return torch.linalg.svd(rows, full_matrices=few).Vh.mT.contiguous()


def require_index_bits(bits: int | None) -> None:
    """Raise ValueError unless an integer codec has so many."""
    allowed = sorted(INTEGER_BITS.values(), reverse=True)
    require(bits is None or bits in allowed, "index_bits", bits, f"one of {', '.join(map(str, allowed))}, or null")


class PartialKeysState(State):
    """A few numbers of every key, and scores on them; `partial_key` and `partial_query` say which.

    partial_keys[layer]: [batch, num_kv_heads, slots, columns], or of coded ones their bytes, uint8.
    """

    slot_tensors = {"partial_keys": 0}
    partial_keys: dict[int, Tensor]
    columns: int

    def __init__(self, method: Any, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        self.codec = None if method.index_bits is None else Codec(f"int{method.index_bits}")

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        """What is kept of `key` [batch, num_kv_heads, n, head_dim]: [batch, num_kv_heads, n, columns]."""
        raise NotImplementedError

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """What scores it, of `query` [batch, num_kv_heads, group, rows, head_dim]: fp32 [..., columns], scaled."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Store the prompt's partial keys."""
        one = self._stored(layer, key[:, :, :1])
        self.partial_keys[layer] = one.new_empty((*key.shape[:2], rows.num_slots + self.spare_slots, one.shape[-1]))
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice) -> None:
        """Store the partial keys that enter `slots`."""
        self.partial_keys[layer][:, :, slots] = self._stored(layer, key)

    def _stored(self, layer: int, key: Tensor) -> Tensor:
        partial = self.partial_key(layer, key)
        self.columns = partial.shape[-1]
        return partial if self.codec is None else self.codec.encode(partial)

    def scores(self, layer: int, rows: Rows) -> Tensor:
        """Scaled scores of `rows.query`: fp32 [batch, num_kv_heads, group, rows, all slots]."""
        query = self.partial_query(layer, rows.query.unflatten(1, (-1, self.geometry.group)))
        keys = self.partial_keys[layer][:, :, : rows.slot_positions.shape[-1]]
        if self.codec is not None:
            keys = self.codec.decode(keys, self.columns, rows.query.dtype)
        return product(query.flatten(2, 3).to(keys.dtype), keys.mT).unflatten(2, query.shape[2:4])

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """What the scores of `positions` [batch, rows] tokens read, in tokens (`Geometry.elements`)."""
        width = 1.0 if self.codec is None else self.codec.bits_per_element(self.columns) / 16
        return positions.double() * (width * self.columns / self.geometry.elements)


class ProjectedState(PartialKeysState):
    """Partial keys are products with a projection; `project` says which.

    projection[layer]: [batch, sides, num_kv_heads, head_dim, columns]; one side for queries and keys alike, or the
    queries' and the keys' own.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ("projection",)
    projection: dict[int, Tensor]

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The projection, shaped as above, given the prompt's query and key."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Choose the projection and store the prompt's partial keys."""
        self.projection[layer] = self.project(layer, query, key, rows)
        super().prompt(layer, query, key, value, rows)

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        """Its product."""
        return key @ self.projection[layer][:, -1]

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """Its product."""
        projection = self.projection[layer][:, 0]
        return product(query.flatten(2, 3), projection, self.geometry.scale).unflatten(2, query.shape[2:4])


class FixedProjectionState(ProjectedState, RetrievingState):
    """One projection, known before any prompt."""

    def __init__(self, method: Projected, geometry: Geometry, lengths: Lengths, fixed: Tensor) -> None:
        """fixed: [num_layers, num_kv_heads, head_dim, columns]."""
        super().__init__(method, geometry, lengths)
        self.fixed = fixed

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The layer's, of every sequence."""
        return self.fixed[layer].to(key).expand(len(key), 1, -1, -1, -1)
