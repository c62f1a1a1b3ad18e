"""What a replayed batch has behind it: keys and values of every column, as the codec gives them back."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.model.attach import Attached
from methods.base import EMPTY, Method, State
from methods.codec import AnyCodec, Codec


class History:
    """Columns of one batch, all layers.

    kv: by layer (keys, values), each [batch, num_kv_heads, columns, head_dim]. exact: where the codec leaves the last
    tokens exact, the same of every coded layer as they were. tokens: int32 [batch, columns], the token of each column,
    `EMPTY` where there is none. length: columns in use. queries: by layer that of the last token, [batch, heads, 1,
    head_dim], where the method selects by the query of the step before. resident: by layer those of the prompt's
    columns that stay exact, bool [batch, num_kv_heads, prompt], where the method holds the keys.
    """

    def __init__(
        self, attached: Attached, method: Method, codec: AnyCodec | None, batch: int, num_columns: int
    ) -> None:
        geometry = attached.geometry
        self.method = method
        self.codec = codec
        self.length = 0
        self.queries: dict[int, Tensor] = {}
        self.resident: dict[int, Tensor] = {}
        shape = (batch, geometry.num_kv_heads, num_columns, geometry.head_dim)

        def rows() -> tuple[Tensor, ...]:
            return tuple(torch.empty(shape, dtype=attached.dtype, device=attached.device) for _ in "kv")

        self.kv = [rows() for _ in range(geometry.num_layers)]
        self.exact: dict[int, tuple[Tensor, ...]] = {}
        if codec is not None and codec.residual:
            self.exact = {layer: rows() for layer in range(method.num_exempt_layers, geometry.num_layers)}
        self.tokens = torch.full((batch, num_columns), EMPTY, dtype=torch.int32, device=attached.device)
        self._regrouped = self.tokens[:, :0].long()
        """Columns of the tokens whose keys are coded with a fresh one, in the order of tokens: int [batch, n]."""

    @property
    def dense(self) -> bool:
        """Whether decode rows read all columns, as they were: the full cache."""
        return self.method.reads_all and self.codec is None

    def enter(self, valid: Tensor) -> Tensor:
        """Give the next columns their tokens; returns positions int [batch, rows], those of padding repeated."""
        before = (self.tokens[:, : self.length] != EMPTY).sum(-1)
        positions = (before[:, None] + valid.cumsum(-1) - 1).clamp(min=0)
        columns = slice(self.length, self.length + valid.shape[1])
        self.tokens[:, columns] = positions.masked_fill(~valid, EMPTY).int()
        self.length = columns.stop
        if self.codec is not None and self.codec.keys.span > 1:
            first = int(before.min()) // self.codec.keys.span * self.codec.keys.span
            self._regrouped = self.tokens[:, : self.length].argsort(-1)[:, first:]
        return positions

    def coded(self, layer: int) -> bool:
        """Whether the layer's rows go through the codec; those of the exempt layers, or that stay, do not."""
        exempt = layer < self.method.num_exempt_layers or layer in self.resident
        return self.codec is not None and not exempt

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows, as they read back from storage."""
        stored, codec = self.kv[layer], self.codec
        if codec is None or not self.coded(layer):
            _write(stored, key, value, columns)
            return
        if layer in self.exact:
            _write(self.exact[layer], key, value, columns)
        by_token = codec.keys.span == 1
        _write(stored, codec.keys.roundtrip(key) if by_token else key, codec.values.roundtrip(value), columns)
        if not by_token:
            self._code_keys(codec.keys, self.exact[layer][0], stored[0])

    def _code_keys(self, codec: Codec, exact: Tensor, stored: Tensor) -> None:
        """Code keys in groups of tokens, those of the fresh rows; a group that is not full yet is read by no row."""
        index = self._regrouped[:, None, :, None].expand(-1, exact.shape[1], -1, exact.shape[3])
        stored.scatter_(2, index, codec.roundtrip(exact.gather(2, index)))

    def hold(self, layer: int, state: State, key: Tensor, value: Tensor) -> None:
        """Write a prompt whose keys `state` has taken in: what stays exactly, the rest as it is given back."""
        self.resident[layer] = state.resident(layer)
        stays = self.resident[layer].unsqueeze(-1)
        columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        keys, values = (part[:, :, : key.shape[2]] for part in self.kv[layer])
        keys.copy_(torch.where(stays, key, state.rebuild(layer, columns)))
        values.copy_(torch.where(stays, value, values))

    def with_staying(self, layer: int, mask: Tensor) -> Tensor:
        """A selection's `mask`, bool [batch, num_kv_heads or 1, rows, columns], and what every row reads beside it."""
        if layer not in self.resident:
            return mask
        prompt = self.resident[layer]
        return mask | pad(prompt, (0, mask.shape[-1] - prompt.shape[-1]), value=True).unsqueeze(2)

    def fork(self, index: Tensor, num_columns: int) -> History:
        """Of the sequences `index` [new_batch], with room for `num_columns`."""
        child = copy(self)
        child.tokens = self._widen(self.tokens, index, 1, num_columns, EMPTY)
        child.queries = {layer: query.index_select(0, index) for layer, query in self.queries.items()}
        child.resident = {layer: prompt.index_select(0, index) for layer, prompt in self.resident.items()}

        def rows(kv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(self._widen(part, index, 2, num_columns, 0) for part in kv)

        child.kv = [rows(kv) for kv in self.kv]
        child.exact = {layer: rows(kv) for layer, kv in self.exact.items()}
        return child

    def _widen(self, tensor: Tensor, index: Tensor, axis: int, num_columns: int, fill: int) -> Tensor:
        used = tensor.narrow(axis, 0, self.length)
        shape = list(used.shape)
        shape[0], shape[axis] = len(index), num_columns
        wide = tensor.new_full(shape, fill) if fill else tensor.new_empty(shape)
        torch.index_select(used, 0, index, out=wide.narrow(axis, 0, self.length))
        return wide


def _write(kv: tuple[Tensor, ...], key: Tensor, value: Tensor, columns: slice) -> None:
    for part, fresh in zip(kv, (key, value), strict=True):
        part[:, :, columns] = fresh
