"""Which rows a layer's attention gets, and when they are asked for: the traffic of live decoding.

Under host placement a request starts a transfer into one of two buffers that take turns, the layer computing and the
next. Under any other whole layers are read in place. In the buffers a head's rows leave room behind them for the step's
own one: attention finds all in one piece. With `reuse` each layer keeps its buffer, and only rows not in it cross.

Where later layers read less than the first ones, which are exempt, a request one layer ahead cannot hide the first
ones' rows, and the link idles later on. Theirs then come ahead, in parts, into buffers of their own: while layer l of
the others computes, one part of what the next step's exempt layers will read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.offload.links import Link, Ticket
from harness.offload.store import (
    Chosen,
    KVStore,
    Part,
    SlotRequest,
    chosen,
    num_requested,
    num_true,
    warm_gather,
)


class Fetched(NamedTuple):
    """Rows of a layer on the device.

    rows: packed, uint8 [batch, num_kv_heads, n, slot_bytes], and the own one behind them where it was given; valid
    until the layer's attention is done. present: bool [batch, num_kv_heads, n], False for rows of no meaning, which are
    those of some other token, or zeros; None where all are present.
    bias: what the selection adds to these rows' scores, [batch, num_kv_heads, group or 1, 1, n]; None for nothing.
    """

    rows: Tensor
    present: Tensor | None
    bias: Tensor | None


class _Pending(NamedTuple):
    """What a layer was asked for. places: where it comes to lie, one more a head than there are rows."""

    store: KVStore
    request: int | Chosen
    present: Tensor | None
    bias: Tensor | None
    places: Tensor
    tickets: list[Ticket]


class Fetcher:
    """Requests and write-backs of one session. link: None but under host placement.

    h2d_bytes, d2h_bytes: payload that crosses the link for the rows taken and written back so far. It is counted where
    a step uses it, so it is exact for any run of steps, whatever is still under way; under CUDA a 0-d tensor.
    """

    def __init__(self, link: Link | None, reuse: bool) -> None:
        self.link = link
        self.reuse = reuse
        self._h2d, self._d2h = Traffic(), Traffic()
        self._pending: dict[int, _Pending] = {}
        self._buffers: list[Tensor] = []
        self._ahead: list[Tensor] = []
        self._resident: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def open(self, stores: list[KVStore], selected: int, ahead: int = 0) -> None:
        """Make the buffers: one for each of the first `ahead` layers, two in turn for any other layer's slots, and
        with reuse one for `selected` rows of each layer. The kernels of a step are compiled, where there are any.
        """
        self.selected = selected
        for store in {store.slot_bytes: store for store in stores}.values():
            if store.reachable:
                warm_gather(store.slots, store.device, store.tuning)
        warm_lists(stores[0].device, reuse=self.reuse)
        if self.link is not None:
            self._ahead = [store.new_buffer(store.capacity) for store in stores[:ahead]]
            largest = max(stores[ahead:], key=lambda store: store.nbytes)
            rows = min(selected, largest.capacity) if ahead else largest.capacity
            self._buffers = [largest.new_buffer(rows) for _ in range(2)]

    @property
    def num_ahead(self) -> int:
        """Leading layers whose rows come during the whole step before."""
        return len(self._ahead)

    def pending(self, layer: int) -> bool:
        """Whether the layer's rows have been asked for."""
        return layer in self._pending

    def request_all(self, layer: int, store: KVStore, count: int) -> None:
        """Ask for the first `count` slots."""
        self._submit(layer, store, count, self._ahead[layer] if layer < len(self._ahead) else self._turn())

    def request_held(self, layer: int, store: KVStore, held: Tensor) -> None:
        """Ask for the slots where `held`, bool [batch, num_kv_heads, slots], each into the place of its slot."""
        slots = torch.arange(held.shape[-1], device=held.device)
        request = Chosen(torch.where(held, slots, -1), num_true(held))
        self._submit(layer, store, request, self._turn(), present=held)

    def request_ahead(self, stores: list[KVStore], count: int, part: int, parts: int) -> None:
        """Ask for one of `parts` equal parts of the first `count` slots of the layers that come ahead."""
        rows = count * stores[0].slots.shape[:2].numel()  # of a layer, all heads
        begin, end = (len(self._ahead) * rows * edge // parts for edge in (part, part + 1))
        for layer, buffer in enumerate(self._ahead):
            first, last = (min(max(edge - layer * rows, 0), rows) for edge in (begin, end))
            if first == last:
                continue
            if layer not in self._pending:
                self._expect(layer, stores[layer], count, buffer)
            self._prefetch(layer, Part(first, last, count), buffer)

    def request_selected(
        self, layer: int, store: KVStore, mask: Tensor, cap: int, bias: Tensor | None = None
    ) -> Tensor:
        """Ask for the slots of `mask`, bool [batch, 1 or num_kv_heads, slots], at most `cap` in a head.

        Returns the slot of each row that `take` will give, int [batch, num_kv_heads, n], -1 for none.

        bias: added to the scores of these slots, fp32 [batch, 1 or num_kv_heads, group or 1, slots].
        """
        mask = mask.expand(-1, store.slots.shape[1], -1)
        if not self.reuse:
            index = indices(mask, cap)
            present = index >= 0
            request = Chosen(index, num_true(present))
            self._submit(layer, store, request, self._turn(), present=present, bias=_at(bias, index))
            return index
        if layer not in self._resident:
            self._resident[layer] = indices(torch.zeros_like(mask), self.selected)
            self._kept[layer] = store.new_buffer(self.selected)
        request, resident = places(mask, self._resident[layer])
        self._resident[layer] = resident
        self._submit(layer, store, request, self._kept[layer], present=resident >= 0, bias=_at(bias, resident))
        return resident

    def wait(self, layer: int) -> None:
        """Let the computation wait until the layer's rows are there."""
        for ticket in self._pending[layer].tickets:
            ticket.wait()

    def take(self, layer: int, own: Tensor | None = None) -> Fetched:
        """The layer's rows, waiting for them if need be.

        own: the step's own row, packed, [batch, num_kv_heads, 1, slot_bytes], to come behind them; where rows are read
        in place, it has been written to the slot there.
        """
        self.wait(layer)
        store, request, present, bias, places, _ = self._pending.pop(layer)
        count = num_requested(request)
        if self.link is not None:
            self._h2d.add(store.num_rows(request), store.slot_bytes)
        if own is None:
            return Fetched(places[:, :, :count], present, bias)
        if not self._in_place(request):
            places[:, :, count:] = own
        return Fetched(places, present, bias)

    def write_back(self, layer: int, store: KVStore, rows: Tensor, at: int | Tensor) -> None:
        """Write packed rows to a store; a kept copy of a slot that is used again is no longer valid."""
        if layer in self._resident and not isinstance(at, int):
            self._resident[layer].masked_fill_(self._resident[layer] == at, -1)
        if self.link is None:
            store.write(rows, at)
        else:
            target = at if isinstance(at, int) else chosen(at)
            self._d2h.add(store.num_rows(rows.shape[2] if isinstance(target, int) else target), store.slot_bytes)
            self.link.write_back(store, rows, target)

    @property
    def h2d_bytes(self) -> int | Tensor:
        """Of the rows taken."""
        return self._h2d.num_bytes

    @property
    def d2h_bytes(self) -> int | Tensor:
        """Of the rows written back."""
        return self._d2h.num_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffer.nbytes for buffer in (*self._buffers, *self._ahead, *self._kept.values()))

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the error of a transfer that failed."""
        if self.link is not None:
            self.link.drain()

    def close(self) -> None:
        """Drain, and give the buffers back: nothing can be taken any more. Raises as `drain`."""
        try:
            self.drain()
        finally:
            for held in (self._pending, self._buffers, self._ahead, self._resident, self._kept):
                held.clear()

    def _turn(self) -> Tensor | None:
        if not self._buffers:
            return None
        self._buffers.reverse()
        return self._buffers[0]

    def _submit(
        self, layer: int, store: KVStore, request: int | Chosen, buffer: Tensor | None, **of_rows: Tensor | None
    ) -> None:
        """Start a request that comes in one piece. of_rows: `present` and `bias` of `_Pending`."""
        self._expect(layer, store, request, buffer, **of_rows)
        if buffer is not None:
            self._prefetch(layer, request, buffer)

    def _expect(
        self,
        layer: int,
        store: KVStore,
        request: int | Chosen,
        buffer: Tensor | None,
        present: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        places = self._places(store, request, buffer)
        self._pending[layer] = _Pending(store, request, present, bias, places, [])

    def _places(self, store: KVStore, request: int | Chosen, buffer: Tensor | None) -> Tensor:
        """Where the rows of a request come to lie: without a link they are there at once."""
        count = num_requested(request)
        if self._in_place(request):
            return store.slots[:, :, : count + 1]
        if buffer is not None:
            return store.places_in(buffer, count)
        places = store.places_in(store.new_buffer(count), count)
        store.load(request, places[:, :, :count])
        return places

    def _in_place(self, request: int | Chosen) -> bool:
        return self.link is None and isinstance(request, int)

    def _prefetch(self, layer: int, request: SlotRequest, buffer: Tensor) -> None:
        assert self.link is not None
        pending = self._pending[layer]
        pending.tickets.append(self.link.prefetch(pending.store, request, buffer))


def _at(bias: Tensor | None, slots: Tensor) -> Tensor | None:
    """`bias` [batch, 1 or heads, group or 1, slots] at `slots` [batch, heads, n]: [batch, heads, group or 1, 1, n]."""
    if bias is None:
        return None
    index = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, bias.shape[2], -1)
    return bias.expand(-1, slots.shape[1], -1, -1).gather(-1, index).unsqueeze(3)


def indices(mask: Tensor, cap: int) -> Tensor:
    """Slots where `mask` [batch, heads, slots] holds, in order: int64 [batch, heads, cap], -1 behind the last.

    At most `cap` may hold in a head. No device sync.
    """
    if mask.is_cuda:
        from harness.offload.kernels import compact as kernels

        return kernels.indices(mask, cap)
    order = torch.where(mask, mask.cumsum(-1) - 1, cap)
    slots = torch.arange(mask.shape[-1], device=mask.device).expand_as(order)
    found = order.new_full((*mask.shape[:-1], cap + 1), -1)
    return found.scatter_(-1, order, slots)[..., :cap]


def places(mask: Tensor, resident: Tensor) -> tuple[Chosen, Tensor]:
    """Where the selected slots go in a kept buffer, those that are there already staying.

    mask: bool [batch, heads, slots]; resident: int64 [batch, heads, places], the slot in each place, -1 for none.
    Returns the slots to fetch with their places, those of a head first, and the new `resident`, which holds exactly the
    selection.
    """
    if mask.is_cuda:
        from harness.offload.kernels import compact as kernels

        missing, free, after = kernels.places(mask, resident)
        return Chosen(missing, num_true(missing >= 0), free), after
    stays = (resident >= 0) & mask.gather(-1, resident.clamp(min=0))
    room = resident.shape[-1]
    missing, free = indices(mask & ~_held(mask, resident, stays), room), indices(~stays, room)
    fetch = Chosen(missing, num_true(missing >= 0), free)
    return fetch, torch.where(stays, resident, fetch.by_place())


def warm_lists(device: torch.device, *, reuse: bool) -> None:
    """Under CUDA compile and load the kernel for lists of slots, or with `reuse` of places."""
    if device.type == "cuda":
        nothing = torch.zeros((1, 1, 1), dtype=torch.bool, device=device)
        if reuse:
            places(nothing, torch.full((1, 1, 1), -1, device=device))
        else:
            indices(nothing, 1)


def _held(mask: Tensor, resident: Tensor, stays: Tensor) -> Tensor:
    """Slots that stay in the buffer, bool shaped like `mask`."""
    slots = mask.shape[-1]
    padded = mask.new_zeros((*mask.shape[:-1], slots + 1))
    return padded.scatter_(-1, torch.where(stays, resident, slots), True)[..., :slots]


AT_ONCE = 1024
"""Counts of the device that are kept until they are summed."""


class Traffic:
    """Rows of any width, counted one transfer after another."""

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
        if len(counts) == AT_ONCE:
            self._sum()

    @property
    def num_bytes(self) -> int | Tensor:
        """So far; 0-d on the device where a number came from there."""
        self._sum()
        return self._num_bytes

    def _sum(self) -> None:
        for row_bytes, counts in self._counts.items():
            self._num_bytes = self._num_bytes + torch.stack(counts).sum() * row_bytes
        self._counts.clear()
