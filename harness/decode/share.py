"""What the layers share in live decoding: the batch's tokens, the method's state, the
link and the fetch buffers; and counts of the rows that cross the link."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.decode.links import Link, Ticket
from harness.decode.memory import PinnedSlab
from harness.decode.store import Chosen, KVStore, chosen
from methods.base import EMPTY, Lengths, PromptRows, State, TokenCounts

LAYERS_UNDER_WAY = 2
"""Layers of a prompt whose packed rows may be on their way to the host at one time. A host that
launches ahead of the device would else hold all layers' rows there."""
COUNTS_AT_ONCE = 1024
"""Counts on the device that are kept before they are summed: one launch for many."""


class BatchLengths(NamedTuple):
    """The lengths of a batch. prompts: tokens of each sequence's prompt. max_new_tokens: of all."""

    prompts: Sequence[int]
    max_new_tokens: int

    @property
    def columns(self) -> int:
        """Columns of the batch at its end."""
        return max(self.prompts) + self.max_new_tokens

    def rows(self, steps: int) -> list[TokenCounts]:
        """The distinct rows of the sequences after `steps` steps, for the arithmetic of sizes."""
        return [
            TokenCounts(prompt + steps, prompt, prompt + self.max_new_tokens)
            for prompt in sorted({*self.prompts})
        ]


class TokenBatch:
    """Tokens and progress of a batch, shared by the layers.

    A step looks at the columns before its `limit`. By default this is the column behind its own.
    With `bucket` it is the end of a bucket: neighbouring steps then have the same lengths, and only
    what lies on the device says which column is theirs. Columns behind that one hold no token yet,
    so they are invisible.

    real: bool [batch, prompt], padding on the left. bucket: generated columns of the first bucket;
    each next one ends at twice as many. 0: there are none. tokens: int32 [batch, columns], the
    position of each column's token, `EMPTY` for none. column: int64 [1], the step's own.
    Of a step: positions: int [batch], cached tokens before it. row_positions, one_row, slots: made
    once for the `QueryRows` of all layers, since each new tensor is a launch.
    """

    def __init__(self, real: Tensor, max_new_tokens: int, bucket: int = 0) -> None:
        batch, prompt_columns = real.shape
        columns = prompt_columns + max_new_tokens
        prompt = real.sum(-1)
        self.real = real
        self.lengths = Lengths(prompt, prompt + max_new_tokens)
        self.prompts: list[int] = prompt.tolist()
        self.counts = BatchLengths(self.prompts, max_new_tokens)
        self.is_padded = min(self.prompts) < prompt_columns
        self.bucket = bucket
        self.steps = 0
        self.column = torch.full((1,), prompt_columns, device=real.device)
        self._padding = prompt_columns - prompt
        self.begin()
        self.one_row = torch.ones_like(real[:, :1])
        self.slots = torch.arange(columns, device=real.device).expand(batch, 1, -1)
        self.tokens = torch.full((batch, columns), EMPTY, device=real.device).int()
        self.tokens[:, :prompt_columns] = PromptRows(real, prompt_columns).positions.int()

    def begin(self) -> None:
        """Begin a step: what is true of it is made anew, since a state may keep that of the step
        before."""
        self.positions = self.column - self._padding
        self.row_positions = self.positions[:, None].int()
        self._own_index: dict[int, Tensor] = {}
        self._generated: dict[tuple[int, int], Chosen] = {}

    @property
    def columns(self) -> int:
        """Columns before this step."""
        return self.real.shape[1] + self.steps

    def limit(self, steps_ahead: int = 0) -> int:
        """Columns that the views of a later step have, its own included."""
        return self.real.shape[1] + self._steps_of_bucket(steps_ahead).stop

    def _steps_of_bucket(self, steps_ahead: int) -> range:
        """The steps whose views have the lengths of a later step's; without buckets it alone."""
        step = self.steps + steps_ahead
        if not self.bucket:
            return range(step, step + 1)
        first, end = 0, self.bucket
        while end <= step:
            first, end = end, 2 * end
        return range(first, min(end, self.counts.max_new_tokens))

    @property
    def hides_columns(self) -> bool:
        """True if a step must not read some of the columns in its views."""
        return self.is_padded or bool(self.bucket)

    @property
    def own_slots(self) -> Tensor:
        """The step's own column, int64 [batch, 1, 1]."""
        return self.column.expand(len(self.tokens), 1, 1)

    def own_index(self, num_kv_heads: int) -> Tensor:
        """The same of each head, int64 [batch, num_kv_heads, 1], made once a step."""
        if num_kv_heads not in self._own_index:
            index = self.own_slots.expand(-1, num_kv_heads, -1)
            # A copy: the column moves on while the link may still read it.
            self._own_index[num_kv_heads] = index.clone(memory_format=torch.contiguous_format)
        return self._own_index[num_kv_heads]

    def generated(self, num_kv_heads: int, steps_ahead: int = 0) -> Chosen | None:
        """The slots of the generated tokens that a later step reads, and -1 for the columns behind
        them in its views; made once a step. None where views end with them: without buckets."""
        first, end = self.real.shape[1], self.limit(steps_ahead) - 1
        if not self.bucket or first == end:
            return None
        key = num_kv_heads, steps_ahead
        if key not in self._generated:
            columns = self.slots[..., first:end]
            slots = torch.where(columns < self.column + steps_ahead, columns, -1)
            self._generated[key] = chosen(slots.expand(-1, num_kv_heads, -1).contiguous())
        return self._generated[key]

    def rows_of_bucket(self, steps_ahead: int = 0) -> list[TokenCounts]:
        """`BatchLengths.rows` of all steps whose views have the lengths of a later step's."""
        rows: list[TokenCounts] = []
        for step in self._steps_of_bucket(steps_ahead):
            rows += self.counts.rows(step)
        return rows

    def advance(self) -> None:
        """End the step: its tokens are cached now."""
        self.tokens.index_copy_(1, self.column, self.row_positions)
        self.column += 1
        self.steps += 1


class RowCount:
    """Rows, and their payload bytes, summed without a sync.

    of_host: sums of numbers that the host knows, by the bytes of a row. Those of numbers that lie
    on the device are there, in place.
    """

    def __init__(self) -> None:
        self.of_host: Counter[int] = Counter()
        self._on_device: dict[int, Tensor] = {}
        self._counts: dict[int, list[Tensor]] = {}

    def add(self, num_rows: int | Tensor, row_bytes: int) -> None:
        """num_rows: under CUDA numbers on the device, to be added up."""
        if isinstance(num_rows, int):
            self.of_host[row_bytes] += num_rows
            return
        counts = self._counts.setdefault(row_bytes, [])
        counts.append(num_rows)
        if len(counts) == COUNTS_AT_ONCE:
            self.add_up()

    @property
    def num_rows(self) -> int | Tensor:
        """So far; 0-d on the device if a count was there."""
        self.add_up()
        return sum([*self.of_host.values(), *self._on_device.values()])

    @property
    def num_bytes(self) -> int | Tensor:
        """As `num_rows`."""
        self.add_up()
        of_host = sum(num_rows * row_bytes for row_bytes, num_rows in self.of_host.items())
        on_device = [num_rows * row_bytes for row_bytes, num_rows in self._on_device.items()]
        return sum(on_device, start=of_host)

    def add_up(self) -> None:
        """Add the numbers that lie on the device to their sums."""
        for row_bytes, counts in self._counts.items():
            total = torch.cat([count.flatten() for count in counts]).sum()
            if row_bytes in self._on_device:
                self._on_device[row_bytes] += total
            else:
                self._on_device[row_bytes] = total
        self._counts.clear()


class Traffic:
    """What crosses a session's link; nothing under managed placement: the driver moves pages.

    loaded, written: rows that the decode steps took from a link, unused prefetches included, and
    wrote back, without the prompt's. They are counted in the step that waits for them, so that they
    are exact for any run of steps. late: the rows of `loaded` that a layer requested by its own
    query, in the layer itself. missed: with a GPU cache, those that were not there when their layer
    selected them. block_bytes: read from a disk for the rows of `loaded`, in whole blocks.
    """

    def __init__(self) -> None:
        self.loaded = RowCount()
        self.written = RowCount()
        self.late = RowCount()
        self.missed = RowCount()
        self.block_bytes = 0

    @property
    def counts(self) -> list[RowCount]:
        """All of them."""
        return [self.loaded, self.written, self.late, self.missed]


class DeviceShare:
    """What the layers of a live session share.

    Set by the session: device; batch; traffic; link, None but where rows lie behind one; rooms: of
    each sequence, the rows of a KV head in the GPU cache of each layer, None: there is none; state:
    the method's, None where it reads everything; slab: the page-locked memory of the stores, if
    they lie there.
    Changed by the layers: buffers: all that fetched rows may lie in; free: the buffers that layers
    use in turns and that hold no rows, the one that was read last at the end. under_way: the
    transfers of the prompt's last layers to the host.
    """

    def __init__(
        self,
        device: torch.device,
        batch: TokenBatch,
        traffic: Traffic,
        link: Link | None,
        rooms: Sequence[int] | None,
        state: State | None,
    ) -> None:
        self.device = device
        self.batch = batch
        self.traffic = traffic
        self.link = link
        self.rooms = rooms
        self.state = state
        self.slab: PinnedSlab | None = None
        self.buffers: list[Tensor] = []
        self.free: list[Tensor] = []
        self.under_way: deque[Ticket] = deque(maxlen=LAYERS_UNDER_WAY)
        self._minus_infinity: dict[torch.dtype, Tensor] = {}

    def forked_state(self) -> State | None:
        """A copy of the state that goes on by itself."""
        if self.state is None:
            return None
        num_slots = 0
        for name in self.state.slot_tensors:
            for tensor in getattr(self.state, name).values():
                num_slots = max(num_slots, tensor.shape[2])
        every = torch.arange(len(self.batch.prompts), device=self.device)
        return self.state.fork(every, num_slots)

    def minus_infinity(self, dtype: torch.dtype) -> Tensor:
        """-inf on the device, shape []. `torch.where` copies a number of the host to the device,
        and the host waits for that."""
        if dtype not in self._minus_infinity:
            number = torch.full((), float("-inf"), dtype=dtype, device=self.device)
            self._minus_infinity[dtype] = number
        return self._minus_infinity[dtype]

    def wait_for_room(self) -> None:
        """Before another layer of the prompt is packed: wait until the rows of the layer
        `LAYERS_UNDER_WAY` before have left the device."""
        if len(self.under_way) == LAYERS_UNDER_WAY:
            self.under_way.popleft().wait_moved()

    def new_buffer(self, store: KVStore, num_rows: int) -> Tensor:
        """A buffer that lasts as long as the session."""
        self.buffers.append(store.new_buffer(num_rows))
        return self.buffers[-1]
