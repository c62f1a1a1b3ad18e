"""Scores on a few numbers a key: what InfiniGen, Double Sparsity, SparQ and Loki have in common.

Every key is kept a second time on the device as its product with a projection, a choice of columns or a rotation cut
short, and a query is scored on these alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.base import PromptRows, Rows, State


class ProjectedState(State):
    """Partial keys and the projection that makes them; `project` says which.

    projection[layer]: [batch, num_kv_heads, head_dim, columns]. partial_keys[layer]: [batch, num_kv_heads, slots,
    columns].
    """

    sequence_tensors = ("projection",)
    slot_tensors = {"partial_keys": 0}
    projection: dict[int, Tensor]
    partial_keys: dict[int, Tensor]

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """Each sequence's projection, [batch, num_kv_heads, head_dim, columns], from its prompt's query and key."""
        raise NotImplementedError

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Choose the projection and store the prompt's partial keys."""
        projection = self.projection[layer] = self.project(layer, query, key, rows)
        shape = (*key.shape[:2], rows.num_slots + self.spare_slots, projection.shape[-1])
        self.partial_keys[layer] = key.new_empty(shape)
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice) -> None:
        """Keep the projection of the keys that enter `slots`."""
        torch.matmul(key, self.projection[layer], out=self.partial_keys[layer][:, :, slots])

    def partial_scores(self, layer: int, rows: Rows) -> Tensor:
        """Scaled scores of `rows.query` on the projection: fp32 [batch, num_kv_heads, group, rows, all slots]."""
        batch, num_kv_heads, head_dim, _ = self.projection[layer].shape
        slots = rows.slot_positions.shape[-1]
        stacked = rows.query.reshape(batch, num_kv_heads, -1, head_dim) @ (self.projection[layer] * self.geometry.scale)
        scores = stacked @ self.partial_keys[layer][:, :, :slots].mT
        return scores.view(batch, num_kv_heads, self.geometry.group, -1, slots).float()

    def index_read(self, layer: int, present: Tensor) -> Tensor:
        """What the scores of `present` [batch, rows] tokens read, in tokens of 2 * head_dim elements."""
        _, _, head_dim, columns = self.projection[layer].shape
        return present.double() * columns / (2 * head_dim)
