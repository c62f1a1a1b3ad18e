"""Replay: score a given text in few large forwards, with exactly the selections that live decoding
would make.

A session holds one padded batch. `prefill` runs the prompt densely, `decode` runs any number of
teacher-forced rows at once, each seeing only its selection and itself, and `fork` repeats sequences
for several continuations of one context. Columns are token slots: prompts are padded on the left
and end in one column, later rows are padded on the right.

All rows of a pass go through a layer at once (`DecodePass`). The layer's fresh keys and values join
the history first. Then blocks of query rows, one after another, select what they read
(`State.select`, as in live decoding) and attend to it and to themselves: replay masks the rows that
live decoding does not fetch. Memory is linear in the length, since the scores of a block stay
within `SCORES_PER_CHUNK`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.live.hot_rows import HotRows, rooms
from harness.model.attached import Attached, Handler
from harness.model.attention import dense_attention, heads_last, weighted_values, with_rest
from harness.model.policies import new_states, policies_of, select
from harness.model.rereading import run_prompts
from harness.model.sizes import (
    ReadStats,
    code_width,
    resident_share,
    share_beside,
    share_of_cache,
    window_share,
)
from methods.attention import hide
from methods.base import (
    EMPTY,
    NAMES_ROWS,
    Calibration,
    LayerInputs,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Selection,
    State,
)
from methods.codec import AnyCodec, SplitCodec, without_keys

SCORES_PER_CHUNK = 2**23
"""Scores held at once, 32 MiB in fp32: more than a CPU's last-level cache is slower."""
MAX_CHUNK = 256


class ReplaySession:
    """One batch of sequences under one method.

    final_lengths: int [batch], T of each sequence. num_columns: columns the batch will ever use.
    measure_recall: also measure attention_recall, at the cost of a second pass over the scores.
    rows_per_block: rows of a layer that select and attend together; None: as many as memory allows.
    It changes no number. device_rows, prefetch: as in `LiveSession`; replay counts which rows would
    be on the device. They change no logit. Raises ValueError where the method cannot work in so few
    layers, and in `prefill` where it cannot at these lengths.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        final_lengths: Tensor,
        num_columns: int,
        codec: AnyCodec | None = None,
        calibration: Calibration | None = None,
        measure_recall: bool = False,
        rows_per_block: int | None = None,
        device_rows: float = 0,
        prefetch: bool = False,
    ) -> None:
        attached.require_length(int(final_lengths.max()))
        codec = without_keys(codec) if method.holds_keys else codec
        self.attached = attached
        self.method = method
        needs_method = not method.reads_all or codec is not None
        self.policies = policies_of(attached, method, needs_method=needs_method, prefetch=prefetch)
        self.final_lengths = final_lengths
        self.calibration = calibration
        self.measure_recall = measure_recall and codec is None
        self.rows_per_block = rows_per_block
        self.device_rows = device_rows
        self.rooms: list[int] | None = None
        self.hot_rows: dict[int, HotRows] = {}
        self.states: dict[torch.device, State] = {}
        is_coded = [policy.kind == "method" for policy in self.policies]
        self.history = History(attached, is_coded, codec, len(final_lengths), num_columns)
        self.model_cache = attached.new_cache()
        self.reads = self._no_reads()

    def prefill(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run the prompt densely, and again where the method asks for it.

        ids: int [batch, prompt]; valid: bool alike, False for the padding on the left;
        multiplicity: int [batch], how many requests share a sequence (1 by default). Returns final
        hidden states [batch, prompt, hidden_size].
        """
        if self.history.length:
            raise RuntimeError("prefill runs once, before any decode row")
        self.attached.require_even(valid)
        lengths = Lengths(valid.sum(-1), self.final_lengths)
        self.states = new_states(self.attached, self.method, lengths, self.calibration)
        of_sequences = zip(*(part.tolist() for part in lengths), strict=True)
        self.rooms = rooms(self.method, self.policies, self.device_rows, of_sequences)
        positions = self.history.enter(valid)
        self._prompt_rows = {
            device: PromptRows(valid.to(device), self.history.tokens.shape[1])
            for device in self.states
        }
        states = self.states.values()
        hidden = run_prompts(
            self.attached, self.method, states, ids, valid, self._keep_prompt, self.model_cache
        )
        pairs = float((_weights(valid, multiplicity) * (positions + 1)).sum())
        self.reads += replace(self._no_reads(), pairs=pairs, pairs_read=pairs)
        return hidden

    def _keep_prompt(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        inputs: LayerInputs | None = None,
    ) -> None:
        """A layer's prompt joins the history, and the state of the method that governs the
        layer."""
        self.history.keep(layer, key, value, slice(0, key.shape[2]))
        policy, device = self.policies[layer], self.attached.layers[layer].device
        if policy.kind != "method" or device not in self.states:
            return
        state = self.states[device]
        state.prompt(
            policy.number, query, key, value, self._prompt_rows[device]._replace(inputs=inputs)
        )
        if policy.when == "previous_step":
            self.history.last_queries[layer] = query[:, :, -1:].clone()
        if self.method.holds_keys:
            self.history.hold(layer, policy.number, state, key, value)

    def decode(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run teacher-forced decode rows; may be called again for the rows that follow.

        ids: int [batch, rows]; valid: bool alike, False for the padding on the right. Returns
        hidden states [batch, rows, hidden_size], where padding holds nothing of meaning.
        """
        if not self.history.length:
            raise RuntimeError("decode rows need a prompt: call prefill first")
        positions = self.history.enter(valid)
        rows = DecodePass(self, positions, valid)
        hidden = self.attached.forward(ids, positions, rows, self.model_cache, valid)
        states, exempt = list(self.states.values()), self.method.num_exempt_layers
        geometry, codec = self.attached.geometry, self.history.codec
        resident = resident_share(states, codec, self.final_lengths, exempt, geometry, self.rooms)
        self.reads += rows.stats(_weights(valid, multiplicity), resident)
        return hidden

    @property
    def reads_everything(self) -> bool:
        """Whether decode rows read all columns, as they were: the full cache."""
        return self.method.reads_all and self.history.codec is None

    def fork(self, index: Tensor, num_columns: int) -> ReplaySession:
        """A session of the sequences `index` [new_batch] of this one, state copied; its `reads`
        start empty."""
        child = copy(self)
        child.reads = self._no_reads()
        child.final_lengths = self.final_lengths[index]
        child.states = {
            device: state.fork(index.to(device), num_columns)
            for device, state in self.states.items()
        }
        child.history = self.history.fork(index, num_columns)
        child.hot_rows = {
            layer: hot.fork(index.to(hot.slots.device)) for layer, hot in self.hot_rows.items()
        }
        child.rooms = None if self.rooms is None else [self.rooms[each] for each in index.tolist()]
        child.model_cache = self.model_cache.fork(index)
        return child

    def _no_reads(self) -> ReadStats:
        codec, layers = self.history.codec, self.attached.layers
        latent = sum(
            each.num_kv_heads * each.elements for each in layers if each.latent is not None
        )
        return ReadStats(
            code_bits=codec.bits if codec else 16,
            recurrent_bytes=self.model_cache.nbytes / len(self.final_lengths),
            latent_bytes=latent * self.attached.dtype.itemsize,
        )


class History:
    """Keys and values of every column of a batch, as the codec gives them back.

    is_coded: by layer, whether the codec applies. kv: by layer (keys, values), each [batch,
    num_kv_heads, columns, head_dim or value_dim]. exact: the same uncoded, where the codec leaves
    the last tokens exact.
    tokens: int32 [batch, columns], the token of each column, `EMPTY` for none. length: columns in
    use. last_queries: by layer, [batch, heads, 1, head_dim] of the last token, where the layer
    selects by the previous step's query. resident: by layer, bool [batch, num_kv_heads, prompt],
    the prompt's columns that stay exact where the method holds the keys.
    """

    def __init__(
        self,
        attached: Attached,
        is_coded: list[bool],
        codec: AnyCodec | None,
        batch: int,
        num_columns: int,
    ) -> None:
        self.is_coded = is_coded
        self.codec = codec
        self.length = 0
        self.last_queries: dict[int, Tensor] = {}
        self.resident: dict[int, Tensor] = {}
        self._layers, self._dtype = attached.layers, attached.dtype
        self.kv = [self._new_rows(layer, batch, num_columns) for layer in range(len(is_coded))]
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}
        if codec is not None and codec.residual:
            coded = [layer for layer, is_one in enumerate(is_coded) if is_one]
            self.exact = {layer: self._new_rows(layer, batch, num_columns) for layer in coded}
        self.tokens = torch.full(
            (batch, num_columns), EMPTY, dtype=torch.int32, device=attached.device
        )
        self._regrouped = self.tokens[:, :0].long()
        """Columns of the tokens whose keys are coded with a fresh one, in the order of tokens: int
        [batch, n]."""

    def _new_rows(self, layer: int, batch: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer. A latent key holds its value as well."""
        shape = self._layers[layer]
        rows = batch, shape.num_kv_heads, num_columns
        keys = torch.empty(*rows, shape.head_dim, dtype=self._dtype, device=shape.device)
        if shape.latent is not None:
            return keys, keys[..., : shape.value_dim]
        return keys, torch.empty(*rows, shape.value_dim, dtype=self._dtype, device=shape.device)

    def enter(self, valid: Tensor) -> Tensor:
        """Give the next columns their tokens; returns positions int [batch, rows], those of padding
        repeated."""
        before = (self.tokens[:, : self.length] != EMPTY).sum(-1)
        positions = (before[:, None] + valid.cumsum(-1) - 1).clamp(min=0)
        columns = slice(self.length, self.length + valid.shape[1])
        self.tokens[:, columns] = positions.masked_fill(~valid, EMPTY).int()
        self.length = columns.stop
        if self.codec is not None and self.codec.keys.span > 1:
            first = int(before.min()) // self.codec.keys.span * self.codec.keys.span
            self._regrouped = self.tokens[:, : self.length].argsort(-1)[:, first:]
        return positions

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows, as they read back from storage: coded in layers under the method, but
        for what stays."""
        stored, codec = self.kv[layer], self.codec
        if codec is None or not self.is_coded[layer] or layer in self.resident:
            self._write(layer, stored, key, value, columns)
            return
        if layer in self.exact:
            self._write(layer, self.exact[layer], key, value, columns)
        by_token = codec.keys.span == 1
        coded = codec.keys.roundtrip(key) if by_token else key
        self._write(layer, stored, coded, codec.values.roundtrip(value), columns)
        if (
            not by_token
        ):  # the groups of the fresh tokens; one that is not full yet is read by no row
            exact = self.exact[layer][0]
            index = self._regrouped.to(exact.device)[:, None, :, None].expand(
                -1, exact.shape[1], -1, exact.shape[3]
            )
            stored[0].scatter_(2, index, codec.keys.roundtrip(exact.gather(2, index)))

    def _write(
        self, layer: int, kv: tuple[Tensor, Tensor], key: Tensor, value: Tensor, columns: slice
    ) -> None:
        kv[0][:, :, columns] = key
        if self._layers[layer].latent is None:
            kv[1][:, :, columns] = value

    def hold(self, layer: int, number: int, state: State, key: Tensor, value: Tensor) -> None:
        """Write a prompt whose keys `state` has taken in: the resident rows exactly, the others as
        `state` rebuilds them. number: the layer's, as methods count."""
        self.resident[layer] = state.resident(number)
        stays = self.resident[layer].unsqueeze(-1)
        columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        keys, values = (part[:, :, : key.shape[2]] for part in self.kv[layer])
        keys.copy_(torch.where(stays, key, state.rebuild(number, columns)))
        values.copy_(torch.where(stays, value, values))

    def fork(self, index: Tensor, num_columns: int) -> History:
        """The sequences `index` [new_batch], with room for `num_columns`."""
        child = copy(self)
        child.tokens = self._widened(self.tokens, index, 1, num_columns, EMPTY)
        child.last_queries = {
            layer: _selected(query, index) for layer, query in self.last_queries.items()
        }
        child.resident = {
            layer: _selected(prompt, index) for layer, prompt in self.resident.items()
        }

        def rows(layer: int, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            keys = self._widened(kv[0], index, 2, num_columns, 0)
            if self._layers[layer].latent is not None:
                return keys, keys[..., : kv[1].shape[3]]
            return keys, self._widened(kv[1], index, 2, num_columns, 0)

        child.kv = [rows(layer, kv) for layer, kv in enumerate(self.kv)]
        child.exact = {layer: rows(layer, kv) for layer, kv in self.exact.items()}
        return child

    def _widened(
        self, tensor: Tensor, index: Tensor, axis: int, num_columns: int, fill: int
    ) -> Tensor:
        used = tensor.narrow(axis, 0, self.length)
        shape = list(used.shape)
        shape[0], shape[axis] = len(index), num_columns
        wide = tensor.new_full(shape, fill) if fill else tensor.new_empty(shape)
        torch.index_select(used, 0, index.to(used.device), out=wide.narrow(axis, 0, self.length))
        return wide


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index.to(tensor.device))


class DecodePass(Handler):
    """Teacher-forced rows, each reading what the policy of its layer says, and itself.

    positions, valid: [batch, rows]. read, index_read, recall: fp64 alike, sums over the layers
    under the method; selected, missed, loaded: where rows stay on the device, rows of all KV heads
    that were selected, those of them that were not there then, and all that crossed the link.
    """

    def __init__(self, session: ReplaySession, positions: Tensor, valid: Tensor) -> None:
        self.session, self.history, self.policies = session, session.history, session.policies
        self.valid = valid
        self.positions = positions.int()
        self.start = self.history.length - valid.shape[1]
        self.has_padding = not bool(valid.all())
        self.is_padded = bool((self.history.tokens[:, : self.history.length] == EMPTY).any())
        self.rehearsed: dict[int, Tensor] = {}
        self.read, self.index_read, self.recall, self.selected, self.missed, self.loaded = (
            torch.zeros_like(valid, dtype=torch.float64) for _ in range(6)
        )
        self.num_selecting = 0
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._latest: State | None = None

    def rehearses(self, layer: int) -> bool:
        return bool(self.session.states) and self.policies[layer].rehearses

    def rehearse(self, layer: int, query: Tensor) -> None:
        self.rehearsed[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        policy, device = self.policies[layer], self.session.attached.layers[layer].device
        tokens = self.rows_on(device)[2]
        columns = slice(self.start, self.history.length)

        # Write: the fresh rows join the history, as they read back from storage.
        self.history.keep(layer, key, value, columns)
        is_selecting = policy.kind == "method" and not self.session.reads_everything
        state = self.session.states.get(device) if is_selecting else None
        if state is not None:
            if self._latest not in (None, state):
                state.take_over(self._latest)
            self._latest = state
            state.append(policy.number, key, value, tokens[:, columns], columns)
        if is_selecting:
            self.num_selecting += 1

        # Select and attend, block by block.
        guess = self.rehearsed.pop(layer) if policy.prefetches else None
        asking = self._selecting_query(layer, query)
        batch, heads, num_rows, _ = query.shape
        affordable = max(
            16, min(MAX_CHUNK, SCORES_PER_CHUNK // (batch * heads * self.history.length))
        )
        size = self.session.rows_per_block or affordable
        outputs = []
        for begin in range(0, num_rows, size):
            block_rows = slice(begin, min(begin + size, num_rows))
            block = _Block(self, layer, state, block_rows, query, asking, guess)
            if is_selecting:
                outputs.append(
                    block.attend_to_selection(key[:, :, block_rows], value[:, :, block_rows])
                )
            else:
                outputs.append(block.attend_to_all())
        return torch.cat(outputs, 1)

    def hot_rows(self, layer: int) -> HotRows | None:
        """The rows of a layer that would be on the device; None where none stay."""
        session, shape = self.session, self.session.attached.layers[layer]
        names_rows = self.policies[layer].when in NAMES_ROWS
        if session.rooms is not None and names_rows and layer not in session.hot_rows:
            session.hot_rows[layer] = HotRows(session.rooms, shape.num_kv_heads, shape.device)
        return session.hot_rows.get(layer)

    def rows_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The pass's positions and which rows are real, [batch, rows], and the tokens, int32
        [batch, columns so far]; copied once to each device."""
        if device not in self._on_device:
            tokens = self.history.tokens[:, : self.history.length]
            self._on_device[device] = (
                self.positions.to(device),
                self.valid.to(device),
                tokens.to(device),
            )
        return self._on_device[device]

    def _selecting_query(self, layer: int, query: Tensor) -> Tensor:
        """The queries that rows select by, shaped like their `query`."""
        if self.policies[layer].when == "previous_step" and layer in self.history.last_queries:
            shifted = torch.cat([self.history.last_queries[layer], query], 2)
            last = (
                self.valid.sum(-1)
                .to(query.device)[:, None, None, None]
                .expand(*query.shape[:2], 1, query.shape[-1])
            )
            self.history.last_queries[layer] = shifted.gather(2, last)
            return shifted[:, :, :-1]
        return self.rehearsed.pop(layer, query)

    def stats(self, weights: Tensor, resident: Tensor) -> ReadStats:
        """Sums over the pass's rows, each `weights` [batch, rows] times; resident: a sequence's
        share, fp64 [batch]."""
        session, geometry, codec = self.session, self.session.attached.geometry, self.history.codec
        cached = self.positions.double()
        rows = float(weights.sum())
        pairs = float((weights * (cached + 1)).sum())
        cached = cached.clamp(min=1)  # 0: padding only
        local = window_share(cached, geometry)
        sums = {
            "window_sum": float((weights * local).sum()),
            "resident_sum": float(weights.sum(1).cpu() @ resident),
        }
        if self.session.reads_everything:
            recall = rows if session.measure_recall else None
            whole = {
                "rows": rows,
                "fired_rows": rows,
                "frac_sum": rows,
                "pairs_read": pairs,
                "pairs": pairs,
            }
            return ReadStats(**whole, **sums, recall_sum=recall)
        exempt, num_layers = session.method.num_exempt_layers, geometry.num_layers
        share = share_of_cache(cached, self.read, code_width(codec, geometry), exempt, num_layers)
        index_share = share_beside(cached, self.index_read, num_layers)
        selecting = num_layers - exempt
        if session.rooms is not None:
            width, heads = code_width(codec, geometry), geometry.num_kv_heads
            of_method = [policy for policy in self.policies if policy.kind == "method"]
            read_whole = sum(policy.when not in NAMES_ROWS for policy in of_method)
            crossed = (exempt * cached + width * (read_whole * cached + self.loaded / heads)) / (
                num_layers * cached
            )
            sums["link_sum"] = float((weights * crossed).sum())
            sums["rows_loaded"] = float((weights * self.loaded).sum())
            sums["hit_sum"] = float(
                (weights * (1 - self.missed / self.selected.clamp(min=1))).sum()
            )
        return ReadStats(
            rows=rows,
            fired_rows=rows if self.num_selecting == selecting else 0.0,
            frac_sum=float((weights * share).sum()),
            index_sum=float((weights * index_share).sum()),
            **sums,
            pairs_read=pairs
            if session.method.reads_all
            else float((weights * (self.read / selecting + 1)).sum()),
            pairs=pairs,
            recall_sum=float((weights * self.recall).sum()) / selecting
            if session.measure_recall
            else None,
        )


class _Block:
    """A block of decode rows in one layer, over the columns up to the block's end."""

    def __init__(
        self, decode: DecodePass, layer: int, state: State | None, rows: slice, query: Tensor, asking: Tensor,
        guess: Tensor | None,
    ) -> None:  # fmt: skip
        self.decode = decode
        self.layer = layer
        self.state = state
        self.policy = decode.policies[layer]
        self.rows = rows
        self.first_own = decode.start + rows.start
        self.stop = decode.start + rows.stop
        self.query = query[:, :, rows]
        self.asking = asking[:, :, rows]
        self.guess = None if guess is None else guess[:, :, rows]
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
        if (
            window is not None and not self.decode.is_padded
        ):  # then a token lies in the column of its number
            first = int(window.first_visible(torch.tensor(self.first_own)))
        hidden = self._hidden(first)
        if window is not None:
            too_old = (
                self.tokens[:, None, first:] < window.first_visible(self.positions)[:, :, None]
            )
            hidden |= too_old & (self.tokens[:, None, first:] != self.positions[:, :, None])
        key, value = self.key[:, :, first:], self.value[:, :, first:]
        return dense_attention(self.query, key, value, self.softmax, ~hidden[:, None])

    def attend_to_selection(self, key: Tensor, value: Tensor) -> Tensor:
        """The selection and the own row, whose exact key and value [batch, num_kv_heads, rows,
        size] are given."""
        exact = None if self.decode.history.codec is None else (key, value)
        selection = self._select(exact)
        scores = self._true_scores(exact)
        everything = torch.logsumexp(scores, -1) if self.decode.session.measure_recall else None
        if selection.bias is not None:
            own = self._own(scores).clone()
            scores += selection.bias
            self._own(scores).copy_(own)
        if selection.mask is not None:
            visible = selection.mask.clone()  # the method may hold it
            resident = self.decode.history.resident.get(self.layer)
            if resident is not None:
                visible = visible | pad(
                    resident, (0, self.stop - resident.shape[-1]), value=True
                ).unsqueeze(2)
            self._own(visible).fill_(True)
            hide(scores, visible.unsqueeze(2))
        if everything is not None:
            self._add(
                self.decode.recall, (torch.logsumexp(scores, -1) - everything).exp_().mean((1, 2))
            )
        rest = selection.rest
        if rest is not None and rest.log_mass is not None:
            rest = rest.beside(self.softmax.log_total(scores))
        output, weights = weighted_values(scores, self.value, self.softmax)
        codec = self.decode.history.codec
        if self.exact is not None and isinstance(
            codec, SplitCodec
        ):  # the last values, the own among them, are exact
            coded = self._first(codec.coded_values)
            recent = (
                weights.masked_fill(coded[:, None, None], 0.0).flatten(2, 3).to(self.value.dtype)
            )
            output += (recent @ (self.exact[1][:, :, : self.stop] - self.value)).view(
                *weights.shape[:-1], -1
            )
        elif exact is not None:
            stored = self.value[:, :, self.first_own :]
            output += self._own(weights).unsqueeze(-1) * (value - stored).unsqueeze(2)
        return heads_last(with_rest(output, rest))

    def _select(self, exact: tuple[Tensor, Tensor] | None) -> Selection:
        """What the rows read besides themselves; takes down how much that is."""
        if self.state is None:  # everything, under a codec
            codec = self.decode.history.codec
            stored = codec.stored(self.positions) if codec else self.positions
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
            guess = None
            if self.guess is not None:
                guess = select(self.state, self.policy.number, replace(rows, query=self.guess))
                if guess.side is not None:
                    self._add(self.decode.index_read, guess.side)
            selection = select(self.state, self.policy.number, rows)
            if (hot := self.decode.hot_rows(self.layer)) is not None:
                self._count_hits(hot, selection, guess)
        self._add(self.decode.read, selection.num_read)
        if selection.side is not None:
            self._add(self.decode.index_read, selection.side)
        return selection

    def _count_hits(self, hot: HotRows, selection: Selection, guess: Selection | None) -> None:
        """Let the block's rows, one after another, fetch what is not on the device, and count
        it."""
        num_kv_heads, real = hot.slots.shape[1], self.real[:, self.rows]
        asked = [
            each.mask for each in (guess, selection) if each is not None and each.mask is not None
        ]
        for row in range(real.shape[1]):
            counts: list[Tensor] = []
            for mask in asked:
                mask = (mask[:, :, row] & real[:, row, None, None]).expand(-1, num_kv_heads, -1)
                most = int(mask.sum(-1).max())
                fetch, _ = hot.request(mask, self.tokens[:, None], most)
                counts.append((fetch.slots >= 0).sum((1, 2)))
            this = slice(self.rows.start + row, self.rows.start + row + 1)
            for total, of_row in (
                (self.decode.loaded, torch.stack(counts).sum(0)),
                (self.decode.missed, counts[-1]),
            ):
                total[:, this] += of_row.to(total.device)[:, None]
        selected = asked[-1].sum(-1).sum(1) * (num_kv_heads // asked[-1].shape[1])
        self._add(self.decode.selected, selected)

    def _add(self, total: Tensor, of_rows: Tensor) -> None:
        total[:, self.rows] += of_rows.to(total.device)

    def _true_scores(self, exact: tuple[Tensor, Tensor] | None) -> Tensor:
        """[batch, num_kv_heads, group, rows, columns], -inf where hidden; the own column from the
        exact key."""
        if self._scores is None:
            scores = self.softmax.scores(self.query, self.key)
            codec = self.decode.history.codec
            if self.exact is not None and isinstance(
                codec, SplitCodec
            ):  # the last keys are read exactly
                exact_scores = self.softmax.scores(self.query, self.exact[0][:, :, : self.stop])
                scores = torch.where(
                    self._first(codec.coded_keys)[:, None, None], scores, exact_scores
                )
            first = (
                0 if self.decode.is_padded else self.first_own
            )  # without padding all earlier columns are visible
            scores[..., first:].masked_fill_(self._hidden(first)[:, None, None], float("-inf"))
            if exact is not None:
                grouped = self.query.view(*scores.shape[:4], -1)
                own = (grouped * exact[0].unsqueeze(2)).sum(-1) * self.softmax.scale
                self._own(scores).copy_(self.softmax.capped(own))
            self._scores = scores
        return self._scores

    def _first(self, number: Callable[[Tensor], Tensor]) -> Tensor:
        """Columns of the first tokens, as many as `number` makes of those cached: bool [batch,
        rows, columns]."""
        return self.tokens[:, None] < number(self.positions)[:, :, None]

    def _hidden(self, first: int) -> Tensor:
        """Columns from `first` that are no real token at or before the row: bool [batch, rows,
        columns]."""
        hidden = self.tokens[:, None, first:] > self.positions[:, :, None]
        hidden.diagonal(self.first_own - first, -2, -1).fill_(
            False
        )  # padding sees itself: no empty softmax
        return hidden

    def _own(self, over_columns: Tensor) -> Tensor:
        """The view of each row's own column, last axis rows."""
        return over_columns.diagonal(self.first_own, -2, -1)


def _weights(valid: Tensor, multiplicity: Tensor | None) -> Tensor:
    return valid.double() if multiplicity is None else valid.double() * multiplicity[:, None]
