"""The decode rows of replay, on one page: a layer keeps the fresh rows, selects for each of them, and attends.

All rows of a pass go through a layer at once. The layer's fresh keys and values join the history first; then blocks of
query rows, one after another, are told what they may read, and attend to it and to themselves. Selections are those of
live decoding, as `State.select` is the same function; what live decoding fetches, replay masks.

Memory is linear in the length: a block's scores stay within `SCORES_PER_CHUNK`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention, heads_last, weighted_values, with_rest
from harness.model.policies import Policy
from harness.replay.history import History
from harness.sizes import ReadStats, code_width, in_windows, share_beside, share_of_cache
from methods.attention import hide
from methods.base import EMPTY, Rows, Selection, State
from methods.codec import SplitCodec

SCORES_PER_CHUNK = 2**23
"""Scores held at once, 32 MiB in fp32: what exceeds a CPU's last-level cache is slower."""
MAX_CHUNK = 256


class _Rows(NamedTuple):
    """The pass's rows on one device. positions, real: [batch, rows]; tokens: int32 [batch, columns so far]."""

    positions: Tensor
    real: Tensor
    tokens: Tensor


class DecodePass(Handler):
    """Teacher-forced rows, each reading what the policy of its layer says, and itself.

    states: the method's, by device; none where it reads everything. rows_per_block: see `ReplaySession`. read,
    index_read, recall: fp64 [batch, rows], summed over the layers under the method.
    """

    def __init__(
        self,
        attached: Attached,
        history: History,
        states: dict[torch.device, State],
        positions: Tensor,
        valid: Tensor,
        measure_recall: bool,
        rows_per_block: int | None = None,
    ) -> None:
        self.attached = attached
        self.geometry = attached.geometry
        self.history = history
        self.policies: Sequence[Policy] = history.policies
        self.states = states
        self.method = history.method
        self.measure_recall = measure_recall
        self.rows_per_block = rows_per_block
        self.reads_everything = self.method.reads_all and history.codec is None
        self.valid = valid
        self.positions = positions.int()
        self.start = history.length - valid.shape[1]
        self.has_padding = not bool(valid.all())
        self.is_padded = bool((history.tokens[:, : history.length] == EMPTY).any())
        self.rehearsed: dict[int, Tensor] = {}
        self.read, self.index_read, self.recall = (torch.zeros_like(valid, dtype=torch.float64) for _ in range(3))
        self.num_selecting = 0
        self._on_device: dict[torch.device, _Rows] = {}
        self._latest: State | None = None

    def rehearses(self, layer: int) -> bool:
        return bool(self.states) and self.policies[layer].when == "previous_layer"

    def rehearse(self, layer: int, query: Tensor) -> None:
        self.rehearsed[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        policy, device = self.policies[layer], self.attached.layers[layer].device
        rows = self.rows_on(device)
        columns = slice(self.start, self.history.length)

        # Write: the fresh rows join the history, as they read back from storage.
        self.history.keep(layer, key, value, columns)
        is_selecting = policy.kind == "method" and not self.reads_everything
        state = self.states.get(device) if is_selecting else None
        if state is not None:
            if self._latest not in (None, state):
                state.take_over(self._latest)
            self._latest = state
            state.append(policy.number, key, value, rows.tokens[:, columns], columns)
        if is_selecting:
            self.num_selecting += 1

        # Select and attend, block by block.
        asking = self._selecting_query(layer, query)
        outputs = []
        for block_rows in self._blocks(query):
            block = _Block(self, layer, state, block_rows, query, asking)
            if is_selecting:
                outputs.append(block.attend_to_selection(key[:, :, block_rows], value[:, :, block_rows]))
            else:
                outputs.append(block.attend_to_all())
        return torch.cat(outputs, 1)

    def rows_on(self, device: torch.device) -> _Rows:
        """The pass's rows, copied once to each device."""
        if device not in self._on_device:
            found = (self.positions, self.valid, self.history.tokens[:, : self.history.length])
            self._on_device[device] = _Rows(*(each.to(device) for each in found))
        return self._on_device[device]

    def _selecting_query(self, layer: int, query: Tensor) -> Tensor:
        """The queries that rows select by, shaped like their `query`."""
        if self.policies[layer].when == "previous_step" and layer in self.history.last_queries:
            shifted = torch.cat([self.history.last_queries[layer], query], 2)
            last = self.valid.sum(-1).to(query.device)[:, None, None, None].expand(*query.shape[:2], 1, query.shape[-1])
            self.history.last_queries[layer] = shifted.gather(2, last)
            return shifted[:, :, :-1]
        return self.rehearsed.pop(layer, query)

    def _blocks(self, query: Tensor) -> list[slice]:
        batch, heads, rows, _ = query.shape
        affordable = max(16, min(MAX_CHUNK, SCORES_PER_CHUNK // (batch * heads * self.history.length)))
        size = self.rows_per_block or affordable
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

    def stats(self, weights: Tensor, resident: Tensor) -> ReadStats:
        """Sums over the pass's rows, each `weights` [batch, rows] times; resident: a sequence's share, fp64 [batch]."""
        geometry, codec = self.geometry, self.history.codec
        cached = self.positions.double()
        rows = float(weights.sum())
        pairs = float((weights * (cached + 1)).sum())
        cached = cached.clamp(min=1)  # 0: padding only
        local = share_beside(cached, in_windows(cached, geometry.windows), geometry.num_layers, geometry.windows)
        sums = {"window_sum": float((weights * local).sum()), "resident_sum": float(weights.sum(1).cpu() @ resident)}
        if self.reads_everything:
            recall = rows if self.measure_recall else None
            whole = {"rows": rows, "fired_rows": rows, "frac_sum": rows, "pairs_read": pairs, "pairs": pairs}
            return ReadStats(**whole, **sums, recall_sum=recall)
        exempt, num_layers = self.method.num_exempt_layers, geometry.num_layers
        share = share_of_cache(cached, self.read, code_width(codec, geometry), exempt, num_layers, geometry.windows)
        index_share = share_beside(cached, self.index_read, num_layers, geometry.windows)
        selecting = num_layers - exempt
        return ReadStats(
            rows=rows,
            fired_rows=rows if self.num_selecting == selecting else 0.0,
            frac_sum=float((weights * share).sum()),
            index_sum=float((weights * index_share).sum()),
            **sums,
            pairs_read=pairs if self.method.reads_all else float((weights * (self.read / selecting + 1)).sum()),
            pairs=pairs,
            recall_sum=float((weights * self.recall).sum()) / selecting if self.measure_recall else None,
        )


class _Block:
    """A block of decode rows in one layer, over the columns up to the block's end."""

    def __init__(
        self, decode: DecodePass, layer: int, state: State | None, rows: slice, query: Tensor, asking: Tensor
    ) -> None:
        self.decode = decode
        self.layer = layer
        self.state = state
        self.policy = decode.policies[layer]
        self.rows = rows
        self.first_own = decode.start + rows.start
        self.stop = decode.start + rows.stop
        self.query = query[:, :, rows]
        self.asking = asking[:, :, rows]
        positions, self.real, tokens = decode.rows_on(query.device)
        self.positions = positions[:, rows]
        self.tokens = tokens[:, : self.stop]
        self.key, self.value = (part[:, :, : self.stop] for part in decode.history.kv[layer])
        self.exact = decode.history.exact.get(layer)
        self.softmax = self.policy.softmax
        self._scores: Tensor | None = None

    def attend_to_all(self) -> Tensor:
        """All columns that the layer sees, and the own one, as stored."""
        first, window = 0, self.policy.window
        if window is not None and not self.decode.is_padded:  # then a token lies in the column of its number
            first = int(window.first_visible(torch.tensor(self.first_own)))
        hidden = self._hidden(first)
        if window is not None:
            too_old = self.tokens[:, None, first:] < window.first_visible(self.positions)[:, :, None]
            hidden |= too_old & (self.tokens[:, None, first:] != self.positions[:, :, None])
        key, value = self.key[:, :, first:], self.value[:, :, first:]
        return dense_attention(self.query, key, value, self.softmax, ~hidden[:, None])

    def attend_to_selection(self, key: Tensor, value: Tensor) -> Tensor:
        """The selection and the own row, whose exact key and value [batch, num_kv_heads, rows, size] are given."""
        exact = None if self.decode.history.codec is None else (key, value)
        selection = self._select(exact)
        scores = self._true_scores(exact)
        everything = torch.logsumexp(scores, -1) if self.decode.measure_recall else None
        if selection.bias is not None:
            own = self._own(scores).clone()
            scores += selection.bias
            self._own(scores).copy_(own)
        if selection.mask is not None:
            visible = self.decode.history.with_resident(self.layer, selection.mask).clone()  # the method may hold it
            self._own(visible).fill_(True)
            hide(scores, visible.unsqueeze(2))
        if everything is not None:
            recall = (torch.logsumexp(scores, -1) - everything).exp_()
            self._add(self.decode.recall, recall.mean((1, 2)))
        output, weights = weighted_values(scores, self.value, self.softmax)
        if self.exact is not None:
            output += self._of_exact_values(weights)
        elif exact is not None:
            stored = self.value[:, :, self.first_own :]
            output += self._own(weights).unsqueeze(-1) * (value - stored).unsqueeze(2)
        return heads_last(with_rest(output, selection.rest))

    def _select(self, exact: tuple[Tensor, Tensor] | None) -> Selection:
        """What the rows read besides themselves; takes down how much that is."""
        if self.state is None:  # everything, under a codec
            codec = self.decode.history.codec
            stored = codec.stored(self.positions) if codec else self.positions
            selection = Selection(None, stored.double(), (self.positions - stored).double())
        else:
            own = torch.arange(self.first_own, self.stop, device=self.positions.device)
            rows = Rows(
                query=self.asking,
                positions=self.positions,
                real=self.real[:, self.rows],
                slot_positions=self.tokens[:, None],
                own_slots=own.expand(len(self.positions), 1, -1),
                true_scores=lambda: self._true_scores(exact),
                padded=self.decode.has_padding,
            )
            selection = self.state.select(self.policy.number, rows)
        self._add(self.decode.read, selection.num_read)
        if selection.side is not None:
            self._add(self.decode.index_read, selection.side)
        return selection

    def _add(self, total: Tensor, of_rows: Tensor) -> None:
        total[:, self.rows] += of_rows.to(total.device)

    def _true_scores(self, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch, num_kv_heads, group, rows, columns], -inf where hidden; the own column from the exact key."""
        if self._scores is None:
            scores = self._stored_scores()
            first = 0 if self.decode.is_padded else self.first_own  # without padding all earlier columns are visible
            scores[..., first:].masked_fill_(self._hidden(first)[:, None, None], float("-inf"))
            if exact is not None:
                grouped = self.query.view(*scores.shape[:4], -1)
                own = (grouped * exact[0].unsqueeze(2)).sum(-1) * self.softmax.scale
                self._own(scores).copy_(self.softmax.capped(own))
            self._scores = scores
        return self._scores

    def _stored_scores(self) -> Tensor:
        """By the keys as a row reads them: the last ones exact where the codec leaves them so."""
        scores = self.softmax.scores(self.query, self.key)
        codec = self.decode.history.codec
        if self.exact is None or not isinstance(codec, SplitCodec):
            return scores
        exact = self.softmax.scores(self.query, self.exact[0][:, :, : self.stop])
        return torch.where(self._first(codec.coded_keys)[:, None, None], scores, exact)

    def _of_exact_values(self, weights: Tensor) -> Tensor:
        """What the values that a row reads exactly, its own among them, add to its output over the coded ones."""
        codec = self.decode.history.codec
        assert isinstance(codec, SplitCodec) and self.exact is not None
        coded = self._first(codec.coded_values)
        recent = weights.masked_fill(coded[:, None, None], 0.0).flatten(2, 3).to(self.value.dtype)
        return (recent @ (self.exact[1][:, :, : self.stop] - self.value)).view(*weights.shape[:-1], -1)

    def _first(self, number: Callable[[Tensor], Tensor]) -> Tensor:
        """Columns of the first tokens, as many as `number` makes of those cached: bool [batch, rows, columns]."""
        return self.tokens[:, None] < number(self.positions)[:, :, None]

    def _hidden(self, first: int) -> Tensor:
        """Columns from `first` that are no real token at or before the row: bool [batch, rows, columns]."""
        hidden = self.tokens[:, None, first:] > self.positions[:, :, None]
        hidden.diagonal(self.first_own - first, -2, -1).fill_(False)  # padding sees itself: no empty softmax
        return hidden

    def _own(self, over_columns: Tensor) -> Tensor:
        """The view of each row's own column, last axis rows."""
        return over_columns.diagonal(self.first_own, -2, -1)
