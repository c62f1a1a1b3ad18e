"""Live decoding: prefill, then one token a step through two memories.

Under host placement the cache of every layer that sees every token lies in host memory. A layer's
rows are requested while the previous layer computes: everything that is kept, or what a predicted
query there selects. A method that selects by the layer's own query requests them in the layer
itself and waits. Rows of the dense layers, where the others read less, cross during the step
before. `harness.decode.step` is the page on which a step can be read.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for _ in generate(session, session.prefill(ids, real), drafts): ...
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from copy import copy
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from harness.decode import memory
from harness.decode.ahead import AheadPart
from harness.decode.cache import Fetcher, LayerCache
from harness.decode.links import Link, Links, LinkUse, leads_to_disk, link_of
from harness.decode.memory import PinnedSlab
from harness.decode.needs import Plan, sizes_of
from harness.decode.opening import Opening
from harness.decode.resident import LocalCache
from harness.decode.session_sizes import SessionSizes
from harness.decode.share import DeviceShare, TokenBatch, Traffic
from harness.decode.step import DecodeStep
from harness.decode.step_reads import StepReads
from harness.decode.store import KVStore
from harness.decode.timeline import StepClock, Timeline
from harness.errors import UserError
from harness.model.attached import Attached
from harness.model.attention import ROW_BACKENDS
from harness.model.dense_prompts import LayerPrompt, PrefilledPrompt
from harness.model.passes import launching_on, require_codable
from harness.model.policies import evicts, new_states
from harness.model.prompts import PASS_TOKENS, prompt_bytes
from harness.model.rereading import held_bytes, planned, read_again, run_prompts
from harness.model.sampling import Draft, write
from harness.settings.config import BEHIND_LINK, Placement
from harness.settings.systems import check_combination
from methods.base import Calibration, Method
from methods.codecs.split import CacheCodec


class LiveSession(SessionSizes):
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the
    cached rows in the layers under the method; None stores them as they are. placement: where the
    cache lies. link: moves the rows of host memory or a disk; one for all devices of a model, or
    one for each. gpu_cache: rows of the GPU cache in each layer and KV head, as a
    multiple of what a step reads at most; 0, or 1 and more. pinned: host memory is page-locked
    under CUDA, so that transfers can overlap. slabs: page-locked memory by device, for sessions one
    after another, as locking takes seconds: a session takes the slab that it finds and leaves its
    own, and the caller closes them. timeline: marks the segments of each step. Raises ValueError
    for combinations without meaning.

    Set by the prompt: shares: by device. caches: of each attention layer; stores: of those that see
    every token. reads: what the steps read on the device. bytes_needed: memory that was asked for;
    activations: the part of it that a pass takes.
    link_uses: how busy each link was, from the end of the prompt to that of the last step.
    clock: when the prompt and each step ended. is_fork: see `fork`.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        max_new_tokens: int,
        codec: CacheCodec | None = None,
        placement: Placement = "device",
        link: Links | None = None,
        calibration: Calibration | None = None,
        gpu_cache: float = 0,
        pinned: bool = True,
        slabs: MutableMapping[torch.device, PinnedSlab] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        check_combination(method, placement, gpu_cache)
        crosses = placement in BEHIND_LINK
        if crosses and link is None:
            raise ValueError(f"placement={placement}: needs a link")
        if (placement == "disk") != (link is not None and leads_to_disk(link)):
            raise ValueError(f"placement={placement}: a DiskLink goes with placement=disk, alone")
        if placement == "managed" and len(attached.devices) > 1:
            raise UserError(
                "placement=managed: the model lies on several devices; allowed there: device, host"
            )
        self.attached = attached
        self.method = method
        self.placement: Placement = placement
        self.plan = Plan(
            sizes_of(attached, method), method, codec, placement, gpu_cache, calibration
        )
        self.policies = self.plan.policies
        if crosses and any(policy.when == "true_scores" for policy in self.policies):
            raise ValueError(
                f"placement={placement}: {method.title} selects by the true scores of all keys"
            )
        self.max_new_tokens = max_new_tokens
        self.codec = self.plan.coded
        self.link = link if crosses else None
        self.pinned = pinned and placement == "host" and attached.device.type == "cuda"
        self.leaves_slabs = slabs is not None
        self.slabs = {} if slabs is None else slabs
        self.timeline = timeline or Timeline(attached.device)
        self.shares: dict[torch.device, DeviceShare] = {}
        self.caches: list[LayerCache | LocalCache] = []
        self.stores: list[KVStore] = []
        self.parts: dict[LayerCache, AheadPart] = {}
        self.reads = self._new_reads()
        self.clock = StepClock(attached.device)
        self.link_uses: list[LinkUse] = []
        self.model_cache = attached.new_cache()
        self.bytes_needed = memory.SessionBytes(0, 0)
        self.activations = 0
        self.is_fork = False
        self._prompt_rows: dict[KVStore, Tensor] = {}

    def _new_reads(self) -> StepReads:
        return StepReads(
            self.attached.geometry,
            self.method.dense_layers,
            self.codec,
            element_bytes=self.attached.dtype.itemsize,
            device=self.attached.devices[0],
            evicts=evicts(self.method),
        )

    @torch.inference_mode()
    def prefill(self, ids: Tensor, real: Tensor) -> Tensor:
        """Run the prompts densely, and again where the method asks for it, and write their rows to
        the cache.

        ids: int [batch, prompt]; real: bool of the same shape, False for the padding on the left,
        so that prompts end in one column. Returns logits [batch, vocab] for the first new token.
        """
        self.clock.begin_prompt()
        needed = held_bytes if self.method.rereads_prompt else prompt_bytes
        self._open(real, ids.numel(), needed(self.attached, ids.numel()))
        hidden = run_prompts(
            self.attached, self.method, self.states, ids, real, self._keep_in_pass, self.model_cache
        )
        logits = self.attached.logits(hidden[:, -1])
        self._count_from_here()
        return logits

    @torch.inference_mode()
    def start(self, prompt: PrefilledPrompt) -> Tensor:
        """Take over a prefilled prompt instead of running it; returns logits [batch, vocab].

        A method that needs the layers' inputs runs it anew: a prefilled prompt has not kept them.
        """
        if self.method.needs_inputs:
            return self.prefill(prompt.ids, prompt.real)
        self.clock.begin_prompt()
        pass_tokens = workspace_tokens(prompt.real)
        if self.method.rereads_prompt:
            passes = planned(self.attached, self.method, prompt.ids, prompt.real)
            longest = max((reread.ids.numel() for reread in passes), default=0)
            self._open(prompt.real, pass_tokens, prompt_bytes(self.attached, longest))
            read_again(self.attached, self.method, self.states, prompt, passes)
        else:
            self._open(prompt.real, pass_tokens, prompt_bytes(self.attached, pass_tokens))
        prompt.hand_to(self._keep_prompt)
        self.model_cache = prompt.model_cache.fork(torch.arange(len(prompt.real)))
        logits = self.attached.logits(prompt.hidden)
        self._count_from_here()
        return logits

    @torch.inference_mode()
    def decode_step(self, ids: Tensor) -> Tensor:
        """Decode one token of every sequence, ids int [batch]; returns logits [batch, vocab] for
        the next."""
        if self.steps >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: all of them have been decoded")
        is_last = self.steps + 2 >= self.max_new_tokens
        step = DecodeStep(self.caches, self.parts, self.timeline, is_last=is_last)
        step.begin()
        positions = self.batch.positions
        with sdpa_kernel(ROW_BACKENDS):
            hidden = self.attached.forward(ids[:, None], positions[:, None], step, self.model_cache)
        self.timeline.switch("other")
        self.reads.count(positions, step.reads, step.index_reads, step.gpu_cache_reads)
        for share in self.shares.values():
            share.batch.advance()
        logits = self.attached.logits(hidden[:, -1])
        self.clock.mark()
        for use in self.link_uses:
            use.mark()
        return logits

    @torch.inference_mode()
    def fork(self) -> LiveSession:
        """A session that goes on from the end of this one's prompt, in the same slots. This one
        decodes nothing itself.

        Forks come one after another: close each before the next, which writes over its rows. The
        method's state, windows and exact last tokens are copied; cached rows are not, but for those
        of a method that evicts while it decodes, whose steps write over kept rows of the prompt.
        All counts and times start anew. Raises ValueError under `placement=disk`, where no rows are
        put back.
        """
        if self.steps:
            raise RuntimeError("a session is forked before its first decode step")
        if self.placement == "disk":
            raise ValueError("placement=disk: a session is not forked there")
        self._bring_back_prompt()
        for use in self.link_uses:  # each fork has its own
            use.close()
        child = copy(self)
        child.is_fork = True
        child.shares = {device: share.fork() for device, share in self.shares.items()}
        forked: dict[LayerCache, LayerCache] = {}
        child.caches = []
        for cache in self.caches:
            if isinstance(cache, LocalCache):
                child.caches.append(cache.fork(child.shares[cache.batch.real.device].batch))
                continue
            forked[cache] = cache.fork(child.shares[cache.share.device])
            child.caches.append(forked[cache])
        _chain([*forked.values()])
        fetchers: dict[Fetcher, Fetcher] = {}
        for cache, of_child in forked.items():
            fetchers[cache.fetcher] = of_child.fetcher
        child.parts = {forked[cache]: part.fork(fetchers) for cache, part in self.parts.items()}
        child.model_cache = self.model_cache.fork(torch.arange(len(self.batch.prompts)))
        child.reads = self._new_reads()
        child.reads.slot_bytes = self.reads.slot_bytes
        child.clock = StepClock(self.attached.device)
        child.link_uses = [link.open_use() for link in self.links]
        return child

    def _bring_back_prompt(self) -> None:
        """Write the prompt's rows over those of the last fork, where forks replace rows. The first
        call keeps a copy of them."""
        self.drain()
        for cache in self.caches:
            if not isinstance(cache, LayerCache) or not cache.replaces_rows:
                continue
            rows = cache.store.slots[:, :, : cache.slots_in_use()]
            if cache.store in self._prompt_rows:
                rows.copy_(self._prompt_rows[cache.store])
            else:
                memory.require_memory(rows.nbytes, rows.device, "a copy of the rows that are kept")
                self._prompt_rows[cache.store] = rows.clone()

    def begin_turn(self, num_rows: int) -> None:
        """A further prompt of `num_rows` rows begins now, which decode steps append. The clock and
        the links' times are its own from here on; all counts go on."""
        self.clock.begin_prompt(num_rows)
        for use in self.link_uses:
            use.begin()

    @property
    def batch(self) -> TokenBatch:
        """How far the session has come, and the tokens of its columns, on the first layer's
        device."""
        return next(iter(self.shares.values())).batch

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    @property
    def links(self) -> list[Link]:
        """The links in use, each once."""
        links: list[Link] = []
        for share in self.shares.values():
            if share.link is not None and share.link not in links:
                links.append(share.link)
        return links

    def _count_from_here(self) -> None:
        """The prompt is written: time and bytes counted from here on are those of decode steps. All
        that stays on the device is there now."""
        self.clock.mark()
        memory.require_emulated(self.device_bytes + self.activations, self.attached.device)
        for share in self.shares.values():
            share.under_way.clear()
            share.written = Traffic()
        for use in self.link_uses:
            use.begin()

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the error of a transfer that failed."""
        for link in self.links:
            link.drain()

    def close(self) -> None:
        """Free the cache. The links stay open. Raises the error of a transfer that failed."""
        try:
            self.drain()
        finally:
            for use in self.link_uses:
                use.close()
            self.caches = []
            self.parts = {}
            self._free()

    def _free(self) -> None:
        """Give memory and files back. Those of a fork are of the session that it comes from."""
        if not self.is_fork:
            self._prompt_rows = {}
            for store in self.stores:
                store.free()
            for device, share in self.shares.items():
                share.buffers, share.free = [], []
                if share.file is not None:
                    share.file.close()
                if share.slab is None:
                    continue
                with launching_on(device):
                    if self.leaves_slabs:
                        share.slab.empty()
                        share.slab = None
                    else:
                        share.slab.close()

    def _open(self, real: Tensor, pass_tokens: int, activations: int) -> None:
        """Make what decoding needs, after asking whether it fits. pass_tokens: tokens of the
        prompts that pass a layer together; activations: bytes that the pass takes."""
        if self.stores:
            raise RuntimeError("a session prefills once")
        attached, method = self.attached, self.method
        self.activations = activations
        attached.require_length(real.shape[1] + self.max_new_tokens)
        attached.require_even(real)
        opening = Opening(attached, self.plan, self.pinned, self.slabs)
        batches: dict[torch.device, TokenBatch] = {}
        for device in attached.devices:
            batches[device] = TokenBatch(real.to(device), self.max_new_tokens)
        first = batches[attached.devices[0]]
        rooms = self.plan.rooms(first.counts)
        states = new_states(attached, method, first.lengths, self.plan.calibration)
        for device, batch in batches.items():
            link = None if self.link is None else link_of(self.link, device)
            share = DeviceShare(device, batch, link, rooms, states.get(device))
            self.shares[device] = share
            with launching_on(device):
                opening.open_share(share, pass_tokens, activations)
        for link in self.links:
            self.link_uses.append(link.open_use())
        self.bytes_needed = opening.bytes_needed
        self.parts = opening.parts
        self.caches = [opening.caches[layer] for layer in sorted(opening.caches)]
        fetching = [cache for cache in self.caches if isinstance(cache, LayerCache)]
        self.stores = [cache.store for cache in fetching]
        _chain(fetching)
        for cache in fetching:
            if cache.policy.kind == "method":
                self.reads.slot_bytes[cache.policy.number] = cache.store.slot_bytes

    def _keep_in_pass(self, layer: int, prompt: LayerPrompt) -> None:
        """`_keep_prompt` while the prompt runs: with few layers' rows on their way to the host."""
        cache = self.caches[layer]
        if isinstance(cache, LayerCache):
            cache.share.wait_for_room()
        self._keep_prompt(layer, prompt)

    def _keep_prompt(self, layer: int, prompt: LayerPrompt) -> None:
        """Hand a layer's prompt to its cache. The first state shows what each layer keeps of a
        prompt, so the memory of the others is asked for before they keep theirs."""
        cache = self.caches[layer]
        if isinstance(cache, LayerCache) and not cache.store.format.is_exact:
            require_codable(cache.store.codec, layer, prompt.key, prompt.value)
        with launching_on(prompt.key.device):
            cache.keep_prompt(prompt)
        if not isinstance(cache, LayerCache) or cache.state is None:
            return
        alike: list[LayerCache] = []
        for other in self.caches:
            if isinstance(other, LayerCache) and other.state is cache.state:
                alike.append(other)
        if cache is alike[0]:
            kept = memory.layer_bytes(cache.state, cache.policy.number)
            on_device = self.bytes_needed.device + kept * len(alike)
            self.bytes_needed = self.bytes_needed._replace(device=on_device)
            memory.require_emulated(on_device, cache.store.device)
            to_come = kept * (len(alike) - 1)
            what = "what the method keeps of the prompt"
            if self.placement == "managed":  # whose pages come when a kernel touches them
                to_come += self.bytes_needed.managed
                what += " and the managed cache"
            memory.require_memory(to_come, cache.store.device, what)


def _chain(caches: Sequence[LayerCache]) -> None:
    """Tell the layers that see every token, in their order, of one another."""
    for cache, following in pairwise(caches):
        cache.following = following
        following.earlier = cache.state


def workspace_tokens(real: Tensor) -> int:
    """Tokens in a pass of a session that takes over its prompt: `PASS_TOKENS` of the prompts, or a
    decode step's. real: bool [batch, prompt]."""
    return max(len(real), min(PASS_TOKENS, real.numel()))


def generate(session: LiveSession, logits: Tensor, drafts: Sequence[Draft]) -> Iterator[None]:
    """Decode one draft for each sequence after `prefill` or `start`, whose logits [batch, vocab]
    are given.

    Yields after each token. The last token is not fed.
    """

    def feed(drafts: Sequence[Draft]) -> tuple[Sequence[Draft], Tensor]:
        last = torch.tensor([draft.tokens[-1] for draft in drafts], device=session.attached.device)
        return drafts, session.decode_step(last)

    return write(drafts, logits, feed)
