"""One layer's cache in live decoding: which token lies in which slot, and which rows are on their
way to the device.

`LayerCache` serves a layer that sees every token; `harness.live.resident` has the caches that leave
some rows on the device. Slots are filled in the order of the columns. Where a method evicts, its
state knows the token of each slot: after the prompt the kept tokens move to the first slots, and a
freed slot takes a later row. The number of slots in use is the method's arithmetic
(`Method.tokens_kept`), so no step asks the device.

Under host placement a request starts a transfer into one of the device's two buffers (`Stage`), for
the layer that computes and the next one. Under other placements whole layers are read in place.
Behind a head's rows a buffer has room for the step's own row, so that attention finds all rows in
one piece. With `device_rows` each layer keeps a buffer of its own, in which rows stay
(`harness.live.hot_rows`), and only rows that are not in it cross the link. Then rows may also be
requested before it is certain that they are read (`prefetch`).

Exempt layers read more than the others. Requested one layer ahead, their rows could not be hidden,
and the link would idle later. They are requested in parts during the whole step before, one part in
each other layer, into own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from harness.live.hot_rows import HotRows
from harness.live.links import Link, Ticket
from harness.live.memory import PinnedSlab
from harness.live.store import Chosen, KeyValue, KVStore, chosen, indices, num_true
from harness.model.policies import Policy, select
from methods.base import (
    EMPTY,
    NAMES_ROWS,
    LayerInputs,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    State,
    TokenCounts,
)
from methods.codec import FLOAT_DTYPES, AnyCodec
from methods.evicting import EvictingState

COUNTS_AT_ONCE = 1024
"""Counts on the device that are kept before they are summed: one launch for many."""


class Batch:
    """Tokens and progress of a batch, shared by the layers of one device.

    real: bool [batch, prompt], padding on the left. tokens: int32 [batch, columns], the position of
    each column's token, `EMPTY` for none. positions: int [batch], cached tokens before this step.
    row_positions, one_row, slots: made once for the `QueryRows` of all layers, since each new
    tensor is a launch.
    """

    def __init__(self, real: Tensor, max_new_tokens: int) -> None:
        prompt = real.sum(-1)
        self.real = real
        self.lengths = Lengths(prompt, prompt + max_new_tokens)
        self.prompts: list[int] = prompt.tolist()
        self.is_padded = min(self.prompts) < real.shape[1]
        self.max_new_tokens = max_new_tokens
        self.steps = 0
        self.positions = prompt
        self.row_positions = prompt[:, None].int()
        self.one_row = torch.ones_like(real[:, :1])
        self.slots = torch.arange(real.shape[1] + max_new_tokens, device=real.device).expand(
            len(real), 1, -1
        )
        self.tokens = torch.full(
            (len(real), real.shape[1] + max_new_tokens), EMPTY, device=real.device
        ).int()
        self.tokens[:, : real.shape[1]] = PromptRows(real, real.shape[1]).positions.int()

    @property
    def columns(self) -> int:
        """Columns before this step."""
        return self.real.shape[1] + self.steps

    def rows(self, steps: int) -> list[TokenCounts]:
        """The distinct rows of the sequences after `steps` steps, for the arithmetic of sizes."""
        return [
            TokenCounts(prompt + steps, prompt, prompt + self.max_new_tokens)
            for prompt in sorted({*self.prompts})
        ]

    def advance(self) -> None:
        """End the step: its tokens are cached now."""
        self.tokens[:, self.columns] = self.row_positions[:, 0]
        self.positions = self.positions + 1
        self.row_positions = self.row_positions + 1
        self.steps += 1


class Traffic:
    """Rows that cross a link, and their payload bytes, summed without a sync."""

    def __init__(self) -> None:
        self._num_rows: dict[int, int | Tensor] = {}
        """By the bytes of a row."""
        self._counts: dict[int, list[Tensor]] = {}

    def add(self, num_rows: int | Tensor, row_bytes: int) -> None:
        """num_rows: under CUDA 0-d on the device."""
        if isinstance(num_rows, int):
            self._num_rows[row_bytes] = self._num_rows.get(row_bytes, 0) + num_rows
            return
        counts = self._counts.setdefault(row_bytes, [])
        counts.append(num_rows)
        if len(counts) == COUNTS_AT_ONCE:
            self._sum()

    @property
    def num_rows(self) -> int | Tensor:
        """So far; 0-d on the device if a count was there."""
        self._sum()
        return sum(self._num_rows.values())

    @property
    def num_bytes(self) -> int | Tensor:
        """As `num_rows`."""
        self._sum()
        return sum(num_rows * row_bytes for row_bytes, num_rows in self._num_rows.items())

    def _sum(self) -> None:
        for row_bytes, counts in self._counts.items():
            self._num_rows[row_bytes] = self._num_rows.get(row_bytes, 0) + torch.stack(counts).sum()
        self._counts.clear()


class Stage:
    """What the attention layers on one device share.

    link: None but under host placement. rooms: of each sequence, the rows of a KV head that stay on
    the device in each layer; None: no row stays. state: the method's. slab: the page-locked memory
    of the stores. buffers: all that fetched rows may lie in; free: the shared ones without rows,
    the one that was read last at the end. loaded, written: rows that the decode steps took from the
    link and wrote back, counted in the step that waits for them, so that they are exact for any run
    of steps. late: those of `loaded` that were requested by a layer's own query, in the layer
    itself.
    """

    def __init__(
        self, device: torch.device, batch: Batch, link: Link | None, rooms: Sequence[int] | None
    ) -> None:
        self.device, self.batch, self.link, self.rooms = device, batch, link, rooms
        self.state: State | None = None
        self.slab: PinnedSlab | None = None
        self.buffers: list[Tensor] = []
        self.free: list[Tensor] = []
        self.loaded, self.written, self.late = Traffic(), Traffic(), Traffic()

    def plan(self, stores: Sequence[KVStore], selected: int, num_ahead: int = 0) -> int:
        """Plan the buffers for layers with these stores, and return their bytes, 0 without a link.

        Each of the first `num_ahead` layers has its own buffer; two serve all others in turns;
        where rows stay, each of the others keeps one for them.
        """
        if self.link is None:
            return 0
        ahead, others = stores[:num_ahead], stores[num_ahead:]
        largest = max(others, key=lambda store: store.nbytes)
        self._in_turns = largest, min(selected, largest.capacity) if num_ahead else largest.capacity
        num_bytes = sum(store.buffer_bytes(store.capacity) for store in ahead)
        num_bytes += 2 * largest.buffer_bytes(self._in_turns[1])
        return num_bytes + (
            sum(store.buffer_bytes(max(self.rooms)) for store in others) if self.rooms else 0
        )

    def open(self, stores: Sequence[KVStore]) -> None:
        """Make the two buffers, once the stores are allocated, and compile the kernels of a
        step."""
        if self.device.type == "cuda":
            from harness.live.kernels import rows as kernels

            for store in {
                store.slot_bytes: store for store in stores if store.is_reachable
            }.values():
                kernels.warm(store.slots, self.device, store.tuning)
            nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=self.device)
            HotRows([1], 1, self.device).request(
                nothing, nothing.int(), 1
            ) if self.rooms else indices(nothing, 1)
        if self.link is not None:
            self.free = [self.new_buffer(*self._in_turns) for _ in range(2)]

    def new_buffer(self, store: KVStore, num_rows: int) -> Tensor:
        """A buffer that lasts as long as the session."""
        self.buffers.append(store.new_buffer(num_rows))
        return self.buffers[-1]


@dataclass
class Fetch:
    """Rows that a layer asked for; `LayerCache.take` waits for them.

    count: rows without the own one. rows: where they go, packed, uint8 [batch, num_kv_heads, n + 1,
    slot_bytes] with room for the own row, valid until the layer's attention is done. present: bool
    [batch, num_kv_heads, n], False for rows that are not to be read (other tokens, stale data or
    zeros); None: all are. bias: added to these rows' scores, [batch, num_kv_heads, group or 1, 1,
    n]; None for nothing. in_place: `rows` are the store's own slots. shared: the buffer to give
    back. moving: the transfers under way, and how many rows each moves.
    """

    count: int
    rows: Tensor
    present: Tensor | None = None
    bias: Tensor | None = None
    in_place: bool = False
    shared: Tensor | None = None
    moving: list[tuple[Ticket, int | Tensor]] = field(default_factory=list)

    @property
    def cached(self) -> Tensor:
        """The rows without the own one."""
        return self.rows[:, :, : self.count]


def slots_needed(
    policy: Policy, method: Method, state: State | None, codec: AnyCodec, batch: Batch
) -> int:
    """Largest number of slots that any sequence uses in a layer."""
    rows = batch.rows(batch.max_new_tokens)
    if policy.kind == "method" and isinstance(state, EvictingState):
        return max(method.tokens_kept(row, policy.number) for row in rows)
    return (
        max(codec.stored(row.cached) for row in rows) if codec.residual else batch.tokens.shape[1]
    )


def no_scores() -> Tensor:
    """The true scores of a method that names rows."""
    raise AssertionError("a method that names rows does so before the true scores are known")


@dataclass(eq=False)
class LayerCache:
    """The cache of one layer that sees every token.

    state: None in a layer that reads everything. fetch: what is on its way. own_buffer: of an
    exempt layer, whose rows come during the whole step before. hot, hot_buffer: the rows that stay
    on the device, and where. candidates: where rows stay, the token of each slot as the last
    selection found it. last_query: [batch, heads, 1, head_dim], if the next step selects by it.
    following: the next layer that fetches rows. earlier: state of the layer before, maybe on
    another device. part: (number, parts, exempt layers): which part of their rows this layer
    requests for the next step.
    """

    policy: Policy
    stage: Stage
    store: KVStore
    state: State | None
    method: Method
    fetch: Fetch | None = None
    own_buffer: Tensor | None = None
    hot: HotRows | None = None
    hot_buffer: Tensor | None = None
    candidates: Tensor | None = None
    last_query: Tensor | None = None
    following: LayerCache | None = None
    earlier: State | None = None
    part: tuple[int, int, Sequence[LayerCache]] | None = None

    @property
    def batch(self) -> Batch:
        """The tokens of the batch, and how far it has come."""
        return self.stage.batch

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
        """True if a query of the layer is made in the previous layer."""
        return self.names_rows and self.policy.rehearses

    @cached_property
    def is_fused(self) -> bool:
        """True if attention is one fused call over the fetched rows with the own row behind them:
        rows are stored in the compute dtype, and no method looks at their scores."""
        codec = self.store.codec
        stored = {FLOAT_DTYPES.get(half.name) for half in (codec.keys, codec.values)}
        return stored == {self.store.format.dtype} and self._hides_scores

    @cached_property
    def attends_to_codes(self) -> bool:
        """True if kernels attend to the coded rows as they are stored."""
        return self._hides_scores and self.store.format.has_kernels(self.store.device)

    @property
    def _hides_scores(self) -> bool:
        sees_none = self.state is None or (self.names_rows and not self.method.weighs_rest)
        return self.policy.softmax.is_plain and sees_none

    @property
    def device_bytes(self) -> int:
        """Bytes that stay on the device under every placement, buffers aside."""
        return 0 if self.hot is None else self.hot.nbytes

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        """Slots that may hold a token before a later step; the step's own token comes behind
        them."""
        if not self.evicts:
            return self.batch.columns + steps_ahead
        rows = self.batch.rows(self.batch.steps + steps_ahead)
        return max(self.method.tokens_kept(row, self.policy.number) for row in rows)

    def slots(self) -> Tensor:
        """The token of each slot in use, the own one last: int32 [batch, 1 or num_kv_heads, slots
        in use + 1]."""
        state, number = self.state, self.policy.number
        tokens = (
            state.tokens[number] if isinstance(state, EvictingState) else self.batch.tokens[:, None]
        )
        return tokens[..., : self.slots_in_use() + 1]

    def keep_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs | None = None
    ) -> None:
        """Write the prompt, or the part that the method keeps, to the store."""
        if self.names_rows and (rooms := self.stage.rooms) is not None:
            self.hot = HotRows(rooms, self.store.num_kv_heads, self.stage.device)
            self.hot_buffer = self.stage.new_buffer(self.store, max(rooms))
        self.remember(query[:, :, -1:])
        if self.state is not None:
            slots = key.shape[2] if self.evicts else self.store.capacity
            rows = PromptRows(self.batch.real, slots, inputs)
            self.state.prompt(self.policy.number, query, key, value, rows)
        if isinstance(self.state, EvictingState):
            columns = self.state.compact(self.policy.number, self.store.capacity)
            index = columns.clamp(min=0).unsqueeze(-1)
            key, value = (
                part.gather(2, index.expand(-1, -1, -1, part.shape[-1])) for part in (key, value)
            )
        self.write(self.store.format.pack(key, value), 0)

    def remember(self, query: Tensor) -> None:
        """Keep the query [batch, heads, 1, head_dim] if the next step selects by it."""
        if self.policy.when == "previous_step" and self.state is not None:
            self.last_query = query.clone()

    # Select

    def append(self, key: Tensor, value: Tensor) -> None:
        """Show the own row to the state."""
        if self.state is not None:
            own = self.slots_in_use()
            positions = self.batch.positions[:, None]
            self.state.append(self.policy.number, key, value, positions, slice(own, own + 1))

    def select(self, query: Tensor, true_scores: Callable[[], Tensor] = no_scores) -> Selection:
        """The selection of the step's row, over `slots()`."""
        assert self.state is not None, "only a layer with a state selects"
        if self.earlier not in (None, self.state):
            self.state.take_over(self.earlier)
        own, tokens = self.slots_in_use(), self.slots()
        if self.hot is not None:  # `select` may evict a token that it names
            self.candidates = tokens.clone() if self.evicts else tokens
        rows = QueryRows(
            query=query,
            positions=self.batch.row_positions,
            real=self.batch.one_row,
            slot_positions=tokens,
            own_slots=self.batch.slots[..., own : own + 1],
            true_scores=true_scores,
        )
        return select(self.state, self.policy.number, rows)

    # Fetch

    def prefetch(self, selection: Selection) -> None:
        """Request what the layer will probably select. What is missing once it has selected is
        requested then."""
        self._request_missing(self._selected(selection))

    def request_selected(self, selection: Selection) -> Tensor:
        """Request a selection's slots. Returns the slot of each row, int [batch, num_kv_heads, n],
        -1 for none."""
        mask = self._selected(selection)
        if self.hot is not None:
            present = self._request_missing(mask)
            slots = self.hot.slots
        else:
            slots = indices(mask, self._most_selected())
            present = slots >= 0
            self._request(Chosen(slots, num_true(present)))
        assert self.fetch is not None, "just requested"
        self.fetch.present = present
        if self.fetch.moving and self.policy.when == "own_query":
            self.stage.late.add(self.fetch.moving[-1][1], self.store.slot_bytes)
        if selection.bias is not None:
            index = slots.clamp(min=0)[:, :, None, None].expand(
                -1, -1, selection.bias.shape[2], -1, -1
            )
            self.fetch.bias = selection.bias.expand(-1, slots.shape[1], -1, -1, -1).gather(
                -1, index
            )
        return slots

    def _selected(self, selection: Selection) -> Tensor:
        """The slots of a selection, bool [batch, num_kv_heads, slots]."""
        assert selection.mask is not None, "a method that names rows gives a mask"
        return selection.mask[:, :, 0].expand(-1, self.store.num_kv_heads, -1)

    def _most_selected(self) -> int:
        rows = self.batch.rows(self.batch.steps)
        return max(self.method.max_tokens_read(row, self.policy.number) for row in rows)

    def _request_missing(self, mask: Tensor) -> Tensor:
        """Request the slots of `mask` that are not on the device. Returns the rows of the buffer
        that hold the mask's, bool [batch, num_kv_heads, room]."""
        assert self.hot is not None and self.hot_buffer is not None, (
            "only where rows stay on the device"
        )
        assert self.candidates is not None, "a selection came before"
        if self.fetch is None:  # else a prefetch is under way
            room = self.hot.slots.shape[-1]
            self.fetch = Fetch(room, self.store.rows_in(self.hot_buffer, room))
        request, present = self.hot.request(mask, self.candidates, self._most_selected())
        self._start(request)
        return present

    def request_kept(self, steps_ahead: int = 0) -> None:
        """Request every slot that holds a token. Where sequences or heads keep different numbers,
        slot by slot."""
        count, number = self.slots_in_use(steps_ahead), self.policy.number
        if self.own_buffer is not None:
            self.request_columns(count, slice(0, count))
            return
        if isinstance(self.state, EvictingState):
            rows = self.batch.rows(self.batch.steps + steps_ahead)
            asked = (self.method.tokens_kept, self.method.tokens_read)
            if len({ask(row, number) for ask in asked for row in rows}) > 1:
                held = self.state.tokens[number][..., :count] != EMPTY
                slots = torch.where(
                    held, torch.arange(count, device=held.device), -1
                )  # each into the row of its slot
                self._request(Chosen(slots, num_true(held))).present = held
                return
        self._request(count)

    def request_part(self, count: int) -> None:
        """Request this layer's part of the first `count` slots of the exempt layers."""
        assert self.part is not None
        number, parts, layers = self.part
        begin, end = (len(layers) * count * edge // parts for edge in (number, number + 1))
        for place, layer in enumerate(layers):
            columns = slice(*(min(max(edge - place * count, 0), count) for edge in (begin, end)))
            if columns.start < columns.stop:
                layer.request_columns(count, columns)

    def request_columns(self, count: int, columns: slice) -> None:
        """Request some columns of the first `count` slots into the layer's own buffer."""
        assert self.stage.link is not None and self.own_buffer is not None
        if self.fetch is None:
            self.fetch = Fetch(count, self.store.rows_in(self.own_buffer, count))
        ticket = self.stage.link.prefetch(self.store, columns, self.fetch.rows[:, :, columns])
        self.fetch.moving.append((ticket, (columns.stop - columns.start) * self.store.heads))

    def _request(self, slots: int | Chosen) -> Fetch:
        """Start a request that comes in one piece; without a link its rows are there at once.

        The shared buffer that it takes is the one that was read longest ago. Requests need not come
        in the order of the layers: a rehearsal for the next layer comes before a layer's own.
        """
        store, free = self.store, self.stage.free
        if self.stage.link is None and isinstance(slots, int):
            self.fetch = Fetch(slots, store.slots[:, :, : slots + 1], in_place=True)
            return self.fetch
        count = slots if isinstance(slots, int) else slots.slots.shape[-1]
        shared = free.pop(0) if free else None
        rows = store.rows_in(store.new_buffer(count) if shared is None else shared, count)
        self.fetch = Fetch(count, rows, shared=shared)
        self._start(slots)
        return self.fetch

    def _start(self, slots: int | Chosen) -> None:
        """Start to load slots into the buffer of the present fetch."""
        assert self.fetch is not None, "its buffer is chosen first"
        store, link = self.store, self.stage.link
        if link is None:
            store.load(slots, self.fetch.cached)
        else:
            self.fetch.moving.append(
                (link.prefetch(store, slots, self.fetch.cached), store.num_rows(slots))
            )

    def take(self) -> Fetch:
        """The requested rows; what runs next waits for them."""
        assert self.fetch is not None, "rows are requested before they are taken"
        fetch, self.fetch = self.fetch, None
        for ticket, num_rows in fetch.moving:
            ticket.wait()
            self.stage.loaded.add(num_rows, self.store.slot_bytes)
        if fetch.shared is not None:
            self.stage.free.append(fetch.shared)
        return fetch

    # Attend

    def parts(self, fetch: Fetch) -> list[KeyValue]:
        """The cached rows: the fetched ones, then those that the device holds."""
        return [self.store.format.unpack(fetch.cached)]

    def visible(self, fetch: Fetch) -> Tensor | None:
        """Cached rows, in the order of `parts`, that the step may see: bool [batch, 1 or kv, 1, n];
        None for all."""
        if fetch.present is not None:
            return fetch.present[:, :, None]
        if not self.batch.is_padded and not self.evicts:
            return None
        return self.slots()[:, :, None, :-1] < self.batch.positions[:, None, None, None]

    # Write back

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        """Write the own row back."""
        self.write_own(self.store.format.pack(key, value))

    def write_own(self, packed: Tensor) -> None:
        """Write the packed own row to its slot; in a layer that evicts, to its victim's slot."""
        at: int | Tensor = self.slots_in_use()
        if isinstance(self.state, EvictingState):
            at = self.state.place_own(self.policy.number, self.slots_in_use())
        self.write(packed, at)

    def write(self, rows: Tensor, at: int | Tensor) -> None:
        """Write packed rows to the store, and forget the kept copies of the slots written to.

        at: the column of the first row, or the slot of each row, int64 [batch, num_kv_heads, n], -1
        for none.
        """
        if self.hot is not None and not isinstance(at, int):
            self.hot.forget(at)
        target, link = at if isinstance(at, int) else chosen(at), self.stage.link
        if link is None:
            self.store.write(rows, target)
        else:
            num_rows = self.store.num_rows(rows.shape[2] if isinstance(target, int) else target)
            self.stage.written.add(num_rows, self.store.slot_bytes)
            link.write_back(self.store, rows, target)
