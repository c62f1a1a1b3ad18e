"""Live decoding: prefill, then one token a step through two memories.

Under host placement every layer's cache lies in host memory. A layer's rows are asked for while the layer before
computes: all of them, or those that InfiniGen's rehearsal there selects; those of the exempt layers, where the others
read less, during the whole step before. The own row never waits: its key and value
are on the device, and are written back while later layers compute.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for logits in generate(session, session.prefill(ids, real)): ...

The selection functions are those of replay, called with one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.offload.codec import FLOAT_DTYPES, Codec
from harness.offload.fetch import Fetcher
from harness.offload.links.link import Link
from harness.offload.passes import Prompt, PromptPass, StepPass, positions_of
from harness.offload.store import KVStore, Placement, require_memory
from harness.offload.timeline import Timeline
from harness.reads import share_of_cache
from harness.settings.speed import check_combination
from methods.base import EMPTY, EvictingState, Method, PromptRows, Rows, State, require
from methods.infinigen import Rotations
from methods.quantization import require_codec


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the cached rows in the
    non-exempt layers; a float codec also of the exempt layers, which an integer one leaves exact. placement: where the
    cache lies. link: moves the rows under host placement. reuse: rows fetched in the step before and selected again
    do not cross the link again. pinned: host memory is page-locked under CUDA, so that transfers can overlap.
    timeline: marks the segments of each step.
    Raises ValueError for combinations without meaning.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        max_new_tokens: int,
        codec: Codec | None = None,
        placement: Placement = "device",
        link: Link | None = None,
        calibration: Rotations | None = None,
        reuse: bool = False,
        pinned: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        check_combination(method, placement, reuse)
        require_codec(method, codec)
        if placement == "host" and link is None:
            raise ValueError("placement=host: needs a link")
        exempt, layers = method.num_exempt_layers, attached.geometry.num_layers
        require(exempt < layers, "num_exempt_layers", exempt, f"< {layers} layers")
        self.attached = attached
        self.method = method
        self.max_new_tokens = max_new_tokens
        self.codec = codec or Codec(_exact(attached.dtype))
        self.placement: Placement = placement
        self.calibration = calibration
        self.pinned = pinned
        self.timeline = timeline or Timeline(attached.device)
        self.state: State | None = None
        self.stores: list[KVStore] = []
        self.fetcher = Fetcher(link if placement == "host" else None, reuse)
        self.tokens = torch.empty(0)  # these three are the prompt's to fill
        self.positions = torch.empty(0)
        self.real = torch.empty(0)
        self.columns = 0
        self.steps = 0
        self.padded = False
        self.frac_sum = torch.zeros((), dtype=torch.float64, device=attached.device)

    def prefill(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the prompts densely and write their rows to the cache.

        ids: int [batch, prompt]; real: bool alike, False for the padding on the left, so that prompts end in one
        column. Returns logits [batch, vocab] for the first new token.
        """
        self._open(real)
        hidden = self.attached.forward(ids, positions_of(real), PromptPass(self, real))
        return self.attached.logits(hidden[:, -1])

    def start(self, prompt: Prompt) -> Tensor:
        """Take over a prefilled prompt instead of running it; returns logits [batch, vocab]."""
        self._open(prompt.real)
        for layer, (query, key, value) in enumerate(prompt.layers):
            self.keep_prompt(layer, query, key, value)
        return self.attached.logits(prompt.hidden)

    def decode_step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence, ids int [batch]; returns logits [batch, vocab] for the next."""
        if self.steps >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: all of them have been decoded")
        for layer in range(max(1, self.ahead)):
            if not self.fetcher.pending(layer):
                self.request(layer, self.columns)  # the first step: nothing computed before it
        step = StepPass(self)
        hidden = self.attached.forward(ids[:, None], self.positions[:, None], step)
        self.timeline.switch("other")
        self.count_reads(step.read)
        self.tokens[:, self.columns] = self.positions.int()
        self.positions = self.positions + 1
        self.columns += 1
        self.steps += 1
        return self.attached.logits(hidden[:, -1])

    @property
    def last_step(self) -> bool:
        """Whether the step under way is the last one needed: the last new token is not fed."""
        return self.steps + 2 >= self.max_new_tokens

    @property
    def h2d_bytes(self) -> int:
        """Payload bytes fetched over the link so far, those under way included: waits for them."""
        self.fetcher.drain()
        return sum(store.h2d_bytes for store in self.stores)

    @property
    def d2h_bytes(self) -> int:
        """Payload bytes written back over the link so far, the prompt's included: waits as `h2d_bytes`."""
        self.fetcher.drain()
        return sum(store.d2h_bytes for store in self.stores)

    @property
    def device_bytes(self) -> int:
        """Bytes of what the cache and the method keep on the device: stores there, buffers, the method's state."""
        stores = sum(store.nbytes for store in self.stores) if self.placement == "device" else 0
        return stores + self.fetcher.device_bytes + _tensor_bytes(vars(self.state) if self.state else None)

    def close(self) -> None:
        """Free the cache. The link stays open. Raises the error of a transfer that failed."""
        try:
            self.fetcher.close()
        finally:
            for store in self.stores:
                store.free()

    def keep_prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Write a layer's prompt to its store: all of it, or what the method keeps."""
        store, state = self.stores[layer], self.selecting(layer)
        if state is not None:
            slots = key.shape[2] if isinstance(state, EvictingState) else store.capacity
            state.prompt(layer, query, key, PromptRows(self.real, slots))
            if isinstance(state, EvictingState):
                columns = state.compact(layer)
                index = columns.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
                key, value = key.gather(2, index), value.gather(2, index)
        self.fetcher.write_back(layer, store, store.pack(key, value), 0)

    def keep_own(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the own row to its slot; in a layer that evicts, to the one its victim left."""
        store, state = self.stores[layer], self.selecting(layer)
        own = self.slots_in_use(layer)
        at: int | Tensor = own
        if state is not None:
            state.append(layer, key, slice(own, own + 1))
            if isinstance(state, EvictingState):
                at = state.place_own(layer, own)
        self.fetcher.write_back(layer, store, store.pack(key, value), at)

    def request(self, layer: int, columns: int) -> None:
        """Ask for every slot in use by the layer's next step, before which `columns` are cached."""
        store = self.stores[layer]
        self.fetcher.request_all(layer, store, min(columns, store.capacity))

    def request_ahead(self, layer: int, columns: int) -> None:
        """Ask, in a layer that is not exempt, for a part of what the exempt ones read of `columns` in the next step."""
        parts = self.attached.geometry.num_layers - self.ahead
        self.fetcher.request_ahead(self.stores, columns, layer - self.ahead, parts)

    def request_selected(self, layer: int, mask: Tensor) -> None:
        """Ask for the slots of a selection, bool [batch, 1 or num_kv_heads, slots]."""
        cap = self.method.max_tokens_read(self.slots_in_use(layer), self.longest)
        self.fetcher.request_selected(layer, self.stores[layer], mask, cap)

    @property
    def ahead(self) -> int:
        """Leading layers whose rows cross during the step before: the exempt ones, where the others read less."""
        reads_less = not self.method.reads_all or not self.codec.is_float
        return self.method.num_exempt_layers if self.fetcher.link is not None and reads_less else 0

    def selecting(self, layer: int) -> State | None:
        """The state that selects in `layer`; None where all is read."""
        return None if layer < self.method.num_exempt_layers else self.state

    def count_reads(self, read: Tensor) -> None:
        """Add a step's share of the full cache; `read` [batch] tokens, summed over the non-exempt layers."""
        geometry, exempt = self.attached.geometry, self.method.num_exempt_layers
        width = self.codec.bits_per_element(geometry.head_dim) / 16
        self.frac_sum += share_of_cache(self.positions, read, width, exempt, geometry.num_layers).sum()

    @property
    def kv_frac(self) -> float:
        """What was read / the full cache, mean over the steps and sequences so far."""
        return float(self.frac_sum) / (self.steps * len(self.positions))

    def rows(self, query: Tensor, slots: Tensor, true_scores: Callable[[], Tensor]) -> Rows:
        """The single row of this step, over `slots` int32 [batch, 1 or kv, slots]; its own slot is the last."""
        own = torch.full((1, 1, 1), slots.shape[-1] - 1, dtype=torch.int64, device=slots.device)
        return Rows(
            query=query,
            positions=self.positions[:, None].int(),
            real=torch.ones_like(self.positions, dtype=torch.bool)[:, None],
            slot_positions=slots,
            own_slots=own.expand(len(slots), -1, -1),
            true_scores=true_scores,
        )

    def slots_in_use(self, layer: int) -> int:
        """Slots of the layer's store that may hold a token before this step; the own token comes behind them."""
        return min(self.columns, self.stores[layer].capacity)

    def slots_of(self, layer: int) -> Tensor:
        """The token in each slot in use, and the own one last: int32 [batch, 1 or num_kv_heads, slots in use + 1]."""
        state = self.selecting(layer)
        tokens = state.tokens[layer] if isinstance(state, EvictingState) else self.tokens[:, None]
        return tokens[..., : self.slots_in_use(layer) + 1]

    def _open(self, real: Tensor) -> None:
        if self.stores:
            raise RuntimeError("a session prefills once")
        batch, prompt = real.shape
        lengths = real.sum(-1)
        self.real = real
        self.padded = bool((lengths < prompt).any())
        self.columns = prompt
        self.positions = lengths
        total = prompt + self.max_new_tokens
        self.longest = int(lengths.max()) + self.max_new_tokens
        self.tokens = torch.full((batch, total), EMPTY, dtype=torch.int32, device=real.device)
        self.tokens[:, :prompt] = positions_of(real).masked_fill(~real, EMPTY).int()
        geometry = self.attached.geometry
        self.attached.require_window(total)
        if not self.method.reads_all:
            self.state = self.method.new_state(geometry, lengths + self.max_new_tokens, self.calibration)
        layout = [self._layout(layer, total) for layer in range(geometry.num_layers)]
        row = 2 * batch * geometry.num_kv_heads
        home = self.attached.device if self.placement == "device" else torch.device("cpu")
        require_memory(sum(row * slots * codec.row_bytes(geometry.head_dim) for slots, codec in layout), home)
        self.stores = [
            KVStore(
                batch=batch,
                num_kv_heads=geometry.num_kv_heads,
                capacity=capacity,
                head_dim=geometry.head_dim,
                dtype=self.attached.dtype,
                codec=codec,
                placement=self.placement,
                device=self.attached.device,
                pinned=self.pinned,
            )
            for capacity, codec in layout
        ]
        self.fetcher.open(self.stores, self.method.max_tokens_read(self.stores[-1].capacity, self.longest), self.ahead)

    def _layout(self, layer: int, total: int) -> tuple[int, Codec]:
        """Slots of a layer's store, where `total` columns are the most, and the codec of its rows."""
        state = self.selecting(layer)
        exact = layer < self.method.num_exempt_layers and not self.codec.is_float
        codec = Codec(_exact(self.attached.dtype)) if exact else self.codec
        return state.capacity if isinstance(state, EvictingState) else total, codec


def generate(session: LiveSession, logits: Tensor, forced: Tensor | None = None) -> Iterator[Tensor]:
    """Decode after `prefill` or `start`, yielding each new token's logits [batch, vocab], the first from `logits`.

    forced: int [batch, max_new_tokens], the tokens to feed (teacher forcing); None feeds the most likely ones.
    The last token is yielded and not fed.
    """
    for step in range(session.max_new_tokens):
        yield logits
        if step + 1 == session.max_new_tokens:
            return
        logits = session.decode_step(logits.argmax(-1) if forced is None else forced[:, step])


def _tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a mapping of them."""
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return value.nbytes if isinstance(value, Tensor) else 0


def _exact(dtype: torch.dtype) -> str:
    return next(name for name, stored in FLOAT_DTYPES.items() if stored == dtype)
