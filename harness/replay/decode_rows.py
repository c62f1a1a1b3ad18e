"""The forward passes of replay, seen from the layers: the prompt's, and that of many decode rows at once.

Memory is linear in the length: query rows are taken in chunks whose scores stay within `SCORES_PER_CHUNK`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention, heads_last, padding, prompt_attention, weighted_values, with_rest
from harness.replay.history import History
from harness.sizes import ReadStats, share_of_cache
from methods.base import EMPTY, PromptRows, Rows, Selection, State, attention_scores
from methods.codec import SplitCodec

SCORES_PER_CHUNK = 2**23
"""Scores held at once, 32 MiB in fp32: what exceeds a CPU's last-level cache is slower."""
MAX_CHUNK = 256


class PromptPass(Handler):
    """Prompt rows attend densely and exactly, in every layer."""

    def __init__(self, attached: Attached, history: History, state: State | None, valid: Tensor) -> None:
        self.history = history
        self.state = state
        self.scale = attached.geometry.scale
        self.rows = PromptRows(valid, history.tokens.shape[1])
        self.padding = padding(valid)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.history.keep(layer, key, value, slice(0, key.shape[2]))
        if self.state is not None and layer >= self.history.method.num_exempt_layers:
            self.state.prompt(layer, query, key, value, self.rows)
            if self.history.method.selects == "previous":
                self.history.queries[layer] = query[:, :, -1:].clone()
            if self.history.method.holds_keys:
                self.history.hold(layer, self.state, key, value)
        return prompt_attention(query, key, value, self.scale, self.padding)


class DecodePass(Handler):
    """Decode rows: in the non-exempt layers each reads its selection plus itself.

    read, index_read, recall: fp64 [batch, rows], summed over the non-exempt layers.
    """

    def __init__(
        self,
        attached: Attached,
        history: History,
        state: State | None,
        positions: Tensor,
        valid: Tensor,
        measure_recall: bool,
    ) -> None:
        self.geometry = attached.geometry
        self.history = history
        self.state = state
        self.method = history.method
        self.positions = positions.int()
        self.valid = valid
        self.measure_recall = measure_recall
        self.dense = history.dense
        self.start = history.length - valid.shape[1]
        self.has_padding = not bool(valid.all())
        self.padded = bool((history.tokens[:, : history.length] == EMPTY).any())
        self.rehearsed: dict[int, Tensor] = {}
        self.read, self.index_read, self.recall = (torch.zeros_like(valid, dtype=torch.float64) for _ in range(3))
        self.layers_fired = 0

    def rehearses(self, layer: int) -> bool:
        rehearsed = self.state is not None and self.method.selects == "rehearsed"
        return rehearsed and layer >= self.method.num_exempt_layers

    def rehearse(self, layer: int, query: Tensor) -> None:
        self.rehearsed[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        columns = slice(self.start, self.history.length)
        self.history.keep(layer, key, value, columns)
        exempt = self.dense or layer < self.method.num_exempt_layers
        if not exempt:
            self.layers_fired += 1
            if self.state is not None:
                self.state.append(layer, key, value, self.history.tokens[:, columns], columns)
        selects_by = self._selecting_query(layer, query)
        chunks = []
        for rows in self._chunks(query):
            block = _Block(self, layer, rows, query, selects_by)
            chunks.append(block.dense() if exempt else block.selected(key[:, :, rows], value[:, :, rows]))
        return torch.cat(chunks, 1)

    def _selecting_query(self, layer: int, query: Tensor) -> Tensor:
        """What the rows select by, shaped like their `query`."""
        if layer not in self.history.queries:
            return self.rehearsed.pop(layer, query)
        shifted = torch.cat([self.history.queries[layer], query], 2)
        last = self.valid.sum(-1)[:, None, None, None].expand(*query.shape[:2], 1, query.shape[-1])
        self.history.queries[layer] = shifted.gather(2, last)
        return shifted[:, :, :-1]

    def stats(self, weights: Tensor, code_bits: float, resident: Tensor) -> ReadStats:
        """Sums over the pass's rows, each `weights` [batch, rows] times; resident: a sequence's share, fp64 [batch]."""
        cached, codec, num_layers = self.positions.double(), self.history.codec, self.geometry.num_layers
        rows = float(weights.sum())
        pairs = float((weights * (cached + 1)).sum())
        if self.dense:
            recall = rows if self.measure_recall else None
            whole = {"rows": rows, "fired_rows": rows, "frac_sum": rows, "pairs_read": pairs, "pairs": pairs}
            return ReadStats(**whole, code_bits=code_bits, recall_sum=recall)
        exempt = self.method.num_exempt_layers
        selecting = num_layers - exempt
        width = codec.bits_per_element(self.geometry.head_dim) / 16 if codec else 1.0
        cached = cached.clamp(min=1)  # 0: padding only
        share = share_of_cache(cached, self.read, width, exempt, num_layers)
        index_share = share_of_cache(cached, self.index_read, 1.0, 0, num_layers)
        return ReadStats(
            rows=rows,
            fired_rows=rows if self.layers_fired == selecting else 0.0,
            frac_sum=float((weights * share).sum()),
            index_sum=float((weights * index_share).sum()),
            resident_sum=float(weights.sum(1).cpu() @ resident),
            pairs_read=pairs if self.method.reads_all else float((weights * (self.read / selecting + 1)).sum()),
            pairs=pairs,
            code_bits=code_bits,
            recall_sum=float((weights * self.recall).sum()) / selecting if self.measure_recall else None,
        )

    def _chunks(self, query: Tensor) -> list[slice]:
        batch, heads, rows, _ = query.shape
        size = max(16, min(MAX_CHUNK, SCORES_PER_CHUNK // (batch * heads * self.history.length)))
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


class _Block:
    """A chunk of decode rows in one layer, over the columns up to the chunk's end."""

    def __init__(self, rows_pass: DecodePass, layer: int, rows: slice, query: Tensor, selects_by: Tensor) -> None:
        self.rows_pass = rows_pass
        self.tokens = rows_pass.history.tokens
        self.layer = layer
        self.rows = rows
        self.first_own = rows_pass.start + rows.start
        self.stop = rows_pass.start + rows.stop
        self.query = query[:, :, rows]
        self.selects_by = selects_by[:, :, rows]
        self.key, self.value = (part[:, :, : self.stop] for part in rows_pass.history.kv[layer])
        self.exact = rows_pass.history.exact.get(layer)
        self.scale = rows_pass.geometry.scale
        self._scores: Tensor | None = None

    def dense(self) -> Tensor:
        """All visible columns and the own one, as stored."""
        return dense_attention(self.query, self.key, self.value, self.scale, ~self._hidden(0)[:, None])

    def selected(self, key: Tensor, value: Tensor) -> Tensor:
        """The selection and the own row, whose exact key and value [batch, num_kv_heads, rows, head_dim] are given."""
        exact = None if self.rows_pass.history.codec is None else (key, value)
        selection = self._select(exact)
        scores = self._true_scores(exact)
        everything = torch.logsumexp(scores, -1) if self.rows_pass.measure_recall else None
        if selection.bias is not None:
            own = self._own(scores).clone()
            scores += selection.bias
            self._own(scores).copy_(own)
        if selection.mask is not None:
            mask = self.rows_pass.history.with_staying(self.layer, selection.mask)
            self._own(mask).fill_(True)
            scores.masked_fill_(~mask.unsqueeze(2), float("-inf"))
        if everything is not None:
            recall = (torch.logsumexp(scores, -1) - everything).exp_()
            self.rows_pass.recall[:, self.rows] += recall.mean((1, 2))
        output, probs = weighted_values(scores, self.value)
        if self.exact is not None:
            output += self._of_exact_values(probs)
        elif exact is not None:
            stored = self.value[:, :, self.first_own :]
            output += self._own(probs).unsqueeze(-1) * (value - stored).unsqueeze(2)
        return heads_last(with_rest(output, selection.rest))

    def _of_exact_values(self, probs: Tensor) -> Tensor:
        """What the values that a row reads exactly, its own among them, add to its output over the coded ones."""
        codec = self.rows_pass.history.codec
        assert isinstance(codec, SplitCodec) and self.exact is not None
        coded = self._first(codec.coded_values)
        recent = probs.masked_fill(coded[:, None, None], 0.0).flatten(2, 3).to(self.value.dtype)
        return (recent @ (self.exact[1][:, :, : self.stop] - self.value)).view(*probs.shape[:-1], -1)

    def _first(self, number: Callable[[Tensor], Tensor]) -> Tensor:
        """Columns of the first tokens, as many as `number` makes of those cached: bool [batch, rows, columns]."""
        return self.tokens[:, None, : self.stop] < number(self.rows_pass.positions[:, self.rows])[:, :, None]

    def _select(self, exact: tuple[Tensor, Tensor] | None) -> Selection:
        positions = self.rows_pass.positions[:, self.rows]
        if self.rows_pass.state is None:
            stored = codec.stored(positions) if (codec := self.rows_pass.history.codec) else positions
            selection = Selection(None, stored.double(), (positions - stored).double())
        else:
            own = torch.arange(self.first_own, self.stop, device=positions.device)
            rows = Rows(
                query=self.selects_by,
                positions=positions,
                real=self.rows_pass.valid[:, self.rows],
                slot_positions=self.tokens[:, None, : self.stop],
                own_slots=own.expand(len(positions), 1, -1),
                true_scores=lambda: self._true_scores(exact),
                padded=self.rows_pass.has_padding,
            )
            selection = self.rows_pass.state.select(self.layer, rows)
        self.rows_pass.read[:, self.rows] += selection.num_read
        if selection.side is not None:
            self.rows_pass.index_read[:, self.rows] += selection.side
        return selection

    def _true_scores(self, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch, num_kv_heads, group, rows, columns], -inf where hidden; the own column from the exact key."""
        if self._scores is None:
            scores = self._stored_scores()
            first = 0 if self.rows_pass.padded else self.first_own  # without padding all earlier columns are visible
            scores[..., first:].masked_fill_(self._hidden(first)[:, None, None], float("-inf"))
            if exact is not None:
                grouped = self.query.view(*scores.shape[:4], -1)
                self._own(scores).copy_((grouped * exact[0].unsqueeze(2)).sum(-1) * self.scale)
            self._scores = scores
        return self._scores

    def _stored_scores(self) -> Tensor:
        """By the keys as a row reads them: the last ones exact where the codec leaves them so."""
        scores = attention_scores(self.query, self.key, self.scale)
        codec = self.rows_pass.history.codec
        if self.exact is None or not isinstance(codec, SplitCodec):
            return scores
        exact = attention_scores(self.query, self.exact[0][:, :, : self.stop], self.scale)
        return torch.where(self._first(codec.coded_keys)[:, None, None], scores, exact)

    def _hidden(self, first: int) -> Tensor:
        """Columns from `first` that are no real token at or before the row: bool [batch, rows, columns]."""
        positions = self.rows_pass.positions[:, self.rows, None]
        hidden = self.tokens[:, None, first : self.stop] > positions
        hidden.diagonal(self.first_own - first, -2, -1).fill_(False)  # padding sees itself: no empty softmax
        return hidden

    def _own(self, over_columns: Tensor) -> Tensor:
        """The view of each row's own column, last axis rows."""
        return over_columns.diagonal(self.first_own, -2, -1)
