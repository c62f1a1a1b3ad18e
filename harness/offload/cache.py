"""One layer's cache in live decoding: its store, its method's state, and which token lies in which slot.

`LayerCache` serves a layer that sees every token. `ResidualCache` leaves the last tokens exact on the device, as KIVI's
codec wants it. `ValuesCache` fetches values only, where the method keeps the keys. `LocalCache` is a local layer's
window, which stays on the device.

Slots are filled in the order of the columns. Where a method evicts, its state knows the token of each slot: after the
prompt the kept tokens move to the first slots, and a freed slot takes a later row. The number of slots in use is the
method's arithmetic (`Method.tokens_kept`), so no step asks the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.model.attention import dense_attention
from harness.model.policies import Policy, select
from harness.offload.fetch import Fetched, Fetcher, indices
from harness.offload.store import KeyValue, KVStore
from methods.base import EMPTY, NAMES_ROWS, Lengths, Method, PromptRows, Row, Rows, Selection, State, Window
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec, SplitCodec
from methods.evicting import EvictingState


class Batch:
    """Tokens and progress of a batch, shared by the layers of one device.

    real: bool [batch, prompt], padding on the left. tokens: int32 [batch, columns], the position of each column's
    token, `EMPTY` for none. positions: int [batch], cached tokens before this step. row_positions, one_row, slots: made
    once for the `Rows` of all layers, since each new tensor is a launch.
    """

    def __init__(self, real: Tensor, max_new_tokens: int) -> None:
        prompt = real.sum(-1)
        self.real = real
        self.lengths = Lengths(prompt, prompt + max_new_tokens)
        self.prompts: list[int] = prompt.tolist()
        self.distinct_prompts = sorted(set(self.prompts))
        self.is_padded = min(self.prompts) < real.shape[1]
        self.max_new_tokens = max_new_tokens
        self.steps = 0
        self.positions = prompt
        self.row_positions = prompt[:, None].int()
        self.one_row = torch.ones_like(real[:, :1])
        self.slots = torch.arange(real.shape[1] + max_new_tokens, device=real.device).expand(len(real), 1, -1)
        self.tokens = torch.full((len(real), real.shape[1] + max_new_tokens), EMPTY, device=real.device).int()
        self.tokens[:, : real.shape[1]] = PromptRows(real, real.shape[1]).positions.int()

    @property
    def columns(self) -> int:
        """Columns before this step."""
        return self.real.shape[1] + self.steps

    def rows(self, steps: int) -> list[Row]:
        """The distinct rows of the sequences after `steps` steps, for the arithmetic of sizes."""
        return [Row(prompt + steps, prompt, prompt + self.max_new_tokens) for prompt in self.distinct_prompts]

    def advance(self) -> None:
        """End the step: its tokens are cached now."""
        self.tokens[:, self.columns] = self.row_positions[:, 0]
        self.positions = self.positions + 1
        self.row_positions = self.row_positions + 1
        self.steps += 1


def slots_needed(policy: Policy, method: Method, state: State | None, codec: AnyCodec, batch: Batch) -> int:
    """Largest number of slots that any sequence uses in a layer."""
    rows = batch.rows(batch.max_new_tokens)
    if policy.kind == "method" and isinstance(state, EvictingState):
        return max(method.tokens_kept(row, policy.number) for row in rows)
    return max(codec.stored(row.cached) for row in rows) if codec.residual else batch.tokens.shape[1]


@dataclass
class LayerCache:
    """The cache of one layer that sees every token.

    index: the layer among all attention layers. state: None in a layer that reads everything. last_query: [batch,
    heads, 1, head_dim], if the next step selects by it. following: the next layer that fetches rows. earlier: state of
    the layer before, maybe on another device. part: (number, parts) of the exempt layers' rows that this layer requests
    for the next step.
    """

    index: int
    policy: Policy
    batch: Batch
    store: KVStore
    state: State | None
    method: Method
    fetcher: Fetcher
    last_query: Tensor | None = None
    following: LayerCache | None = None
    earlier: State | None = None
    part: tuple[int, int] | None = None

    @property
    def evicts(self) -> bool:
        """True if tokens are evicted."""
        return isinstance(self.state, EvictingState)

    @property
    def names_rows(self) -> bool:
        """True if `select` runs before the fetch and decides what is fetched."""
        return self.state is not None and self.policy.when in NAMES_ROWS

    @property
    def rehearses(self) -> bool:
        """True if the layer selects by a query made in the previous layer."""
        return self.names_rows and self.policy.when == "previous_layer"

    @cached_property
    def is_fused(self) -> bool:
        """True if attention is one fused call over the fetched rows with the own row behind them: rows are stored in
        the compute dtype, and no method looks at their scores."""
        codec = self.store.codec
        stored = {FLOAT_DTYPES.get(half.name) for half in (codec.keys, codec.values)}
        return stored == {self.store.format.dtype} and self._hides_scores

    @cached_property
    def attends_to_codes(self) -> bool:
        """True if kernels attend to the coded rows as they are stored."""
        return self._hides_scores and self.store.format.has_kernels(self.store.device)

    @property
    def _hides_scores(self) -> bool:
        return self.policy.softmax.is_plain and (self.state is None or self.names_rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of rows that stay on the device under every placement."""
        return 0

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        """Slots that may hold a token before a later step; the step's own token comes behind them."""
        if not self.evicts:
            return self.batch.columns + steps_ahead
        rows = self.batch.rows(self.batch.steps + steps_ahead)
        return max(self.method.tokens_kept(row, self.policy.number) for row in rows)

    def slots(self) -> Tensor:
        """The token of each slot in use, the own one last: int32 [batch, 1 or num_kv_heads, slots in use + 1]."""
        state, number = self.state, self.policy.number
        tokens = state.tokens[number] if isinstance(state, EvictingState) else self.batch.tokens[:, None]
        return tokens[..., : self.slots_in_use() + 1]

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the prompt, or the part that the method keeps, to the store."""
        self.remember(query[:, :, -1:])
        if self.state is not None:
            slots = key.shape[2] if self.evicts else self.store.capacity
            self.state.prompt(self.policy.number, query, key, value, PromptRows(self.batch.real, slots))
        if isinstance(self.state, EvictingState):
            columns = self.state.compact(self.policy.number, self.store.capacity)
            index = columns.clamp(min=0).unsqueeze(-1)
            key, value = (part.gather(2, index.expand(-1, -1, -1, part.shape[-1])) for part in (key, value))
        self.fetcher.write_back(self.index, self.store.format.pack(key, value), 0)

    def remember(self, query: Tensor) -> None:
        """Keep the query [batch, heads, 1, head_dim] if the next step selects by it."""
        if self.policy.when == "previous_step" and self.state is not None:
            self.last_query = query.clone()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Show the own row to the state."""
        if self.state is not None:
            own = self.slots_in_use()
            positions = self.batch.positions[:, None]
            self.state.append(self.policy.number, key, value, positions, slice(own, own + 1))

    def select(self, query: Tensor, true_scores: Callable[[], Tensor]) -> Selection:
        """The selection of the step's row, over `slots()`."""
        assert self.state is not None, "only a layer with a state selects"
        if self.earlier not in (None, self.state):
            self.state.take_over(self.earlier)
        own = self.slots_in_use()
        rows = Rows(
            query=query,
            positions=self.batch.row_positions,
            real=self.batch.one_row,
            slot_positions=self.slots(),
            own_slots=self.batch.slots[..., own : own + 1],
            true_scores=true_scores,
        )
        return select(self.state, self.policy.number, rows)

    def request_selected(self, selection: Selection) -> Tensor:
        """Request a selection's slots; returns them in the order of the fetched rows."""
        assert selection.mask is not None, "a method that names rows gives a mask"
        rows = self.batch.rows(self.batch.steps)
        cap = max(self.method.max_tokens_read(row, self.policy.number) for row in rows)
        bias = None if selection.bias is None else selection.bias[:, :, :, 0]
        return self.fetcher.request_selected(self.index, selection.mask[:, :, 0], cap, bias)

    def request_kept(self, steps_ahead: int = 0) -> None:
        """Request every slot that holds a token. Where sequences or heads keep different numbers, slot by slot."""
        count, number = self.slots_in_use(steps_ahead), self.policy.number
        if isinstance(self.state, EvictingState):
            rows = self.batch.rows(self.batch.steps + steps_ahead)
            asked = (self.method.tokens_kept, self.method.tokens_read)
            if len({ask(row, number) for ask in asked for row in rows}) > 1:
                held = self.state.tokens[number][..., :count] != EMPTY
                self.fetcher.request_held(self.index, held)
                return
        self.fetcher.request_all(self.index, count)

    def take(self, own: Tensor | None = None) -> Fetched:
        """The requested rows, after waiting for them; own: the packed own row, to come behind them."""
        return self.fetcher.take(self.index, own)

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        """The cached rows: the fetched ones, then those that the device holds."""
        return [self.store.format.unpack(fetched.rows)]

    def visible(self, fetched: Fetched) -> Tensor | None:
        """Cached rows, in the order of `parts`, that the step may see: bool [batch, 1 or kv, 1, n]; None for all."""
        if fetched.present is not None:
            return fetched.present[:, :, None]
        if not self.batch.is_padded and not self.evicts:
            return None
        return self.slots()[:, :, None, :-1] < self.batch.positions[:, None, None, None]

    def write_own(self, packed: Tensor) -> None:
        """Write the packed own row to its slot; in a layer that evicts, to its victim's slot."""
        at: int | Tensor = self.slots_in_use()
        if isinstance(self.state, EvictingState):
            at = self.state.place_own(self.policy.number, self.slots_in_use())
        self.fetcher.write_back(self.index, packed, at)

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        """Write the own row back."""
        self.write_own(self.store.format.pack(key, value))


@dataclass
class ValuesCache(LayerCache):
    """The cache of a method that keeps the keys: the store has values only, and some tokens stay on the device.

    The state says which prompt tokens stay; all generated tokens stay too. Their rows are exact, and a step reads them
    beside the fetched rows, whose keys the state rebuilds while their values cross the link.
    """

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().keep_prompt(query, key, value)
        assert self.state is not None
        mask = self.state.resident(self.policy.number)
        rows = self.batch.rows(0)
        slots = indices(mask, max(self.method.tokens_resident(row, self.policy.number) for row in rows))
        index = slots.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        room = (0, 0, 0, self.batch.max_new_tokens)
        self.keys, self.values = (pad(part.gather(2, index), room) for part in (key, value))
        self.present = slots >= 0
        self.num_prompt = slots.shape[-1]

    @property
    def device_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.present.nbytes

    def request_selected(self, selection: Selection) -> Tensor:
        slots = super().request_selected(selection)
        assert self.state is not None
        self.fetched_keys = self.state.rebuild(self.policy.number, slots)  # beside the transfer
        return slots

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        rows = self.num_prompt + self.batch.steps
        rebuilt = KeyValue(self.fetched_keys, self.store.format.unpack(fetched.rows).values)
        return [rebuilt, KeyValue(self.keys[:, :, :rows], self.values[:, :, :rows])]

    def visible(self, fetched: Fetched) -> Tensor:
        assert fetched.present is not None
        generated = self.present.new_ones(*self.present.shape[:2], self.batch.steps)
        return torch.cat([fetched.present, self.present, generated], -1).unsqueeze(2)

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own = self.num_prompt + self.batch.steps
        self.keys[:, :, own : own + 1], self.values[:, :, own : own + 1] = key, value


@dataclass
class ResidualCache(LayerCache):
    """The cache under a codec that leaves the last tokens exact on the device, as KIVI's does.

    A slot is a token's position, so groups of tokens are counted from each sequence's first token. The last tokens lie
    in a ring, as they are read (`keys`, `values`) and as packed rows (`rows`). A key or value is packed when the codec
    says so and read coded from then on. A row goes to the store when key and value are packed, with all rows of its
    key's group, so that fetched rows decode by themselves.
    """

    def __post_init__(self) -> None:
        store, codec = self.store, self.store.codec
        assert isinstance(codec, SplitCodec) and self.state is None
        self.codec = codec
        self.ring_rows = codec.residual + codec.keys.span
        """Token t lies in row t % ring_rows. One row more takes writes that are not due."""
        shape, row_format = (*store.slots.shape[:2], self.ring_rows + 1), store.format
        options: dict[str, Any] = {"dtype": row_format.dtype, "device": store.device}
        self.keys = torch.zeros(*shape, row_format.head_dim, **options)
        self.values = torch.zeros(*shape, row_format.value_dim or row_format.head_dim, **options)
        self.rows = torch.zeros(*shape, store.slot_bytes, dtype=torch.uint8, device=store.device)
        if self.batch.is_padded:
            store.slots.zero_()  # a shorter sequence's are read before they are written, and must be numbers

    @property
    def device_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.rows.nbytes

    @property
    def is_fused(self) -> bool:
        return False  # the ring lies between

    @property
    def attends_to_codes(self) -> bool:
        return False

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        rows = self.batch.rows(self.batch.steps + steps_ahead)
        return max(self.codec.stored(row.cached) for row in rows)

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        last = KeyValue(self.keys[:, :, : self.ring_rows], self.values[:, :, : self.ring_rows])
        return [*super().parts(fetched), last]

    def visible(self, fetched: Fetched) -> Tensor:
        cached = self.batch.positions[:, None]
        stored = self.codec.stored(cached)
        slots = torch.arange(self.slots_in_use(), device=cached.device)
        return torch.cat([slots < stored, self._ring_tokens(cached) >= stored], -1)[:, None, None]

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = self._from_first_token(key), self._from_first_token(value)
        prompts, cached = self.batch.prompts, self.batch.positions[:, None]
        tokens = self._ring_tokens(cached)
        for ring, fresh in ((self.keys, key), (self.values, value)):
            ring[:, :, : self.ring_rows] = _rows_at(fresh, tokens)
        stored, coded = self.slots_in_use(), max(map(self.codec.coded_keys, prompts))
        packed = self.store.format.pack(key[:, :, :coded], value[:, :, :coded])
        if stored:
            self.fetcher.write_back(self.index, packed[:, :, :stored].contiguous(), 0)
        begin = min(map(self.codec.stored, prompts))
        if begin == coded:
            return
        # Tokens of the ring that are packed already.
        packed, index = packed[:, :, begin:], tokens - begin
        self.rows[:, :, : self.ring_rows] = _rows_at(packed, index)
        is_coded = (tokens < self.codec.coded_keys(cached), tokens < self.codec.coded_values(cached))
        decoded = self.store.format.unpack(packed)
        for ring, half, which in zip((self.keys, self.values), decoded, is_coded, strict=True):
            ring = ring[:, :, : self.ring_rows]
            ring.copy_(torch.where(which[:, None, :, None], _rows_at(half, index), ring))

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own, rows, codec = self.batch.positions[:, None], self.batch.rows(self.batch.steps + 1), self.codec
        for ring, fresh in ((self.keys, key), (self.values, value)):
            ring.scatter_(2, _index_along(own % self.ring_rows, ring), fresh)
        oldest, end = own - codec.residual, self.store.format.key_bytes
        if not self.store.format.values_in_keys:
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
        """Pack the keys or values of `tokens`, int [batch, n], in the sequences that are `due`, bool [batch, 1], None
        for all. ring: keys or values as they are read; packed: their bytes of `rows`, maybe with padding behind."""
        at = tokens % self.ring_rows
        fresh = codec.encode(_rows_at(ring, at))
        target = at if due is None else torch.where(due, at, self.ring_rows)
        packed[..., : fresh.shape[-1]].scatter_(2, _index_along(target, fresh), fresh)
        decoded = codec.decode(fresh, ring.shape[-1], ring.dtype)
        ring.scatter_(2, _index_along(target, decoded), decoded)

    def _store(self, cached: Tensor) -> None:
        """Write a finished group to the store; cached: int [batch, 1], the step's own token included."""
        stored = self.codec.stored(cached)
        tokens = torch.arange(-self.codec.keys.span, 0, device=cached.device) + stored
        leaving = torch.where(stored > self.codec.stored(cached - 1), tokens, -1)
        at = leaving[:, None].expand(-1, self.rows.shape[1], -1).contiguous()
        self.fetcher.write_back(self.index, _rows_at(self.rows, tokens % self.ring_rows), at)

    def _ring_tokens(self, cached: Tensor) -> Tensor:
        """The token in each row of the ring, below 0 for none: int [batch, ring_rows]; cached: int [batch, 1]."""
        rows = torch.arange(self.ring_rows, device=cached.device)
        return cached - 1 - (cached - 1 - rows) % self.ring_rows

    def _from_first_token(self, states: Tensor) -> Tensor:
        """A prompt's rows [batch, num_kv_heads, prompt, size] from its first token on, anything behind the last."""
        if not self.batch.is_padded:
            return states
        columns = states.shape[2]
        padding = columns - self.batch.lengths.prompt[:, None]
        return _rows_at(states, padding + torch.arange(columns, device=states.device))


def _index_along(index: Tensor, rows: Tensor) -> Tensor:
    """`index` [batch, n] for a gather or scatter along the third axis of `rows` [batch, num_kv_heads, any, width]."""
    return index[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1])


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Rows at `index` [batch, n], clamped to the valid range."""
    return rows.gather(2, _index_along(index.clamp(0, rows.shape[2] - 1), rows))


class LocalCache:
    """A local layer's window (sliding or chunked): a ring on the device, under every method and placement. Column c of
    the batch lies in row c % ring_rows."""

    def __init__(self, policy: Policy, batch: Batch) -> None:
        assert policy.window is not None
        self.policy, self.batch, self.window = policy, batch, policy.window
        self.ring_rows = self.rows_needed(self.window, batch.tokens.shape[1])

    @staticmethod
    def rows_needed(window: Window, columns: int) -> int:
        """Rows of the ring for a batch of that many columns."""
        return max(1, min(window.size - 1, columns))

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring."""
        return self.keys.nbytes + self.values.nbytes

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the prompt's last columns."""
        prompt = key.shape[2]
        last = torch.arange(max(0, prompt - self.ring_rows), prompt, device=key.device)
        self.keys, self.values = (
            part.new_zeros(*part.shape[:2], self.ring_rows, part.shape[3]) for part in (key, value)
        )
        self.tokens = self.batch.tokens.new_full((len(key), self.ring_rows), EMPTY)
        self._write(last, key[:, :, last], value[:, :, last], self.batch.tokens[:, last])

    def attend(self, query: Tensor, own: KeyValue) -> Tensor:
        """Attention of the step's row, query [batch, heads, 1, head_dim], over the window and its own token: [batch, 1,
        heads, value_dim]. Keeps the own row."""
        position = self.batch.row_positions
        seen = (self.tokens < position) & (self.tokens >= self.window.first_visible(position))
        keys, values = (torch.cat(pair, 2) for pair in zip((self.keys, self.values), own, strict=True))
        visible = pad(seen, (0, 1), value=True)[:, None, None]
        output = dense_attention(query, keys, values, self.policy.softmax, visible)
        self._write(slice(self.batch.columns, self.batch.columns + 1), *own, position)
        return output

    def _write(self, columns: Tensor | slice, keys: Tensor, values: Tensor, tokens: Tensor) -> None:
        if isinstance(columns, slice):
            at: Tensor | slice = slice(columns.start % self.ring_rows, columns.start % self.ring_rows + 1)
        else:
            at = columns % self.ring_rows
        self.keys[:, :, at], self.values[:, :, at], self.tokens[:, at] = keys, values, tokens
