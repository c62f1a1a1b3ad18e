"""Live decoding: prefill, then one token a step through two memories.

Under host placement the cache of every layer that sees every token lies in host memory. A layer's rows are asked for
while the previous layer computes: all that is kept, or what a rehearsal there selects; a method that selects by the
layer's own query asks in the layer itself and waits. Rows of the exempt layers, where the others read less, cross
during the step before. `harness.offload.step` is the page on which a step can be read.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for logits in generate(session, session.prefill(ids, real)): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.attach import Attached, launching_on
from harness.model.policies import Policy, new_states, policies_of
from harness.model.prompt import PrefilledPrompt, PromptPass, positions_of, prompt_bytes
from harness.offload import memory
from harness.offload.cache import Batch, LayerCache, LocalCache, ResidualCache, ValuesCache, slots_needed
from harness.offload.fetch import Fetcher
from harness.offload.links import Link, Links
from harness.offload.memory import DEFAULT_TUNING, PinnedSlab
from harness.offload.step import DecodeStep
from harness.offload.store import KVStore, RowFormat
from harness.offload.timeline import Timeline
from harness.settings.speed import Placement, check_combination
from harness.sizes import StepReads
from methods.base import Calibration, Method, State
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec, without_keys


@dataclass
class _Stage:
    """What a session has on one device. layers: indices of the attention layers that lie there."""

    device: torch.device
    layers: list[int]
    fetcher: Fetcher
    batch: Batch | None = None
    state: State | None = None
    slab: PinnedSlab | None = None


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the cached rows in the
    layers under the method; None stores them as they are. placement: where the cache lies. link: moves the rows under
    host placement; of a model on several devices one for each. reuse: rows fetched in the step before and selected
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
        if placement == "host" and link is None:
            raise ValueError("placement=host: needs a link")
        self.attached = attached
        self.method = method
        self.policies: list[Policy] = policies_of(attached, method)
        if placement == "host" and any(policy.when == "true_scores" for policy in self.policies):
            raise ValueError(f"placement=host: {method.title} selects by the true scores of all keys")
        self.max_new_tokens = max_new_tokens
        self.exact = Codec(next(name for name, stored in FLOAT_DTYPES.items() if stored == attached.dtype))
        self.codec: AnyCodec = codec or self.exact
        if method.holds_keys:
            self.codec = without_keys(self.codec)
        self.placement: Placement = placement
        self.calibration = calibration
        self.pinned = pinned and placement == "host" and attached.device.type == "cuda"
        self.timeline = timeline or Timeline(attached.device)
        self.stages: dict[torch.device, _Stage] = {}
        for device in attached.devices:
            own_link = link[device] if isinstance(link, Mapping) else link
            layers = [index for index, layer in enumerate(attached.layers) if layer.device == device]
            self.stages[device] = _Stage(device, layers, Fetcher(own_link if placement == "host" else None, reuse))
        if placement == "managed" and len(self.stages) > 1:
            raise UserError("placement=managed: the model lies on several devices; allowed there: device, host")
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
            assert stage.batch is not None
            stage.batch.advance()
        return self.attached.logits(hidden[:, -1])

    @property
    def batch(self) -> Batch:
        """How far the session has come, and the tokens of its columns, on the first layer's device."""
        batch = next(iter(self.stages.values())).batch
        assert batch is not None, "prefill or start comes first"
        return batch

    @property
    def fetcher(self) -> Fetcher:
        """Of the first layer's device."""
        return next(iter(self.stages.values())).fetcher

    @property
    def links(self) -> list[Link]:
        """Those that the session uses, each once."""
        found = [stage.fetcher.link for stage in self.stages.values() if stage.fetcher.link is not None]
        return list(dict.fromkeys(found))

    @property
    def states(self) -> list[State]:
        """The method's, one on each device; none where it reads everything."""
        return [stage.state for stage in self.stages.values() if stage.state is not None]

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    @property
    def stores(self) -> list[KVStore]:
        """The store of each layer that sees every token."""
        return [cache.store for cache in self.caches if isinstance(cache, LayerCache)]

    @property
    def loaded_bytes(self) -> int | Tensor:
        """Payload bytes of the rows that the steps so far took from the link, whatever is still under way."""
        return self._total([stage.fetcher.loaded.num_bytes for stage in self.stages.values()])

    @property
    def written_bytes(self) -> int | Tensor:
        """Payload bytes that were written back so far, alike, the prompt's included."""
        return self._total([stage.fetcher.written.num_bytes for stage in self.stages.values()])

    @property
    def h2d_bytes(self) -> int:
        """Payload bytes fetched over the link so far, those under way included: waits for them."""
        self.drain()
        return sum(store.h2d_bytes for store in self.stores)

    @property
    def d2h_bytes(self) -> int:
        """Payload bytes written back over the link so far, the prompt's included: waits as `h2d_bytes`."""
        self.drain()
        return sum(store.d2h_bytes for store in self.stores)

    @property
    def device_bytes(self) -> int:
        """Bytes of what the cache and the method keep on the device: stores there (none under managed placement, whose
        pages come and go), rows that stay there, windows, recurrent states, buffers for fetched rows, and every tensor
        of the method's state, a calibration included."""
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

    def _total(self, counts: list[int | Tensor]) -> int | Tensor:
        return sum(each.to(self.attached.device) if isinstance(each, Tensor) else each for each in counts)

    def _open(self, real: Tensor, activations: int) -> None:
        """Make all that decoding needs, after asking whether it fits. activations: bytes that the prompt takes."""
        if self.caches:
            raise RuntimeError("a session prefills once")
        self.attached.require_length(real.shape[1] + self.max_new_tokens)
        self.attached.require_even(real)
        caches: dict[int, LayerCache | LocalCache] = {}
        batches = {device: Batch(real.to(device), self.max_new_tokens) for device in self.stages}
        states = new_states(self.attached, self.method, next(iter(batches.values())).lengths, self.calibration)
        for device, stage in self.stages.items():
            stage.batch, stage.state = batches[device], states.get(device)
            with launching_on(device):
                caches |= self._open_stage(stage, batches[device], activations)
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

    def _open_stage(self, stage: _Stage, batch: Batch, activations: int) -> dict[int, LayerCache | LocalCache]:
        """The caches of the layers on one device."""
        fetched = [layer for layer in stage.layers if self.policies[layer].kind != "local"]
        slots = {layer: self._slots(layer, stage, batch) for layer in fetched}
        under_method = [layer for layer in fetched if self.policies[layer].kind == "method"]
        rows = {row for steps in range(self.max_new_tokens + 1) for row in batch.rows(steps)}
        numbers = [self.policies[layer].number for layer in under_method]
        selected = max((self.method.max_tokens_read(row, number) for row in rows for number in numbers), default=0)
        reads_less = bool(under_method) and (not self.method.reads_all or self.codec.bits < 16)
        num_ahead = len(fetched) - len(under_method) if reads_less else 0
        if fetched:
            needed = memory.session_bytes(
                list(slots.values()), self.placement, ahead=num_ahead, selected=selected, reuse=stage.fetcher.reuse,
                activations=activations + self._window_bytes(stage, batch),
            )  # fmt: skip
            self.bytes_needed = memory.SessionBytes(*map(sum, zip(self.bytes_needed, needed, strict=True)))
            if self.placement == "managed":
                memory.require_managed(needed.managed, stage.device)
            memory.require_session(needed, stage.device)
            if self.pinned and needed.host:
                stage.slab = PinnedSlab(needed.host)
        caches: dict[int, LayerCache | LocalCache] = {
            layer: self._cache(layer, stage, batch, slots[layer].capacity) if layer in slots
            else LocalCache(self.policies[layer], batch)
            for layer in stage.layers
        }  # fmt: skip
        in_order = [cache for cache in caches.values() if isinstance(cache, LayerCache)]
        if in_order:
            stage.fetcher.open({cache.index: cache.store for cache in in_order}, selected, num_ahead)
        others = in_order[len(stage.fetcher.ahead) :]
        for part, cache in enumerate(others if stage.fetcher.ahead else []):
            cache.part = part, len(others)
        return caches

    def _keep_prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Hand a layer's prompt to its cache. The first that has a state shows what each of them keeps of a prompt, so
        that is asked for before the others make it."""
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

    def _format(self, layer: int) -> RowFormat:
        """How a layer's rows are stored: exempt layers as they are, in replay and here."""
        shape, policy = self.attached.layers[layer], self.policies[layer]
        codec = self.codec if policy.kind == "method" else self.exact
        return RowFormat(codec, shape.head_dim, self.attached.dtype, shape.value_dim, shape.latent is not None)

    def _slots(self, layer: int, stage: _Stage, batch: Batch) -> memory.LayerSlots:
        row_format = self._format(layer)
        capacity = slots_needed(self.policies[layer], self.method, stage.state, row_format.codec, batch)
        heads = len(batch.prompts) * self.attached.layers[layer].num_kv_heads
        return memory.LayerSlots(heads, capacity, row_format.slot_bytes)

    def _window_bytes(self, stage: _Stage, batch: Batch) -> int:
        """Of the local layers' rings."""
        elements = 0
        for layer in stage.layers:
            shape, window = self.attached.layers[layer], self.policies[layer].window
            if window is not None:
                rows = LocalCache.rows_needed(window, batch.tokens.shape[1])
                elements += rows * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        return len(batch.prompts) * elements * self.attached.dtype.itemsize

    def _cache(self, layer: int, stage: _Stage, batch: Batch, capacity: int) -> LayerCache:
        policy = self.policies[layer]
        store = KVStore(
            self._format(layer),
            batch=len(batch.prompts),
            num_kv_heads=self.attached.layers[layer].num_kv_heads,
            capacity=capacity,
            placement=self.placement,
            device=stage.device,
            slab=stage.slab,
            tuning=stage.fetcher.link.tuning if stage.fetcher.link is not None else DEFAULT_TUNING,
        )
        kind = ValuesCache if self.method.holds_keys and policy.kind == "method" else LayerCache
        kind = ResidualCache if store.codec.residual else kind
        state = stage.state if policy.kind == "method" else None
        return kind(layer, policy, batch, store, state, self.method, stage.fetcher)


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
