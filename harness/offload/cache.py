"""One layer's cache in live decoding: its store, its method's state, and which token lies in which slot.

Slots are filled in the order of the columns. Where a method evicts, its state keeps the book: after the prompt what is
kept moves to the first slots, and a freed slot takes a later row. How many slots may be in use is arithmetic of the
method's (`Method.tokens_kept`), so no step asks the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.offload.fetch import Fetched, Fetcher, indices
from harness.offload.store import KeyValue, KVStore, has_kernels
from methods.base import EMPTY, Lengths, Method, PromptRows, Row, Rows, Selection, State
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec, SplitCodec
from methods.evicting import EvictingState


class Batch:
    """What the layers of a session share: the tokens of its columns, and how far it has come.

    real: bool [batch, prompt], left padded. tokens: int32 [batch, columns], the position of each column's token,
    `EMPTY` where there is none. positions: int [batch], cached tokens before this step. columns: as many of the batch.
    row_positions, one_row, slots: what the layers' `Rows` share, since each tensor that is made is a launch.
    """

    def __init__(self, real: Tensor, max_new_tokens: int) -> None:
        prompt = real.sum(-1)
        self.real = real
        self.lengths = Lengths(prompt, prompt + max_new_tokens)
        self.prompts: list[int] = prompt.tolist()
        self.distinct_prompts = sorted(set(self.prompts))
        self.max_new_tokens = max_new_tokens
        self.steps = 0
        self.positions = prompt
        self.row_positions = prompt[:, None].int()
        self.one_row = torch.ones_like(real[:, :1])
        self.slots = torch.arange(real.shape[1] + max_new_tokens, device=real.device).expand(len(real), 1, -1)
        self.tokens = torch.full((len(real), real.shape[1] + max_new_tokens), EMPTY, device=real.device).int()
        self.tokens[:, : real.shape[1]] = PromptRows(real, real.shape[1]).positions.int()

    @property
    def padded(self) -> bool:
        """Whether a column of the prompt is padding."""
        return min(self.prompts) < self.real.shape[1]

    @property
    def columns(self) -> int:
        """Columns before this step."""
        return self.real.shape[1] + self.steps

    def rows(self, steps: int) -> list[Row]:
        """The rows that the sequences have after `steps` steps, each once, for the arithmetic of sizes."""
        return [Row(prompt + steps, prompt, prompt + self.max_new_tokens) for prompt in self.distinct_prompts]

    def advance(self) -> None:
        """The step under way is done: its tokens are cached."""
        self.tokens[:, self.columns] = self.row_positions[:, 0]
        self.positions = self.positions + 1
        self.row_positions = self.row_positions + 1
        self.steps += 1


def positions_of(real: Tensor) -> Tensor:
    """Positions of left-padded prompts, int [batch, prompt]; 0 in the padding."""
    return (real.cumsum(-1) - 1).clamp(min=0)


def slots_needed(method: Method, batch: Batch, layer: int) -> int:
    """Slots of a layer that evicts, at the most that any sequence keeps."""
    return max(method.tokens_kept(row, layer) for row in batch.rows(batch.max_new_tokens))


@dataclass
class LayerCache:
    """state: None in a layer where all is read. exempt: it reads the full cache whatever the method. last_query: by
    which the next step selects, [batch, heads, 1, head_dim], where it does by the step before's."""

    layer: int
    batch: Batch
    store: KVStore
    state: State | None
    method: Method
    fetcher: Fetcher
    exempt: bool
    last_query: Tensor | None = None

    @property
    def evicts(self) -> bool:
        """Whether tokens leave for good."""
        return isinstance(self.state, EvictingState)

    @property
    def rehearses(self) -> bool:
        """Whether rows are chosen in the layer before."""
        return self.state is not None and self.method.selects == "rehearsed"

    @property
    def foresees(self) -> bool:
        """Whether rows are chosen in the layer before, by the query of the step before."""
        return self.state is not None and self.method.selects == "previous"

    @property
    def known_ahead(self) -> bool:
        """Whether what is fetched follows from what is kept."""
        return self.state is None or self.method.selects in ("ahead", "scores")

    @property
    def chooses(self) -> bool:
        """Whether rows are chosen by the layer's own query, before any is fetched."""
        return self.state is not None and self.method.selects == "query"

    @property
    def hides_scores(self) -> bool:
        """Whether no method looks at the scores of attention."""
        return self.state is None or self.method.names_rows

    @cached_property
    def attends_to_codes(self) -> bool:
        """Whether kernels attend to the rows as they are stored."""
        return self.hides_scores and has_kernels(self.store.codec, self.store.device)

    @cached_property
    def joins_own(self) -> bool:
        """Whether attention may find the own row behind those that are fetched: they are stored as they are computed
        with, and no method looks at their scores."""
        codec = self.store.codec
        stored = {FLOAT_DTYPES.get(half.name) for half in (codec.keys, codec.values)}
        return stored == {self.store.dtype} and self.hides_scores

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        """Slots that may hold a token before the step that is so many ahead; its own token comes behind them."""
        steps = self.batch.steps + steps_ahead
        if not self.evicts:
            return self.batch.columns + steps_ahead
        return max(self.method.tokens_kept(row, self.layer) for row in self.batch.rows(steps))

    def slots(self) -> Tensor:
        """The token in each slot in use, and the own one last: int32 [batch, 1 or num_kv_heads, slots in use + 1]."""
        tokens = self.state.tokens[self.layer] if isinstance(self.state, EvictingState) else self.batch.tokens[:, None]
        return tokens[..., : self.slots_in_use() + 1]

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the prompt to the store: all of it, or what the method keeps."""
        self.remember(query[:, :, -1:])
        if self.state is not None:
            slots = key.shape[2] if self.evicts else self.store.capacity
            self.state.prompt(self.layer, query, key, value, PromptRows(self.batch.real, slots))
        if isinstance(self.state, EvictingState):
            columns = self.state.compact(self.layer, self.store.capacity)
            index = columns.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
            key, value = key.gather(2, index), value.gather(2, index)
        self.fetcher.write_back(self.layer, self.store, self.store.pack(key, value), 0)

    def remember(self, query: Tensor) -> None:
        """Keep the query [batch, heads, 1, head_dim] by which the next step selects."""
        if self.foresees:
            self.last_query = query.clone()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Show the own row to the state."""
        if self.state is not None:
            own = self.slots_in_use()
            self.state.append(self.layer, key, value, self.batch.positions[:, None], slice(own, own + 1))

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        """Write the own row to its slot; in a layer that evicts, to the one its victim left."""
        self._write_own(self.store.pack(key, value))

    def take(self) -> Fetched:
        """What was asked for, waiting for it if need be."""
        return self.fetcher.take(self.layer)

    def take_with_own(self, key: Tensor, value: Tensor) -> Fetched:
        """The same and the own row behind it, which is also written to its slot; of a cache that `joins_own`."""
        own = self.store.pack(key, value)
        self._write_own(own)
        return self.fetcher.take(self.layer, own)

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        """The cached rows: what was fetched, and behind it what the device holds beside."""
        return [self.store.unpack(fetched.rows)]

    def visible(self, fetched: Fetched) -> Tensor | None:
        """Which cached rows, in the order of `parts`, have a token that the step may see: bool [batch, 1 or kv, 1, n];
        None where all have."""
        if fetched.present is not None:
            return fetched.present[:, :, None]
        if not self.batch.padded and not self.evicts:
            return None
        return self.slots()[:, :, None, :-1] < self.batch.positions[:, None, None, None]

    @property
    def device_bytes(self) -> int:
        """Bytes of the resident rows."""
        return 0

    def select(self, query: Tensor, true_scores: Callable[[], Tensor]) -> Selection:
        """What the step's single row reads, over `slots()`."""
        assert self.state is not None, "only a layer with a state selects"
        slots, own = self.slots(), self.slots_in_use()
        rows = Rows(
            query=query,
            positions=self.batch.row_positions,
            real=self.batch.one_row,
            slot_positions=slots,
            own_slots=self.batch.slots[..., own : own + 1],
            true_scores=true_scores,
        )
        return self.state.select(self.layer, rows)

    def request(self, steps_ahead: int = 0) -> None:
        """Ask for all that is kept; where sequences or KV heads keep different numbers, for the slots with a token."""
        count = self.slots_in_use(steps_ahead)
        if isinstance(self.state, EvictingState) and not self._even(steps_ahead):
            held = self.state.tokens[self.layer][..., :count] != EMPTY
            self.fetcher.request_held(self.layer, self.store, held)
        else:
            self.fetcher.request_all(self.layer, self.store, count)

    def request_selected(self, selection: Selection) -> Tensor:
        """Ask for the slots of a single row's selection; returns them in the order in which they come."""
        assert selection.mask is not None, "a method that chooses names what it reads"
        cap = max(self.method.max_tokens_read(row, self.layer) for row in self.batch.rows(self.batch.steps))
        bias = None if selection.bias is None else selection.bias[:, :, :, 0]
        return self.fetcher.request_selected(self.layer, self.store, selection.mask[:, :, 0], cap, bias)

    def _write_own(self, row: Tensor) -> None:
        at: int | Tensor = self.slots_in_use()
        if isinstance(self.state, EvictingState):
            at = self.state.place_own(self.layer, self.slots_in_use())
        self.fetcher.write_back(self.layer, self.store, row, at)

    def _even(self, steps_ahead: int) -> bool:
        """Whether all sequences' KV heads hold as many tokens as any may."""
        method, rows = self.method, self.batch.rows(self.batch.steps + steps_ahead)
        asked = (method.tokens_kept, method.tokens_read)
        return len({count(row, self.layer) for count in asked for row in rows}) == 1


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


@dataclass
class ValuesCache(LayerCache):
    """See `LayerCache`."""

    def keep_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().keep_prompt(query, key, value)
        assert self.state is not None
        mask = self.state.resident(self.layer)
        slots = indices(mask, max(self.method.tokens_resident(row, self.layer) for row in self.batch.rows(0)))
        index = slots.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        room = (0, 0, 0, self.batch.max_new_tokens)
        self.keys, self.values = (pad(part.gather(2, index), room) for part in (key, value))
        self.present = slots >= 0
        self.num_prompt = slots.shape[-1]

    def parts(self, fetched: Fetched) -> list[KeyValue]:
        rows = self.num_prompt + self.batch.steps
        rebuilt = KeyValue(self.fetched_keys, self.store.unpack(fetched.rows).values)
        return [rebuilt, KeyValue(self.keys[:, :, :rows], self.values[:, :, :rows])]

    def visible(self, fetched: Fetched) -> Tensor:
        assert fetched.present is not None
        generated = self.present.new_ones(*self.present.shape[:2], self.batch.steps)
        return torch.cat([fetched.present, self.present, generated], -1).unsqueeze(2)

    @property
    def device_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.present.nbytes

    def request_selected(self, selection: Selection) -> Tensor:
        slots = super().request_selected(selection)
        assert self.state is not None
        self.fetched_keys = self.state.rebuild(self.layer, slots)  # beside the transfer
        return slots

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        own = self.num_prompt + self.batch.steps
        self.keys[:, :, own : own + 1], self.values[:, :, own : own + 1] = key, value
