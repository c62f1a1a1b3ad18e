"""One layer's cache under a codec that leaves the last tokens exact, as KIVI's does: those stay on the device.

A slot is a token's position, so that groups of tokens are counted from each sequence's own first token. The last
tokens lie in a ring: as they are read (`keys`, `values`), and as the packed rows that they become (`rows`). A key or
value is packed when the codec says so and read coded from then on; a row goes to the store when both of its halves are
packed, together with all rows that its key was coded with, so that what is fetched decodes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.offload.cache import Batch, LayerCache
from harness.offload.fetch import Fetched
from harness.offload.store import KeyValue
from methods.codec import AnyCodec, Codec, SplitCodec


def slots_stored(codec: AnyCodec, batch: Batch, steps: int) -> int:
    """Slots that hold a token after `steps` steps, at the most of any sequence."""
    return max(codec.stored(row.cached) for row in batch.rows(steps))


@dataclass
class ResidualCache(LayerCache):
    """Of a layer that reads all; see `LayerCache`."""

    def __post_init__(self) -> None:
        store, codec = self.store, self.store.codec
        assert isinstance(codec, SplitCodec) and self.state is None
        self.codec = codec
        self.places = codec.residual + codec.keys.span
        """Of the ring: token t lies in t % places. One more takes what belongs nowhere."""
        shape = (*store.slots.shape[:2], self.places + 1)
        self.keys, self.values = torch.zeros(2, *shape, store.head_dim, dtype=store.dtype, device=store.device)
        self.rows = torch.zeros(*shape, store.slot_bytes, dtype=torch.uint8, device=store.device)
        if self.batch.padded:
            store.slots.zero_()  # a shorter sequence's are read before they are written, and must be numbers

    @property
    def device_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.rows.nbytes

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        return slots_stored(self.codec, self.batch, self.batch.steps + steps_ahead)

    @property
    def joins_own(self) -> bool:
        return False  # the ring lies between

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        return [*super().parts(fetched), KeyValue(self.keys[:, :, : self.places], self.values[:, :, : self.places])]

    def visible(self, fetched: Fetched) -> Tensor:
        cached = self.batch.positions[:, None]
        stored = self.codec.stored(cached)
        slots = torch.arange(self.slots_in_use(), device=cached.device)
        return torch.cat([slots < stored, self._tokens(cached) >= stored], -1)[:, None, None]

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = self._by_token(key), self._by_token(value)
        prompts, tokens = self.batch.prompts, self._tokens(self.batch.positions[:, None])
        for ring, fresh in ((self.keys, key), (self.values, value)):
            ring[:, :, : self.places] = _at(fresh, tokens)
        stored, coded = self.slots_in_use(), max(map(self.codec.coded_keys, prompts))
        packed = self.store.pack(key[:, :, :coded], value[:, :, :coded])
        if stored:
            self.fetcher.write_back(self.layer, self.store, packed[:, :, :stored].contiguous(), 0)
        begin = min(map(self.codec.stored, prompts))
        if begin < coded:
            self._take_packed(packed[:, :, begin:], tokens, begin)

    def _take_packed(self, packed: Tensor, tokens: Tensor, begin: int) -> None:
        """Put the prompt's packed rows, of the tokens from `begin` on, into the ring, which has `tokens`."""
        cached, index = self.batch.positions[:, None], tokens - begin
        self.rows[:, :, : self.places] = _at(packed, index)
        coded = (tokens < self.codec.coded_keys(cached), tokens < self.codec.coded_values(cached))
        for ring, decoded, which in zip((self.keys, self.values), self.store.unpack(packed), coded, strict=True):
            ring = ring[:, :, : self.places]
            ring.copy_(torch.where(which[:, None, :, None], _at(decoded, index), ring))

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own, rows, codec = self.batch.positions[:, None], self.batch.rows(self.batch.steps + 1), self.codec
        for ring, fresh in ((self.keys, key), (self.values, value)):
            ring.scatter_(2, _along(own % self.places, ring), fresh)
        oldest, end = own - codec.residual, self.store.key_bytes
        self._code(codec.values, self.values, self.rows[..., end:], oldest)
        keys = codec.keys, self.keys, self.rows[..., :end]
        if codec.keys.span == 1:
            self._code(*keys, oldest)
        elif any(row.cached % codec.residual == 0 for row in rows):
            block = oldest + 1 + torch.arange(codec.residual, device=own.device)
            self._code(*keys, block, ((own + 1) % codec.residual == 0))
        if any(codec.stored(row.cached) > codec.stored(row.cached - 1) for row in rows):
            self._store(own + 1)

    def _code(self, codec: Codec, ring: Tensor, packed: Tensor, tokens: Tensor, due: Tensor | None = None) -> None:
        """Pack one half of `tokens`, int [batch, n], in the sequences that are `due`, bool [batch, 1]; None is all.

        ring: the half as it is read; packed: its bytes of `rows`, maybe with padding behind. A token before the first
        one has a place that is still empty.
        """
        places = tokens % self.places
        fresh = codec.encode(_at(ring, places))
        target = places if due is None else torch.where(due, places, self.places)
        packed[..., : fresh.shape[-1]].scatter_(2, _along(target, fresh), fresh)
        decoded = codec.decode(fresh, self.store.head_dim, self.store.dtype)
        ring.scatter_(2, _along(target, decoded), decoded)

    def _store(self, cached: Tensor) -> None:
        """Write to the store what is fetched from now on; cached: int [batch, 1], the step's own token included."""
        stored = self.codec.stored(cached)
        tokens = torch.arange(-self.codec.keys.span, 0, device=cached.device) + stored
        leaving = torch.where(stored > self.codec.stored(cached - 1), tokens, -1)
        at = leaving[:, None].expand(-1, self.rows.shape[1], -1).contiguous()
        self.fetcher.write_back(self.layer, self.store, _at(self.rows, tokens % self.places), at)

    def _tokens(self, cached: Tensor) -> Tensor:
        """The token in each place of the ring, below 0 for none: int [batch, places]; cached: int [batch, 1]."""
        places = torch.arange(self.places, device=cached.device)
        return cached - 1 - (cached - 1 - places) % self.places

    def _by_token(self, states: Tensor) -> Tensor:
        """A prompt's rows [batch, num_kv_heads, prompt, head_dim] from its first token on, anything behind the last."""
        if not self.batch.padded:
            return states
        columns = states.shape[2]
        padding = columns - self.batch.lengths.prompt[:, None]
        return _at(states, padding + torch.arange(columns, device=states.device))


def _along(index: Tensor, rows: Tensor) -> Tensor:
    """`index` [batch, n] for a gather or scatter along the third axis of `rows` [batch, num_kv_heads, any, width]."""
    return index[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1])


def _at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows at `index` [batch, n], or at the nearest there is."""
    return rows.gather(2, _along(index.clamp(0, rows.shape[2] - 1), rows))
