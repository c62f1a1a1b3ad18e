"""Scores on a few numbers per key: Loki, Double Sparsity and SparQ, and the states that InfiniGen
shares with them.

The device keeps of every key its product with a projection (a choice of columns, or a truncated
rotation) or the whole key, exact or in a few bits. A query is scored on these numbers alone.

Loki (Singhania et al., NeurIPS 2024): the first principal components of a KV head's keys, after
their positions, measured on a text. Double Sparsity (Yang et al., 2024): the channels that add most
to the scores on a text. SparQ (Ribar et al., ICML 2024): the channels in which the present query is
largest. They change from query to query, so the index is the keys themselves. The mean value stands
for the tokens that are not read.

The rule, and where it differs (made into docs/methods.md):

**doublesparsity**, **loki** and **sparq** score on `rank` · head_dim numbers per key; with `rank=1`
they rank as the true scores do. The official code is `group=union`.

- **doublesparsity**: channels ranked on the calibration text by the mean of |q_j k_j|, |q_j| or
  |k_j| (`channels`), after positions. The official code measures the last two before them; its mean
  of |q_j k_j| mixes the heads, as it reshapes [heads, tokens] to [tokens, heads] without a
  transpose, and is of the last block of text alone. Defaults: 1/16 of the channels and of the
  tokens. DS-Offload is `when=previous_layer`.
- **loki**: the first principal components of a KV head's keys on the calibration text. Defaults: a
  quarter of both.
- **sparq**: the channels in which the present query is largest. They change every step, so all keys
  lie on the device. Scores are divided by the root of the share of |q| that the channels hold. The
  output is (1 - u) · attention + u · the mean of all values, u the softmax weight of the tokens not
  read (`mean_value`; needs `when=own_query`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.attention import product
from methods.base import EMPTY, Calibration, Geometry, PromptRows, QueryRows, Rest, State, require
from methods.codecs.integers import INTEGER_BITS, IntegerCodec
from methods.coded_keys import coded_scores, room_for_keys
from methods.compiled import kernels_for
from methods.selection import Retrieving, RetrievingState
from methods.settings import one_of, setting, share

INDEX_BITS = one_of(*INTEGER_BITS.values(), None)
"""Bits of each number of an index, with scales as in `methods.codecs`."""
BITS_MEANING = "bits of each number of the index; null keeps the dtype of the keys"


@dataclass(frozen=True)
class Projected(Retrieving):
    """Reads the tokens that score best on `rank` * head_dim numbers per key, rounded up."""

    rank: float = setting(0.25, "numbers of the index a key, as a share of head_dim", share())

    @property
    def index_bits(self) -> int | None:
        """Bits of each number; None keeps the dtype of the keys."""
        return None

    def num_columns(self, head_dim: int) -> int:
        """Numbers of a key that are scored."""
        return math.ceil(self.rank * head_dim)


def right_vectors(rows: Tensor) -> Tensor:
    """Right singular vectors of `rows` [..., n, head_dim] as columns by falling singular value,
    [..., head_dim, head_dim]."""
    few = rows.shape[-2] < rows.shape[-1]  # then the reduced V would not be square
    return torch.linalg.svd(rows, full_matrices=few).Vh.mT.contiguous()


class PartialKeysState(State):
    """A few numbers of every key, and scores on them; `partial_key` and `partial_query` compute
    them.

    partial_keys[layer]: [batch, num_kv_heads, slots, columns]; with `index_bits` the packed bytes,
    uint8, in the layout of `methods.coded_keys`.
    """

    slot_tensors = {"partial_keys": 0}
    partial_keys: dict[int, Tensor]
    columns: int

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        bits = self.method.index_bits
        self.codec = None if bits is None else IntegerCodec(f"int{bits}")

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        """Numbers that are kept of `key` [batch, num_kv_heads, n, head_dim]: [batch, num_kv_heads,
        n, columns]."""
        raise NotImplementedError

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """Scaled query on these numbers: fp32 [batch, num_kv_heads, group, rows, columns], of [...,
        head_dim]."""
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        one = self._stored(layer, key[:, :, :1])
        num_slots = rows.num_slots + self.spare_slots
        self.partial_keys[layer] = (
            one.new_empty((*key.shape[:2], num_slots, one.shape[-1]))
            if self.codec is None
            else room_for_keys(one, num_slots)
        )
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice
    ) -> None:
        self.partial_keys[layer][:, :, slots] = self._stored(layer, key)

    def _stored(self, layer: int, key: Tensor) -> Tensor:
        partial = self.partial_key(layer, key)
        self.columns = partial.shape[-1]
        return partial if self.codec is None else self.codec.encode(partial)

    def scores(self, layer: int, rows: QueryRows) -> Tensor:
        """Scaled scores of `rows.query`: fp32 [batch, num_kv_heads, group, rows, slots]."""
        query = self.partial_query(layer, rows.query.unflatten(1, (-1, self.geometry.group)))
        keys = self.partial_keys[layer][:, :, : rows.slot_positions.shape[-1]]
        stacked = query.flatten(2, 3)
        if self.codec is None:
            scores = product(stacked.to(keys.dtype), keys.mT)
        else:
            scores = coded_scores(stacked.to(rows.query.dtype), keys, self.codec)
        return scores.unflatten(2, query.shape[2:4])

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """Size of the partial keys of `positions` [batch, rows] tokens, in tokens
        (`Geometry.elements`)."""
        width = 1.0 if self.codec is None else self.codec.bits_per_element(self.columns) / 16
        return positions.double() * (width * self.columns / self.geometry.elements)


class ProjectedState(PartialKeysState):
    """Partial keys are products with a projection.

    projection[layer]: [batch, sides, num_kv_heads, head_dim, columns]; one side for queries and
    keys together, or one for queries and one for keys. With `projection_bits` it is coded, each row
    of `columns` numbers by itself: uint8 [batch, sides, num_kv_heads, head_dim, bytes of a row].
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ("projection",)
    selects_without_own = True
    projection: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        bits = getattr(self.method, "projection_bits", None)
        self.projection_codec: IntegerCodec | None = None
        if bits is not None:  # a row is one group, as `coded_product` needs
            columns = self.method.num_columns(self.geometry.head_dim)
            self.projection_codec = IntegerCodec(f"int{bits}", group_size=columns)

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The projection, shaped as above, from the prompt's query and key."""
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.projection[layer] = self.project(layer, query, key, rows)
        super().prompt(layer, query, key, value, rows)

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        return self.times(key, self.projection[layer][:, -1])

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The partial keys, and the projection: the row's query and own key meet all of it."""
        of_head = self.projection[layer][0, :, 0]
        return super().index_read(layer, positions) + tokens_of(of_head, self.geometry)

    def times(self, rows: Tensor, side: Tensor) -> Tensor:
        """`rows` [batch, num_kv_heads, n, head_dim] times a side of a projection: [batch,
        num_kv_heads, n, columns] in the dtype of `rows`."""
        if self.projection_codec is None:
            return rows @ side
        return coded_product(rows, side, self.projection_codec).to(rows.dtype)

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        side, stacked = self.projection[layer][:, 0], query.flatten(2, 3)
        if self.projection_codec is None:
            partial = product(stacked, side, self.geometry.scale)
        else:
            scaled = stacked.float() * self.geometry.scale
            partial = coded_product(scaled, side, self.projection_codec)
        return partial.unflatten(2, query.shape[2:4])


def tokens_of(tensor: Tensor, geometry: Geometry) -> float:
    """Size of a tensor of one KV head in tokens (`Geometry.elements`), a float counted as 16
    bits."""
    width = 1.0 if tensor.is_floating_point() else tensor.itemsize / 2
    return tensor.numel() * width / geometry.elements


def coded_product(rows: Tensor, side: Tensor, codec: IntegerCodec) -> Tensor:
    """`rows` [batch, num_kv_heads, n, head_dim] times a coded matrix: fp32 [batch, num_kv_heads, n,
    columns].

    side: uint8 [batch, num_kv_heads, head_dim, row bytes]. A row is one group of the codec, so that
    it has one lo and one step. The codes are multiplied as they are: rows @ side = (rows * step) @
    codes + rows @ lo.
    """
    kernels = kernels_for(rows)
    if kernels and rows.shape[2] <= kernels.MOST_ROWS:
        return kernels.coded_product(rows, side, codec)
    codes, lo, step = codec.unpack(side, codec.group_size, torch.float32)
    lo, step = lo.squeeze(-1).float(), step.squeeze(-1).float()
    rows = rows.float()
    return (rows * step.mT) @ codes + rows @ lo


class FixedProjectionState(ProjectedState, RetrievingState):
    """A projection that is known before the prompt: the method's `projection`."""

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.fixed: Tensor = self.method.projection(self.geometry.head_dim, calibration)

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        return self.fixed[layer].to(key).expand(len(key), 1, -1, -1, -1)


@dataclass(frozen=True)
class Calibrated(Projected):
    """A method whose projection is measured once, by `calibrate`."""

    index_bits: int | None = setting(None, BITS_MEANING, INDEX_BITS)

    state = FixedProjectionState

    needs_calibration = True

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        """[num_layers, num_kv_heads, head_dim, columns]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Loki(Calibrated):
    """Scores on the first principal components. Defaults are the paper's k_f = d_f = 0.25."""

    read_frac: float = 0.25

    title = "Loki"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """rotation: components of the centred keys, fp32 [num_kv_heads, head_dim, head_dim],
        columns by variance."""
        centred = key.float() - key.float().mean(1, keepdim=True)
        return {"rotation": right_vectors(centred)}

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        return calibration["rotation"][..., : self.num_columns(head_dim)]


@dataclass(frozen=True)
class DoubleSparsity(Calibrated):
    """Scores on a few channels. Defaults are the paper's 1/16 of the tokens by 1/16 of the
    channels."""

    channels: str = setting(
        "qk",
        "channels are ranked by the mean of |q k| (each token's own), of |q| or of |k|",
        one_of("qk", "q", "k"),
    )

    rank: float = 0.0625
    read_frac: float = 0.0625
    num_exempt_layers: int = 2  # `self.layer_idx < 2` in most of its modify_*.py

    title = "Double Sparsity"

    def calibrate(
        self, query: Tensor, key: Tensor, geometry: Geometry, earlier: Sequence[Calibration]
    ) -> Calibration:
        """qk, q, k: mean magnitude of each channel, over tokens and the group, fp32 [num_kv_heads,
        head_dim]."""
        grouped, keys = query.float().view(len(key), -1, *key.shape[1:]), key.float()
        return {
            "qk": (grouped * keys.unsqueeze(1)).abs().mean((1, 2)),
            "q": grouped.abs().mean((1, 2)),
            "k": keys.abs().mean(1),
        }

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        channels = calibration[self.channels].topk(self.num_columns(head_dim)).indices
        return torch.nn.functional.one_hot(channels, head_dim).mT


class SparQState(PartialKeysState, RetrievingState):
    """value_sum[layer]: fp32 [batch, num_kv_heads, head_dim], sum of all values so far.

    For the rows that were appended last: through[layer], fp32 [batch, num_kv_heads, rows,
    head_dim], the sum up to each row, and first[layer], int [batch], the position of the first row.
    """

    sequence_tensors = ("value_sum",)
    value_sum: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self.through: dict[int, Tensor] = {}
        self.first: dict[int, Tensor] = {}

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        return key

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """The largest channels of each row, by the sum over the group; the scale makes up for the
        others."""
        query = query.float()
        magnitude = query.abs()
        best = magnitude.sum(2, keepdim=True).topk(self.method.num_columns(query.shape[-1])).indices
        kept = torch.zeros_like(query[:, :, :1]).scatter_(-1, best, 1.0)
        share = (magnitude * kept).sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
        return query * kept * self.geometry.scale / share.sqrt()

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        self.value_sum[layer] = value.new_zeros(
            (*value.shape[:2], value.shape[-1]), dtype=torch.float32
        )
        super().prompt(layer, query, key, value, rows)
        del self.through[layer], self.first[layer]

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice
    ) -> None:
        super().append(layer, key, value, positions, slots)
        entering = value.float().masked_fill((positions == EMPTY)[:, None, :, None], 0.0)
        self.through[layer] = self.value_sum[layer].unsqueeze(2) + entering.cumsum(2)
        self.first[layer] = positions[:, 0]
        self.value_sum[layer] = self.through[layer][:, :, -1].clone()

    def rest(self, layer: int, rows: QueryRows, scores: Tensor, mask: Tensor) -> Rest | None:
        """The mean value of the cached tokens and the own one, weighted by the scores of the tokens
        not read."""
        if not self.method.mean_value:
            return None
        own = rows.own_slots.unsqueeze(-1)
        seen = rows.visible().scatter(-1, own, True).unsqueeze(2)
        read = mask.scatter(-1, own.expand(-1, mask.shape[1], -1, -1), True).unsqueeze(2)
        softmax = self.geometry.softmax(layer)
        weights = softmax.weights(softmax.capped(scores).masked_fill(~seen, -math.inf))
        share = weights.masked_fill(read, 0.0).sum(-1)
        through, row = self.through[layer], rows.positions - self.first[layer][:, None]
        index = row.clamp(0, through.shape[2] - 1).long()[:, None, :, None]
        total = through.gather(2, index.expand(-1, through.shape[1], -1, through.shape[-1]))
        return Rest(share, (total / (rows.positions + 1)[:, None, :, None]).unsqueeze(2))

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """The channels of each key, and the mean value."""
        head_dim, elements = self.geometry.head_dim, self.geometry.elements
        channels = positions.double() * self.method.num_columns(head_dim) / elements
        return channels + self.method.mean_value * (self.geometry.value_dim or head_dim) / elements


@dataclass(frozen=True)
class SparQ(Projected):
    """Scores on the query's largest channels; the index is the keys. Defaults are the paper's r =
    head_dim / 4, k = 128, l = k / 4."""

    mean_value: bool = setting(True, "the mean value stands for the tokens that are not read")

    read_tokens: int | None = 128
    recent_frac: float = 0.25
    group: str = "sum_logits"

    title = "SparQ"
    state = SparQState

    def prefetches(self, layer: int) -> bool:
        """Not with the mean value, which needs the row's own token."""
        return not self.mean_value and super().prefetches(layer)

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "own_query, where the own token's weight is known; or set mean_value=false"
        require(self.when == "own_query" or not self.mean_value, "when", self.when, allowed)
