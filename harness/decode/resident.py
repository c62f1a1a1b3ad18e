"""Caches that leave some rows on the device: the tokens that a method keeps, the last tokens, or a
layer's window.

`ValuesCache` fetches values only, where the method keeps the keys. `ResidualCache` leaves the last
tokens exact, as KIVI's codec wants it. `LocalCache` is a local layer's window (sliding or chunked),
under every method and placement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.decode.cache import Fetch, Fetcher, LayerCache
from harness.decode.share import BatchLengths, TokenBatch
from harness.decode.store import KeyValue, KVStore, PackedRows, chosen, indices
from harness.model.attention import dense_attention
from harness.model.passes import LayerPrompt
from harness.model.policies import Policy
from methods.base import EMPTY, Method, Selection, State, Window, rebuilt, resident_of
from methods.codecs.base import RowCodec
from methods.codecs.split import SplitCodec


class ValuesCache(LayerCache):
    """The cache of a method that keeps the keys: the store has values only, and some tokens stay on
    the device.

    The state says which prompt tokens stay; all generated tokens stay too. Their rows are exact,
    and a step reads them beside the fetched rows, whose keys the state rebuilds while their values
    cross the link.

    Set by the prompt: keys, values: the resident rows, with room for generated tokens. present:
    bool [batch, num_kv_heads, num_prompt], False in rows that hold no token. num_prompt: rows of
    the prompt. Set in each step: fetched_keys: of the fetched rows.
    """

    state: State

    def __init__(self, policy: Policy, fetcher: Fetcher, state: State, method: Method) -> None:
        super().__init__(policy, fetcher, state, method)
        self.keys = self.values = self.fetched_keys = torch.empty(0)
        self.present = torch.empty(0, dtype=torch.bool)
        self.num_prompt = 0

    def keep_prompt(self, prompt: LayerPrompt) -> None:
        super().keep_prompt(prompt)
        key, value = prompt.key, prompt.value
        mask = resident_of(self.state, self.policy.number, key)
        rows = self.batch.counts.rows(0)
        most = max(self.method.tokens_resident(row, self.policy.number) for row in rows)
        slots, _ = indices(mask, most)
        index = slots.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        room = (0, 0, 0, self.batch.counts.max_new_tokens)
        self.keys = pad(key.gather(2, index), room)
        self.values = pad(value.gather(2, index), room)
        self.present = slots >= 0
        self.num_prompt = slots.shape[-1]

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self.keys.nbytes + self.values.nbytes + self.present.nbytes

    @staticmethod
    def bytes_of(store: KVStore, num_prompt: int, max_new_tokens: int) -> int:
        """Bytes of the resident rows, with `num_prompt` of the prompt in each head."""
        row = store.format
        rows = num_prompt + max_new_tokens
        return store.heads * (rows * row.elements * row.dtype.itemsize + num_prompt)

    def request_rows(self, selection: Selection, tokens: Tensor) -> Tensor:
        slots = super().request_rows(selection, tokens)
        self.fetched_keys = rebuilt(self.state, self.policy.number, slots)  # beside the transfer
        return slots

    def parts(self, fetch: Fetch) -> list[KeyValue | PackedRows]:
        rows = self.num_prompt + self.batch.steps
        rebuilt = KeyValue(self.fetched_keys, self.store.format.unpack(fetch.cached).values)
        return [rebuilt, KeyValue(self.keys[:, :, :rows], self.values[:, :, :rows])]

    def visible(self, fetch: Fetch) -> Tensor:
        assert fetch.present is not None, "rows of a selection"
        generated = self.present.new_ones(*self.present.shape[:2], self.batch.steps)
        return torch.cat([fetch.present, self.present, generated], -1).unsqueeze(2)

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own = self.num_prompt + self.batch.steps
        self.keys[:, :, own : own + 1] = key
        self.values[:, :, own : own + 1] = value


class ResidualCache(LayerCache):
    """The cache under a codec that leaves the last tokens exact on the device, as KIVI's does.

    A slot is a token's position, so groups of tokens are counted from each sequence's first token.
    The last tokens lie in a ring of `ring_rows` rows, as they are read (`keys`, `values`) and as
    packed rows (`rows`). Where keys hold the values, `values` is a view of `keys`. Token t lies in
    row t % ring_rows. One row more takes writes that are not due. A key or value is packed when the
    codec says so and read coded from then on. A row goes to the store when key and value are
    packed, with all rows of its key's group, so that fetched rows decode by themselves.
    """

    def __init__(self, policy: Policy, fetcher: Fetcher, codec: SplitCodec, method: Method) -> None:
        super().__init__(policy, fetcher, None, method)
        store = self.store
        self.is_fused = self.attends_by_kernels = False  # the ring lies between
        self.codec = codec
        self.ring_rows = self.num_ring_rows(codec)
        row, ring = store.format, (store.batch, store.num_kv_heads, self.ring_rows + 1)
        value_dim = row.value_dim or row.head_dim
        options: dict[str, Any] = {"dtype": row.dtype, "device": store.device}
        self.keys = torch.zeros(*ring, row.head_dim, **options)
        if row.values_in_keys:
            self.values = self.keys[..., :value_dim]
        else:
            self.values = torch.zeros(*ring, value_dim, **options)
        options["dtype"] = torch.uint8
        self.rows = torch.zeros(*ring, store.slot_bytes, **options)
        if self.batch.is_padded:
            # Slots of a shorter sequence are read before they are written, and must be numbers.
            store.clear()

    @staticmethod
    def num_ring_rows(codec: SplitCodec) -> int:
        """Rows of the ring: the exact tokens, and those of a group."""
        return codec.residual + codec.span

    @property
    def device_bytes(self) -> int:
        return self.bytes_of(self.store, self.codec)

    @classmethod
    def bytes_of(cls, store: KVStore, codec: SplitCodec) -> int:
        """Bytes of the ring, one row more included."""
        row = store.format
        of_row = row.elements * row.dtype.itemsize + store.slot_bytes
        return store.heads * (cls.num_ring_rows(codec) + 1) * of_row

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        rows = self.batch.counts.rows(self.batch.steps + steps_ahead)
        return max(self.codec.stored(row.cached) for row in rows)

    def parts(self, fetch: Fetch) -> list[KeyValue | PackedRows]:
        last = KeyValue(self.keys[:, :, : self.ring_rows], self.values[:, :, : self.ring_rows])
        return [*super().parts(fetch), last]

    def visible(self, fetch: Fetch) -> Tensor:
        cached = self.batch.positions[:, None]
        stored = self.codec.stored(cached)
        slots = torch.arange(self.slots_in_use(), device=cached.device)
        return torch.cat([slots < stored, self._ring_tokens(cached) >= stored], -1)[:, None, None]

    def keep_prompt(self, prompt: LayerPrompt) -> None:
        key = self._from_first_token(prompt.key)
        value = self._from_first_token(prompt.value)
        prompts, cached = self.batch.prompts, self.batch.positions[:, None]
        tokens = self._ring_tokens(cached)
        keys, values = self.keys[:, :, : self.ring_rows], self.values[:, :, : self.ring_rows]
        keys.copy_(_rows_at(key, tokens))
        values.copy_(_rows_at(value, tokens))
        coded = max(*map(self.codec.coded_keys, prompts), *map(self.codec.coded_values, prompts))
        stored = self.slots_in_use()
        packed = self.store.format.pack(key[:, :, :coded], value[:, :, :coded])
        if stored:
            self.write_prompt(packed[:, :, :stored].contiguous())
        begin = min(map(self.codec.stored, prompts))
        if begin == coded:
            return
        # Tokens of the ring that are packed already.
        packed, index = packed[:, :, begin:], tokens - begin
        self.rows[:, :, : self.ring_rows] = _rows_at(packed, index)
        decoded = self.store.format.unpack(packed)
        coded_keys = (tokens < self.codec.coded_keys(cached))[:, None, :, None]
        coded_values = (tokens < self.codec.coded_values(cached))[:, None, :, None]
        keys.copy_(torch.where(coded_keys, _rows_at(decoded.keys, index), keys))
        values.copy_(torch.where(coded_values, _rows_at(decoded.values, index), values))

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own, codec = self.batch.positions[:, None], self.codec
        rows = self.batch.counts.rows(self.batch.steps + 1)
        at = own % self.ring_rows
        self.keys.scatter_(2, _index_along(at, self.keys), key)
        self.values.scatter_(2, _index_along(at, self.values), value)
        oldest, end = own - codec.residual, self.store.format.key_bytes
        halves = [(codec.keys, self.keys, self.rows[..., :end])]
        if not self.store.format.values_in_keys:
            halves.append((codec.values, self.values, self.rows[..., end:]))
        for half, ring, packed in halves:
            if half.span == 1:
                self._code(half, ring, packed, oldest)
            elif any(row.cached % codec.residual == 0 for row in rows):
                block = oldest + 1 + torch.arange(codec.residual, device=own.device)
                is_due = (own + 1) % codec.residual == 0
                self._code(half, ring, packed, block, is_due)
        if any(codec.stored(row.cached) > codec.stored(row.cached - 1) for row in rows):
            self._store(own + 1)

    def _code(
        self,
        codec: RowCodec,
        ring: Tensor,
        packed: Tensor,
        tokens: Tensor,
        due: Tensor | None = None,
    ) -> None:
        """Pack the keys or values of `tokens`, int [batch, n], in the sequences that are `due`,
        bool [batch, 1], None for all. ring: keys or values as they are read; packed: their bytes of
        `rows`, maybe with padding behind."""
        at = tokens % self.ring_rows
        fresh = codec.encode(_rows_at(ring, at))
        target = at if due is None else torch.where(due, at, self.ring_rows)
        packed[..., : fresh.shape[-1]].scatter_(2, _index_along(target, fresh), fresh)
        decoded = codec.decode(fresh, ring.shape[-1], ring.dtype)
        ring.scatter_(2, _index_along(target, decoded), decoded)

    def _store(self, cached: Tensor) -> None:
        """Write a finished group to the store; cached: int [batch, 1], the step's current token
        included."""
        stored = self.codec.stored(cached)
        tokens = torch.arange(-self.codec.stored_together, 0, device=cached.device) + stored
        leaving = torch.where(stored > self.codec.stored(cached - 1), tokens, -1)
        at = leaving[:, None].expand(-1, self.rows.shape[1], -1).contiguous()
        self.write(_rows_at(self.rows, tokens % self.ring_rows), chosen(at))

    def _ring_tokens(self, cached: Tensor) -> Tensor:
        """The token in each row of the ring, below 0 for none: int [batch, ring_rows]; cached: int
        [batch, 1]."""
        rows = torch.arange(self.ring_rows, device=cached.device)
        return cached - 1 - (cached - 1 - rows) % self.ring_rows

    def _from_first_token(self, states: Tensor) -> Tensor:
        """A prompt's rows [batch, num_kv_heads, prompt, size] from its first token on, anything
        behind the last."""
        if not self.batch.is_padded:
            return states
        columns = states.shape[2]
        padding = columns - self.batch.lengths.prompt[:, None]
        return _rows_at(states, padding + torch.arange(columns, device=states.device))


def _index_along(index: Tensor, rows: Tensor) -> Tensor:
    """`index` [batch, n] for a gather or scatter along the third axis of `rows` [batch,
    num_kv_heads, any, width]."""
    return index[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1])


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows at `index` [batch, n], clamped to the valid range."""
    return rows.gather(2, _index_along(index.clamp(0, rows.shape[2] - 1), rows))


class LocalCache:
    """A local layer's window: a ring on the device. Column c of the batch lies in row c %
    ring_rows.

    Set by the prompt: keys, values: [batch, num_kv_heads, ring_rows, size]. tokens: int32 [batch,
    ring_rows], the token of each row, `EMPTY` for none.
    """

    def __init__(self, policy: Policy, batch: TokenBatch) -> None:
        assert policy.window is not None
        self.policy = policy
        self.batch = batch
        self.window = policy.window
        self.ring_rows = self.num_ring_rows(self.window, batch.tokens.shape[1])
        self.keys = self.values = torch.empty(0)
        self.tokens = batch.tokens.new_full((len(batch.tokens), self.ring_rows), EMPTY)

    @staticmethod
    def num_ring_rows(window: Window, columns: int) -> int:
        """Rows of the ring in a batch of so many columns."""
        return max(1, min(window.size - 1, columns))

    @classmethod
    def bytes_of(
        cls, window: Window, lengths: BatchLengths, elements: int, dtype: torch.dtype
    ) -> int:
        """`device_bytes` after the prompt. elements: of a token's keys and values, all heads."""
        rows = cls.num_ring_rows(window, lengths.columns) * len(lengths.prompts)
        return rows * elements * dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring."""
        return self.keys.nbytes + self.values.nbytes

    def keep_prompt(self, prompt: LayerPrompt) -> None:
        """Keep the prompt's last columns."""
        key, value = prompt.key, prompt.value
        columns = key.shape[2]
        last = torch.arange(max(0, columns - self.ring_rows), columns, device=key.device)
        self.keys = key.new_zeros(*key.shape[:2], self.ring_rows, key.shape[3])
        self.values = value.new_zeros(*value.shape[:2], self.ring_rows, value.shape[3])
        rows = KeyValue(key[:, :, last], value[:, :, last])
        self._write(last % self.ring_rows, rows, self.batch.tokens[:, last])

    def attend(self, query: Tensor, own: KeyValue) -> Tensor:
        """Attention of the step's row, query [batch, heads, 1, head_dim], over the window and its
        current token: [batch, 1, heads, value_dim]. Keeps the own row."""
        position = self.batch.row_positions
        seen = (self.tokens < position) & (self.tokens >= self.window.first_visible(position))
        keys = torch.cat([self.keys, own.keys], 2)
        values = torch.cat([self.values, own.values], 2)
        visible = pad(seen, (0, 1), value=True)[:, None, None]
        output = dense_attention(query, keys, values, self.policy.softmax, visible)
        at: Tensor | slice
        if self.batch.bucket:
            at = self.batch.column % self.ring_rows
        else:
            row = self.batch.columns % self.ring_rows
            at = slice(row, row + 1)
        self._write(at, own, position)
        return output

    def _write(self, at: Tensor | slice, rows: KeyValue, tokens: Tensor) -> None:
        self.keys[:, :, at] = rows.keys
        self.values[:, :, at] = rows.values
        self.tokens[:, at] = tokens
