"""Live decoding: prefill, then one token a step through two memories.

Under host placement the cache of every layer that sees every token lies in host memory. A layer's rows are requested
while the previous layer computes: everything that is kept, or what a rehearsal there selects. A method that selects by
the layer's own query requests them in the layer itself and waits. Rows of the exempt layers, where the others read
less, cross during the step before. `harness.offload.step` is the page on which a step can be read.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for logits in generate(session, session.prefill(ids, real)): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.attach import Attached, launching_on
from harness.model.policies import Policy, new_states, policies_of
from harness.model.prompt import PrefilledPrompt, PromptPass, positions_of, prompt_bytes
from harness.offload import memory
from harness.offload.cache import Batch, LayerCache, LocalCache, ResidualCache, ValuesCache, slots_needed
from harness.offload.fetch import Fetcher
from harness.offload.links import Link, Links, link_of
from harness.offload.memory import DEFAULT_TUNING, PinnedSlab
from harness.offload.step import DecodeStep, Timeline
from harness.offload.store import KVStore, RowFormat
from harness.settings.config import Placement
from harness.settings.systems import check_combination
from harness.sizes import StepReads
from methods.base import Calibration, Method, State
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec, without_keys


@dataclass
class _Stage:
    """What a session has on one device. layers: indices of the attention layers on it."""

    device: torch.device
    layers: list[int]
    fetcher: Fetcher
    batch: Batch = field(init=False)
    state: State | None = None
    slab: PinnedSlab | None = None


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the cached rows in the
    layers under the method; None stores them as they are. placement: where the cache lies. link: moves the rows under
    host placement; one for all devices of a model, or one for each. reuse: rows fetched in the step before and selected
    again do not cross the link again. pinned: host memory is page-locked under CUDA, so that transfers can overlap.
    timeline: marks the segments of each step. Raises ValueError for combinations without meaning.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        max_new_tokens: int,
        codec: AnyCodec | None = None,
        placement: Placement = "device",
        link: Links | None = None,
        calibration: Calibration | None = None,
        reuse: bool = False,
        pinned: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        check_combination(method, placement, reuse)
        on_host = placement == "host"
        if on_host and link is None:
            raise ValueError("placement=host: needs a link")
        if placement == "managed" and len(attached.devices) > 1:
            raise UserError("placement=managed: the model lies on several devices; allowed there: device, host")
        self.attached = attached
        self.method = method
        self.policies: list[Policy] = policies_of(attached, method)
        if on_host and any(policy.when == "true_scores" for policy in self.policies):
            raise ValueError(f"placement=host: {method.title} selects by the true scores of all keys")
        self.max_new_tokens = max_new_tokens
        self.exact = Codec(next(name for name, stored in FLOAT_DTYPES.items() if stored == attached.dtype))
        self.codec: AnyCodec = codec or self.exact
        if method.holds_keys:
            self.codec = without_keys(self.codec)
        self.placement: Placement = placement
        self.calibration = calibration
        self.pinned = pinned and on_host and attached.device.type == "cuda"
        self.timeline = timeline or Timeline(attached.device)
        self.stages: dict[torch.device, _Stage] = {}
        for device in attached.devices:
            layers = [index for index, layer in enumerate(attached.layers) if layer.device == device]
            fetcher = Fetcher(link_of(link, device) if on_host and link is not None else None, reuse)
            self.stages[device] = _Stage(device, layers, fetcher)
        self.caches: list[LayerCache | LocalCache] = []
        self.model_cache = attached.new_cache()
        self.bytes_needed = memory.SessionBytes(0, 0)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the prompts densely and write their rows to the cache.

        ids: int [batch, prompt]; real: bool alike, False for the padding on the left, so that prompts end in one
        column. Returns logits [batch, vocab] for the first new token.
        """
        self._open(real, prompt_bytes(self.attached, ids.numel()))
        keep = PromptPass(self.attached, real, self._keep_prompt)
        hidden = self.attached.forward(ids, positions_of(real), keep, self.model_cache, real)
        return self.attached.logits(hidden[:, -1])

    @torch.inference_mode()
    def start(self, prompt: PrefilledPrompt) -> Tensor:
        """Take over a prefilled prompt instead of running it; returns logits [batch, vocab]."""
        self._open(prompt.real, activations=0)
        for layer, states in enumerate(prompt.layers):
            self._keep_prompt(layer, *states)
        self.model_cache = prompt.model_cache.fork(torch.arange(len(prompt.real)))
        return self.attached.logits(prompt.hidden)

    @torch.inference_mode()
    def decode_step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence, ids int [batch]; returns logits [batch, vocab] for the next."""
        if self.steps >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: all of them have been decoded")
        step = DecodeStep(self.caches, self.timeline, is_last=self.steps + 2 >= self.max_new_tokens)
        step.begin()
        hidden = self.attached.forward(ids[:, None], self.batch.positions[:, None], step, self.model_cache)
        self.timeline.switch("other")
        self.reads.count(self.batch.positions, step.reads, step.index_reads)
        for stage in self.stages.values():
            stage.batch.advance()
        return self.attached.logits(hidden[:, -1])

    @property
    def batch(self) -> Batch:
        """How far the session has come, and the tokens of its columns, on the first layer's device."""
        return next(iter(self.stages.values())).batch

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    @property
    def links(self) -> list[Link]:
        """The links in use, each once."""
        links = [stage.fetcher.link for stage in self.stages.values() if stage.fetcher.link is not None]
        return list(dict.fromkeys(links))

    @property
    def states(self) -> list[State]:
        """The method's states, one on each device; none where it reads everything."""
        return [stage.state for stage in self.stages.values() if stage.state is not None]

    @property
    def stores(self) -> list[KVStore]:
        """The store of each layer that sees every token."""
        return [cache.store for cache in self.caches if isinstance(cache, LayerCache)]

    @property
    def loaded_bytes(self) -> int | Tensor:
        """Payload bytes of the rows that the steps so far took from the link. Counts nothing that is under way."""
        return self._total([stage.fetcher.loaded.num_bytes for stage in self.stages.values()])

    @property
    def written_bytes(self) -> int | Tensor:
        """Payload bytes written back so far, the prompt's included. Counted as `loaded_bytes`."""
        return self._total([stage.fetcher.written.num_bytes for stage in self.stages.values()])

    def _total(self, counts: list[int | Tensor]) -> int | Tensor:
        return sum(each.to(self.attached.device) if isinstance(each, Tensor) else each for each in counts)

    @property
    def h2d_bytes(self) -> int:
        """Payload bytes fetched over the link so far, with those under way: waits for them."""
        self.drain()
        return sum(store.h2d_bytes for store in self.stores)

    @property
    def d2h_bytes(self) -> int:
        """Payload bytes written back over the link so far, the prompt's included: waits as `h2d_bytes`."""
        self.drain()
        return sum(store.d2h_bytes for store in self.stores)

    @property
    def device_bytes(self) -> int:
        """Bytes that cache and method keep on the device: stores (none under managed placement, whose pages come and
        go), rows that stay there, windows, recurrent states, fetch buffers, and the method's states with their
        calibration."""
        stores = sum(store.nbytes for store in self.stores) if self.placement == "device" else 0
        kept = sum(cache.device_bytes for cache in self.caches) + self.model_cache.nbytes
        buffers = sum(stage.fetcher.device_bytes for stage in self.stages.values())
        return stores + kept + buffers + sum(memory.tensor_bytes(vars(state)) for state in self.states)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this session."""
        return sum(stage.slab.nbytes for stage in self.stages.values() if stage.slab is not None)

    def close(self) -> None:
        """Free the cache. The links stay open. Raises the error of a transfer that failed."""
        try:
            for stage in self.stages.values():
                stage.fetcher.close()
        finally:
            for store in self.stores:
                store.free()
            for stage in self.stages.values():
                if stage.slab is not None:
                    with launching_on(stage.device):
                        stage.slab.close()

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the error of a transfer that failed."""
        for stage in self.stages.values():
            stage.fetcher.drain()

    def _open(self, real: Tensor, activations: int) -> None:
        """Make what decoding needs, after asking whether it fits. activations: bytes that the prompt's pass takes."""
        if self.caches:
            raise RuntimeError("a session prefills once")
        self.attached.require_length(real.shape[1] + self.max_new_tokens)
        self.attached.require_even(real)
        for device, stage in self.stages.items():
            stage.batch = Batch(real.to(device), self.max_new_tokens)
        states = new_states(self.attached, self.method, self.batch.lengths, self.calibration)
        caches: dict[int, LayerCache | LocalCache] = {}
        for device, stage in self.stages.items():
            stage.state = states.get(device)
            with launching_on(device):
                caches |= self._open_stage(stage, activations)
        self.caches = [caches[layer] for layer in sorted(caches)]
        fetched = [cache for cache in self.caches if isinstance(cache, LayerCache)]
        for cache, following in zip(fetched, fetched[1:], strict=False):
            cache.following = following
            following.earlier = cache.state
        self.reads = StepReads(
            self.attached.geometry,
            self.method.num_exempt_layers,
            self.codec,
            slot_bytes=self.stores[-1].slot_bytes,
            element_bytes=self.attached.dtype.itemsize,
            device=self.batch.real.device,
        )

    def _open_stage(self, stage: _Stage, activations: int) -> dict[int, LayerCache | LocalCache]:
        """The caches of the layers on one device: stores and buffers are planned, asked for, and then allocated."""
        stores = {layer: self._store(layer, stage) for layer in stage.layers if self.policies[layer].kind != "local"}
        under_method = [self.policies[layer].number for layer in stores if self.policies[layer].kind == "method"]
        rows = {row for steps in range(self.max_new_tokens + 1) for row in stage.batch.rows(steps)}
        most = (self.method.max_tokens_read(row, number) for row in rows for number in under_method)
        reads_less = bool(under_method) and (not self.method.reads_all or self.codec.bits < 16)
        num_ahead = len(stores) - len(under_method) if reads_less else 0
        if stores:
            buffers = stage.fetcher.plan(stores, max(most, default=0), num_ahead)
            slots = sum(memory.aligned(store.nbytes) for store in stores.values())
            on_device = buffers + activations + self._window_bytes(stage)
            needed = {
                "host": memory.SessionBytes(slots, on_device),
                "device": memory.SessionBytes(0, slots + on_device),
                "managed": memory.SessionBytes(0, on_device, slots),
            }[self.placement]
            self.bytes_needed = memory.SessionBytes(*map(sum, zip(self.bytes_needed, needed, strict=True)))
            memory.require_session(needed, stage.device)
            if self.pinned and slots:
                stage.slab = PinnedSlab(slots)
            for store in stores.values():
                store.allocate(stage.slab)
            stage.fetcher.open()
        caches = {layer: self._cache(layer, stage, stores.get(layer)) for layer in stage.layers}
        others = [cache for layer, cache in caches.items() if layer in stores and layer not in stage.fetcher.ahead]
        for part, cache in enumerate(others if stage.fetcher.ahead else []):
            assert isinstance(cache, LayerCache)
            cache.part = part, len(others)
        return caches

    def _store(self, layer: int, stage: _Stage) -> KVStore:
        """A layer's store, not allocated yet. Exempt layers store rows as they are, in replay and here."""
        shape, policy, batch, link = self.attached.layers[layer], self.policies[layer], stage.batch, stage.fetcher.link
        codec = self.codec if policy.kind == "method" else self.exact
        return KVStore(
            RowFormat(codec, shape.head_dim, self.attached.dtype, shape.value_dim, shape.latent is not None),
            batch=len(batch.prompts),
            num_kv_heads=shape.num_kv_heads,
            capacity=slots_needed(policy, self.method, stage.state, codec, batch),
            placement=self.placement,
            device=stage.device,
            tuning=DEFAULT_TUNING if link is None else link.tuning,
        )

    def _cache(self, layer: int, stage: _Stage, store: KVStore | None) -> LayerCache | LocalCache:
        policy = self.policies[layer]
        if store is None:
            return LocalCache(policy, stage.batch)
        kind = ValuesCache if self.method.holds_keys and policy.kind == "method" else LayerCache
        kind = ResidualCache if store.codec.residual else kind
        state = stage.state if policy.kind == "method" else None
        return kind(layer, policy, stage.batch, store, state, self.method, stage.fetcher)

    def _window_bytes(self, stage: _Stage) -> int:
        """Bytes of the local layers' rings."""
        elements, batch = 0, stage.batch
        for layer in stage.layers:
            shape, window = self.attached.layers[layer], self.policies[layer].window
            if window is not None:
                rows = LocalCache.rows_needed(window, batch.tokens.shape[1])
                elements += rows * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        return len(batch.prompts) * elements * self.attached.dtype.itemsize

    def _keep_prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Hand a layer's prompt to its cache. The first state shows what each layer keeps of a prompt, so the memory of
        the others is asked for before they keep theirs."""
        cache = self.caches[layer]
        with launching_on(key.device):
            cache.keep_prompt(query, key, value)
        if not isinstance(cache, LayerCache) or cache.state is None:
            return
        alike = [each for each in self.caches if isinstance(each, LayerCache) and each.state is cache.state]
        if cache is alike[0]:
            kept, others = memory.layer_bytes(cache.state, cache.policy.number), len(alike) - 1
            self.bytes_needed = self.bytes_needed._replace(device=self.bytes_needed.device + kept * (others + 1))
            memory.require_memory(kept * others, cache.store.device, "what the method keeps of the prompt")


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
