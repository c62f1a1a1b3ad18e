"""Teacher-forced decode rows in replay: all rows of a pass go through a layer at once. And what
they read, with the sums of it that a session reports (`PassCounts`).

The layer's fresh keys and values join the history first. Then blocks of query rows, one after
another, select what they read (`State.select`, as in live decoding) and attend to it and to
themselves: replay masks the rows that live decoding does not fetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.decode.cache import select
from harness.decode.gpu_cache import GpuCache
from harness.decode.reads import LayerRead, RowReads
from harness.model.attention import (
    ROWS,
    SCORES_PER_CHUNK,
    dense_attention,
    heads_last,
    read_by_any,
    relative_error,
    weighted_values,
    with_rest,
)
from harness.model.budgets import ReadStats, code_widths, window_share
from harness.model.passes import Handler
from harness.model.policies import Policy, evicts
from methods.attention import hide, log_sum_exp
from methods.base import EMPTY, Geometry, Method, QueryRows, Selection, State
from methods.codecs.split import CacheCodec, SplitCodec

if TYPE_CHECKING:
    from harness.replay.session import ReplaySession

GATHERED_SCORES = 2**16
"""Scores of a KV head in a block from which on its columns are gathered. For fewer the calls cost
more than the arithmetic that they save."""
GATHERED_SHARE = 0.6
"""The largest share of the columns that a block gathers. Beyond it a mask is as fast."""


class PassCounts(RowReads):
    """Counts of the rows of a decode pass: what they read, and more sums over the layers under the
    method, fp64 [batch, rows].

    recall: share of the attention on what is read.
    With a GPU cache, rows of all KV heads: selected: rows chosen. loaded: by layer, those that
    were not on the device, and crossed the link.
    num_selecting: layers in which the method ran. errors: where they are measured, relative errors
    of attention outputs by layer under the method, fp32 [batch, rows, heads].
    """

    def __init__(
        self, cached: Tensor, geometry: Geometry, method: Method, codec: CacheCodec | None
    ) -> None:
        super().__init__(cached, geometry, method, code_widths(codec, geometry))
        self.recall = torch.zeros_like(self.read)
        self.selected = torch.zeros_like(self.read)
        self.loaded: dict[int, Tensor] = {}
        self.num_selecting = 0
        self.errors: dict[int, Tensor] = {}

    def stats(self, weights: Tensor, *, measures_recall: bool) -> ReadStats:
        """Sums over the rows, each `weights` [batch, rows] times."""
        selecting = self.geometry.num_layers - self.method.dense_layers
        stats = self.stats_of_all(weights, measures_recall=measures_recall)
        if not self.method.reads_all:
            pairs_read = float((weights * (self.read / selecting + 1)).sum())
            stats = replace(stats, pairs_read=pairs_read)
        if measures_recall:
            recall_sum = float((weights * self.recall).sum()) / selecting
            stats = replace(stats, recall_sum=recall_sum)
        if evicts(self.method):
            stats = replace(stats, evicted_sum=float((weights * self.evicted).sum()))
        return replace(
            stats,
            fired_rows=stats.rows if self.num_selecting == selecting else 0.0,
            frac_sum=float((weights * self.share).sum()),
            index_sum=float((weights * self.index_share).sum()),
        )

    def stats_of_all(self, weights: Tensor, *, measures_recall: bool) -> ReadStats:
        """The sums of rows that read the full cache."""
        rows = float(weights.sum())
        pairs = float((weights * (self.cached.double() + 1)).sum())
        local = window_share(self.whole, self.geometry)
        return ReadStats(
            rows=rows,
            fired_rows=rows,
            frac_sum=rows,
            window_sum=float((weights * local).sum()),
            pairs_read=pairs,
            pairs=pairs,
            recall_sum=rows if measures_recall else None,
        )

    def attention_errors(self, real: Tensor) -> Tensor:
        """Relative errors of the attention outputs of the rows that are `real` (bool [batch,
        rows]): fp32 [layers that see every token, real rows, heads], on the CPU. They are 0 in
        layers that read every token as it is."""
        geometry = self.geometry
        found = torch.zeros(geometry.num_layers, int(real.sum()), geometry.num_heads)
        for number, errors in self.errors.items():
            found[number] = errors[real].cpu()
        return found

    def with_link(self, stats: ReadStats, weights: Tensor, policies: Sequence[Policy]) -> ReadStats:
        """`stats`, and what crosses the link with a GPU cache. policies: of all
        layers."""
        cached, num_kv_heads = self.whole, self.geometry.num_kv_heads
        crossed = self.method.dense_layers * cached
        rows_loaded: Counter[int] = Counter()
        for policy in policies:
            if policy.kind != "method":
                continue
            number, width = policy.number, self.widths[policy.number]
            if not policy.names_rows:
                crossed = crossed + width * cached
            elif number in self.loaded:
                crossed = crossed + width * self.loaded[number] / num_kv_heads
                rows_loaded[number] = round(float((weights * self.loaded[number]).sum()))
        crossed = crossed / (self.geometry.num_layers * cached)
        missed = sum(self.loaded.values(), torch.zeros_like(self.selected))
        hits = 1 - missed / self.selected.clamp(min=1)
        return replace(
            stats,
            link_sum=float((weights * crossed).sum()),
            rows_loaded=rows_loaded,
            hit_sum=float((weights * hits).sum()),
        )


class DecodePass(Handler):
    """Teacher-forced rows, each reading what the policy of its layer says, and itself.

    positions, valid: [batch, rows]. tokens: int32 [batch, columns so far], the token of each
    column. counts: what the rows read. predicted: by layer, queries made in the layer before.
    """

    def __init__(self, session: ReplaySession, positions: Tensor, valid: Tensor) -> None:
        self.session = session
        self.history = session.history
        self.policies = session.policies
        self.valid = valid
        self.positions = positions.int()
        self.start = self.history.length - valid.shape[1]
        self.has_padding = not bool(valid.all())
        self.tokens = self.history.tokens[:, : self.history.length]
        self.is_padded = bool((self.tokens == EMPTY).any())
        self.counts = PassCounts(
            self.positions, session.attached.geometry, session.method, session.codec
        )
        self.predicted: dict[int, Tensor] = {}

    def predicts(self, layer: int) -> bool:
        return self.session.state is not None and self.policies[layer].is_predicted

    def predict(self, layer: int, query: Tensor) -> None:
        self.predicted[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        policy = self.policies[layer]
        columns = slice(self.start, self.history.length)

        # Write: the fresh rows join the history, as they read back from storage.
        self.history.keep(layer, key, value, columns)
        is_selecting = policy.kind == "method" and not self.session.reads_everything
        state = self.session.state if is_selecting else None
        if state is not None:
            state.append(policy.number, key, value, self.tokens[:, columns], columns)
        if not is_selecting:
            return self._attend_to_all(layer, query, self.history.kv[layer])
        self.counts.num_selecting += 1

        # Select and attend, block by block.
        asking = self._selecting_query(layer, query)
        outputs: list[Tensor] = []
        full_outputs: list[Tensor] = []
        for rows in self._blocks(query):
            block = _Block(self, layer, state, rows, query, asking)
            outputs.append(block.attend_to_selection(key[:, :, rows], value[:, :, rows]))
            if block.full is not None:
                full_outputs.append(block.full)
        output = torch.cat(outputs, 1)
        if self.session.measure_errors:
            if full_outputs:
                full = torch.cat(full_outputs, 1)
            else:
                full = self._attend_to_all(layer, query, self.history.uncoded_rows(layer))
            self.counts.errors[policy.number] = relative_error(output, full)
        return output

    def _attend_to_all(self, layer: int, query: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Attention to all columns that the layer sees, and the own one. kv: keys and values of all
        columns."""
        if self._is_causal(layer, query):
            return self._causal_attention(layer, query, kv)
        outputs = []
        for rows in self._blocks(query):
            block = _Block(self, layer, None, rows, query, query)
            outputs.append(block.attend_to_all(*kv))
        return torch.cat(outputs, 1)

    def _is_causal(self, layer: int, query: Tensor) -> bool:
        """True if rows that read everything are best computed with the columns before them, as one
        causal pass: it costs half as much for each pair as a mask does."""
        policy = self.policies[layer]
        if self.is_padded or policy.window is not None or not policy.softmax.is_plain:
            return False
        return query.shape[2] > 1 and self.start <= 2 * query.shape[2]

    def _causal_attention(self, layer: int, query: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Attention to all columns, in one causal pass in which the columns before the rows have
        queries of zeros."""
        keys, values = kv
        queries = pad(query, (0, 0, self.start, 0))
        columns = slice(0, self.history.length)
        softmax = self.policies[layer].softmax
        output = dense_attention(queries, keys[:, :, columns], values[:, :, columns], softmax)
        return output[:, self.start :]

    def _blocks(self, query: Tensor) -> Iterator[slice]:
        """Rows that select and attend together: as many as asked for, or as memory allows."""
        size, num_rows = self.session.rows_per_block, query.shape[2]
        if size is None:
            scores_of_row = query.shape[0] * query.shape[1] * self.history.length
            size = max(16, min(ROWS, SCORES_PER_CHUNK // scores_of_row))
        for begin in range(0, num_rows, size):
            yield slice(begin, min(begin + size, num_rows))

    def _selecting_query(self, layer: int, query: Tensor) -> Tensor:
        """The queries that rows select by, shaped like their `query`."""
        before = self.history.last_queries.get(layer)
        if self.policies[layer].when != "previous_step" or before is None:
            return self.predicted.pop(layer, query)
        shifted = torch.cat([before, query], 2)
        last = self.valid.sum(-1)[:, None, None, None]
        index = last.expand(*query.shape[:2], 1, query.shape[-1])
        self.history.last_queries[layer] = shifted.gather(2, index)
        return shifted[:, :, :-1]

    def stats(self, weights: Tensor) -> ReadStats:
        """Sums over the pass's rows, each `weights` [batch, rows] times."""
        session = self.session
        if session.reads_everything:
            return self.counts.stats_of_all(weights, measures_recall=session.measure_recall)
        stats = self.counts.stats(weights, measures_recall=session.measure_recall)
        if session.rooms is not None:
            stats = self.counts.with_link(stats, weights, self.policies)
        return stats


class _Block:
    """A block of decode rows in one layer, over the columns up to the block's end."""

    def __init__(
        self,
        decode: DecodePass,
        layer: int,
        state: State | None,
        rows: slice,
        query: Tensor,
        asking: Tensor,
    ) -> None:
        self.decode = decode
        self.counts = decode.counts
        self.codec = decode.history.codecs[layer]
        self.layer = layer
        self.state = state
        self.policy = decode.policies[layer]
        self.rows = rows
        self.first_own = decode.start + rows.start
        self.stop = decode.start + rows.stop
        self.query = query[:, :, rows]
        self.asking = asking[:, :, rows]
        self.positions = decode.positions[:, rows]
        self.real = decode.valid
        self.tokens = decode.tokens[:, : self.stop]
        self.key = decode.history.kv[layer][0][:, :, : self.stop]
        self.value = decode.history.kv[layer][1][:, :, : self.stop]
        leaves_exact = self.codec is not None and self.codec.residual
        self.exact = decode.history.uncoded[layer] if leaves_exact else None
        self.softmax = self.policy.softmax
        self._scores: Tensor | None = None
        self.full: Tensor | None = None
        """Where recall and errors are measured, the full cache's output, set by
        `attend_to_selection`: it costs little beside the recall."""

    def attend_to_all(self, key: Tensor, value: Tensor) -> Tensor:
        """All columns that the layer sees, and the own one. key, value: of all columns."""
        first, window = 0, self.policy.window
        if window is not None and not self.decode.is_padded:  # a token lies in its number's column
            first = int(window.first_visible(torch.tensor(self.first_own)))
        hidden = self._hidden(first)
        if window is not None:
            tokens = self.tokens[:, None, first:]
            too_old = tokens < window.first_visible(self.positions)[:, :, None]
            hidden |= too_old & (tokens != self.positions[:, :, None])
        columns = slice(first, self.stop)
        visible = ~hidden[:, None]
        return dense_attention(
            self.query, key[:, :, columns], value[:, :, columns], self.softmax, visible
        )

    def attend_to_selection(self, key: Tensor, value: Tensor) -> Tensor:
        """The selection and the own row, whose exact key and value [batch, num_kv_heads, rows,
        size] are given."""
        exact = None if self.codec is None else (key, value)
        selection = self._choose_tokens(exact)
        visible = None if selection.mask is None else self._visible(selection.mask)
        if visible is not None and self._gathers(selection, visible):
            output = self._attend_to_gathered(visible, exact)
            return heads_last(with_rest(output, selection.rest))
        return self._attend_to_masked(selection, visible, exact)

    def _attend_to_masked(
        self, selection: Selection, visible: Tensor | None, exact: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Scores of all columns, those hidden that a row does not read."""
        scores = self._true_scores(exact)
        everything = None
        if self.decode.session.measure_recall:
            everything = self._everything(scores, is_last_use=False)
        if selection.bias is not None:
            own = self._own(scores).clone()
            scores += selection.bias
            self._own(scores).copy_(own)
        if visible is not None:
            hide(scores, visible.unsqueeze(2))
        if everything is not None:
            recall = (log_sum_exp(scores) - everything).exp_()
            self._add(self.counts.recall, recall.mean((1, 2)))
        rest = selection.rest
        if rest is not None and rest.log_mass is not None:
            rest = rest.beside(self.softmax.log_total(scores))
        output, weights = weighted_values(scores, self.value, self.softmax)
        if self.exact is not None and isinstance(self.codec, SplitCodec):
            # The last values, the own among them, are exact.
            coded = self._first(self.codec.coded_values)[:, None, None]
            recent = weights.masked_fill(coded, 0.0).flatten(2, 3).to(self.value.dtype)
            off = self.exact[1][:, :, : self.stop] - self.value
            output += (recent @ off).view(*weights.shape[:-1], -1)
        elif exact is not None:
            stored = self.value[:, :, self.first_own :]
            output += self._own(weights).unsqueeze(-1) * (exact[1] - stored).unsqueeze(2)
        return heads_last(with_rest(output, rest))

    def _everything(self, scores: Tensor, *, is_last_use: bool) -> Tensor:
        """Logarithm of the sum of exp(score) over all columns, of true scores; sets `full` where
        errors are measured. is_last_use: the scores may be overwritten."""
        if not self.decode.session.measure_errors:
            return log_sum_exp(scores)
        largest = scores.amax(-1)
        total: Tensor | None = None
        if self.softmax.sinks is not None:  # their share is not in the weights
            total = log_sum_exp(scores)
        scores = scores if is_last_use else scores.clone()
        output, weights = weighted_values(scores, self.value, self.softmax)
        self.full = heads_last(output)
        return largest - weights.amax(-1).log_() if total is None else total

    def _gathers(self, selection: Selection, visible: Tensor) -> bool:
        """True if the block looks only at the columns that some of its rows read, which is faster
        where they are few."""
        rest = selection.rest
        has_log_mass = rest is not None and rest.log_mass is not None
        if visible.device.type != "cpu":  # its size would have to be waited for
            return False
        if selection.bias is not None or has_log_mass or self.exact is not None:
            return False
        group = self.query.shape[1] // self.key.shape[1]
        if group * visible.shape[2] * visible.shape[3] < GATHERED_SCORES:
            return False
        return float(read_by_any(visible).float().mean()) <= GATHERED_SHARE

    def _attend_to_gathered(self, visible: Tensor, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of each KV head over the columns that some row of the block reads: [batch,
        num_kv_heads, group, rows, value_dim].

        visible: as `_visible`. exact: the own keys and values. The other columns have a weight of 0
        in `_attend_to_masked`, so only the order of the sums differs.
        """
        batch, num_kv_heads, num_rows = *self.key.shape[:2], self.query.shape[2]
        grouped = self.query.unflatten(1, (num_kv_heads, -1))
        output = grouped.new_empty(*grouped.shape[:4], self.value.shape[-1])
        everything = None
        if self.decode.session.measure_recall:
            everything = self._everything(self._true_scores(exact), is_last_use=True)
            recall = torch.empty_like(everything)
        own_scores = None if exact is None else self._own_scores(exact[0])
        used = read_by_any(visible)
        for sequence in range(batch):
            for head in range(num_kv_heads):
                set_of_head = min(head, visible.shape[1] - 1)
                of_head = used[sequence, set_of_head]
                columns = of_head.nonzero().flatten()
                read = visible[sequence, set_of_head].numpy().compress(of_head.numpy(), 1)
                key = self.key[sequence, head].index_select(0, columns)[None, None]
                value = self.value[sequence, head].index_select(0, columns)[None, None]
                softmax = self.softmax.of_kv_head(head, num_kv_heads)
                scores = softmax.scores(grouped[sequence, head][None], key)
                # The last columns are the rows' own.
                first_own = len(columns) - num_rows
                if own_scores is not None:
                    of_own = scores.diagonal(first_own, -2, -1)
                    of_own.copy_(own_scores[sequence, head])
                hide(scores, torch.from_numpy(read))
                if everything is not None:
                    of_all = everything[sequence, head]
                    recall[sequence, head] = (log_sum_exp(scores[0, 0]) - of_all).exp_()
                attended, weights = weighted_values(scores, value, softmax)
                if exact is not None:
                    off = exact[1][sequence, head] - value[0, 0, first_own:]
                    attended += weights.diagonal(first_own, -2, -1).unsqueeze(-1) * off
                output[sequence, head] = attended[0, 0]
        if everything is not None:
            self._add(self.counts.recall, recall.mean((1, 2)))
        return output

    def _visible(self, mask: Tensor) -> Tensor:
        """The columns that each row reads, its own among them: bool, shaped as the `mask` of a
        selection."""
        visible = mask.clone()  # the method may hold it
        resident = self.decode.history.resident.get(self.layer)
        if resident is not None:
            generated = (0, self.stop - resident.shape[-1])
            visible = visible | pad(resident, generated, value=True).unsqueeze(2)
        first = 0 if self.decode.is_padded else self.first_own
        visible[..., first:] &= ~self._hidden(first)[:, None]
        self._own(visible).fill_(True)
        return visible

    def _choose_tokens(self, exact: tuple[Tensor, Tensor] | None) -> Selection:
        """The tokens that the rows read besides themselves, whose number is counted."""
        if self.state is None:  # everything, under a codec
            stored = self.codec.stored(self.positions) if self.codec else self.positions
            selection = Selection(None, stored.double(), (self.positions - stored).double())
        else:
            own = torch.arange(self.first_own, self.stop, device=self.positions.device)
            rows = QueryRows(
                query=self.asking,
                positions=self.positions,
                real=self.real[:, self.rows],
                slot_positions=self.tokens[:, None],
                own_slots=own.expand(len(self.positions), 1, -1),
                true_scores=lambda: self._true_scores(exact),
                padded=self.decode.has_padding,
            )
            selection = select(self.state, self.policy.number, rows)
            gpu_cache = self.decode.session.gpu_caches.get(self.layer)
            if gpu_cache is not None:
                assert selection.mask is not None, "a method that names rows gives a mask"
                self._count_hits(gpu_cache, selection.mask)
        read = LayerRead(self.policy.number, selection.num_read, selection.side)
        self.counts.add([read], self.rows)
        return selection

    def _count_hits(self, gpu_cache: GpuCache, mask: Tensor) -> None:
        """Let the block's rows, one after another, fetch what is not on the device, and count it.

        mask: of the selection, bool [batch, 1 or num_kv_heads, rows, slots].
        """
        num_kv_heads, real = gpu_cache.slots.shape[1], self.real[:, self.rows]
        loaded = self.counts.loaded.setdefault(
            self.policy.number, torch.zeros_like(self.counts.read)
        )
        for row in range(real.shape[1]):
            this = slice(self.rows.start + row, self.rows.start + row + 1)
            of_row = mask[:, :, row] & real[:, row, None, None]
            of_row = of_row.expand(-1, num_kv_heads, -1)
            most = int(of_row.sum(-1).max())
            own = torch.tensor([self.first_own + row], device=of_row.device)
            fetch, _ = gpu_cache.request(of_row, self.tokens[:, None], own, most)
            loaded[:, this] += (fetch.slots >= 0).sum((1, 2))[:, None].to(loaded)
        selected = mask.sum(-1).sum(1) * (num_kv_heads // mask.shape[1])
        self._add(self.counts.selected, selected)

    def _add(self, total: Tensor, of_rows: Tensor) -> None:
        total[:, self.rows] += of_rows

    def _true_scores(self, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch, num_kv_heads, group, rows, columns], -inf where hidden; the own column from the
        exact key."""
        if self._scores is not None:
            return self._scores
        scores = self.softmax.scores(self.query, self.key)
        if self.exact is not None and isinstance(self.codec, SplitCodec):
            # The last keys are read exactly.
            exact_scores = self.softmax.scores(self.query, self.exact[0][:, :, : self.stop])
            coded = self._first(self.codec.coded_keys)[:, None, None]
            scores = torch.where(coded, scores, exact_scores)
        # Without padding all earlier columns are visible.
        first = 0 if self.decode.is_padded else self.first_own
        hide(scores[..., first:], ~self._hidden(first)[:, None, None])
        if exact is not None:
            self._own(scores).copy_(self._own_scores(exact[0]))
        self._scores = scores
        return scores

    def _own_scores(self, key: Tensor) -> Tensor:
        """Scores of the rows' own exact `key`, [batch, num_kv_heads, group, rows]."""
        grouped = self.query.unflatten(1, (key.shape[1], -1))
        own = (grouped * key.unsqueeze(2)).sum(-1) * self.softmax.scale
        return self.softmax.capped(own)

    def _first(self, number: Callable[[Tensor], Tensor]) -> Tensor:
        """Columns of the first tokens, as many as `number` makes of those cached: bool [batch,
        rows, columns]."""
        return self.tokens[:, None] < number(self.positions)[:, :, None]

    def _hidden(self, first: int) -> Tensor:
        """Columns from `first` that are no real token at or before the row: bool [batch, rows,
        columns]."""
        hidden = self.tokens[:, None, first:] > self.positions[:, :, None]
        own = hidden.diagonal(self.first_own - first, -2, -1)
        own.fill_(False)  # padding sees itself: no empty softmax
        return hidden

    def _own(self, over_columns: Tensor) -> Tensor:
        """The view of each row's own column, last axis rows."""
        return over_columns.diagonal(self.first_own, -2, -1)
