"""What a replayed batch has behind it: keys and values of every column, as the codec gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.model.attach import Attached
from harness.model.policies import Policy
from methods.base import EMPTY, Method, State
from methods.codec import AnyCodec, Codec


class History:
    """Columns of one batch, all attention layers.

    kv: by layer (keys, values), each [batch, num_kv_heads, columns, head_dim or value_dim]. exact: where the codec
    leaves the last tokens exact, the same of every coded layer as they were. tokens: int32 [batch, columns], the token
    of each column, `EMPTY` where there is none. length: columns in use. last_queries: by layer that of the last token,
    [batch, heads, 1, head_dim], where the layer selects by the query of the previous step. resident: by layer which of
    the prompt's columns stay exact, bool [batch, num_kv_heads, prompt], where the method holds the keys.
    """

    def __init__(
        self,
        attached: Attached,
        policies: Sequence[Policy],
        method: Method,
        codec: AnyCodec | None,
        batch: int,
        num_columns: int,
    ) -> None:
        self.policies = policies
        self.method = method
        self.codec = codec
        self.length = 0
        self.last_queries: dict[int, Tensor] = {}
        self.resident: dict[int, Tensor] = {}
        self._layers, self._dtype = attached.layers, attached.dtype
        self.kv = [self._new_rows(layer, batch, num_columns) for layer in range(len(policies))]
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}
        if codec is not None and codec.residual:
            under_method = [layer for layer, policy in enumerate(policies) if policy.kind == "method"]
            self.exact = {layer: self._new_rows(layer, batch, num_columns) for layer in under_method}
        self.tokens = torch.full((batch, num_columns), EMPTY, dtype=torch.int32, device=attached.device)
        self._regrouped = self.tokens[:, :0].long()
        """Columns of the tokens whose keys are coded with a fresh one, in the order of tokens: int [batch, n]."""

    def _new_rows(self, layer: int, batch: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer. A latent key holds its value as well."""
        shape = self._layers[layer]
        rows = batch, shape.num_kv_heads, num_columns
        keys = torch.empty(*rows, shape.head_dim, dtype=self._dtype, device=shape.device)
        if shape.latent is not None:
            return keys, keys[..., : shape.value_dim]
        return keys, torch.empty(*rows, shape.value_dim, dtype=self._dtype, device=shape.device)

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

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows, as they read back from storage: coded in layers under the method, but for what stays."""
        stored, codec = self.kv[layer], self.codec
        if codec is None or self.policies[layer].kind != "method" or layer in self.resident:
            self._write(layer, stored, key, value, columns)
            return
        if layer in self.exact:
            self._write(layer, self.exact[layer], key, value, columns)
        by_token = codec.keys.span == 1
        self._write(
            layer, stored, codec.keys.roundtrip(key) if by_token else key, codec.values.roundtrip(value), columns
        )
        if not by_token:
            self._code_keys(codec.keys, self.exact[layer][0], stored[0])

    def _write(self, layer: int, kv: tuple[Tensor, Tensor], key: Tensor, value: Tensor, columns: slice) -> None:
        kv[0][:, :, columns] = key
        if self._layers[layer].latent is None:
            kv[1][:, :, columns] = value

    def _code_keys(self, codec: Codec, exact: Tensor, stored: Tensor) -> None:
        """Code keys in groups of tokens, those of the fresh rows; a group that is not full yet is read by no row."""
        index = self._regrouped.to(stored.device)[:, None, :, None].expand(-1, exact.shape[1], -1, exact.shape[3])
        stored.scatter_(2, index, codec.roundtrip(exact.gather(2, index)))

    def hold(self, layer: int, state: State, key: Tensor, value: Tensor) -> None:
        """Write a prompt whose keys `state` has taken in: exactly what stays, the rest as `state` gives it back."""
        number = self.policies[layer].number
        self.resident[layer] = state.resident(number)
        stays = self.resident[layer].unsqueeze(-1)
        columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        keys, values = (part[:, :, : key.shape[2]] for part in self.kv[layer])
        keys.copy_(torch.where(stays, key, state.rebuild(number, columns)))
        values.copy_(torch.where(stays, value, values))

    def with_resident(self, layer: int, mask: Tensor) -> Tensor:
        """A selection's `mask`, bool [batch, num_kv_heads or 1, rows, columns], and what every row reads beside it."""
        if layer not in self.resident:
            return mask
        prompt = self.resident[layer]
        return mask | pad(prompt, (0, mask.shape[-1] - prompt.shape[-1]), value=True).unsqueeze(2)

    def fork(self, index: Tensor, num_columns: int) -> History:
        """The sequences `index` [new_batch], with room for `num_columns`."""
        child = copy(self)
        child.tokens = self._widened(self.tokens, index, 1, num_columns, EMPTY)
        child.last_queries = {layer: _selected(query, index) for layer, query in self.last_queries.items()}
        child.resident = {layer: _selected(prompt, index) for layer, prompt in self.resident.items()}

        def rows(layer: int, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            keys = self._widened(kv[0], index, 2, num_columns, 0)
            if self._layers[layer].latent is not None:
                return keys, keys[..., : kv[1].shape[3]]
            return keys, self._widened(kv[1], index, 2, num_columns, 0)

        child.kv = [rows(layer, kv) for layer, kv in enumerate(self.kv)]
        child.exact = {layer: rows(layer, kv) for layer, kv in self.exact.items()}
        return child

    def _widened(self, tensor: Tensor, index: Tensor, axis: int, num_columns: int, fill: int) -> Tensor:
        used = tensor.narrow(axis, 0, self.length)
        shape = list(used.shape)
        shape[0], shape[axis] = len(index), num_columns
        wide = tensor.new_full(shape, fill) if fill else tensor.new_empty(shape)
        torch.index_select(used, 0, index.to(used.device), out=wide.narrow(axis, 0, self.length))
        return wide


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))
