"""Live decoding: prefill, then one token a step through two memories.

Under host placement every layer's cache lies in host memory. A layer's rows are asked for while the layer before
computes: all that is kept, or what a rehearsal there selects; a method that selects by the layer's own query asks in
the layer itself and waits. Rows of the exempt layers, where the others read less, cross during the step before. The own
row never waits: its key and value are on the device, and are written back while later layers compute.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for logits in generate(session, session.prefill(ids, real)): ...

The selection functions are those of replay, called with one row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.offload import memory
from harness.offload.cache import (
    Batch,
    LayerCache,
    ResidualCache,
    ValuesCache,
    positions_of,
    slots_needed,
    slots_stored,
)
from harness.offload.fetch import Fetcher
from harness.offload.links import Link
from harness.offload.memory import PinnedSlab
from harness.offload.step import PrefilledPrompt, PromptPass, StepPass
from harness.offload.store import KVStore, slot_bytes
from harness.offload.timeline import Timeline
from harness.offload.tuning import DEFAULT_TUNING
from harness.settings.speed import Placement, check_combination
from harness.sizes import share_of_cache
from methods.base import Calibration, Method, State
from methods.checks import require
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec
from methods.evicting import EvictingState
from methods.keyless_codec import without_keys


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the cached rows in the
    non-exempt layers; None stores them as they are. placement: where the cache lies. link: moves the rows under host
    placement. reuse: rows fetched in the step before and selected again do not cross the link again. pinned: host
    memory is page-locked under CUDA, so that transfers can overlap. timeline: marks the segments of each step.
    Raises ValueError for combinations without meaning.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        max_new_tokens: int,
        codec: AnyCodec | None = None,
        placement: Placement = "device",
        link: Link | None = None,
        calibration: Calibration | None = None,
        reuse: bool = False,
        pinned: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        check_combination(method, placement, reuse)
        if placement == "host" and link is None:
            raise ValueError("placement=host: needs a link")
        exempt, layers = method.num_exempt_layers, attached.geometry.num_layers
        require(exempt < layers, "num_exempt_layers", exempt, f"< {layers} layers")
        self.attached = attached
        self.method = method
        self.max_new_tokens = max_new_tokens
        self.exact = Codec(next(name for name, stored in FLOAT_DTYPES.items() if stored == attached.dtype))
        self.codec: AnyCodec = codec or self.exact
        if method.holds_keys:
            self.codec = without_keys(self.codec)
        self.placement: Placement = placement
        self.calibration = calibration
        self.pinned = pinned and placement == "host" and attached.device.type == "cuda"
        self.timeline = timeline or Timeline(attached.device)
        self.fetcher = Fetcher(link if placement == "host" else None, reuse)
        self.tuning = link.tuning if link is not None else DEFAULT_TUNING
        self.caches: list[LayerCache] = []
        self.slab: PinnedSlab | None = None
        self.bytes_needed = memory.SessionBytes(0, 0)

    def prefill(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the prompts densely and write their rows to the cache.

        ids: int [batch, prompt]; real: bool alike, False for the padding on the left, so that prompts end in one
        column. Returns logits [batch, vocab] for the first new token.
        """
        self._open(real, memory.prompt_bytes(self.attached, ids.numel()))
        handler = PromptPass(self._keep_prompt, self.attached.geometry.scale, real)
        hidden = self.attached.forward(ids, positions_of(real), handler)
        return self.attached.logits(hidden[:, -1])

    def start(self, prompt: PrefilledPrompt) -> Tensor:
        """Take over a prefilled prompt instead of running it; returns logits [batch, vocab]."""
        self._open(prompt.real, activations=0)
        for layer, states in enumerate(prompt.layers):
            self._keep_prompt(layer, *states)
        return self.attached.logits(prompt.hidden)

    def decode_step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence, ids int [batch]; returns logits [batch, vocab] for the next."""
        if self.steps >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: all of them have been decoded")
        scale, last = self.attached.geometry.scale, self.steps + 2 >= self.max_new_tokens  # the last token is not fed
        step = StepPass(self.caches, self.fetcher, self.timeline, scale, last=last)
        for cache in self.caches[: max(1, self.fetcher.num_ahead)]:
            if not self.fetcher.pending(cache.layer):
                step.request_early(cache.layer)  # the first step: nothing computed before it
        hidden = self.attached.forward(ids[:, None], self.batch.positions[:, None], step)
        self.timeline.switch("other")
        self.reads.count(self.batch.positions, step.reads, step.index_reads)
        self.batch.advance()
        return self.attached.logits(hidden[:, -1])

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    @property
    def stores(self) -> list[KVStore]:
        """Each layer's store."""
        return [cache.store for cache in self.caches]

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
        """Bytes of what the cache and the method keep on the device: stores there (none under managed placement, whose
        pages come and go), resident rows, buffers for fetched rows, and every tensor of the method's state, a
        calibration included."""
        stores = sum(store.nbytes for store in self.stores) if self.placement == "device" else 0
        state = next((cache.state for cache in self.caches if cache.state is not None), None)
        resident = sum(cache.device_bytes for cache in self.caches)
        return stores + resident + self.fetcher.device_bytes + memory.tensor_bytes(vars(state) if state else None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this session."""
        return self.slab.nbytes if self.slab else 0

    def close(self) -> None:
        """Free the cache. The link stays open. Raises the error of a transfer that failed."""
        try:
            self.fetcher.close()
        finally:
            for store in self.stores:
                store.free()
            if self.slab is not None:
                self.slab.close()

    def _open(self, real: Tensor, activations: int) -> None:
        """Make all that decoding needs, after asking whether it fits. activations: bytes that the prompt takes."""
        if self.caches:
            raise RuntimeError("a session prefills once")
        self.attached.require_window(real.shape[1] + self.max_new_tokens)
        self.batch = Batch(real, self.max_new_tokens)
        state = None
        if not self.method.reads_all:
            state = self.method.new_state(self.attached.geometry, self.batch.lengths, self.calibration)
        layers = range(self.attached.geometry.num_layers)
        slots = [self._slots(layer, state) for layer in layers]
        exempt = self.method.num_exempt_layers
        rows = {row for steps in range(self.max_new_tokens + 1) for row in self.batch.rows(steps)}
        selected = max(self.method.max_tokens_read(row, layer) for row in rows for layer in layers[exempt:])
        ahead = exempt if not self.method.reads_all or self.codec.bits < 16 else 0
        self.bytes_needed = memory.session_bytes(
            slots, self.placement, ahead=ahead, selected=selected, reuse=self.fetcher.reuse, activations=activations
        )
        if self.placement == "managed":
            memory.require_managed(self.bytes_needed.managed, self.attached.device)
        memory.require_session(self.bytes_needed, self.attached.device)
        if self.pinned and self.bytes_needed.host:
            self.slab = PinnedSlab(self.bytes_needed.host)
        self.caches = [self._cache(layer, state, slots[layer].capacity) for layer in layers]
        self.reads = StepReads(self.attached, exempt, self.codec, self.stores[-1].slot_bytes)
        self.fetcher.open(self.stores, selected, ahead)

    def _keep_prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Hand a layer's prompt to its cache. The first that has a state shows what each of them keeps of a prompt, so
        that is asked for before the others make it."""
        cache = self.caches[layer]
        cache.keep_prompt(query, key, value)
        if cache.state is not None and layer == self.method.num_exempt_layers:
            kept, others = memory.layer_bytes(cache.state, layer), len(self.caches) - layer - 1
            self.bytes_needed = self.bytes_needed._replace(device=self.bytes_needed.device + kept * (others + 1))
            memory.require_memory(kept * others, self.attached.device, "what the method keeps of the prompt")

    def _slots(self, layer: int, state: State | None) -> memory.LayerSlots:
        geometry = self.attached.geometry
        size = slot_bytes(self._codec(layer), geometry.head_dim)
        return memory.LayerSlots(len(self.batch.prompts) * geometry.num_kv_heads, self._num_slots(layer, state), size)

    def _num_slots(self, layer: int, state: State | None) -> int:
        if isinstance(state, EvictingState) and layer >= self.method.num_exempt_layers:
            return slots_needed(self.method, self.batch, layer)
        codec = self._codec(layer)
        return slots_stored(codec, self.batch, self.max_new_tokens) if codec.residual else self.batch.tokens.shape[1]

    def _codec(self, layer: int) -> AnyCodec:
        """Exempt layers are stored as they are, in replay and here."""
        return self.exact if layer < self.method.num_exempt_layers else self.codec

    def _cache(self, layer: int, state: State | None, num_slots: int) -> LayerCache:
        geometry, exempt = self.attached.geometry, layer < self.method.num_exempt_layers
        store = KVStore(
            batch=len(self.batch.prompts),
            num_kv_heads=geometry.num_kv_heads,
            capacity=num_slots,
            head_dim=geometry.head_dim,
            dtype=self.attached.dtype,
            codec=self._codec(layer),
            placement=self.placement,
            device=self.attached.device,
            slab=self.slab,
            tuning=self.tuning,
        )
        kind = ValuesCache if self.method.holds_keys and not exempt else LayerCache
        kind = ResidualCache if store.codec.residual else kind
        return kind(layer, self.batch, store, None if exempt else state, self.method, self.fetcher, exempt)


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


class StepReads:
    """Sums over the steps and sequences so far; the shares are those of `harness.sizes`.

    codec: of the rows in the non-exempt layers, which take `slot_bytes` a token and KV head.
    num_bytes: fp64, 0-d: the rows that attention read as they are stored, what was read of an index in the dtype that
    is computed in, and the own token of every layer; of real tokens only, padding is not counted.
    """

    def __init__(self, attached: Attached, num_exempt: int, codec: AnyCodec, slot_bytes: int) -> None:
        geometry = attached.geometry
        self.num_layers, self.num_kv_heads = geometry.num_layers, geometry.num_kv_heads
        self.num_exempt = num_exempt
        self.width = codec.bits_per_element(geometry.head_dim) / 16
        self.token_bytes = 2 * geometry.head_dim * attached.dtype.itemsize  # exact, of a KV head
        self.slot_bytes = slot_bytes
        self.rows = 0
        self.frac_sum, self.index_sum, self.num_bytes = torch.zeros(3, dtype=torch.float64, device=attached.device)

    def count(self, cached: Tensor, reads: list[Tensor], index_reads: list[Tensor]) -> None:
        """Add a step: int [batch] tokens cached before it; of each non-exempt layer [batch] tokens read, and read of an
        index, mean over KV heads."""
        read, index_read = (_sum(cached, each) for each in (reads, index_reads))
        self.rows += len(cached)
        share = share_of_cache(cached, read, self.width, self.num_exempt, self.num_layers)
        index_share = share_of_cache(cached, index_read, 1.0, 0, self.num_layers)
        exact = self.num_exempt * cached + index_read + self.num_layers
        num_bytes = self.num_kv_heads * (exact * self.token_bytes + read * self.slot_bytes)
        self.frac_sum = self.frac_sum + share.sum()
        self.index_sum = self.index_sum + index_share.sum()
        self.num_bytes = self.num_bytes + num_bytes.sum()

    @property
    def kv_frac(self) -> float:
        """What was read of the cache / the full cache, mean over the steps and sequences so far."""
        return float(self.frac_sum) / self.rows

    @property
    def device_frac(self) -> float:
        """What was read in device memory / the full cache, alike."""
        return float(self.frac_sum + self.index_sum) / self.rows


def _sum(cached: Tensor, layers: list[Tensor]) -> Tensor:
    """Over the layers, one launch for all: fp64, shaped like `cached`, zeros of none."""
    return torch.stack(layers).sum(0, dtype=torch.float64) if layers else torch.zeros_like(cached, dtype=torch.float64)
