"""YAKV (Yandex Research, 2026): each key is its own landmark, in two bits a channel.

Official code: github.com/yandex-research/context-intensive-kv-offloading, `kv_cache.py` and
`quantization/higgs.py` under `shadowkv-models/shadowkv_models`.

The rule, and where it differs (made into docs/methods.md):

**yakv** codes a key as HIGGS does: blocks of at most 128 channels are rotated by the Hadamard
matrix and divided by their length, so that a channel is nearly N(0, 1), and four channels become
the number of the nearest of 256 points (`GRID_FILE`). A byte holds four channels; a block has its
length in 16 bits. A token's score is the query's product with the key that the codes give;
probabilities are over the tokens that compete, and a group takes the largest of its heads'. First
tokens (`num_sinks`, 4) and the most recent ones (`recent_frac`, 0.22 of those that are read) are
read beside the best.

- The points are ours: Lloyd's iteration on 2^20 normal vectors of a Sobol sequence. Their mean
  squared error of a channel is 0.0966, that of the official ones 0.0965.
- A block of the official code may span two KV heads (head_dim 64); here a head has its own blocks.
- The official code reads rows of the prompt alone, and keeps generated tokens exact on the device;
  here generated tokens are coded and compete.
- Its rows are coded, too, in FP8 or by HIGGS with two channels a byte: `codec=` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from methods.base import Calibration, PromptRows, QueryRows
from methods.codecs.base import hadamard
from methods.selection import Retrieving, RetrievingState

PART = 4
"""Channels of a byte."""
BLOCK = 128
"""Channels that are rotated together, at most."""
GRID_FILE = Path(__file__).with_name("yakv_grid.csv")
"""256 points of 4 numbers, for normal vectors."""
CODED_NUMBERS = 2**22
"""Distances to points that a part of a prompt's keys has at a time."""


@cache
def grid(device: torch.device) -> Tensor:
    """The points, fp32 [256, 4], copied to a device once."""
    points = np.loadtxt(GRID_FILE, delimiter=",", dtype=np.float32)
    return torch.from_numpy(points).to(device)


def nearest_points(vectors: Tensor, points: Tensor) -> Tensor:
    """Number of the nearest of the `points` of each vector [..., 4]: uint8 [...]."""
    norms = points.square().sum(-1)
    flat = vectors.reshape(-1, PART)
    found = flat.new_empty(len(flat), dtype=torch.uint8)
    step = CODED_NUMBERS // len(points)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        found[part] = (2 * flat[part] @ points.mT - norms).argmax(-1)
    return found.view(vectors.shape[:-1])


class YAKVState(RetrievingState):
    """codes[layer]: uint8 [batch, num_kv_heads, slots, head_dim / 4]. block_lengths[layer]: of each
    block, fp16 [batch, num_kv_heads, slots, blocks].

    block: channels of a block. points: as of `grid`.
    """

    replayable = True
    selects_without_own = True
    slot_tensors = {"codes": 0, "block_lengths": 0}
    codes: dict[int, Tensor]
    block_lengths: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        head_dim = self.geometry.head_dim
        self.block = min(BLOCK, head_dim & -head_dim)
        self.points = grid(self.lengths.final.device)

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        shape = (*key.shape[:2], rows.num_slots)
        head_dim = key.shape[3]
        self.codes[layer] = torch.zeros(
            (*shape, head_dim // PART), dtype=torch.uint8, device=key.device
        )
        lengths = torch.zeros(
            (*shape, head_dim // self.block), dtype=torch.float16, device=key.device
        )
        self.block_lengths[layer] = lengths
        super().prompt(layer, query, key, value, rows)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        blocks = key.float().unflatten(-1, (-1, self.block))
        lengths = blocks.norm(dim=-1)
        self.block_lengths[layer][:, :, slots] = lengths.half()
        directions = hadamard(blocks) / lengths.clamp(
            min=torch.finfo(lengths.dtype).tiny
        ).unsqueeze(-1)
        as_normal = directions * self.block**0.5
        parts = as_normal.flatten(-2).unflatten(-1, (-1, PART))
        self.codes[layer][:, :, slots] = nearest_points(parts, self.points)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Products with the coded keys. The rotation is its own inverse and leaves products as they
        are, so the queries are rotated, not the keys."""
        geometry, num_slots = self.geometry, rows.slot_positions.shape[-1]
        codes = self.codes[layer][:, :, :num_slots]
        lengths = self.block_lengths[layer][:, :, :num_slots].float() * self.block**-0.5
        directions = embedding(codes.int(), self.points)
        blocks = directions.flatten(-2).unflatten(-1, (-1, self.block))
        keys = (blocks * lengths.unsqueeze(-1)).flatten(-2)
        query = rows.query.float().unflatten(1, (geometry.num_kv_heads, -1)).flatten(2, 3)
        rotated = hadamard(query, self.block) * geometry.scale
        return (rotated @ keys.mT).unflatten(2, (geometry.group, -1))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The codes of every token, and the lengths of its blocks."""
        head_dim = self.geometry.head_dim
        bits = 8 * head_dim // PART + 16 * head_dim // self.block
        return positions.double() * bits / (16 * self.geometry.elements)


@dataclass(frozen=True)
class YAKV(Retrieving):
    """Reads first and recent tokens, and the best by their keys in two bits. Of what is read, as
    many are recent as in the paper, which reads 2.8 % of long prompts.

    Source: YAKV (2026)
    Keeps: every token; its key in 2 bits a channel
    Reads: first and recent tokens, and the best by their coded keys
    """

    budget: float = 0.05
    num_sinks: int = 4
    recent_frac: float = 0.22
    group: str = "max_probs"

    title = "YAKV"
    state = YAKVState
