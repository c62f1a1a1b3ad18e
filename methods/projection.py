"""Scores on a few numbers per key: the base of Loki, Double Sparsity, SparQ and InfiniGen.

The device keeps of every key its product with a projection (a choice of columns, or a truncated
rotation) or the whole key, exact or in a few bits. A query is scored on these numbers alone.

Numbers in few bits are packed as `methods.codecs` does it: lo and step of each group of columns,
then the codes. In memory each byte of a key lies beside the same byte of the next token's
(`room_for_keys`). A query is multiplied with the codes themselves, and lo and step are applied to
the products:

    query . key = sum over the groups of  lo * sum(query) + step * (query . codes)

with the sums over a group's columns. So no key is decoded, and a byte is read of many tokens at a
time.

The rule, and where it differs (made into docs/methods.md):

**doublesparsity**, **loki** and **sparq** score on `rank` · head_dim numbers per key; with `rank=1`
they rank as the true scores do. The official code is `group=union`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.attention import MANY_ROWS, by_matrix, product
from methods.base import Calibration, Geometry, PromptRows, QueryRows, State, checked
from methods.codecs.integers import GROUP_META_BYTES, INTEGER_BITS, IntegerCodec
from methods.compiled import kernels_for
from methods.packing import plane_width
from methods.selection import Retrieving, RetrievingState
from methods.settings import one_of, setting, share

INDEX_BITS = one_of(*INTEGER_BITS.values(), None)
"""Bits of each number of an index, with scales as in `methods.codecs`."""
BITS_MEANING = "bits of each number of the index; null keeps the dtype of the keys"
BLOCK_BYTES = 2**19
"""Codes that a CPU holds as floats at a time, a part of a second-level cache."""


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
    them, here all of the key's elements.

    partial_keys[layer]: [batch, num_kv_heads, slots, columns]; with `index_bits` the packed bytes,
    uint8, in the layout of `room_for_keys`.
    """

    slot_tensors = {"partial_keys": 0}
    partial_keys: dict[int, Tensor]
    columns: int

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        self._asked_about: Callable[[], Tensor | None] = lambda: None
        self._index_reads: WeakValueDictionary[tuple[float, float], Tensor] = WeakValueDictionary()
        bits = self.method.index_bits
        self.codec = None if bits is None else IntegerCodec(f"int{bits}")

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        """Numbers that are kept of `key` [batch, num_kv_heads, n, head_dim]: [batch, num_kv_heads,
        n, columns]."""
        return key

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        """Scaled query on these numbers: fp32 [batch, num_kv_heads, group, rows, columns], of [...,
        head_dim]."""
        return query.float() * self.geometry.scale

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        one = self._stored(layer, key[:, :, :1])
        if self.codec is None:
            room = one.new_empty((*key.shape[:2], rows.num_slots, one.shape[-1]))
        else:
            room = room_for_keys(one, rows.num_slots)
        self.partial_keys[layer] = room
        self.append(layer, key, value, rows.positions, slice(0, key.shape[2]))

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
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

    def index_size(self, layer: int) -> tuple[float, float]:
        """Size of a layer's index that scores read, in tokens (`Geometry.elements`): of each cached
        token, and once."""
        width = 1.0 if self.codec is None else self.codec.bits_per_element(self.columns) / 16
        return width * self.columns / self.geometry.elements, 0.0

    def index_read(self, layer: int, positions: Tensor) -> Tensor:
        """`index_size` of `positions` [batch, rows] tokens, [batch, rows]. Layers of one size
        share what they are told of the same rows, as long as the step holds it: it would be three
        launches in each."""
        if self._asked_about() is not positions:
            self._asked_about, self._index_reads = ref(positions), WeakValueDictionary()
        token_size, once = size = self.index_size(layer)
        read = self._index_reads.get(size)
        if read is None:
            read = self._index_reads[size] = positions.double() * token_size + once
        return read


class ProjectedState(PartialKeysState):
    """Partial keys are products with a projection.

    projection[layer]: [batch, sides, num_kv_heads, head_dim, columns]; one side for queries and
    keys together, or one for queries and one for keys.
    """

    sequence_tensors: ClassVar[tuple[str, ...]] = ("projection",)
    selects_without_own = True
    projection: dict[int, Tensor]

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        """The projection, shaped as above, from the prompt's query and key."""
        raise NotImplementedError

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        axes = "batch, sides, KV heads, head_dim, columns"
        batch, kv_heads, _, head_dim = key.shape
        sizes = batch, (1, 2), kv_heads, head_dim, None
        found = self.project(layer, query, key, rows)
        self.projection[layer] = checked(self.project, found, axes, *sizes)
        super().prompt(layer, query, key, value, rows)

    def partial_key(self, layer: int, key: Tensor) -> Tensor:
        return self.times(key, self.projection[layer][:, -1])

    def index_size(self, layer: int) -> tuple[float, float]:
        """The partial keys, and the projection: the row's query and own key meet all of it."""
        token_size, once = super().index_size(layer)
        head_projection = self.projection[layer][0, :, 0]
        return token_size, once + tokens_of(head_projection, self.geometry)

    def times(self, rows: Tensor, side: Tensor) -> Tensor:
        """`rows` [batch, num_kv_heads, n, head_dim] times a side of a projection: [batch,
        num_kv_heads, n, columns] in the dtype of `rows`."""
        return rows @ side

    def partial_query(self, layer: int, query: Tensor) -> Tensor:
        side, stacked = self.projection[layer][:, 0], query.flatten(2, 3)
        return product(stacked, side, self.geometry.scale).unflatten(2, query.shape[2:4])


def tokens_of(tensor: Tensor, geometry: Geometry) -> float:
    """Size of a tensor of one KV head in tokens (`Geometry.elements`), a float counted as 16
    bits."""
    width = 1.0 if tensor.is_floating_point() else tensor.itemsize / 2
    return tensor.numel() * width / geometry.elements


class FixedProjectionState(ProjectedState, RetrievingState):
    """A projection that is known before the prompt: the method's `projection`."""

    replayable = True

    def start(self, calibration: Calibration | None) -> None:
        super().start(calibration)
        geometry, hook = self.geometry, self.method.projection
        sizes = None, geometry.num_kv_heads, geometry.head_dim, None
        found = hook(geometry.head_dim, calibration)
        self.fixed = checked(hook, found, "layers, KV heads, head_dim, columns", *sizes)

    def project(self, layer: int, query: Tensor, key: Tensor, rows: PromptRows) -> Tensor:
        return self.fixed[layer].to(key).expand(len(key), 1, -1, -1, -1)


@dataclass(frozen=True)
class Calibrated(Projected):
    """A method whose projection is measured once, by `calibrate`."""

    index_bits: int | None = setting(None, BITS_MEANING, INDEX_BITS)

    state = FixedProjectionState

    def projection(self, head_dim: int, calibration: Calibration) -> Tensor:
        """[num_layers, num_kv_heads, head_dim, columns]."""
        raise NotImplementedError


# Keys in few bits


def room_for_keys(like: Tensor, num_slots: int) -> Tensor:
    """Memory for the packed keys of `num_slots` tokens, uint8 [batch, num_kv_heads, num_slots, row
    bytes]; like: a packed key of every head, [batch, num_kv_heads, 1, row bytes]."""
    batch, num_kv_heads, _, row_bytes = like.shape
    return like.new_empty((batch, num_kv_heads, row_bytes, num_slots)).mT


def coded_scores(query: Tensor, keys: Tensor, codec: IntegerCodec) -> Tensor:
    """Products of queries and coded keys: fp32 [batch, num_kv_heads, rows, slots].

    query: [batch, num_kv_heads, rows, columns]. keys: uint8 [batch, num_kv_heads, slots, row
    bytes], packed by an integer codec without rotation.
    """
    rows, columns = query.shape[2:]
    kernels = kernels_for(query)
    if kernels is not None and rows <= kernels.MOST_ROWS:
        return kernels.coded_scores(query, keys, codec.bits, codec.group_size)
    if query.device.type == "cpu":
        query = query.float()
        if rows >= MANY_ROWS:
            # To scale so many products takes longer than to decode the keys.
            decoded = codec.decode(keys.contiguous(), columns, torch.float32)
            return by_matrix(query, decoded.mT)
        products = _products_by_blocks(_by_group(query, codec), keys, columns, codec)
    else:
        codes = _codes_of(keys, columns, codec)
        num_codes = codes.shape[2] * 8 // codec.bits
        numbers = query.new_empty((*codes.shape[:2], num_codes, codes.shape[3]))
        unpack_to(codes, codec.bits, numbers)
        products = product(_by_group(query, codec), numbers)
    return _scaled(products, query, keys, codec)


def _codes_of(keys: Tensor, columns: int, codec: IntegerCodec) -> Tensor:
    """The bytes of the codes, uint8 [batch, num_kv_heads, bytes, slots]."""
    first = GROUP_META_BYTES * codec.num_groups(columns)
    return keys.mT[:, :, first : first + plane_width(columns, codec.bits)]


def _by_group(query: Tensor, codec: IntegerCodec) -> Tensor:
    """Queries [..., rows, columns] once for each group, with zeros in the other groups' columns:
    [..., groups * rows, columns], as many columns as the packed codes have."""
    columns = query.shape[-1]
    num_codes = plane_width(columns, codec.bits) * 8 // codec.bits
    padded = pad(query, (0, num_codes - columns)) if num_codes > columns else query
    num_groups = codec.num_groups(columns)
    if num_groups == 1:
        return padded
    group = torch.arange(num_codes, device=query.device) // codec.group_size
    is_own = group == torch.arange(num_groups, device=query.device)[:, None, None]
    return (padded.unsqueeze(-3) * is_own).flatten(-3, -2)


def _products_by_blocks(query: Tensor, keys: Tensor, columns: int, codec: IntegerCodec) -> Tensor:
    """Products of fp32 queries [batch, num_kv_heads, n, codes] with the codes, a few heads at a
    time, so that their codes stay in the cache between unpacking and product."""
    codes = _codes_of(keys, columns, codec).flatten(0, 1)
    heads, _, slots = codes.shape
    flat = query.flatten(0, 1)
    products = query.new_empty((heads, query.shape[2], slots))
    head_bytes = query.shape[3] * slots * query.element_size()
    at_once = min(heads, max(1, BLOCK_BYTES // max(1, head_bytes)))
    numbers = query.new_empty((at_once, query.shape[3], slots))
    for first in range(0, heads, at_once):
        block = slice(first, min(first + at_once, heads))
        block_numbers = numbers[: block.stop - first]
        unpack_to(codes[block], codec.bits, block_numbers)
        torch.bmm(flat[block], block_numbers, out=products[block])
    return products.unflatten(0, query.shape[:2])


def unpack_to(codes: Tensor, bits: int, numbers: Tensor) -> None:
    """Write the codes in packed bytes [..., bytes, slots] to `numbers`, of a float dtype, [..., 8 /
    bits * bytes, slots], plane by plane (`methods.codecs.base`)."""
    width = codes.shape[-2]
    for shift in range(0, 8, bits):
        shifted = codes >> shift if shift else codes
        if shift + bits < 8:  # else nothing lies above these bits
            shifted = shifted & (2**bits - 1)
        first = shift // bits * width
        numbers[..., first : first + width, :] = shifted


def _scaled(products: Tensor, query: Tensor, keys: Tensor, codec: IntegerCodec) -> Tensor:
    """Scores [batch, num_kv_heads, rows, slots] from products with codes [batch, num_kv_heads,
    groups * rows, slots], which are overwritten."""
    rows, columns = query.shape[2:]
    num_groups = codec.num_groups(columns)
    scale_bytes = keys.mT[:, :, : GROUP_META_BYTES * num_groups]
    words = scale_bytes[:, :, 1::2].short() << 8 | scale_bytes[:, :, ::2]  # low bytes come first
    scales = words.view(torch.float16).float()
    group_queries = query.float().split(codec.group_size, -1)
    scores = products[:, :, :rows]
    for group, group_query in enumerate(group_queries):
        lo, step = scales[:, :, 2 * group, None], scales[:, :, 2 * group + 1, None]
        part = products[:, :, group * rows : (group + 1) * rows]
        part.mul_(step).addcmul_(group_query.sum(-1, keepdim=True), lo)
        if group:
            scores += part
    return scores
