"""Replay: score a given text in few large forwards, with exactly the selections that live decoding would make.

A session holds one padded batch. `prefill` runs the prompt densely, `decode` runs any number of teacher-forced rows
at once, each seeing only its selection plus itself, and `fork` repeats sequences for several continuations of one
context. Columns are token slots: prompts are padded left and end in one column, later rows are padded right.

Memory is linear in the length: query rows are taken in chunks whose scores stay within `SCORES_PER_CHUNK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention, heads_last, visible_to_prompt, weigh
from harness.offload.codec import Codec
from harness.reads import ReadStats, share_of_cache
from methods.base import EMPTY, Method, PromptRows, Rows, Selection, attention_scores, require
from methods.infinigen import Rotations
from methods.quantization import require_codec

SCORES_PER_CHUNK = 2**23
"""Scores held at once, 32 MiB in fp32: what exceeds a CPU's last-level cache is slower."""
MAX_CHUNK = 256


class ReplaySession:
    """One batch of sequences under one method.

    final_lengths: int [batch], T of each sequence. num_columns: columns the batch will ever use.
    measure_recall: also measure attention_recall, at the cost of a second pass over the scores.
    Raises ValueError where the method cannot work at these lengths, in so few layers, or without its codec.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        final_lengths: Tensor,
        num_columns: int,
        codec: Codec | None = None,
        calibration: Rotations | None = None,
        measure_recall: bool = False,
    ) -> None:
        require_codec(method, codec)
        geometry = attached.geometry
        self.dense = method.reads_all and codec is None
        exempt, layers = method.num_exempt_layers, geometry.num_layers
        require(self.dense or exempt < layers, "num_exempt_layers", exempt, f"< {layers} layers")
        attached.require_window(int(final_lengths.max()))
        self.attached = attached
        self.method = method
        self.codec = codec
        self.measure_recall = measure_recall and codec is None
        self.state = None if method.reads_all else method.new_state(geometry, final_lengths, calibration)
        self.length = 0
        self.reads = self._no_reads()
        shape = (len(final_lengths), geometry.num_kv_heads, num_columns, geometry.head_dim)
        self.history = [
            tuple(torch.empty(shape, dtype=attached.dtype, device=attached.device) for _ in "kv") for _ in range(layers)
        ]
        self.tokens = torch.full((len(final_lengths), num_columns), EMPTY, dtype=torch.int32, device=attached.device)

    @property
    def num_tokens(self) -> Tensor:
        """Real tokens so far, int [batch]."""
        return (self.tokens[:, : self.length] != EMPTY).sum(-1)

    def prefill(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run the prompt densely.

        ids: int [batch, prompt]; valid: bool alike, False for the padding on the left; multiplicity: int [batch], how
        many requests share a sequence (1 by default). Returns final hidden states [batch, prompt, hidden_size].
        """
        if self.length:
            raise RuntimeError("prefill runs once, before any decode row")
        positions = self._enter(valid)
        hidden = self.attached.forward(ids, positions, _PromptPass(self, valid))
        pairs = float((_weights(valid, multiplicity) * (positions + 1)).sum())
        self.reads += ReadStats(pairs=pairs, pairs_read=pairs, code_bits=self.reads.code_bits)
        return hidden

    def decode(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run teacher-forced decode rows; may be called again for the rows that follow.

        ids: int [batch, rows]; valid: bool alike, False for the padding on the right. Returns hidden states
        [batch, rows, hidden_size], where padding holds nothing of meaning.
        """
        if not self.length:
            raise RuntimeError("decode rows need a prompt: call prefill first")
        positions = self._enter(valid)
        rows = _DecodePass(self, positions, valid)
        hidden = self.attached.forward(ids, positions, rows)
        self.reads += rows.stats(_weights(valid, multiplicity))
        return hidden

    def fork(self, index: Tensor, final_lengths: Tensor, num_columns: int) -> ReplaySession:
        """A session of the sequences `index` [new_batch] of this one, state copied; its `reads` start empty."""
        child = object.__new__(ReplaySession)
        child.__dict__.update(self.__dict__)
        child.reads = self._no_reads()
        child.state = None if self.state is None else self.state.fork(index, final_lengths, num_columns)
        child.tokens = self._widen(self.tokens, index, 1, num_columns, EMPTY)
        child.history = [tuple(self._widen(part, index, 2, num_columns, 0) for part in kv) for kv in self.history]
        return child

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows to the history, as the codec gives them back."""
        coded = self.codec is not None and layer >= self.method.num_exempt_layers
        for part, fresh in zip(self.history[layer], (key, value), strict=True):
            part[:, :, columns] = self.codec.roundtrip(fresh) if coded and self.codec else fresh

    def _enter(self, valid: Tensor) -> Tensor:
        """Give the fresh columns their tokens; returns positions int [batch, rows], those of padding repeated."""
        before = self.num_tokens
        positions = (before[:, None] + valid.cumsum(-1) - 1).clamp(min=0)
        columns = slice(self.length, self.length + valid.shape[1])
        self.tokens[:, columns] = positions.masked_fill(~valid, EMPTY).int()
        self.length = columns.stop
        return positions

    def _widen(self, tensor: Tensor, index: Tensor, axis: int, num_columns: int, fill: int) -> Tensor:
        used = tensor.narrow(axis, 0, self.length)
        shape = list(used.shape)
        shape[0], shape[axis] = len(index), num_columns
        wide = tensor.new_full(shape, fill) if fill else tensor.new_empty(shape)
        torch.index_select(used, 0, index, out=wide.narrow(axis, 0, self.length))
        return wide

    def _no_reads(self) -> ReadStats:
        return ReadStats(code_bits=self.codec.bits if self.codec and not self.codec.is_float else 16)


class _PromptPass(Handler):
    """Prompt rows attend densely and exactly, in every layer."""

    def __init__(self, session: ReplaySession, valid: Tensor) -> None:
        self.session = session
        self.rows = PromptRows(valid, session.tokens.shape[1])
        self.visible = visible_to_prompt(valid)

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        session = self.session
        session.keep(layer, key, value, slice(0, key.shape[2]))
        if session.state is not None and layer >= session.method.num_exempt_layers:
            session.state.prompt(layer, query, key, self.rows)
        return dense_attention(query, key, value, session.attached.geometry.scale, self.visible)


class _DecodePass(Handler):
    """Decode rows: in the non-exempt layers each reads its selection plus itself."""

    def __init__(self, session: ReplaySession, positions: Tensor, valid: Tensor) -> None:
        self.session = session
        self.positions = positions.int()
        self.valid = valid
        self.start = session.length - valid.shape[1]
        self.padded = bool((session.tokens[:, : session.length] == EMPTY).any())
        self.rehearsed: dict[int, Tensor] = {}
        self.read = torch.zeros(valid.shape, dtype=torch.float64, device=valid.device)  # tokens, summed over layers
        self.recall = torch.zeros(valid.shape, dtype=torch.float64, device=valid.device)
        self.layers_fired = 0

    def rehearses(self, layer: int) -> bool:
        return self.session.method.rehearses and layer >= self.session.method.num_exempt_layers

    def rehearse(self, layer: int, query: Tensor) -> None:
        self.rehearsed[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        session = self.session
        session.keep(layer, key, value, slice(self.start, session.length))
        exempt = session.dense or layer < session.method.num_exempt_layers
        if not exempt:
            self.layers_fired += 1
            if session.state is not None:
                session.state.append(layer, key, slice(self.start, session.length))
        rehearsed = self.rehearsed.pop(layer, query)
        chunks = []
        for rows in self._chunks(query):
            block = _Block(self, layer, rows, query, rehearsed)
            chunks.append(block.dense() if exempt else block.selected(key[:, :, rows], value[:, :, rows]))
        return torch.cat(chunks, 1)

    def stats(self, weights: Tensor) -> ReadStats:
        """Sums over the pass's rows, each `weights` [batch, rows] times."""
        session, geometry = self.session, self.session.attached.geometry
        cached = self.positions.double()
        rows = float(weights.sum())
        pairs = float((weights * (cached + 1)).sum())
        bits = session.reads.code_bits
        if session.dense:
            recall = rows if session.measure_recall else None
            return ReadStats(rows, rows, rows, pairs, pairs, bits, recall)
        exempt = session.method.num_exempt_layers
        selecting = geometry.num_layers - exempt
        width = session.codec.bits_per_element(geometry.head_dim) / 16 if session.codec else 1.0
        share = share_of_cache(cached.clamp(min=1), self.read, width, exempt, geometry.num_layers)  # 0: padding only
        return ReadStats(
            rows=rows,
            fired_rows=rows if self.layers_fired == selecting else 0.0,
            frac_sum=float((weights * share).sum()),
            pairs_read=float((weights * (self.read / selecting + 1)).sum()),
            pairs=pairs,
            code_bits=bits,
            recall_sum=float((weights * self.recall).sum()) / selecting if session.measure_recall else None,
        )

    def _chunks(self, query: Tensor) -> list[slice]:
        batch, heads, rows, _ = query.shape
        size = max(16, min(MAX_CHUNK, SCORES_PER_CHUNK // (batch * heads * self.session.length)))
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


class _Block:
    """A chunk of decode rows in one layer, over the columns up to the chunk's end."""

    def __init__(self, rows_pass: _DecodePass, layer: int, rows: slice, query: Tensor, rehearsed: Tensor) -> None:
        session = rows_pass.session
        self.rows_pass = rows_pass
        self.session = session
        self.layer = layer
        self.rows = rows
        self.first_own = rows_pass.start + rows.start
        self.stop = rows_pass.start + rows.stop
        self.query = query[:, :, rows]
        self.rehearsed = rehearsed[:, :, rows]
        self.key, self.value = (part[:, :, : self.stop] for part in session.history[layer])
        self.scale = session.attached.geometry.scale
        self._scores: Tensor | None = None

    def dense(self) -> Tensor:
        """All visible columns and the own one, as stored."""
        return dense_attention(self.query, self.key, self.value, self.scale, ~self._hidden(0)[:, None])

    def selected(self, key: Tensor, value: Tensor) -> Tensor:
        """The selection and the own row, whose exact key and value [batch, num_kv_heads, rows, head_dim] are given."""
        exact = None if self.session.codec is None else (key, value)
        selection = self._select(exact)
        scores = self._true_scores(exact)
        everything = torch.logsumexp(scores, -1) if self.session.measure_recall else None
        if selection.mask is not None:
            self._own(selection.mask).fill_(True)
            scores.masked_fill_(~selection.mask.unsqueeze(2), float("-inf"))
        if everything is not None:
            recall = (torch.logsumexp(scores, -1) - everything).exp_()
            self.rows_pass.recall[:, self.rows] += recall.mean((1, 2))
        output, probs = weigh(scores, self.value)
        if exact is not None:
            stored = self.value[:, :, self.first_own :]
            output += self._own(probs).unsqueeze(-1) * (value - stored).unsqueeze(2)
        return heads_last(output)

    def _select(self, exact: tuple[Tensor, Tensor] | None) -> Selection:
        positions = self.rows_pass.positions[:, self.rows]
        if self.session.state is None:
            selection = Selection(None, positions.double())
        else:
            own = torch.arange(self.first_own, self.stop, device=positions.device)
            rows = Rows(
                query=self.rehearsed,
                positions=positions,
                real=self.rows_pass.valid[:, self.rows],
                slot_positions=self.session.tokens[:, None, : self.stop],
                own_slots=own.expand(len(positions), 1, -1),
                true_scores=lambda: self._true_scores(exact),
            )
            selection = self.session.state.select(self.layer, rows)
        self.rows_pass.read[:, self.rows] += selection.num_read
        return selection

    def _true_scores(self, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch, num_kv_heads, group, rows, columns], -inf where hidden; the own column from the exact key."""
        if self._scores is None:
            scores = attention_scores(self.query, self.key, self.scale)
            first = 0 if self.rows_pass.padded else self.first_own  # without padding all earlier columns are visible
            scores[..., first:].masked_fill_(self._hidden(first)[:, None, None], float("-inf"))
            if exact is not None:
                grouped = self.query.view(*scores.shape[:4], -1)
                self._own(scores).copy_((grouped * exact[0].unsqueeze(2)).sum(-1) * self.scale)
            self._scores = scores
        return self._scores

    def _hidden(self, first: int) -> Tensor:
        """Columns from `first` that are no real token at or before the row: bool [batch, rows, columns]."""
        positions = self.rows_pass.positions[:, self.rows, None]
        hidden = self.session.tokens[:, None, first : self.stop] > positions
        hidden.diagonal(self.first_own - first, -2, -1).fill_(False)  # padding sees itself: no empty softmax
        return hidden

    def _own(self, over_columns: Tensor) -> Tensor:
        """The view of each row's own column, last axis rows."""
        return over_columns.diagonal(self.first_own, -2, -1)


def _weights(valid: Tensor, multiplicity: Tensor | None) -> Tensor:
    return valid.double() if multiplicity is None else valid.double() * multiplicity[:, None]
