"""One layer's cache in live decoding: which token lies in which slot, and which rows are on their
way to the device.

Slots are filled in the order of the columns. Where a method evicts, its state knows the token of
each slot: after the prompt the kept tokens move to the first slots, and a freed slot takes a later
row. The number of slots in use is the method's arithmetic (`Method.tokens_kept`), so no step asks
the device.

A layer's `Fetcher` brings its rows: behind a link by a transfer into one of the device's buffers;
else whole layers are read in place. Behind a head's rows a buffer has room for the step's own row,
so that attention finds all rows in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.decode.links import Ticket
from harness.decode.share import DeviceShare
from harness.decode.store import (
    Chosen,
    KeyValue,
    KVStore,
    PackedRows,
    SlotRequest,
    chosen,
    indices,
    num_true,
)
from harness.model.passes import LayerPrompt
from harness.model.policies import Policy, check_selection, take_prompt
from methods.base import (
    EMPTY,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    State,
)
from methods.codecs.base import FLOAT_DTYPES
from methods.evicting import EvictingState


@dataclass
class Fetch:
    """Rows that a layer requested; `Fetcher.take` waits for them.

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


class Fetcher:
    """Brings rows of one layer to the device, into the buffers that layers use in turns.

    fetch: the rows under way, from their request until `take`; None between the two.
    """

    is_ahead = False
    """True if the rows cross during the whole step before."""
    keeps_rows = False
    """True for the GPU cache: fetched rows stay on the device."""

    def __init__(self, share: DeviceShare, store: KVStore) -> None:
        self.share = share
        self.store = store
        self.fetch: Fetch | None = None
        self._of_pending: dict[str, Tensor] = {}

    @property
    def device_bytes(self) -> int:
        """Bytes that stay on the device under every placement, buffers aside."""
        return 0

    def request_first(self, count: int, last: Chosen | None = None) -> None:
        """Request the first `count` slots of every head. Without a link they are read in place.

        last: of the last slots those that hold a token, if not all do. They come row by row, the
        others in one piece.
        """
        if self.share.link is None:
            self.fetch = Fetch(count, self.store.slots[:, :, : count + 1], in_place=True)
            return
        whole = num_whole(count, last)
        fetch = self._take_buffer(count)
        self.load(whole, fetch.rows[:, :, :whole])
        if last is not None:
            self.load(last, fetch.rows[:, :, whole:count])

    def request_slots(self, slots: Tensor, present: Tensor, num_rows: int | Tensor) -> Fetch:
        """Request slots one by one. slots: int64 [batch, num_kv_heads, n], the slot of each row;
        present: bool of the same shape, False where the slot is -1; num_rows: as in `Chosen`."""
        fetch = self._take_buffer(slots.shape[-1])
        fetch.present = present
        self.load(Chosen(slots, num_rows), fetch.cached)
        return fetch

    def request_selected(self, mask: Tensor, most: int, tokens: Tensor) -> tuple[Fetch, Tensor]:
        """Request the slots of `mask`, bool [batch, num_kv_heads, slots], at most `most` in a head.

        tokens: the token of each slot, int32 [batch, 1 or num_kv_heads, slots or more].

        Returns the fetch, and the slot of each of its rows, int64 [batch, num_kv_heads, n], -1 for
        none.
        """
        slots, num_rows = indices(mask, most)
        return self.request_slots(slots, slots >= 0, num_rows), slots

    def forget(self, slots: Tensor) -> None:
        """Drop copies of slots that are written anew, with a GPU cache."""

    def _take_buffer(self, count: int) -> Fetch:
        """Begin a fetch of `count` rows.

        The shared buffer that it takes is the one that was read longest ago. Requests need not come
        in the order of the layers: a prediction for the next layer comes before a layer's own.
        """
        store, free = self.store, self.share.free
        shared = free.pop(0) if free else None
        buffer = store.new_buffer(count) if shared is None else shared
        self.fetch = Fetch(count, store.rows_in(buffer, count), shared=shared)
        return self.fetch

    def load(self, request: SlotRequest, rows: Tensor) -> None:
        """Start to load slots into `rows` of the fetch."""
        store, link = self.store, self.share.link
        assert self.fetch is not None, "a fetch begins before its rows are loaded"
        if link is None:
            store.load(request, rows)
        else:
            ticket = link.prefetch(store, request, rows)
            self.fetch.moving.append((ticket, store.num_rows(request)))

    def settle(self) -> None:
        """Wait for the rows under way, and keep what is known of them where the next step looks for
        it, so that it needs nothing else of this one."""
        fetch = self.fetch
        if fetch is None:
            return
        for ticket, _ in fetch.moving:
            ticket.wait()
        if fetch.present is not None:
            fetch.present = self._kept("present", fetch.present)
        if fetch.bias is not None:
            fetch.bias = self._kept("bias", fetch.bias)
        for place, (ticket, num_rows) in enumerate(fetch.moving):
            if isinstance(num_rows, Tensor):
                fetch.moving[place] = ticket, self._kept(f"rows of {place}", num_rows)

    def _kept(self, name: str, value: Tensor) -> Tensor:
        """A copy of `value`, in the place of the last one of this name."""
        kept = self._of_pending.get(name)
        if kept is None or kept.shape != value.shape:
            self._of_pending[name] = value.clone()
        else:
            kept.copy_(value)
        return self._of_pending[name]

    def take(self) -> Fetch:
        """The requested rows; the work that is queued next waits for them."""
        fetch, self.fetch = self.fetch, None
        assert fetch is not None, "rows are requested before they are taken"
        for ticket, num_rows in fetch.moving:
            ticket.wait()
            self.share.traffic.loaded.add(num_rows, self.store.slot_bytes)
            self.share.traffic.block_bytes += ticket.block_bytes
        if fetch.shared is not None:
            self.share.free.append(fetch.shared)
        return fetch


# Dense layers read more than the others. Requested one layer ahead, their rows could not be hidden,
# and the link would idle later. So each dense layer has a buffer of its own (`AheadFetcher`), and
# each other layer requests one part of their rows for the next step (`AheadPart`).


class AheadFetcher(Fetcher):
    """Brings columns of a dense layer's rows into the layer's own buffer."""

    is_ahead = True

    def __init__(self, share: DeviceShare, store: KVStore) -> None:
        super().__init__(share, store)
        self.buffer = share.new_buffer(store, store.capacity)

    def request_first(self, count: int, last: Chosen | None = None) -> None:
        self.request_columns(count, slice(0, num_whole(count, last)), last)

    def request_columns(self, count: int, columns: slice, last: Chosen | None) -> None:
        """Request some columns of the first `count` slots, and behind them `last`, as in
        `request_first`."""
        if self.fetch is None:
            self.fetch = Fetch(count, self.store.rows_in(self.buffer, count))
        self.load(columns, self.fetch.rows[:, :, columns])
        if last is not None:
            self.load(last, self.fetch.rows[:, :, columns.stop : count])


@dataclass
class AheadPart:
    """One of `num_parts` equal parts of the dense layers' rows; one other layer requests it.

    number: of the part. fetchers: of the dense layers, in their order.
    """

    number: int
    num_parts: int
    fetchers: Sequence[AheadFetcher]

    def request(self, count: int) -> None:
        """Request the part of the first `count` slots of all dense layers, for the next step. What
        comes row by row is requested behind the last column that comes in one piece."""
        for place, fetcher in enumerate(self.fetchers):
            last = fetcher.share.batch.generated(fetcher.store.num_kv_heads, steps_ahead=1)
            whole = num_whole(count, last)
            columns = len(self.fetchers) * whole  # of all layers, one after another
            before = place * whole
            begin = columns * self.number // self.num_parts - before
            end = columns * (self.number + 1) // self.num_parts - before
            part = slice(min(max(begin, 0), whole), min(max(end, 0), whole))
            if part.start < part.stop:
                fetcher.request_columns(count, part, last if part.stop == whole else None)


def num_whole(count: int, last: Chosen | None) -> int:
    """Of the first `count` slots those that come in one piece: all but the `last`."""
    return count if last is None else count - last.slots.shape[-1]


class LayerCache:
    """The cache of one layer that sees every token.

    Given: policy; fetcher, whose share and store it has; state: the method's, None in a layer that
    reads everything; method.
    Derived from them: evicts: the method evicts tokens. names_rows: `select` runs before the fetch
    and decides what is fetched. is_predicted: a query of the layer is made in the previous layer.
    is_fused: attention is one fused call over the fetched rows with the own row behind them, since
    rows are stored in the compute dtype and no method looks at their scores or weighs an estimate
    beside them. attends_by_kernels: kernels attend to the rows as they are stored: coded ones, or
    exact ones beside an estimate or in a GPU cache, of whose rows they load those that are read.
    Set by the session: following: the next layer that fetches rows. part: of the dense layers' rows
    that it requests for the next step, if any.
    Set in each step: last_query: [batch, heads, 1, head_dim], if the next step selects by it.
    """

    def __init__(
        self, policy: Policy, fetcher: Fetcher, state: State | None, method: Method
    ) -> None:
        share, store = fetcher.share, fetcher.store
        self.policy = policy
        self.share = share
        self.batch = share.batch
        self.store = store
        self.state = state
        self.method = method
        self.fetcher = fetcher
        self.evicts = isinstance(state, EvictingState)
        self.names_rows = state is not None and policy.names_rows
        self.is_predicted = self.names_rows and policy.is_predicted
        self.appends_last = state is not None and state.selects_without_own
        sees_scores = state is not None and not self.names_rows
        weighs_rest = state is not None and method.weighs_rest
        hides_scores = policy.softmax.is_plain and not sees_scores
        codec, rows = store.codec, store.format
        stored = {FLOAT_DTYPES.get(codec.keys.name), FLOAT_DTYPES.get(codec.values.name)}
        has_kernels = rows.has_kernels(store.device)
        if weighs_rest or fetcher.keeps_rows:
            has_kernels |= rows.has_kernels_for_exact(store.device)
        self.attends_by_kernels = hides_scores and has_kernels
        is_known = not weighs_rest and not self.attends_by_kernels and stored == {rows.dtype}
        self.is_fused = hides_scores and is_known
        self.following: LayerCache | None = None
        self.part: AheadPart | None = None
        self.last_query: Tensor | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes that stay on the device under every placement, buffers aside."""
        return self.fetcher.device_bytes

    def slots_in_use(self, steps_ahead: int = 0) -> int:
        """Slots that may hold a token before a later step; the step's current token comes behind
        them."""
        if not self.evicts:
            return self.batch.limit(steps_ahead) - 1
        rows = self.batch.rows_of_bucket(steps_ahead)
        return max(self.method.tokens_kept(row, self.policy.number) for row in rows)

    def slots(self) -> Tensor:
        """The token of each slot in use, the own one last: int32 [batch, 1 or num_kv_heads, slots
        in use + 1]."""
        state = self.state
        if isinstance(state, EvictingState):
            tokens = state.tokens[self.policy.number]
        else:
            tokens = self.batch.tokens[:, None]
        return tokens[..., : self.slots_in_use() + 1]

    def keep_prompt(self, prompt: LayerPrompt) -> None:
        """Write the prompt, or the part that the method keeps, to the store."""
        query, key, value = prompt.query, prompt.key, prompt.value
        self.remember(query[:, :, -1:])
        if self.state is not None:
            slots = key.shape[2] if self.evicts else self.store.capacity
            rows = PromptRows(self.batch.real, slots, prompt.inputs)
            take_prompt(self.state, self.policy.number, prompt, rows)
        if isinstance(self.state, EvictingState):
            columns = self.state.compact(self.policy.number, self.store.capacity)
            index = columns.clamp(min=0).unsqueeze(-1)
            key = key.gather(2, index.expand(-1, -1, -1, key.shape[-1]))
            value = value.gather(2, index.expand(-1, -1, -1, value.shape[-1]))
        self.write_prompt(self.store.format.pack(key, value))

    def remember(self, query: Tensor) -> None:
        """Keep the query [batch, heads, 1, head_dim] if the next step selects by it."""
        if self.policy.when == "previous_step" and self.state is not None:
            if self.batch.bucket and self.last_query is not None:
                self.last_query.copy_(query)  # where the next step looks for it
            else:
                self.last_query = query.clone()

    # Select

    def append(self, key: Tensor, value: Tensor) -> None:
        """Show the own row to the state."""
        if self.state is None:
            return
        first = self.slots_in_use() if self.evicts else self.batch.columns
        own: slice | Tensor = slice(first, first + 1)
        if self.batch.bucket and not self.evicts:
            own = self.batch.column
        self.state.append(self.policy.number, key, value, self.batch.positions[:, None], own)

    def selection_by(
        self, query: Tensor, true_scores: Callable[[], Tensor] | None = None
    ) -> Selection:
        """Run the method's `select` for the step's row, over `slots()`.

        query: [batch, heads, 1, head_dim]. true_scores: None for a method that names rows.
        """
        assert self.state is not None, "only a layer with a state selects"
        tokens = self.slots()
        own_slots = self.batch.slots[..., tokens.shape[-1] - 1 : tokens.shape[-1]]
        if self.batch.bucket and not self.evicts:
            own_slots = self.batch.own_slots
        rows = QueryRows(
            query=query,
            positions=self.batch.row_positions,
            real=self.batch.one_row,
            slot_positions=tokens,
            own_slots=own_slots,
            true_scores=true_scores or _no_scores,
        )
        return select(self.state, self.policy.number, rows)

    # Fetch

    def request_selection(self, query: Tensor) -> Selection:
        """Let the method select by `query`, and request the rows. Returns the selection."""
        tokens = self.slots()
        if self.fetcher.keeps_rows and self.evicts:
            tokens = tokens.clone()  # a selection may evict
        selection = self.selection_by(query)
        self.request_rows(selection, tokens)
        return selection

    def request_rows(self, selection: Selection, tokens: Tensor) -> Tensor:
        """Request the rows of a selection. tokens: of the slots before it. Returns the slot of each
        row of the fetch, int64 [batch, num_kv_heads, n], -1 for none."""
        assert selection.mask is not None, "a method that names rows gives a mask"
        mask = selection.mask[:, :, 0].expand(-1, self.store.num_kv_heads, -1)
        rows = self.batch.rows_of_bucket()
        most = max(self.method.max_tokens_read(row, self.policy.number) for row in rows)
        fetch, slots = self.fetcher.request_selected(mask, most, tokens)
        if fetch.moving and self.policy.when == "own_query":
            _, num_rows = fetch.moving[-1]
            self.share.traffic.late.add(num_rows, self.store.slot_bytes)
        if selection.bias is not None:
            num_heads, group = slots.shape[1], selection.bias.shape[2]
            index = slots.clamp(min=0)[:, :, None, None].expand(-1, -1, group, -1, -1)
            fetch.bias = selection.bias.expand(-1, num_heads, -1, -1, -1).gather(-1, index)
        return slots

    def request_kept(self, steps_ahead: int = 0) -> None:
        """Request every slot that holds a token. Where sequences or heads keep different numbers,
        slot by slot."""
        count, number = self.slots_in_use(steps_ahead), self.policy.number
        last: Chosen | None = None
        if self.share.link is not None and not self.evicts:
            last = self.batch.generated(self.store.num_kv_heads, steps_ahead)
        if isinstance(self.state, EvictingState):
            numbers: set[float | None] = set()
            for row in self.batch.rows_of_bucket(steps_ahead):
                numbers.add(self.method.tokens_kept(row, number))
                numbers.add(self.method.tokens_read(row, number))
            if len(numbers) > 1:
                held = self.state.tokens[number][..., :count] != EMPTY
                own_slot = torch.arange(count, device=held.device)  # the row of each slot
                self.fetcher.request_slots(torch.where(held, own_slot, -1), held, num_true(held))
                return
        self.fetcher.request_first(count, last)

    # Attend

    def parts(self, fetch: Fetch) -> list[KeyValue | PackedRows]:
        """The cached rows: the fetched ones, then those that the device holds."""
        if self.store.format.values_in_keys:  # decoded once for both
            return [self.store.format.unpack(fetch.cached)]
        return [PackedRows(fetch.cached, self.store.format)]

    def as_slots_lie(self, scores: Tensor) -> Tensor:
        """Scores [..., slots] of the cached rows in place, and of the own row behind them, as a
        selection sees them: the own row's in its slot."""
        if self.evicts or not self.batch.bucket:
            return scores
        placed = scores.clone()
        placed[..., -1] = float("-inf")
        return placed.index_copy_(-1, self.batch.column, scores[..., -1:])

    def visible(self, fetch: Fetch) -> Tensor | None:
        """Cached rows, in the order of `parts`, that the step may see: bool [batch, 1 or kv, 1, n];
        None for all."""
        if fetch.present is not None:
            return fetch.present[:, :, None]
        if not self.batch.hides_columns and not self.evicts:
            return None
        return self.slots()[:, :, None, :-1] < self.batch.positions[:, None, None, None]

    # Write back

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        """Write the own row back."""
        self.write_own(self.store.format.pack(key, value))

    def write_own(self, packed: Tensor) -> None:
        """Write the packed own row to its slot; in a layer that evicts, to its victim's slot."""
        if isinstance(self.state, EvictingState):
            victim = self.state.place_own(self.policy.number, self.slots_in_use())
            self.fetcher.forget(victim)
            self.write(packed, chosen(victim))
        elif self.batch.bucket:
            own = self.batch.own_index(self.store.num_kv_heads)
            self.write(packed, Chosen(own, self.store.heads))
        else:
            self.write(packed, self.batch.columns)

    def write_prompt(self, rows: Tensor) -> None:
        """Write the prompt's packed rows to the first slots."""
        ticket = self.write(rows, 0)
        if ticket is not None:
            self.share.under_way.append(ticket)

    def write(self, rows: Tensor, at: int | Chosen) -> Ticket | None:
        """Write packed rows to the store. Returns the transfer, if they cross a link.

        at: the column of the first row, or the slot of each row.
        """
        store, link = self.store, self.share.link
        if link is None:
            store.write(rows, at)
            return None
        moved = at if isinstance(at, Chosen) else rows.shape[2]
        self.share.traffic.written.add(store.num_rows(moved), store.slot_bytes)
        return link.write_back(store, rows, at)


def select(state: State, number: int, rows: QueryRows) -> Selection:
    """A method's selection in a layer, checked. Raises UserError for what is wrong in a user's own
    method."""
    selection = state.select(number, rows)
    check_selection(selection, state, rows)
    return selection


def _no_scores() -> Tensor:
    """The true scores of a method that names rows."""
    raise AssertionError("a method that names rows does so before the true scores are known")
