"""Keys and values of the columns that a replay session has decoded."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from harness.model.attached import Attached
from harness.model.passes import require_codable
from methods.base import EMPTY, State, rebuilt, resident_of
from methods.codecs.base import RowCodec
from methods.codecs.split import AnyCodec


class History:
    """Keys and values of every column of a batch, as their codec gives them back.

    codecs: of each layer; None stores rows as they are. kv: by layer (keys, values), each [batch,
    num_kv_heads, columns, head_dim or value_dim]. uncoded: the same as they were made, where the
    codec leaves the last tokens exact, and of every coded layer where `keeps_uncoded`.
    tokens: int32 [batch, columns], the token of each column, `EMPTY` for none. length: columns in
    use. last_queries: by layer, [batch, heads, 1, head_dim] of the last token, where the layer
    selects by the previous step's query. resident: by layer, bool [batch, num_kv_heads, prompt],
    the prompt's columns that stay exact where the method holds the keys.
    """

    def __init__(
        self,
        attached: Attached,
        codecs: Sequence[AnyCodec | None],
        batch: int,
        num_columns: int,
        *,
        keeps_uncoded: bool = False,
    ) -> None:
        self.codecs = codecs
        self.length = 0
        self.last_queries: dict[int, Tensor] = {}
        self.resident: dict[int, Tensor] = {}
        self._layers, self._dtype = attached.layers, attached.dtype
        self._device = attached.device
        self.kv = {layer: self._new_rows(layer, batch, num_columns) for layer in range(len(codecs))}
        self._span = 1
        """Tokens whose rows some layer codes together; other layers code one by one."""
        self.uncoded: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, codec in enumerate(codecs):
            if codec is not None and codec.residual:
                self._span = max(self._span, codec.span)
            if codec is not None and (codec.residual or keeps_uncoded):
                self.uncoded[layer] = self._new_rows(layer, batch, num_columns)
        shape = (batch, num_columns)
        self.tokens = torch.full(shape, EMPTY, dtype=torch.int32, device=attached.device)
        self._regrouped = self.tokens[:, :0].long()
        """Columns of the tokens that are coded with a fresh one, in the order of tokens: int
        [batch, n]."""

    def _new_rows(self, layer: int, batch: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer. A latent key holds its value as well."""
        shape = self._layers[layer]
        rows = batch, shape.num_kv_heads, num_columns
        keys = torch.empty(*rows, shape.head_dim, dtype=self._dtype, device=self._device)
        if shape.latent is not None:
            return keys, keys[..., : shape.value_dim]
        return keys, torch.empty(*rows, shape.value_dim, dtype=self._dtype, device=self._device)

    def enter(self, valid: Tensor) -> Tensor:
        """Give the next columns their tokens; returns positions int [batch, rows], those of padding
        repeated."""
        before = (self.tokens[:, : self.length] != EMPTY).sum(-1)
        positions = (before[:, None] + valid.cumsum(-1) - 1).clamp(min=0)
        columns = slice(self.length, self.length + valid.shape[1])
        self.tokens[:, columns] = positions.masked_fill(~valid, EMPTY).int()
        self.length = columns.stop
        if self._span > 1:
            first = int(before.min()) // self._span * self._span
            self._regrouped = self.tokens[:, : self.length].argsort(-1)[:, first:]
        return positions

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows, as they read back from storage: coded in layers that have a codec, but
        for what stays. Several rows that a codec cannot hold raise UserError; a single one is a
        step of generation, which waits for no device."""
        stored, codec = self.kv[layer], self.codecs[layer]
        if layer in self.uncoded:
            self._write(layer, self.uncoded[layer], key, value, columns)
        if codec is None or layer in self.resident:
            self._write(layer, stored, key, value, columns)
            return
        if key.shape[2] > 1:
            require_codable(codec, layer, key, value)
        coded_key = codec.keys.roundtrip(key) if codec.keys.span == 1 else key
        coded_value = codec.values.roundtrip(value) if codec.values.span == 1 else value
        self._write(layer, stored, coded_key, coded_value, columns)
        if codec.keys.span > 1:
            self._code_groups(codec.keys, self.uncoded[layer][0], stored[0])
        if codec.values.span > 1 and self._layers[layer].latent is None:
            self._code_groups(codec.values, self.uncoded[layer][1], stored[1])

    def _code_groups(self, half: RowCodec, exact: Tensor, stored: Tensor) -> None:
        """Code the groups of the fresh tokens again. No row reads one that is not full yet."""
        regrouped = self._regrouped[:, None, :, None]
        index = regrouped.expand(-1, exact.shape[1], -1, exact.shape[3])
        stored.scatter_(2, index, half.roundtrip(exact.gather(2, index)))

    def uncoded_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer's columns as the model made them. Needs `keeps_uncoded` where
        they read back otherwise."""
        return self.uncoded.get(layer, self.kv[layer])

    def _write(
        self, layer: int, kv: tuple[Tensor, Tensor], key: Tensor, value: Tensor, columns: slice
    ) -> None:
        kv[0][:, :, columns] = key
        if self._layers[layer].latent is None:
            kv[1][:, :, columns] = value

    def hold(self, layer: int, number: int, state: State, key: Tensor, value: Tensor) -> None:
        """Write a prompt whose keys `state` has taken in: the resident rows exactly, the others as
        `state` rebuilds them. number: the layer's, as methods count."""
        self.resident[layer] = resident_of(state, number, key)
        stays = self.resident[layer].unsqueeze(-1)
        columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        keys = self.kv[layer][0][:, :, : key.shape[2]]
        values = self.kv[layer][1][:, :, : key.shape[2]]
        keys.copy_(torch.where(stays, key, rebuilt(state, number, columns)))
        values.copy_(torch.where(stays, value, values))

    def fork(self, index: Tensor, num_columns: int) -> History:
        """The sequences `index` [new_batch], with room for `num_columns`."""
        child, used = copy(self), slice(0, self.length)
        index = index.to(self._device)
        child.tokens = self.tokens.new_full((len(index), num_columns), EMPTY)
        child.tokens[:, used] = self.tokens[index, used]
        for name in ("last_queries", "resident"):
            taken = {}
            for layer, tensor in getattr(self, name).items():
                taken[layer] = tensor.index_select(0, index)
            setattr(child, name, taken)
        for name in ("kv", "uncoded"):
            rows = {}
            for layer, kv in getattr(self, name).items():
                rows[layer] = self._new_rows(layer, len(index), num_columns)
                for new, old in zip(rows[layer], kv, strict=True):
                    torch.index_select(old[:, :, used], 0, index, out=new[:, :, used])
            setattr(child, name, rows)
        return child
