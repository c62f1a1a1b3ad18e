"""The forward passes of live decoding, seen from the layers: a prompt's, and a step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.model.attach import Attached, Handler
from harness.model.attention import heads_last, padding, prompt_attention, row_attention, with_rest
from harness.offload.cache import LayerCache, positions_of
from harness.offload.fetch import Fetcher
from harness.offload.store import KeyValue
from harness.offload.timeline import Timeline
from methods.base import Rest, Selection, attention_scores
from methods.codec import Codec


@dataclass
class PrefilledPrompt:
    """A prompt that has run, from which several methods can start.

    real: bool [batch, prompt]; layers: (query, key, value) of each layer, [batch, heads, prompt, head_dim];
    hidden: final hidden states of the last column [batch, hidden_size].
    """

    real: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor]]
    hidden: Tensor


class PromptKeeper(Handler):
    """A dense pass that keeps every layer's query, key and value."""

    def __init__(self, scale: float, real: Tensor) -> None:
        self.scale = scale
        self.padding = padding(real)
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append((_alone(query), _alone(key), _alone(value)))
        return prompt_attention(query, key, value, self.scale, self.padding)


def _alone(states: Tensor) -> Tensor:
    """`states`, copied where they are a part of a larger tensor, a fused projection, that would be kept with them."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states


def run_prompt(attached: Attached, ids: Tensor, real: Tensor) -> PrefilledPrompt:
    """One dense pass over left-padded prompts, ids and real [batch, prompt]."""
    keeper = PromptKeeper(attached.geometry.scale, real)
    hidden = attached.forward(ids, positions_of(real), keeper)
    return PrefilledPrompt(real, keeper.layers, hidden[:, -1])


class PromptPass(Handler):
    """A dense pass that hands every layer's number, query, key and value to `keep` as they come."""

    def __init__(self, keep: Callable[[int, Tensor, Tensor, Tensor], None], scale: float, real: Tensor) -> None:
        self.keep = keep
        self.scale = scale
        self.padding = padding(real)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keep(layer, query, key, value)
        return prompt_attention(query, key, value, self.scale, self.padding)


class StepPass(Handler):
    """One token: each layer asks for the next one's rows, waits for its own, attends, and writes its row back.

    reads, index_reads: [batch] of each layer that is not exempt: tokens read, and read on the device, of an index or of
    rows that stay there.
    """

    def __init__(
        self, caches: Sequence[LayerCache], fetcher: Fetcher, timeline: Timeline, scale: float, *, last: bool
    ) -> None:
        self.caches = caches
        self.fetcher = fetcher
        self.timeline = timeline
        self.scale = scale
        self.last = last
        self.reads: list[Tensor] = []
        self.index_reads: list[Tensor] = []
        self.rest: dict[int, Rest] = {}

    def layer_begins(self, layer: int) -> None:
        """The rehearsal comes first, the next layer's query projection included."""
        self.timeline.switch("prediction" if self.rehearses(layer + 1) else "attention")

    def layer_ends(self, layer: int) -> None:
        self.timeline.switch("ffn")

    def rehearses(self, layer: int) -> bool:
        return layer < len(self.caches) and self.caches[layer].rehearses

    def rehearse(self, layer: int, query: Tensor) -> None:
        self._choose(layer, query)
        self.timeline.switch("attention")

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self.caches[layer]
        cache.append(key, value)
        if cache.chooses:
            self.timeline.switch("prediction")
            self._choose(layer, query)
        cache.remember(query)
        self._request_next(layer)
        self.timeline.switch("transfer")
        self.fetcher.wait(layer)
        self.timeline.switch("attention")
        output = self._how(cache)(cache, query, KeyValue(key, value))
        if cache.state is None and not cache.exempt:
            self._note_all(cache)
        return heads_last(with_rest(output, self.rest.pop(layer, None)))

    def _how(self, cache: LayerCache) -> Callable[[LayerCache, Tensor, KeyValue], Tensor]:
        """The attention that a layer's rows allow, fewest launches first."""
        if cache.joins_own:
            return self._attend
        return self._attend_to_codes if cache.attends_to_codes else self._attend_by_scores

    def _attend(self, cache: LayerCache, query: Tensor, own: KeyValue) -> Tensor:
        fetched = cache.take_with_own(*own)
        (rows,) = cache.parts(fetched)
        return attend(query, rows, cache.visible(fetched), fetched.bias, self.scale)

    def _attend_to_codes(self, cache: LayerCache, query: Tensor, own: KeyValue) -> Tensor:
        fetched, codec = cache.take(), cache.store.codec
        assert isinstance(codec, Codec)
        output = attend_to_codes(query, fetched.rows, own, cache.visible(fetched), fetched.bias, self.scale, codec)
        cache.keep_own(*own)
        return output

    def _attend_by_scores(self, cache: LayerCache, query: Tensor, own: KeyValue) -> Tensor:
        fetched = cache.take()

        def edit(scores: Tensor) -> None:
            if fetched.bias is not None:
                scores[..., : fetched.rows.shape[2]] += fetched.bias
            if cache.state is not None and cache.known_ahead:
                self._select_kept(cache, query, scores)

        output = attend_by_scores(query, cache.parts(fetched), own, cache.visible(fetched), self.scale, edit)
        cache.keep_own(*own)
        return output

    def request_early(self, layer: int) -> None:
        """Ask for a layer's rows where they are known before its query is."""
        cache = self.caches[layer]
        if cache.known_ahead:
            cache.request()
        elif cache.foresees:
            assert cache.last_query is not None, "a prompt comes first"
            self._choose(layer, cache.last_query)

    def _choose(self, layer: int, query: Tensor) -> None:
        """Let the method name rows by a query, and ask for them."""
        selection = self.caches[layer].select(query, _no_scores)
        self._note(layer, selection)
        self.caches[layer].request_selected(selection)

    def _request_next(self, layer: int) -> None:
        """Ask for the next layer's rows where they are known, and for the next step's first ones."""
        following, ahead = layer + 1, self.fetcher.num_ahead
        if ahead <= following < len(self.caches):
            self.request_early(following)
        if self.last:
            return
        if layer >= ahead > 0:
            columns = self.caches[0].slots_in_use(steps_ahead=1)
            stores = [cache.store for cache in self.caches]
            self.fetcher.request_ahead(stores, columns, layer - ahead, len(self.caches) - ahead)
        elif following == len(self.caches) and self.caches[0].known_ahead:
            self.caches[0].request(steps_ahead=1)

    def _select_kept(self, cache: LayerCache, query: Tensor, scores: Tensor) -> None:
        """Let a method that looks at the fetched rows choose among them; `scores` has the own row last."""
        selection = cache.select(query, lambda: scores)
        self._note(cache.layer, selection)
        if selection.bias is not None:
            scores[..., :-1] += selection.bias[..., :-1]
        if selection.mask is not None and not cache.evicts:  # what it keeps is visible, and it reads all of it
            scores[..., :-1].masked_fill_(~selection.mask[..., :-1].unsqueeze(2), float("-inf"))

    def _note_all(self, cache: LayerCache) -> None:
        cached, codec = cache.batch.positions, cache.store.codec
        stored = codec.stored(cached)
        self.reads.append(stored)
        if codec.residual:
            self.index_reads.append(cached - stored)

    def _note(self, layer: int, selection: Selection) -> None:
        if selection.rest is not None:
            self.rest[layer] = selection.rest
        self.reads.append(selection.num_read[:, 0])
        if selection.side is not None:
            self.index_reads.append(selection.side[:, 0])


def _no_scores() -> Tensor:
    raise AssertionError("a method that chooses what is fetched does so before the true scores are known")


def attend(query: Tensor, rows: KeyValue, visible: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """In one call.

    rows: [batch, num_kv_heads, n + 1, head_dim], the own one last. Of the n others, visible: bool [batch, 1 or
    num_kv_heads, 1, n], None for all; bias: added to the scores, fp32 [batch, num_kv_heads, 1 or group, 1, n].
    """
    return row_attention(query, *rows, scale, _mask(visible, bias, query.dtype))


def attend_to_codes(
    query: Tensor,
    rows: Tensor,
    own: KeyValue,
    visible: Tensor | None,
    bias: Tensor | None,
    scale: float,
    codec: Codec,
) -> Tensor:
    """By kernels, where `has_kernels`.

    rows: the cached ones, packed, uint8 [batch, num_kv_heads, n, slot_bytes], contiguous in a head; own: [batch,
    num_kv_heads, 1, head_dim]; visible and bias as in `attend`.
    """
    from harness.offload.kernels import attention as kernels

    of_group = None if visible is None else visible.unsqueeze(2)
    return kernels.attend(query, rows, own, of_group, bias, scale, codec)


def _mask(visible: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Both in one, the own row included."""
    mask = None if visible is None else pad(visible, (0, 1), value=True)
    if bias is None:
        return mask
    added = pad(bias.squeeze(3), (0, 1)).to(dtype)
    return added if mask is None else added.masked_fill(~mask, float("-inf"))


def attend_by_scores(
    query: Tensor,
    parts: Sequence[KeyValue],
    own: KeyValue,
    visible: Tensor | None,
    scale: float,
    edit: Callable[[Tensor], None],
) -> Tensor:
    """With the scores fp32 [batch, num_kv_heads, group, 1, n + 1], the own one last, shown to `edit`, which may change
    those of the cached rows in place.

    parts: the n cached rows, together; own: [batch, num_kv_heads, 1, head_dim]; visible as in `attend`.
    """
    of_keys = (*(part.keys for part in parts), own.keys)
    *cached, of_own_key = (attention_scores(query, keys, scale) for keys in of_keys)
    if visible is not None:
        seen = visible.unsqueeze(2).split([part.shape[-1] for part in cached], -1)
        cached = [torch.where(*each, float("-inf")) for each in zip(seen, cached, strict=True)]
    scores = torch.cat([*cached, of_own_key], -1)
    edit(scores)
    probs = scores.softmax(-1).to(own.values.dtype)
    *of_parts, of_own = probs[..., 0, :].split([keys.shape[2] for keys in of_keys], -1)
    output = of_own * own.values  # [batch, kv, group, head_dim]
    for weights, part in zip(of_parts, parts, strict=True):
        output = output + weights @ part.values
    return output.unsqueeze(3)
