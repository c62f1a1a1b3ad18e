"""ShadowKV (Sun et al., ICML 2025): keys of low rank on the device, values fetched by chunks.

The keys of a prompt before their positions, all KV heads side by side, are kept as a product of low rank. A chunk of
tokens is scored by its landmark, the mean of its keys after their positions. The keys of the best chunks are rebuilt
and get their positions back, their values cross the link. Chunks whose keys are unlike their landmark stay exact on
the device, as do the last ones of the prompt and all that is generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from methods.base import (
    Calibration,
    Geometry,
    Lengths,
    PromptRows,
    Row,
    Rows,
    Selection,
    State,
    attention_scores,
    floor_frac,
)
from methods.checks import require, require_fraction, require_one_of
from methods.retrieving import Retrieving
from methods.selection import largest


@dataclass(frozen=True)
class ShadowKV(Retrieving):
    """Fetches the values of `read_frac` of the cached tokens, or of `read_tokens`, in chunks of `page_size` tokens.

    rank_frac: rank of the kept keys / elements of a token's key over all KV heads, rounded up; 160 of 1,024 in the
        official code. local_chunks: the prompt's last full chunks, which stay, with what is behind them. outlier_frac:
        share of the other chunks that stay, rounded up; 48 of 128 Ki tokens in the official code.
    """

    group: str = "max_probs"
    page_size: int = 8
    rank_frac: float = 0.156
    local_chunks: int = 4
    outlier_frac: float = 0.003

    title = "ShadowKV"
    needs_prompt = True
    holds_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("covers", self.covers, ("kv_head",))  # what stays is a KV head's own
        require_fraction("rank_frac", self.rank_frac)
        require(self.local_chunks >= 0, "local_chunks", self.local_chunks, "an integer >= 0")
        require_fraction("outlier_frac", self.outlier_frac, zero=True)

    def outliers(self, chunks: int) -> int:
        """How many of so many chunks stay."""
        return math.ceil(self.outlier_frac * chunks)

    def chunks(self, prompt: int) -> int:
        """Chunks of a prompt that do not stay for being its last."""
        return max(0, prompt // self.page_size - self.local_chunks)

    def tokens_read(self, row: Row, layer: int) -> float | None:
        """The chunks whose values are fetched."""
        return None if self.group == "union" else self._fetched(row)

    def max_tokens_read(self, row: Row, layer: int) -> int:
        """As many; of a union any that do not stay."""
        return self._fetchable(row.prompt) * self.page_size if self.group == "union" else self._fetched(row)

    def tokens_resident(self, row: Row, layer: int) -> int:
        """All that is in no chunk to fetch."""
        return row.cached - self._fetchable(row.prompt) * self.page_size

    def _fetchable(self, prompt: int) -> int:
        chunks = self.chunks(prompt)
        return chunks - self.outliers(chunks)

    def _fetched(self, row: Row) -> int:
        wanted = max(1, self.budget(row.cached) // self.page_size)
        return min(wanted, self._fetchable(row.prompt)) * self.page_size

    def new_state(self, geometry: Geometry, lengths: Lengths, calibration: Calibration | None = None) -> ShadowKVState:
        """No calibration."""
        return ShadowKVState(self, geometry, lengths)


class ShadowKVState(State):
    """What is kept of the prompt, by layer.

    left: [batch, prompt, rank], right: [batch, num_kv_heads, rank, head_dim]; their product is the keys before their
    positions. landmarks: [batch, num_kv_heads, chunks, head_dim]; selectable: bool [batch, num_kv_heads, chunks], those
    whose tokens do not stay. Chunks are counted from position 0. outliers, fetchable: int [batch], chunks that are.
    """

    sequence_tensors = ("left", "right", "landmarks", "selectable", "outliers", "fetchable")
    left: dict[int, Tensor]
    right: dict[int, Tensor]
    landmarks: dict[int, Tensor]
    selectable: dict[int, Tensor]

    def __init__(self, method: ShadowKV, geometry: Geometry, lengths: Lengths) -> None:
        super().__init__(method, geometry, lengths)
        method.check_lengths(lengths)
        chunks = [method.chunks(prompt) for prompt in lengths.prompt.tolist()]
        outliers = [method.outliers(count) for count in chunks]
        self.outliers = torch.tensor(outliers, device=lengths.prompt.device)
        self.fetchable = torch.tensor(chunks, device=lengths.prompt.device) - self.outliers

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows) -> None:
        """Keep the keys' product of low rank, the landmarks, and which chunks stay."""
        self._keep_low_rank(layer, key, rows)
        size, length = self.method.page_size, key.shape[2]
        chunks = -(-length // size)
        column = torch.arange(chunks * size, device=key.device) + (length - rows.lengths)[:, None]
        index = column.clamp(max=length - 1)[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[-1])
        chunked = key.gather(2, index).unflatten(2, (chunks, size))
        landmarks = self.landmarks[layer] = chunked.mean(3)
        unlike = -cosine_similarity(chunked.float(), landmarks.float().unsqueeze(3), dim=-1).amin(-1)
        candidate = torch.arange(chunks, device=key.device) < (self.outliers + self.fetchable)[:, None]
        unlike = unlike.masked_fill(~candidate[:, None], -math.inf).unsqueeze(2)
        outlier = largest(unlike, self.outliers[:, None])[:, :, 0]
        self.selectable[layer] = candidate[:, None] & ~outlier

    def _keep_low_rank(self, layer: int, key: Tensor, rows: PromptRows) -> None:
        """Of each sequence's real tokens: padding is rows of zeros, which change nothing."""
        positions = rows.positions.masked_fill(~rows.real, 0)
        bare = self.geometry.rotate(key.float(), positions, inverse=True, layer=layer) * rows.real[:, None, :, None]
        left, scale, right = torch.linalg.svd(bare.transpose(1, 2).flatten(2), full_matrices=False)
        rank = math.ceil(self.method.rank_frac * right.shape[-1])
        self.left[layer] = (left * scale.unsqueeze(1))[..., :rank].to(key.dtype)
        self.right[layer] = right[:, :rank].unflatten(-1, (key.shape[1], -1)).transpose(1, 2).to(key.dtype)

    def resident(self, layer: int) -> Tensor:
        """The tokens of the outliers and of the prompt's last chunks, and what is behind these."""
        position = self._positions(torch.arange(self.left[layer].shape[1], device=self.left[layer].device))
        return (position >= 0)[:, None] & ~self._in_chunks(self.selectable[layer].unsqueeze(2), position)[:, :, 0]

    def rebuild(self, layer: int, slots: Tensor) -> Tensor:
        """Rebuilt, and put at their positions."""
        slots = slots.clamp(min=0)
        left = self.left[layer]
        rows = left.gather(1, slots.flatten(1).unsqueeze(-1).expand(-1, -1, left.shape[-1]))
        bare = rows.unflatten(1, slots.shape[1:]) @ self.right[layer]
        positions = self._positions(slots.flatten(1)).clamp(min=0).view_as(slots)
        # The heads' tokens lie at positions of their own, so each head is a sequence here.
        rebuilt = self.geometry.rotate(bare.flatten(0, 1).unsqueeze(1), positions.flatten(0, 1), layer=layer)
        return rebuilt.view_as(bare)

    def select(self, layer: int, rows: Rows) -> Selection:
        """The best chunks by their landmarks."""
        method, selectable = self.method, self.selectable[layer].unsqueeze(2)
        scores = attention_scores(rows.query, self.landmarks[layer], self.geometry.scale)
        scores.masked_fill_(~selectable.unsqueeze(2), -math.inf)
        count = self._chunks_fetched(rows.positions)
        first = torch.arange(scores.shape[-1], device=scores.device)[None, None] * method.page_size
        forced = method.forced(first, first + method.page_size - 1, rows.positions, count * method.page_size)
        relative = method.reduced(scores, forced)
        chosen = largest(relative, count)
        chunks, num_chunks = method.joined(chosen, count, self.geometry)
        mask = self._in_chunks(chunks, rows.slot_positions.squeeze(1))
        num_read = num_chunks * method.page_size
        return Selection(mask, num_read, self._side(layer, rows.positions, num_read))

    def _chunks_fetched(self, positions: Tensor) -> Tensor:
        """int [batch, rows]."""
        method = self.method
        if method.read_tokens is None:
            wanted = floor_frac(method.read_frac, positions)
        else:
            wanted = positions.clamp(max=method.read_tokens)
        return torch.minimum((wanted // method.page_size).clamp(min=1), self.fetchable[:, None])

    def _side(self, layer: int, positions: Tensor, num_read: Tensor) -> Tensor:
        """The landmarks, the rows of `left` and all of `right` that the keys are rebuilt of, and what stays."""
        most, head_dim = self.right[layer].shape[-2:]
        rank = self.lengths.prompt.clamp(max=most)[:, None]  # a shorter prompt has fewer
        index = self.fetchable[:, None] * head_dim + num_read * rank + rank * head_dim
        return index / self.geometry.elements + positions - self.fetchable[:, None] * self.method.page_size

    def _positions(self, columns: Tensor) -> Tensor:
        """Of the prompt's `columns` [n] or [batch, n], below 0 in the padding: [batch, n]."""
        prompt = next(iter(self.left.values())).shape[1]
        return columns - (prompt - self.lengths.prompt)[:, None]

    def _in_chunks(self, chunks: Tensor, positions: Tensor) -> Tensor:
        """Whether the tokens at `positions` [batch, n] are in `chunks`, bool [batch, num_kv_heads, rows, chunks]: alike
        [..., n]."""
        chunk = positions.clamp(min=0) // self.method.page_size
        index = chunk.clamp(max=chunks.shape[-1] - 1).long()[:, None, None].expand(*chunks.shape[:3], -1)
        return chunks.gather(-1, index) & (chunk < chunks.shape[-1])[:, None, None]
