"""Live decoding: prefill, then one token a step through two memories.

Under host placement the cache of every layer that sees every token lies in host memory. A layer's
rows are requested while the previous layer computes: everything that is kept, or what a rehearsal
there selects. A method that selects by the layer's own query requests them in the layer itself and
waits. Rows of the exempt layers, where the others read less, cross during the step before.
`harness.live.step` is the page on which a step can be read.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for _ in generate(session, session.prefill(ids, real), drafts): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.errors import UserError
from harness.live import hot_rows, memory
from harness.live.cache import Batch, LayerCache, Stage, Traffic, slots_needed
from harness.live.links import Link, Links, link_of
from harness.live.memory import DEFAULT_TUNING, PinnedSlab
from harness.live.resident import LocalCache, ResidualCache, ValuesCache
from harness.live.step import DecodeStep
from harness.live.store import KVStore, RowFormat
from harness.live.timeline import Timeline
from harness.model.attached import Attached, launching_on
from harness.model.dense_prompts import PrefilledPrompt
from harness.model.policies import Policy, new_states, policies_of
from harness.model.prompts import prompt_bytes
from harness.model.rereading import held_bytes, planned, read_again, run_prompts
from harness.model.sampling import Draft, write
from harness.model.sizes import StepReads
from harness.settings.config import Placement
from harness.settings.systems import check_combination
from methods.base import Calibration, LayerInputs, Method, State
from methods.codec import FLOAT_DTYPES, AnyCodec, Codec, without_keys


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the
    cached rows in the layers under the method; None stores them as they are. placement: where the
    cache lies. link: moves the rows under host placement; one for all devices of a model, or one
    for each. device_rows: rows of each layer and KV head that stay on the device, in times of what
    a step reads at most; 0, or 1 and more. prefetch: what a query made in the layer before would
    select crosses the link early, for methods that select by the layer's own. pinned: host memory
    is page-locked under CUDA, so that transfers can overlap. timeline: marks the segments of each
    step. Raises ValueError for combinations without meaning.

    caches: of each attention layer; stores: of those that see every token. reads: what the steps
    read on the device. bytes_needed: memory that was asked for.
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
        device_rows: float = 0,
        prefetch: bool = False,
        pinned: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        check_combination(method, placement, device_rows, prefetch)
        on_host = placement == "host"
        if on_host and link is None:
            raise ValueError("placement=host: needs a link")
        if placement == "managed" and len(attached.devices) > 1:
            raise UserError(
                "placement=managed: the model lies on several devices; allowed there: device, host"
            )
        self.attached = attached
        self.method = method
        self.policies: list[Policy] = policies_of(attached, method, prefetch=prefetch)
        if on_host and any(policy.when == "true_scores" for policy in self.policies):
            raise ValueError(
                f"placement=host: {method.title} selects by the true scores of all keys"
            )
        self.max_new_tokens = max_new_tokens
        self.exact = Codec(
            next(name for name, stored in FLOAT_DTYPES.items() if stored == attached.dtype)
        )
        self.codec: AnyCodec = (
            without_keys(codec or self.exact) if method.holds_keys else codec or self.exact
        )
        self.placement: Placement = placement
        self.link = link if on_host else None
        self.calibration = calibration
        self.device_rows = device_rows
        self.pinned = pinned and on_host and attached.device.type == "cuda"
        self.timeline = timeline or Timeline(attached.device)
        self.stages: dict[torch.device, Stage] = {}
        self.caches: list[LayerCache | LocalCache] = []
        self.stores: list[KVStore] = []
        self.model_cache = attached.new_cache()
        self.bytes_needed = memory.SessionBytes(0, 0)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the prompts densely, and again where the method asks for it, and write their rows to
        the cache.

        ids: int [batch, prompt]; real: bool of the same shape, False for the padding on the left,
        so that prompts end in one column. Returns logits [batch, vocab] for the first new token.
        """
        needed = held_bytes if self.method.rereads else prompt_bytes
        self._open(real, needed(self.attached, ids.numel()))
        hidden = run_prompts(
            self.attached, self.method, self.states, ids, real, self._keep_prompt, self.model_cache
        )
        self._count_from_here()
        return self.attached.logits(hidden[:, -1])

    @torch.inference_mode()
    def start(self, prompt: PrefilledPrompt) -> Tensor:
        """Take over a prefilled prompt instead of running it; returns logits [batch, vocab].

        A method that needs the layers' inputs runs it anew: a prefilled prompt has not kept them.
        """
        if self.method.needs_inputs:
            return self.prefill(prompt.ids, prompt.real)
        passes = (
            planned(self.attached, self.method, prompt.ids, prompt.real)
            if self.method.rereads
            else []
        )
        self._open(
            prompt.real,
            prompt_bytes(self.attached, max((each.ids.numel() for each in passes), default=0)),
        )
        if self.method.rereads:
            read_again(self.attached, self.method, self.states, prompt, passes)
        for layer, states in enumerate(prompt.layers):
            self._keep_prompt(layer, *states)
        self._count_from_here()
        self.model_cache = prompt.model_cache.fork(torch.arange(len(prompt.real)))
        return self.attached.logits(prompt.hidden)

    @torch.inference_mode()
    def decode_step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence, ids int [batch]; returns logits [batch, vocab] for
        the next."""
        if self.steps >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: all of them have been decoded")
        step = DecodeStep(self.caches, self.timeline, is_last=self.steps + 2 >= self.max_new_tokens)
        step.begin()
        hidden = self.attached.forward(
            ids[:, None], self.batch.positions[:, None], step, self.model_cache
        )
        self.timeline.switch("other")
        self.reads.count(self.batch.positions, step.reads, step.index_reads)
        for stage in self.stages.values():
            stage.batch.advance()
        return self.attached.logits(hidden[:, -1])

    @property
    def batch(self) -> Batch:
        """How far the session has come, and the tokens of its columns, on the first layer's
        device."""
        return next(iter(self.stages.values())).batch

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    @property
    def links(self) -> list[Link]:
        """The links in use, each once."""
        return list(
            dict.fromkeys(stage.link for stage in self.stages.values() if stage.link is not None)
        )

    @property
    def states(self) -> list[State]:
        """The method's states, one on each device; none where it reads everything."""
        return [stage.state for stage in self.stages.values() if stage.state is not None]

    @property
    def loaded_bytes(self) -> int | Tensor:
        """Payload bytes of the rows that the decode steps so far took from the link: every row that
        a layer asked for and waited for, in vain or not. Rows that are under way for a step that
        has not come are not among them. Under CUDA a 0-d tensor (no sync)."""
        return self._total([stage.loaded.num_bytes for stage in self.stages.values()])

    @property
    def late_bytes(self) -> int | Tensor:
        """The part of `loaded_bytes` that layers asked for by their own query, and waited for."""
        return self._total([stage.late.num_bytes for stage in self.stages.values()])

    @property
    def written_bytes(self) -> int | Tensor:
        """Payload bytes that the decode steps so far wrote back, without the prompt's. Counted as
        `loaded_bytes`."""
        return self._total([stage.written.num_bytes for stage in self.stages.values()])

    @property
    def rows_loaded(self) -> int:
        """Rows of `loaded_bytes`, of one token and KV head each."""
        return int(self._total([stage.loaded.num_rows for stage in self.stages.values()]))

    def _count_from_here(self) -> None:
        """The prompt is written: the bytes counted from here on are those of decode steps."""
        for stage in self.stages.values():
            stage.written = Traffic()

    def _total(self, counts: list[int | Tensor]) -> int | Tensor:
        return sum(
            each.to(self.attached.device) if isinstance(each, Tensor) else each for each in counts
        )

    @property
    def h2d_bytes(self) -> int:
        """`loaded_bytes` as a number, which a GPU has to tell; 0 under managed placement, where the
        driver moves pages."""
        return int(self.loaded_bytes)

    @property
    def d2h_bytes(self) -> int:
        """`written_bytes` as a number, like `h2d_bytes`."""
        return int(self.written_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that cache and method keep on the device: stores (none under managed placement,
        whose pages come and go), rows that stay there, windows, recurrent states, fetch buffers,
        and the method's states with their calibration."""
        stores = sum(store.nbytes for store in self.stores) if self.placement == "device" else 0
        kept = sum(cache.device_bytes for cache in self.caches) + self.model_cache.nbytes
        buffers = sum(buffer.nbytes for stage in self.stages.values() for buffer in stage.buffers)
        return (
            stores + kept + buffers + sum(memory.tensor_bytes(vars(state)) for state in self.states)
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this session."""
        return sum(stage.slab.nbytes for stage in self.stages.values() if stage.slab is not None)

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the error of a transfer that failed."""
        for link in self.links:
            link.drain()

    def close(self) -> None:
        """Free the cache. The links stay open. Raises the error of a transfer that failed."""
        try:
            self.drain()
        finally:
            self.caches = []
            for store in self.stores:
                store.free()
            for device, stage in self.stages.items():
                stage.buffers, stage.free = [], []
                if stage.slab is not None:
                    with launching_on(device):
                        stage.slab.close()

    def _open(self, real: Tensor, activations: int) -> None:
        """Make what decoding needs, after asking whether it fits. activations: bytes that the
        prompt's pass takes."""
        if self.stores:
            raise RuntimeError("a session prefills once")
        attached = self.attached
        attached.require_length(real.shape[1] + self.max_new_tokens)
        attached.require_even(real)
        self.bytes_needed = memory.SessionBytes(0, 0)
        batches = {
            device: Batch(real.to(device), self.max_new_tokens) for device in attached.devices
        }
        lengths = [
            (prompt, prompt + self.max_new_tokens)
            for prompt in batches[attached.devices[0]].prompts
        ]
        rooms = hot_rows.rooms(self.method, self.policies, self.device_rows, lengths)
        for device, batch in batches.items():
            link = None if self.link is None else link_of(self.link, device)
            self.stages[device] = Stage(device, batch, link, rooms)
        states = new_states(attached, self.method, self.batch.lengths, self.calibration)
        caches: dict[int, LayerCache | LocalCache] = {}
        for device, stage in self.stages.items():
            stage.state = states.get(device)
            with launching_on(device):
                caches |= self._open_stage(stage, activations)
        self.caches = [caches[layer] for layer in sorted(caches)]
        fetching = [cache for cache in self.caches if isinstance(cache, LayerCache)]
        self.stores = [cache.store for cache in fetching]
        for cache, following in zip(fetching, fetching[1:], strict=False):
            cache.following = following
            following.earlier = cache.state
        self.reads = StepReads(
            attached.geometry,
            self.method.num_exempt_layers,
            self.codec,
            slot_bytes=self.stores[-1].slot_bytes,
            element_bytes=attached.dtype.itemsize,
            device=self.batch.real.device,
        )

    def _open_stage(self, stage: Stage, activations: int) -> dict[int, LayerCache | LocalCache]:
        """The caches of the layers on one device: stores and buffers are planned, asked for, and
        then allocated."""
        policies = {
            layer: policy
            for layer, (policy, shape) in enumerate(
                zip(self.policies, self.attached.layers, strict=True)
            )
            if shape.device == stage.device
        }
        stores = {
            layer: self._store(layer, stage)
            for layer, policy in policies.items()
            if policy.kind != "local"
        }
        under_method = [
            self.policies[layer].number for layer in stores if self.policies[layer].kind == "method"
        ]
        rows = {row for steps in range(self.max_new_tokens + 1) for row in stage.batch.rows(steps)}
        most = (self.method.max_tokens_read(row, number) for row in rows for number in under_method)
        reads_less = bool(under_method) and (not self.method.reads_all or self.codec.bits < 16)
        num_ahead = len(stores) - len(under_method) if reads_less and stage.link is not None else 0
        if stores:
            buffers = stage.plan([*stores.values()], max(most, default=0), num_ahead)
            slots = sum(memory.aligned(store.nbytes) for store in stores.values())
            on_device = buffers + activations + self._window_bytes(stage.batch, policies)
            needed = {
                "host": memory.SessionBytes(slots, on_device),
                "device": memory.SessionBytes(0, slots + on_device),
                "managed": memory.SessionBytes(0, on_device, slots),
            }[self.placement]
            self.bytes_needed = memory.SessionBytes(
                *map(sum, zip(self.bytes_needed, needed, strict=True))
            )
            memory.require_session(needed, stage.device)
            if self.pinned and slots:
                stage.slab = PinnedSlab(slots)
            for store in stores.values():
                store.allocate(stage.slab)
            stage.open([*stores.values()])
        caches = {
            layer: self._cache(policy, stage, stores.get(layer))
            for layer, policy in policies.items()
        }
        fetching = [cache for cache in caches.values() if isinstance(cache, LayerCache)]
        ahead, others = fetching[:num_ahead], fetching[num_ahead:]
        for cache in ahead:
            cache.own_buffer = stage.new_buffer(cache.store, cache.store.capacity)
        for number, cache in enumerate(others if ahead else []):
            cache.part = number, len(others), ahead
        return caches

    def _store(self, layer: int, stage: Stage) -> KVStore:
        """A layer's store, not allocated yet. Exempt layers store rows as they are, in replay and
        here."""
        shape, policy, batch, link = (
            self.attached.layers[layer],
            self.policies[layer],
            stage.batch,
            stage.link,
        )
        codec = self.codec if policy.kind == "method" else self.exact
        return KVStore(
            RowFormat(
                codec,
                shape.head_dim,
                self.attached.dtype,
                shape.value_dim,
                shape.latent is not None,
            ),
            batch=len(batch.prompts),
            num_kv_heads=shape.num_kv_heads,
            capacity=slots_needed(policy, self.method, stage.state, codec, batch),
            placement=self.placement,
            device=stage.device,
            tuning=DEFAULT_TUNING if link is None else link.tuning,
        )

    def _cache(
        self, policy: Policy, stage: Stage, store: KVStore | None
    ) -> LayerCache | LocalCache:
        if store is None:
            return LocalCache(policy, stage.batch)
        is_under_method = policy.kind == "method"
        kind = ValuesCache if self.method.holds_keys and is_under_method else LayerCache
        kind = ResidualCache if store.codec.residual else kind
        return kind(policy, stage, store, stage.state if is_under_method else None, self.method)

    def _window_bytes(self, batch: Batch, policies: dict[int, Policy]) -> int:
        """Bytes of the local layers' rings."""
        elements = 0
        for layer, policy in policies.items():
            shape = self.attached.layers[layer]
            if policy.window is not None:
                rows = LocalCache.rows_needed(policy.window, batch.tokens.shape[1])
                elements += rows * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        return len(batch.prompts) * elements * self.attached.dtype.itemsize

    def _keep_prompt(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        inputs: LayerInputs | None = None,
    ) -> None:
        """Hand a layer's prompt to its cache. The first state shows what each layer keeps of a
        prompt, so the memory of the others is asked for before they keep theirs."""
        cache = self.caches[layer]
        with launching_on(key.device):
            cache.keep_prompt(query, key, value, inputs)
        if not isinstance(cache, LayerCache) or cache.state is None:
            return
        alike = [
            each
            for each in self.caches
            if isinstance(each, LayerCache) and each.state is cache.state
        ]
        if cache is alike[0]:
            kept, others = memory.layer_bytes(cache.state, cache.policy.number), len(alike) - 1
            self.bytes_needed = self.bytes_needed._replace(
                device=self.bytes_needed.device + kept * (others + 1)
            )
            memory.require_memory(
                kept * others, cache.store.device, "what the method keeps of the prompt"
            )


def generate(session: LiveSession, logits: Tensor, drafts: Sequence[Draft]) -> Iterator[None]:
    """Decode one draft for each sequence after `prefill` or `start`, whose logits [batch, vocab]
    are given.

    Yields after each token. The last token is not fed.
    """

    def feed(drafts: Sequence[Draft]) -> tuple[Sequence[Draft], Tensor]:
        last = torch.tensor([draft.tokens[-1] for draft in drafts], device=session.attached.device)
        return drafts, session.decode_step(last)

    return write(drafts, logits, feed)
