"""Live decoding: prefill, then one token a step through two memories. `harness.decode.step` is the
page on which a step can be read.

    with attach(model) as attached, open_link(attached.device) as link:
        session = LiveSession(attached, method, max_new_tokens=64, placement="host", link=link)
        for _ in generate(session, session.prefill(ids, real), drafts): ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from harness.decode import memory
from harness.decode.cache import AheadFetcher, AheadPart, Fetcher, LayerCache
from harness.decode.gpu_cache import GpuCacheFetcher
from harness.decode.graphs import BUCKET, LEAST_TOKENS, StepGraphs
from harness.decode.links import DiskLink, Link, LinkUse
from harness.decode.memory import PinnedSlab
from harness.decode.needs import Needs, Plan, sizes_of
from harness.decode.reads import StepReads
from harness.decode.resident import LocalCache, ResidualCache, ValuesCache
from harness.decode.share import DeviceShare, RowCount, TokenBatch, Traffic
from harness.decode.step import DecodeStep
from harness.decode.store import KVStore
from harness.decode.timeline import StepClock, Timeline
from harness.model.attached import Attached
from harness.model.attention import ROW_BACKENDS
from harness.model.generation import Draft, write
from harness.model.passes import LayerPrompt, PrefilledPrompt, launching_on, require_codable
from harness.model.policies import Policy, new_state
from harness.model.prompts import PASS_TOKENS, prompt_bytes
from harness.model.rereading import held_bytes, planned, read_again, run_prompts
from harness.settings.config import BEHIND_LINK, Placement
from methods.base import Calibration, Method
from methods.codecs.split import CacheCodec, SplitCodec, every_codec
from methods.evicting import EvictingState

log = logging.getLogger(__name__)


class LiveSession:
    """One batch of sequences under one method, decoded one token a step.

    max_new_tokens: generated tokens, so that T = real prompt tokens + max_new_tokens. codec: of the
    cached rows in the layers under the method; None stores them as they are. placement: where the
    cache lies. link: moves the rows of host memory or a disk. gpu_cache: rows of the GPU cache in
    each layer and KV head, as a multiple of what a step reads at most; 0, or 1 and more. pinned:
    host memory is page-locked under CUDA, so that transfers can overlap. slabs: at most one, for
    sessions one after another, as locking takes seconds: a session takes the slab that it finds and
    leaves its own, and the caller closes it. timeline: marks the segments of
    each step. graphs: steps are recorded and replayed (`StepGraphs`), where nothing speaks against
    it (`why_eager`). bucket: as in `TokenBatch`, likewise; 0: none, or with graphs `BUCKET` for
    `LEAST_TOKENS` and more. Raises ValueError for combinations without meaning.

    Set by the prompt: share: what its layers share. caches: of each attention layer; stores: of
    those that see every token. reads: what the steps read on the device. traffic: what crossed the
    link. needs: memory that was asked for. link_use: how busy the link was, if there is one, from
    the end of the prompt to that of the last step.
    clock: when the prompt and each step ended. is_fork: see `fork`.
    """

    needs: Needs

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        max_new_tokens: int,
        codec: CacheCodec | None = None,
        placement: Placement = "device",
        link: Link | None = None,
        calibration: Calibration | None = None,
        gpu_cache: float = 0,
        pinned: bool = True,
        slabs: list[PinnedSlab] | None = None,
        timeline: Timeline | None = None,
        bucket: int = 0,
        graphs: bool = False,
    ) -> None:
        crosses = placement in BEHIND_LINK
        assert link is not None or not crosses, "rows behind a link need it"
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
        why_eager = self.why_eager()
        if graphs and why_eager:
            log.warning("decode steps run by Python, not as CUDA graphs: %s", why_eager)
        if graphs and not bucket and max_new_tokens >= LEAST_TOKENS:
            bucket = BUCKET
        self.bucket = 0 if why_eager else bucket
        self.graphs = StepGraphs(self) if self.bucket and graphs else None
        self.slabs = slabs
        self.timeline = timeline or Timeline(attached.device)
        self._share: DeviceShare | None = None
        self.traffic = Traffic()
        self.caches: list[LayerCache | LocalCache] = []
        self.stores: list[KVStore] = []
        self.reads = StepReads(attached, method, self.codec)
        self.clock = StepClock(attached.device)
        self.link_use: LinkUse | None = None
        self.model_cache = attached.new_cache()
        self.is_fork = False
        self._prompt_rows: dict[KVStore, Tensor] = {}

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
        state, keep = self.share.state, self._keep_prompt
        hidden = run_prompts(self.attached, self.method, state, ids, real, keep, self.model_cache)
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
        pass_tokens = max(len(prompt.real), min(PASS_TOKENS, prompt.real.numel()))
        if self.method.rereads_prompt:
            passes = planned(self.attached, self.method, prompt.ids, prompt.real)
            longest = max((reread.ids.numel() for reread in passes), default=0)
            self._open(prompt.real, pass_tokens, prompt_bytes(self.attached, longest))
            read_again(self.attached, self.method, self.share.state, prompt, passes)
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
        logits = self.run_step(ids) if self.graphs is None else self.graphs.step(ids)
        self.clock.mark()
        if self.link_use is not None:
            self.link_use.mark()
        return logits

    @property
    def is_last_step(self) -> bool:
        """True if no step follows the next one."""
        return self.steps + 2 >= self.max_new_tokens

    def run_step(self, ids: Tensor) -> Tensor:
        """`decode_step` by Python."""
        self.batch.begin()
        step = DecodeStep(self.caches, self.timeline, is_last=self.is_last_step)
        positions = self.batch.positions
        with launching_on(self.attached.device), sdpa_kernel(ROW_BACKENDS):
            step.begin()
            hidden = self.attached.forward(ids[:, None], positions[:, None], step, self.model_cache)
            self.timeline.switch("other")
            step.end()
        self.reads.count(positions[:, None], step.reads)
        self.batch.advance()
        logits = self.attached.logits(hidden[:, -1])
        if self.bucket:
            self._settle()
        return logits

    def _settle(self) -> None:
        """End a step that may be recorded: nothing that it began goes on behind it."""
        for count in self.traffic.counts:
            count.add_up()  # they may be kept where the next step's come
        with launching_on(self.attached.device):
            for cache in self.fetching:
                cache.fetcher.settle()
            if self.link is not None:
                self.link.join()

    @torch.inference_mode()
    def fork(self) -> LiveSession:
        """A session that goes on from the end of this one's prompt, in the same slots. This one
        decodes nothing itself.

        Forks come one after another: close each before the next, which writes over its rows. The
        method's state, windows and exact last tokens are copied; cached rows are not, but for those
        of a method that evicts while it decodes, whose steps write over kept rows of the prompt.
        All counts and times start anew.
        """
        assert self.placement != "disk", "no rows are put back there"
        assert not self.steps, "a session is forked before its first decode step"
        self._bring_back_prompt()
        child = copy(self)
        child.is_fork = True
        child.traffic = Traffic()
        # What both have. All else that hangs on the caches is copied.
        shared: list[Any] = [self.method, *self.policies, self.link]
        for store in self.stores:
            shared += [store, store.codec]
        shared += [*self.share.buffers, self.share.slab]
        for cache in self.caches:
            if isinstance(cache, ValuesCache):
                shared += [cache.keys, cache.values]
        memo = {id(part): part for part in shared}
        memo[id(self.traffic)] = child.traffic
        memo[id(self.share.state)] = self.share.forked_state()
        child._share, child.caches = deepcopy((self.share, self.caches), memo)
        child.model_cache = self.model_cache.fork(torch.arange(len(self.batch.prompts)))
        child.reads = StepReads(self.attached, self.method, self.codec)
        child.reads.slot_bytes = self.reads.slot_bytes
        child.clock = StepClock(self.attached.device)
        if self.link is not None and self.link_use is not None:
            self.link_use.close()  # each fork has its own
            child.link_use = self.link.open_use()
        child.graphs = None if self.graphs is None else StepGraphs(child)
        return child

    def _bring_back_prompt(self) -> None:
        """Write the prompt's rows over those of the last fork, where forks replace rows. The first
        call keeps a copy of them."""
        self.drain()
        for cache in self.fetching:
            if not isinstance(cache.state, EvictingState) or not cache.state.evicts_in_steps:
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
        if self.link_use is not None:
            self.link_use.begin()

    def why_eager(self) -> str | None:
        """Why no decode step can be replayed in place of a neighbour, in words; None: one can."""
        state, device = self.method.state, self.attached.device
        if state is not None and not state.replayable:
            return f"{self.method.title} does not say that its steps are replayable"
        if any(each.residual for each in every_codec(self.codec)):
            return "the codec packs groups of tokens in some steps"
        if self.placement == "disk" or (self.link is not None and not self.link.overlap):
            return "the host moves rows within a step"
        if self.placement == "host" and device.type == "cuda" and not self.pinned:
            return "the host waits for transfers from memory that is not page-locked"
        if self.attached.decoder.recurrent:
            return "the model has recurrent layers"
        return None

    @property
    def share(self) -> DeviceShare:
        """What the layers share, from the prompt on."""
        assert self._share is not None, "a prompt comes first"
        return self._share

    @property
    def batch(self) -> TokenBatch:
        """How far the session has come, and the tokens of its columns."""
        return self.share.batch

    @property
    def fetching(self) -> list[LayerCache]:
        """The caches of the layers that see every token."""
        return [cache for cache in self.caches if isinstance(cache, LayerCache)]

    @property
    def steps(self) -> int:
        """Steps decoded."""
        return self.batch.steps

    # What it holds, and what its decode steps have moved and read, in bytes and rows

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that hold the cache."""
        return sum(store.nbytes for store in self.stores) if self.placement == "disk" else 0

    @property
    def rows_read(self) -> float | Tensor:
        """Rows that the steps so far read, of one token and KV head each, in layers that see every
        token. Padding is not counted. Under CUDA a 0-d tensor (no sync)."""
        return self.reads.tokens_read * self.attached.geometry.num_kv_heads

    @property
    def rows_found(self) -> float | Tensor:
        """The part of `rows_read` that was on the device when its layer selected it: fetched before
        and kept in the GPU cache."""
        selected = self.reads.gpu_cache_tokens_read * self.attached.geometry.num_kv_heads
        return selected - self.traffic.missed.num_rows

    @property
    def device_bytes(self) -> int:
        """Bytes that cache and method keep on the device: stores (none under managed placement,
        whose pages come and go), the GPU cache, windows, recurrent states, fetch buffers,
        and the method's state with its calibration."""
        total = self.model_cache.nbytes
        if self.placement == "device":
            total += sum(store.nbytes for store in self.stores)
        for cache in self.caches:
            total += cache.device_bytes
        total += sum(buffer.nbytes for buffer in self.share.buffers)
        if self.share.state is not None:
            total += memory.tensor_bytes(vars(self.share.state))
        return total

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the cache in host memory; None under managed placement, whose pages come and
        go."""
        if self.placement == "managed":
            return None
        return sum(store.nbytes for store in self.stores) if self.placement == "host" else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked for this session."""
        slab = self.share.slab
        return 0 if slab is None else slab.nbytes

    # Open and close

    def _count_from_here(self) -> None:
        """The prompt is written: time and bytes counted from here on are those of decode steps. All
        that stays on the device is there now."""
        self.clock.mark()
        kept = 0
        for cache in self.fetching:
            if cache.state is not None:
                kept += memory.layer_bytes(cache.state, cache.policy.number)
        self.needs = self.needs._replace(kept=kept)
        most = max(self.device_bytes + self.needs.workspace, self.needs.asked)
        memory.require_emulated(most, self.attached.device)
        self.traffic.written = RowCount()
        self.share.under_way.clear()
        if self.link_use is not None:
            self.link_use.begin()

    def drain(self) -> None:
        """Wait until nothing is under way. Raises the error of a transfer that failed."""
        if self.link is not None:
            self.link.drain()

    def close(self) -> None:
        """Free the cache. The link stays open. Raises the error of a transfer that failed."""
        try:
            self.drain()
        finally:
            if self.link_use is not None:
                self.link_use.close()
            if self.graphs is not None:
                self.graphs.close()
            self.caches = []
            self._free()

    def _free(self) -> None:
        """Give memory and files back. Those of a fork are of the session that it comes from."""
        share = self._share
        if self.is_fork or share is None:
            return
        self._prompt_rows = {}
        for store in self.stores:
            store.free()
        share.buffers, share.free = [], []
        if share.slab is None:
            return
        with launching_on(self.attached.device):
            if self.slabs is None:
                share.slab.close()
            else:
                share.slab.empty()
                self.slabs.append(share.slab)
                share.slab = None

    def _open(self, real: Tensor, pass_tokens: int, activations: int) -> None:
        """Make what decoding needs, after asking whether it fits. pass_tokens: tokens of the
        prompts that pass a layer together; activations: bytes that the pass takes."""
        assert not self.stores, "a session prefills once"
        attached, method = self.attached, self.method
        attached.require_length(real.shape[1] + self.max_new_tokens)
        attached.require_even(real)
        batch = TokenBatch(real, self.max_new_tokens, self.bucket)
        rooms = self.plan.rooms(batch.counts)
        state = new_state(attached, method, batch.lengths, self.plan.calibration)
        self._share = DeviceShare(attached.device, batch, self.traffic, self.link, rooms, state)
        needs = self.plan.needs(batch.counts, pass_tokens, with_state=False)
        self.needs = needs._replace(workspace=activations)
        with launching_on(attached.device):
            self.caches = self._open_caches(self.share)
        if self.link is not None:
            self.link_use = self.link.open_use()
        self.stores = [cache.store for cache in self.fetching]
        for cache, following in pairwise(self.fetching):
            cache.following = following
        for cache in self.fetching:
            if cache.policy.kind == "method":
                self.reads.slot_bytes[cache.policy.number] = cache.store.slot_bytes

    def _open_caches(self, share: DeviceShare) -> list[LayerCache | LocalCache]:
        """Open the caches of the layers. Raises UserError where they do not fit into memory."""
        plan, lengths = self.plan, share.batch.counts
        stores = plan.stores(lengths, share.device)
        self._allocate(share, stores)
        if share.link is not None and stores:
            largest = plan.shared_buffer(stores, lengths)
            for _ in range(2):
                share.free.append(share.new_buffer(*largest))
        caches: list[LayerCache | LocalCache] = []
        ahead: list[AheadFetcher] = []
        others: list[LayerCache] = []
        for layer, policy in enumerate(plan.policies):
            if layer not in stores:
                caches.append(LocalCache(policy, share.batch))
                continue
            store = stores[layer]
            if layer in plan.ahead:
                ahead.append(AheadFetcher(share, store))
                caches.append(self._new_cache(policy, ahead[-1]))
                continue
            has_gpu_cache = share.rooms is not None and policy.names_rows
            fetcher = (GpuCacheFetcher if has_gpu_cache else Fetcher)(share, store)
            others.append(self._new_cache(policy, fetcher))
            caches.append(others[-1])
        if ahead:
            for number, cache in enumerate(others):
                cache.part = AheadPart(number, len(others), ahead)
        return caches

    def _allocate(self, share: DeviceShare, stores: Mapping[int, KVStore]) -> None:
        """Ask for the memory of the layers, and allocate the stores."""
        needs = self.needs
        memory.require_emulated(needs.asked, share.device)
        slab = self.slabs.pop() if self.slabs else None
        if slab is not None and slab.nbytes != needs.host:  # of a session of another size
            slab.close()
            slab = None
        host = needs.host if slab is None else 0
        memory.require_session(host, needs.asked, needs.managed, share.device)
        if self.pinned and stores:
            share.slab = slab or PinnedSlab(needs.host)
        for store in stores.values():
            store.allocate(share.link.disk if isinstance(share.link, DiskLink) else share.slab)
            if self.bucket and self.link is None:
                store.clear()  # slots are read before they are written, and must be numbers

    def _new_cache(self, policy: Policy, fetcher: Fetcher) -> LayerCache:
        state = fetcher.share.state if policy.kind == "method" else None
        method, codec = self.method, fetcher.store.codec
        if isinstance(codec, SplitCodec) and codec.residual:
            return ResidualCache(policy, fetcher, codec, method)
        if state is not None and method.keeps_keys:
            return ValuesCache(policy, fetcher, state, method)
        return LayerCache(policy, fetcher, state, method)

    def _keep_prompt(self, layer: int, prompt: LayerPrompt) -> None:
        """Hand a layer's prompt to its cache, with few layers' rows on their way to the host."""
        cache = self.caches[layer]
        if isinstance(cache, LayerCache):
            cache.share.wait_for_room()
            if not cache.store.format.is_exact:
                require_codable(cache.store.codec, layer, prompt.key, prompt.value)
        with launching_on(prompt.key.device):  # a prompt that is taken over is not in a pass
            cache.keep_prompt(prompt)


def generate(session: LiveSession, logits: Tensor, drafts: Sequence[Draft]) -> Iterator[None]:
    """Decode one draft for each sequence after `prefill` or `start`, whose logits [batch, vocab]
    are given.

    Yields after each token. The last token is not fed.
    """

    def feed(drafts: Sequence[Draft]) -> tuple[Sequence[Draft], Tensor]:
        last = torch.tensor([draft.tokens[-1] for draft in drafts], device=session.attached.device)
        return drafts, session.decode_step(last)

    return write(drafts, logits, feed)
