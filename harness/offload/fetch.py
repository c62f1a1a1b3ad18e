"""Requests for rows: which rows a layer's attention gets, into which buffer, and when they cross the link.

Under host placement a request starts a transfer into one of two buffers, for the layer that computes and the next one.
Under other placements whole layers are read in place. Behind a head's rows a buffer has room for the step's own row, so
that attention finds all rows in one piece. With `reuse` each layer keeps its buffer, and only rows that are not in it
cross the link.

Exempt layers read more than the others. Requested one layer ahead, their rows could not be hidden, and the link would
idle later. They are requested in parts during the whole step before, one part in each other layer, into own buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from harness.offload.links import Link, Ticket
from harness.offload.store import Chosen, KVStore, SlotRequest, chosen, num_true, warm_gather

COUNTS_AT_ONCE = 1024
"""Counts on the device that are kept before they are summed: one launch for many."""


class Fetched(NamedTuple):
    """Rows of a layer on the device.

    rows: packed, uint8 [batch, num_kv_heads, n, slot_bytes], with the own row behind them if it was given; valid until
    the layer's attention is done. present: bool [batch, num_kv_heads, n], False for invalid rows (stale data or zeros);
    None: all are valid. bias: added to these rows' scores, [batch, num_kv_heads, group or 1, 1, n]; None for nothing.
    """

    rows: Tensor
    present: Tensor | None
    bias: Tensor | None


class _Pending(NamedTuple):
    """A layer's request. rows: its target, one more a head than there are rows. buffer: the shared or kept one."""

    request: int | Chosen
    rows: Tensor
    present: Tensor | None
    bias: Tensor | None
    tickets: list[Ticket]
    buffer: Tensor | None = None


class Traffic:
    """Payload bytes that cross a link, summed without a sync."""

    def __init__(self) -> None:
        self._num_bytes: int | Tensor = 0
        self._counts: dict[int, list[Tensor]] = {}

    def add(self, num_rows: int | Tensor, row_bytes: int) -> None:
        """num_rows: under CUDA 0-d on the device."""
        if isinstance(num_rows, int):
            self._num_bytes = self._num_bytes + num_rows * row_bytes
            return
        counts = self._counts.setdefault(row_bytes, [])
        counts.append(num_rows)
        if len(counts) == COUNTS_AT_ONCE:
            self._sum()

    @property
    def num_bytes(self) -> int | Tensor:
        """So far; 0-d on the device if a count was there."""
        self._sum()
        return self._num_bytes

    def _sum(self) -> None:
        for row_bytes, counts in self._counts.items():
            self._num_bytes = self._num_bytes + torch.stack(counts).sum() * row_bytes
        self._counts.clear()


class Fetcher:
    """Requests and write-backs of the layers on one device. link: None but under host placement.

    loaded, written: payload of the rows taken and written back so far, counted when a step uses it, so that it is exact
    for any run of steps. ahead: the leading layers, whose rows come during the whole step before.
    """

    def __init__(self, link: Link | None, reuse: bool) -> None:
        self.link = link
        self.reuse = reuse
        self.loaded, self.written = Traffic(), Traffic()
        self.ahead: list[int] = []
        self._stores: dict[int, KVStore] = {}
        self._pending: dict[int, _Pending] = {}
        self._shared: list[Tensor] = []
        self._latest: Tensor | None = None
        self._ahead_buffers: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        self._kept_slots: dict[int, Tensor] = {}

    def plan(self, stores: Mapping[int, KVStore], selected: int, num_ahead: int = 0) -> int:
        """Plan the buffers for `stores`, by layer, and return their bytes, 0 without a link.

        Each of the first `num_ahead` layers has its own buffer; two serve all others in turns; with reuse each of the
        others keeps one for `selected` rows.
        """
        self._stores, self._selected = dict(stores), selected
        if self.link is None:
            return 0
        self.ahead, others = list(stores)[:num_ahead], list(stores.values())[num_ahead:]
        largest = max(others, key=lambda store: store.nbytes)
        self._in_turns = largest, min(selected, largest.capacity) if num_ahead else largest.capacity
        num_bytes = sum(stores[layer].buffer_bytes(stores[layer].capacity) for layer in self.ahead)
        num_bytes += 2 * largest.buffer_bytes(self._in_turns[1])
        return num_bytes + (sum(store.buffer_bytes(selected) for store in others) if self.reuse else 0)

    def open(self) -> None:
        """Make the planned buffers, once the stores are allocated, and compile the kernels of a step."""
        stores = self._stores
        for store in {store.slot_bytes: store for store in stores.values()}.values():
            if store.reachable:
                warm_gather(store.slots, store.device, store.tuning)
        if (device := next(iter(stores.values())).device).type == "cuda":
            nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=device)
            missing_rows(nothing, torch.full((1, 1, 1), -1, device=device)) if self.reuse else indices(nothing, 1)
        if self.link is not None:
            largest, rows = self._in_turns
            self._shared = [largest.new_buffer(rows) for _ in range(2)]
            self._ahead_buffers = {layer: stores[layer].new_buffer(stores[layer].capacity) for layer in self.ahead}

    def is_pending(self, layer: int) -> bool:
        """True if the layer's rows have been requested."""
        return layer in self._pending

    def request_all(self, layer: int, count: int) -> None:
        """Request the first `count` slots of every head."""
        if layer in self._ahead_buffers:
            self._request_part(layer, count, slice(0, count))
        else:
            self._request(layer, count, self._free_buffer())

    def request_ahead(self, count: int, part: int, parts: int) -> None:
        """Request one of `parts` equal parts of the first `count` slots of the layers `ahead`."""
        begin, end = (len(self.ahead) * count * edge // parts for edge in (part, part + 1))
        for place, layer in enumerate(self.ahead):
            columns = slice(*(min(max(edge - place * count, 0), count) for edge in (begin, end)))
            if columns.start < columns.stop:
                self._request_part(layer, count, columns)

    def request_held(self, layer: int, held: Tensor) -> None:
        """Request the slots where `held`, bool [batch, num_kv_heads, slots], each into the row of its slot."""
        slots = torch.arange(held.shape[-1], device=held.device)
        request = Chosen(torch.where(held, slots, -1), num_true(held))
        self._request(layer, request, self._free_buffer(), present=held)

    def request_selected(self, layer: int, mask: Tensor, cap: int, bias: Tensor | None = None) -> Tensor:
        """Request the slots of `mask`, bool [batch, 1 or num_kv_heads, slots], at most `cap` in a head.

        bias: added to the scores of these slots, fp32 [batch, 1 or num_kv_heads, group or 1, slots]. Returns the slot
        of each row that `take` will give, int [batch, num_kv_heads, n], -1 for none.
        """
        mask = mask.expand(-1, self._stores[layer].num_kv_heads, -1)
        if not self.reuse:
            index = indices(mask, cap)
            present = index >= 0
            self._request(layer, Chosen(index, num_true(present)), self._free_buffer(), present, _at(bias, index))
            return index
        if layer not in self._kept:
            self._kept_slots[layer] = indices(torch.zeros_like(mask), self._selected)
            self._kept[layer] = self._stores[layer].new_buffer(self._selected)
        request, slots = missing_rows(mask, self._kept_slots[layer])
        self._kept_slots[layer] = slots
        self._request(layer, request, self._kept[layer], slots >= 0, _at(bias, slots))
        return slots

    def wait(self, layer: int) -> None:
        """Let the computation wait for the layer's rows."""
        for ticket in self._pending[layer].tickets:
            ticket.wait()

    def take(self, layer: int, own: Tensor | None = None) -> Fetched:
        """The layer's rows, after waiting for them.

        own: the step's own row, packed [batch, num_kv_heads, 1, slot_bytes], to come behind them. Where rows are read
        in place, it has been written to its slot already.
        """
        self.wait(layer)
        store, (request, rows, present, bias, _, self._latest) = self._stores[layer], self._pending.pop(layer)
        count = _num_rows(request)
        if self.link is not None:
            self.loaded.add(store.num_rows(request), store.slot_bytes)
        if own is None:
            return Fetched(rows[:, :, :count], present, bias)
        if not self._reads_in_place(request):
            rows[:, :, count:] = own
        return Fetched(rows, present, bias)

    def write_back(self, layer: int, rows: Tensor, at: int | Tensor) -> None:
        """Write packed rows to a layer's store, and forget the kept copies of the slots written to."""
        store = self._stores[layer]
        if layer in self._kept_slots and not isinstance(at, int):
            self._kept_slots[layer].masked_fill_(self._kept_slots[layer] == at, -1)
        if self.link is None:
            store.write(rows, at)
        else:
            target = at if isinstance(at, int) else chosen(at)
            self.written.add(store.num_rows(rows.shape[2] if isinstance(target, int) else target), store.slot_bytes)
            self.link.write_back(store, rows, target)

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        buffers = (*self._shared, *self._ahead_buffers.values(), *self._kept.values())
        return sum(buffer.nbytes for buffer in buffers)

    def drain(self) -> None:
        """Wait for all transfers. Raises the error of one that failed."""
        if self.link is not None:
            self.link.drain()

    def close(self) -> None:
        """Drain, and give the buffers back. Raises as `drain`."""
        try:
            self.drain()
        finally:
            self._latest = None
            for held in (self._pending, self._shared, self._ahead_buffers, self._kept, self._kept_slots):
                held.clear()

    def _free_buffer(self) -> Tensor | None:
        """The shared buffer without a request; if both are free, the one that the computing layer does not read.

        Requests need not come in the order of the layers: a rehearsal for the next layer comes before a layer's own.
        """
        held = [pending.buffer for pending in self._pending.values()]
        free = [buffer for buffer in self._shared if not any(buffer is each for each in held)]
        return next((buffer for buffer in free if buffer is not self._latest), free[0] if free else None)

    def _request_part(self, layer: int, count: int, columns: slice) -> None:
        """Request some columns of the first `count` slots of a layer in `ahead`."""
        if not self.is_pending(layer):
            rows = self._stores[layer].rows_in(self._ahead_buffers[layer], count)
            self._pending[layer] = _Pending(count, rows, None, None, [])
        self._prefetch(layer, columns, self._pending[layer].rows[:, :, columns])

    def _request(
        self,
        layer: int,
        request: int | Chosen,
        buffer: Tensor | None,
        present: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Start a request that comes in one piece; without a link its rows are there at once."""
        store, count = self._stores[layer], _num_rows(request)
        if self._reads_in_place(request):
            rows = store.slots[:, :, : count + 1]
        else:
            rows = store.rows_in(store.new_buffer(count) if buffer is None else buffer, count)
        self._pending[layer] = _Pending(request, rows, present, bias, [], buffer)
        if self.link is not None:
            self._prefetch(layer, request, rows[:, :, :count])
        elif not self._reads_in_place(request):
            store.load(request, rows[:, :, :count])

    def _reads_in_place(self, request: SlotRequest) -> bool:
        return self.link is None and isinstance(request, int)

    def _prefetch(self, layer: int, request: SlotRequest, rows: Tensor) -> None:
        assert self.link is not None
        self._pending[layer].tickets.append(self.link.prefetch(self._stores[layer], request, rows))


def _num_rows(request: int | Chosen) -> int:
    """Buffer rows of each head that a request fills, those of negative indices included."""
    return request if isinstance(request, int) else request.slots.shape[-1]


def _at(bias: Tensor | None, slots: Tensor) -> Tensor | None:
    """`bias` [batch, 1 or heads, group or 1, slots] at `slots` [batch, heads, n]: [batch, heads, group or 1, 1, n]."""
    if bias is None:
        return None
    index = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, bias.shape[2], -1)
    return bias.expand(-1, slots.shape[1], -1, -1).gather(-1, index).unsqueeze(3)


# Lists of slots from masks, without a sync. Shapes: masks bool [batch, heads, slots]; lists int64 [batch, heads, n],
# filled up with -1. Under CUDA each is one kernel, a program a head.


def indices(mask: Tensor, cap: int) -> Tensor:
    """Slots where `mask` [batch, heads, slots] is True, in order: int64 [batch, heads, cap], -1 behind the last.

    At most `cap` may be True in a head. No device sync.
    """
    if mask.is_cuda:
        from harness.offload.kernels import rows as kernels

        return kernels.indices(mask, cap)
    order = torch.where(mask, mask.cumsum(-1) - 1, cap)
    slots = torch.arange(mask.shape[-1], device=mask.device).expand_as(order)
    found = order.new_full((*mask.shape[:-1], cap + 1), -1)
    return found.scatter_(-1, order, slots)[..., :cap]


def missing_rows(mask: Tensor, kept: Tensor) -> tuple[Chosen, Tensor]:
    """The rows to fetch so that a kept buffer holds exactly the selected slots; slots that are there stay.

    mask: bool [batch, heads, slots]; kept: int64 [batch, heads, n], the slot in each row of the buffer, -1 for none.
    Returns the slots to fetch with the rows they go to, those of a head first, and the new `kept`.
    """
    if mask.is_cuda:
        from harness.offload.kernels import rows as kernels

        missing, free, after = kernels.missing_rows(mask, kept)
        return Chosen(missing, num_true(missing >= 0), free), after
    stays = (kept >= 0) & mask.gather(-1, kept.clamp(min=0))
    num_slots, room = mask.shape[-1], kept.shape[-1]
    there = mask.new_zeros((*mask.shape[:-1], num_slots + 1))
    there.scatter_(-1, torch.where(stays, kept, num_slots), True)
    missing, free = indices(mask & ~there[..., :num_slots], room), indices(~stays, room)
    fetch = Chosen(missing, num_true(missing >= 0), free)
    return fetch, torch.where(stays, kept, fetch.by_target())
