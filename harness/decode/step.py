"""The decode step, on one page: one token of every sequence passes all layers. Each layer does four
things:

    select      the method names the rows to read, by the layer's own query here or earlier
                (`methods.base.When`)
    fetch       these rows cross the link while an earlier layer computes; the layer waits for
                missing ones. Rows may be in the GPU cache
    attend      to the fetched rows and the step's own row, which is on the device
    write back  the own row to its slot in the store, while later layers compute

A layer selects through `State.select` with one row; replay calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.decode.cache import Fetch, LayerCache
from harness.decode.reads import LayerRead
from harness.decode.resident import LocalCache
from harness.decode.store import KeyValue, PackedRows, RowFormat
from harness.decode.timeline import Timeline
from harness.model.attention import heads_last, row_attention, with_rest
from harness.model.passes import Handler
from methods.attention import Softmax
from methods.base import Rest, Selection
from methods.codecs.integers import IntegerCodec

BIAS_ALIGNMENT = 8
"""Elements. torch's attention on a GPU copies a bias whose lines begin elsewhere."""


class DecodeStep(Handler):
    """One step. is_last: no further step follows, so nothing is requested for it.

    reads: of each layer under the method, whose tensors a state may give to several layers of the
    step. rest: what stands for the tokens that a layer does not read, between its selection
    and its attention. bias_of_columns: of the layers that read all columns where some are hidden,
    by dtype, and whether they lie in place. own: rows that `end` packs, with their layers' caches,
    by format and shape.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache | LocalCache],
        timeline: Timeline,
        *,
        is_last: bool,
    ) -> None:
        self.caches = caches
        self.timeline = timeline
        self.is_last = is_last
        self.first = next(cache for cache in caches if isinstance(cache, LayerCache))
        self.reads: list[LayerRead] = []
        self.rest: dict[LayerCache, Rest] = {}
        self.bias_of_columns: dict[tuple[torch.dtype, bool], Tensor] = {}
        self.own: dict[tuple[RowFormat, torch.Size], list[tuple[LayerCache, KeyValue]]] = {}

    def begin(self) -> None:
        """Request the first layers' rows, unless the step before has: in the first step it has
        not."""
        for cache in self.caches:
            if not isinstance(cache, LayerCache) or cache.fetcher.fetch is not None:
                continue
            if cache is self.first or cache.fetcher.is_ahead:
                self._request_early(cache, None)

    def end(self) -> None:
        """Write the own rows that are left, packed together: a row is small, and packing takes as
        many calls for one layer as for all."""
        for (row_format, _), layers in self.own.items():
            keys = torch.cat([own.keys for _, own in layers])
            values = torch.cat([own.values for _, own in layers])
            packed = row_format.pack(keys, values).chunk(len(layers))
            for (cache, _), rows in zip(layers, packed, strict=True):
                cache.write_own(rows)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, own = self.caches[layer], KeyValue(key, value)
        if isinstance(cache, LocalCache):
            return cache.attend(query, own)

        # Select, where the layer's own query decides. Other layers have selected by now.
        if not cache.appends_last:
            cache.append(*own)
        if cache.names_rows and cache.policy.when == "own_query":
            self.timeline.switch("prediction")
            self._request_selection(cache, query)
        cache.remember(query)

        # Fetch: first ask for the next layer's rows, then wait for this one's.
        self._request_next(cache, query)
        if cache.appends_last:  # what can be done without them comes in between
            self.timeline.switch("prediction")
            cache.append(*own)
        self.timeline.switch("transfer")
        fetch = cache.fetcher.take()
        self.timeline.switch("attention")

        # Attend, and write the own row back.
        if cache.is_fused:
            output = self._attend_fused(cache, fetch, query, own)
        elif cache.attends_by_kernels:
            output = self._attend_by_kernels(cache, fetch, query, own)
        else:
            output = self._attend_by_scores(cache, fetch, query, own)
        if cache.state is None and cache.policy.kind == "method":  # it reads everything
            cached = cache.batch.positions[:, None]
            stored = cache.store.codec.stored(cached)
            exact = cached - stored if cache.store.codec.residual else None
            self.reads.append(LayerRead(cache.policy.number, stored, exact))
        return heads_last(with_rest(output, self.rest.pop(cache, None)))

    # Predict: a layer may select in the layer before, by a query made there.

    def layer_begins(self, layer: int) -> None:
        cache = self.caches[layer]
        following = cache.following if isinstance(cache, LayerCache) else None
        predicts = following is not None and following.is_predicted
        self.timeline.switch("prediction" if predicts else "attention")

    def predicts(self, layer: int) -> bool:
        cache = self.caches[layer]
        return isinstance(cache, LayerCache) and cache.is_predicted

    def predict(self, layer: int, query: Tensor) -> None:
        cache = self.caches[layer]
        assert isinstance(cache, LayerCache)
        self._request_selection(cache, query)
        self.timeline.switch("attention")

    def layer_ends(self, layer: int) -> None:
        self.timeline.switch("ffn")

    # Select

    def _request_selection(self, cache: LayerCache, query: Tensor) -> None:
        """Let the method select by `query`, request the rows, and note what the layer reads."""
        self._note(cache, cache.request_selection(query))

    def _note(self, cache: LayerCache, selection: Selection) -> None:
        if selection.rest is not None:
            self.rest[cache] = selection.rest
        keeps_rows = cache.fetcher.keeps_rows
        read = LayerRead(cache.policy.number, selection.num_read, selection.side, keeps_rows)
        self.reads.append(read)

    def _hide_unread(self, cache: LayerCache, query: Tensor, scores: Tensor) -> None:
        """Let a method that looks at scores say which fetched rows it reads, and hide the scores of
        the others. `scores` has the own row last."""
        selection = cache.selection_by(query, lambda: cache.as_slots_lie(scores))
        self._note(cache, selection)
        if cache.following is not None and _decides_for_next(cache):
            self._request_early(cache.following, query)
        if selection.bias is not None:
            scores[..., :-1] += selection.bias[..., :-1]
        if selection.mask is not None and not cache.evicts:  # else it reads all that it keeps
            hidden = ~selection.mask[..., :-1].unsqueeze(2)
            scores[..., :-1].masked_fill_(hidden, float("-inf"))

    # Fetch

    def _request_next(self, cache: LayerCache, query: Tensor) -> None:
        """Request the next layer's rows if they are known, and the first layers' rows of the next
        step."""
        following, first = cache.following, self.first
        is_known = not _decides_for_next(cache)
        if following is not None and is_known and not following.fetcher.is_ahead:
            self._request_early(following, query)
        if self.is_last:
            return
        if cache.part is not None:
            cache.part.request(first.slots_in_use(steps_ahead=1))
        is_last_layer = following is None and cache is not first  # an only layer has still to take
        if is_last_layer and not first.names_rows and not first.fetcher.is_ahead:
            first.request_kept(steps_ahead=1)

    def _request_early(self, cache: LayerCache, query: Tensor | None) -> None:
        """Request a layer's rows if they are known before its own query."""
        if not cache.names_rows:
            cache.request_kept()
        elif cache.policy.when == "previous_step":
            assert cache.last_query is not None, "a prompt comes first"
            self._request_selection(cache, cache.last_query)
        elif cache.policy.when == "earlier_layer":
            assert query is not None, "an earlier layer has selected"
            self._request_selection(cache, query)

    # Attend, and write back

    def _attend_fused(
        self, cache: LayerCache, fetch: Fetch, query: Tensor, own: KeyValue
    ) -> Tensor:
        """One fused call over rows in one piece, the own row last."""
        packed = cache.store.format.pack(*own)
        cache.write_own(packed)
        if not fetch.in_place:
            fetch.rows[:, :, -1:] = packed
        keys, values = cache.store.format.unpack(fetch.rows)
        bias = self._bias(cache, fetch, query)
        return row_attention(query, keys, values, cache.policy.softmax.scale, bias)

    def _bias(self, cache: LayerCache, fetch: Fetch, query: Tensor) -> Tensor | None:
        """What is added to the scores of the fetched rows and the own one behind them, -inf where a
        row is not read: [batch, 1 or num_kv_heads, 1 or group, n + 1] in the dtype of `query`, None
        for nothing."""
        if fetch.present is None and not cache.evicts:  # all columns, in each such layer
            key = query.dtype, fetch.in_place
            if cache.batch.hides_columns and key not in self.bias_of_columns:
                self.bias_of_columns[key] = _bias_of_columns(cache, query, fetch)
            return self.bias_of_columns.get(key)
        return _new_bias(cache, query, fetch.bias, cache.visible(fetch))

    def _attend_by_kernels(
        self, cache: LayerCache, fetch: Fetch, query: Tensor, own: KeyValue
    ) -> Tensor:
        """Kernels decode coded rows as they go, and weigh an estimate beside the rows."""
        from harness.decode.kernels import codes as kernels

        # Another rest has a share of the output already.
        rest = self.rest.pop(cache, None) if cache.method.weighs_rest else None
        codec, visible = cache.store.codec, cache.visible(fetch)
        of_group = None if visible is None else visible.unsqueeze(2)
        scale = cache.policy.softmax.scale
        coded_by = codec if isinstance(codec, IntegerCodec) else None
        given = (query, fetch.cached, own, of_group, fetch.bias)
        output = kernels.attend(*given, scale, coded_by, rest)
        cache.keep_own(*own)
        return output

    def _attend_by_scores(
        self, cache: LayerCache, fetch: Fetch, query: Tensor, own: KeyValue
    ) -> Tensor:
        """By scores: for methods that look at them, rows in several places, formats that the
        kernels do not know, and softmaxes that the fused call does not know."""

        def edit(scores: Tensor) -> None:
            if fetch.bias is not None:
                scores[..., : fetch.bias.shape[-1]] += fetch.bias
            if cache.state is not None and not cache.names_rows:
                self._hide_unread(cache, query, scores)
            rest = self.rest.get(cache)
            if rest is not None and rest.log_mass is not None:
                self.rest[cache] = rest.beside(cache.policy.softmax.log_total(scores))

        parts, visible = cache.parts(fetch), cache.visible(fetch)
        output = attend_by_scores(query, parts, own, visible, cache.policy.softmax, edit)
        # Within the step no one asks for the own row but a state, a link, or another kind of cache.
        if cache.state is None and cache.share.link is None and type(cache) is LayerCache:
            key = cache.store.format, own.keys.shape
            self.own.setdefault(key, []).append((cache, own))
        else:
            cache.keep_own(*own)
        return output


def _bias_of_columns(cache: LayerCache, query: Tensor, fetch: Fetch) -> Tensor:
    """`DecodeStep._bias` of a layer that reads all columns."""
    batch, visible = cache.batch, cache.visible(fetch)
    if not (batch.bucket and fetch.in_place):
        return _new_bias(cache, query, None, visible)
    # The own row lies at its column, which need not be the last one.
    tokens = batch.tokens[:, None, None, : batch.limit()]
    columns = batch.slots[:, :, None, : batch.limit()]
    visible = (tokens < batch.positions[:, None, None, None]) | (columns == batch.column)
    return _new_bias(cache, query, None, visible, own=0)


def _new_bias(
    cache: LayerCache,
    query: Tensor,
    of_rows: Tensor | None,
    visible: Tensor | None,
    own: int = 1,
) -> Tensor:
    """A bias of the n cached rows, and 0 for the own one: [batch, 1 or num_kv_heads, 1 or group, n
    + own].

    of_rows: added to their scores, [batch, num_kv_heads, 1 or group, 1, n]; visible: bool [batch, 1
    or num_kv_heads, 1, n]; None for all. own: 0 where the own row is among the n.
    """
    known = of_rows.squeeze(3) if of_rows is not None else visible
    assert known is not None, "there is something to add"
    num_cached = known.shape[-1]
    room = -(-(num_cached + own) // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = query.new_zeros((*known.shape[:-1], room))[..., : num_cached + own]
    cached = bias[..., :num_cached]
    if of_rows is not None:
        cached.copy_(known)
    if visible is not None:  # one launch, where `masked_fill_` takes the mask's opposite
        torch.where(visible, cached, cache.share.minus_infinity(query.dtype), out=cached)
    return bias


def attend_by_scores(
    query: Tensor,
    parts: Sequence[KeyValue | PackedRows],
    own: KeyValue,
    visible: Tensor | None,
    softmax: Softmax,
    edit: Callable[[Tensor], None],
) -> Tensor:
    """Attention of one row with its scores fp32 [batch, num_kv_heads, group, 1, n + 1], the own one
    last, shown to `edit`, which may change those of the cached rows in place.

    query: [batch, heads, 1, head_dim]; parts: the n cached rows, together; own: [batch,
    num_kv_heads, 1, size]; visible: of the cached rows, bool [batch, 1 or num_kv_heads, 1, n], None
    for all. Returns [batch, num_kv_heads, group, 1, value_dim].
    """
    cached = [softmax.scores(query, part.keys) for part in parts]
    of_own_key = softmax.scores(query, own.keys)
    counts = [scores.shape[-1] for scores in cached]
    if visible is not None:
        seen = visible.unsqueeze(2).split(counts, -1)
        for number, of_part in enumerate(cached):
            cached[number] = torch.where(seen[number], of_part, float("-inf"))
    scores = torch.cat([*cached, of_own_key], -1)
    edit(scores)
    weights = softmax.weights(scores).to(own.values.dtype)[..., 0, :]
    *of_parts, of_own = weights.split([*counts, 1], -1)
    output = of_own * own.values  # [batch, kv, group, value_dim]
    for of_part, part in zip(of_parts, parts, strict=True):
        output = output + of_part @ part.values
    return output.unsqueeze(3)


def _decides_for_next(cache: LayerCache) -> bool:
    """True if the next layer's rows follow from this layer's selection among its fetched rows."""
    following = cache.following
    if following is None or not following.names_rows or following.policy.when != "earlier_layer":
        return False
    return cache.state is not None and not cache.names_rows
