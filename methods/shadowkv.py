"""ShadowKV (Sun et al., ICML 2025): keys of low rank on the device, values fetched by chunks.

A landmark is the mean of a chunk's keys after their positions. Those of the best chunks are rebuilt
and get their positions back.

The rule, and where it differs (made into docs/methods.md):

**shadowkv** keeps the prompt's keys before their positions as a product of rank `rank_frac` · KV
heads · head_dim. A landmark is the mean key of a chunk of `page_size` (8) tokens. Exact on the
device are the last `local_chunks` (4) full chunks of the prompt, the `outlier_frac` of the others
whose keys differ most from their landmark, and all generated tokens. A step reads these, and the
best chunks by the softmax over landmarks: their values cross the link, their keys are rebuilt. A
value counts as half a token in the budget; the rest counts in `device_frac`, so compare it after
long prompts. The official code fetches 1.56 %, in all layers, and no chunk twice in a row, which is
nearly `gpu_cache=1`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from methods.attention import attention_scores
from methods.base import (
    Calibration,
    PromptRows,
    QueryRows,
    Selection,
    State,
    TokenCounts,
    floor_frac,
)
from methods.selection import RetrievingPages, largest
from methods.settings import least, setting, share


class ShadowKVState(State):
    """Tensors of the prompt, by layer. Chunks are counted from position 0.

    left: [batch, prompt, rank], right: [batch, num_kv_heads, rank, head_dim]; their product is the
    keys before their positions. landmarks: [batch, num_kv_heads, chunks, head_dim]. selectable:
    bool [batch, num_kv_heads, chunks], False for chunks that stay on the device. outliers,
    fetchable: int [batch], numbers of chunks.
    """

    sequence_tensors = ("left", "right", "landmarks", "selectable", "outliers", "fetchable")
    left: dict[int, Tensor]
    right: dict[int, Tensor]
    landmarks: dict[int, Tensor]
    selectable: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        prompts, device = self.lengths.prompt.tolist(), self.lengths.prompt.device
        chunks = [self.method.chunks(prompt) for prompt in prompts]
        outliers = [self.method.outliers(count) for count in chunks]
        self.outliers = torch.tensor(outliers, device=device)
        self.fetchable = torch.tensor(chunks, device=device) - self.outliers

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        # Keys of low rank. Padding is rows of zeros, which change nothing.
        positions = rows.positions.masked_fill(~rows.real, 0)
        bare = self.geometry.rotate(key.float(), positions, inverse=True, layer=layer)
        bare_rows = (bare * rows.real[:, None, :, None]).transpose(1, 2).flatten(2)
        rank = math.ceil(self.method.rank_frac * bare_rows.shape[-1])
        left, right = low_rank(bare_rows, rank)
        self.left[layer] = left.to(key.dtype)
        self.right[layer] = right.unflatten(-1, (key.shape[1], -1)).transpose(1, 2).to(key.dtype)
        # The landmarks, and the chunks that stay
        size, length = self.method.page_size, key.shape[2]
        chunks = -(-length // size)
        column = torch.arange(chunks * size, device=key.device) + (length - rows.lengths)[:, None]
        index = column.clamp(max=length - 1)[:, None, :, None]
        index = index.expand(-1, key.shape[1], -1, key.shape[-1])
        chunked = key.gather(2, index).unflatten(2, (chunks, size))
        landmarks = self.landmarks[layer] = chunked.mean(3)
        cosines = cosine_similarity(chunked.float(), landmarks.float().unsqueeze(3), dim=-1)
        unlike = -cosines.amin(-1)
        num_candidates = (self.outliers + self.fetchable)[:, None]
        candidate = torch.arange(chunks, device=key.device) < num_candidates
        unlike = unlike.masked_fill(~candidate[:, None], -math.inf).unsqueeze(2)
        outlier = largest(unlike, self.outliers[:, None])[:, :, 0]
        self.selectable[layer] = candidate[:, None] & ~outlier

    def resident(self, layer: int) -> Tensor:
        left = self.left[layer]
        position = self._positions(torch.arange(left.shape[1], device=left.device))
        in_chunks = self._in_chunks(self.selectable[layer].unsqueeze(2), position)[:, :, 0]
        return (position >= 0)[:, None] & ~in_chunks

    def rebuild(self, layer: int, slots: Tensor) -> Tensor:
        slots = slots.clamp(min=0)
        left = self.left[layer]
        rows = left.gather(1, slots.flatten(1).unsqueeze(-1).expand(-1, -1, left.shape[-1]))
        bare = rows.unflatten(1, slots.shape[1:]) @ self.right[layer]
        positions = self._positions(slots.flatten(1)).clamp(min=0).view_as(slots)
        # Each head's tokens have positions of their own, so each head is a sequence here.
        heads = bare.flatten(0, 1).unsqueeze(1)
        rebuilt = self.geometry.rotate(heads, positions.flatten(0, 1), layer=layer)
        return rebuilt.view_as(bare)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        """The best chunks by their landmarks."""
        method, positions = self.method, rows.positions
        selectable = self.selectable[layer].unsqueeze(2)
        scores = attention_scores(rows.query, self.landmarks[layer], self.geometry.scale)
        scores.masked_fill_(~selectable.unsqueeze(2), -math.inf)
        if method.read_tokens is None:
            wanted = floor_frac(method.budget, positions)
        else:
            wanted = positions.clamp(max=method.read_tokens)
        count = torch.minimum((wanted // method.page_size).clamp(min=1), self.fetchable[:, None])
        first = torch.arange(scores.shape[-1], device=scores.device)[None, None] * method.page_size
        last = first + method.page_size - 1
        forced = method.forced(first, last, positions, count * method.page_size)
        chosen = largest(method.reduced(scores, forced), count)
        chunks, num_chunks = method.joined(chosen, count, self.geometry)
        num_read = num_chunks * method.page_size
        mask = self._in_chunks(chunks, rows.slot_positions.squeeze(1))
        # The landmarks, the rows of `left` and all of `right` that rebuild the keys, and the tokens
        # that stay
        head_dim, prompt = self.geometry.head_dim, self.lengths.prompt[:, None]
        # The rank of a shorter prompt is its length
        rank = prompt.clamp(max=self.right[layer].shape[-2])
        fetchable = self.fetchable[:, None]
        index = fetchable * head_dim + num_read * rank + rank * head_dim
        side = index / self.geometry.elements + positions - fetchable * method.page_size
        return Selection(mask, num_read, side)

    def _positions(self, columns: Tensor) -> Tensor:
        """Positions [batch, n] of the prompt's `columns` [n] or [batch, n], below 0 in the
        padding."""
        prompt = next(iter(self.left.values())).shape[1]
        return columns - (prompt - self.lengths.prompt)[:, None]

    def _in_chunks(self, chunks: Tensor, positions: Tensor) -> Tensor:
        """Mask of the tokens at `positions` [batch, n] that are in `chunks` [batch, num_kv_heads,
        rows, chunks]: bool [..., n]."""
        chunk = positions.clamp(min=0) // self.method.page_size
        index = chunk.clamp(max=chunks.shape[-1] - 1).long()[:, None, None]
        index = index.expand(*chunks.shape[:3], -1)
        return chunks.gather(-1, index) & (chunk < chunks.shape[-1])[:, None, None]


def low_rank(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two factors, [batch, n, r] and [batch, r, width], of the product of rank r that is
    nearest to `rows` [batch, n, width]: that of the SVD cut to r. r is `rank`, or less where
    `rows` has no such rank. fp64.

    They follow from the eigenvectors of the smaller of the two squares of `rows`, which is faster
    than an SVD.
    """
    rows = rows.double()
    if rows.shape[-2] < rows.shape[-1]:
        left = _strongest(rows @ rows.mT, rank)
        return left, left.mT @ rows
    right = _strongest(rows.mT @ rows, rank)
    return rows @ right, right.mT


def _strongest(square: Tensor, rank: int) -> Tensor:
    """The eigenvectors of a symmetric matrix by falling eigenvalue, `rank` columns at most."""
    return torch.linalg.eigh(square).eigenvectors.flip(-1)[..., :rank]


@dataclass(frozen=True)
class ShadowKV(RetrievingPages):
    """Fetches the values of `budget` of the cached tokens, or of `read_tokens`, in chunks of
    `page_size` tokens. The official code keeps a rank of 160 of 1,024, and 48 outliers of 128 Ki
    tokens.

    Source: ShadowKV (ICML 2025)
    Keeps: values; keys of low rank, landmarks and some exact tokens on the device
    Reads: values of the chunks with the best landmarks
    """

    group: str = "max_probs"
    page_size: int = 8
    rank_frac: float = setting(
        0.156, "rank of the kept keys / elements of a token's key over all KV heads", share()
    )
    local_chunks: int = setting(
        4, "last full chunks of the prompt that stay, with what follows them", least(0)
    )
    outlier_frac: float = setting(
        0.003, "share of the other chunks that stay, rounded up", share(zero=True)
    )

    title = "ShadowKV"
    state = ShadowKVState

    def chunks(self, prompt: int) -> int:
        """Full chunks of a prompt before its `local_chunks`."""
        return max(0, prompt // self.page_size - self.local_chunks)

    def outliers(self, chunks: int) -> int:
        """Number of `chunks` that stay."""
        return math.ceil(self.outlier_frac * chunks)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        chunks = self._fetchable(counts.prompt)
        if self.group != "union":
            chunks = min(max(1, self.budget_in_tokens(counts.cached) // self.page_size), chunks)
        return chunks * self.page_size

    def tokens_resident(self, counts: TokenCounts, layer: int) -> int:
        return counts.cached - self._fetchable(counts.prompt) * self.page_size

    def _fetchable(self, prompt: int) -> int:
        chunks = self.chunks(prompt)
        return chunks - self.outliers(chunks)
