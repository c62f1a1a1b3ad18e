"""Replay: score a given text in few large forwards, with exactly the selections that live decoding
would make.

A session holds one padded batch. `prefill` runs the prompt densely, `decode` runs any number of
teacher-forced rows at once, each seeing only its selection and itself, and `fork` repeats sequences
for several continuations of one context. Columns are token slots: prompts are padded on the left
and end in one column, later rows are padded on the right.

Keys and values are in a `History`; the rows of a pass, and what they read, in
`harness.replay.decode_pass`. Memory is linear in the length, since the scores of a block of rows
stay within `SCORES_PER_CHUNK`. Kascade is the exception: its state holds what an anchor chose for
all rows of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.decode.gpu_cache import GpuCache, rooms
from harness.decode.session import LiveSession
from harness.model.attached import Attached
from harness.model.budgets import ReadStats, codec_of_cache, resident_share
from harness.model.passes import LayerPrompt, require_codable
from harness.model.policies import new_state, policies_of, require_layers, take_prompt
from harness.model.rereading import run_prompts
from harness.replay.decode_pass import DecodePass
from methods.base import (
    EMPTY,
    Calibration,
    Lengths,
    Method,
    PromptRows,
    State,
    rebuilt,
    resident_of,
)
from methods.codecs.base import RowCodec
from methods.codecs.split import AnyCodec, CacheCodec, codec_at, mean_bits
from methods.evicting import EvictingState


class History:
    """Keys and values of every column of a batch, as their codec gives them back.

    codecs: of each layer; None stores rows as they are. kv: by layer (keys, values), each [batch,
    num_kv_heads, columns, head_dim or value_dim]. uncoded: the same as they were made, where the
    codec leaves the last tokens exact, and of every coded layer where `keeps_uncoded`.
    tokens: int32 [batch, columns], the token of each column, `EMPTY` for none. length: columns in
    use. last_queries: by layer, [batch, heads, 1, head_dim] of the last token, where the layer
    selects by the previous step's query. resident: by layer, bool [batch, num_kv_heads, prompt],
    the prompt's columns that stay exact where the method holds the keys.
    """

    def __init__(
        self,
        attached: Attached,
        codecs: Sequence[AnyCodec | None],
        batch: int,
        num_columns: int,
        *,
        keeps_uncoded: bool = False,
    ) -> None:
        self.codecs = codecs
        self.length = 0
        self.last_queries: dict[int, Tensor] = {}
        self.resident: dict[int, Tensor] = {}
        self._layers, self._dtype = attached.layers, attached.dtype
        self._device = attached.device
        self.kv = {layer: self._new_rows(layer, batch, num_columns) for layer in range(len(codecs))}
        self._span = 1
        """Tokens whose rows some layer codes together; other layers code one by one."""
        self.uncoded: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, codec in enumerate(codecs):
            if codec is not None and codec.residual:
                self._span = max(self._span, codec.span)
            if codec is not None and (codec.residual or keeps_uncoded):
                self.uncoded[layer] = self._new_rows(layer, batch, num_columns)
        shape = (batch, num_columns)
        self.tokens = torch.full(shape, EMPTY, dtype=torch.int32, device=attached.device)
        self._regrouped = self.tokens[:, :0].long()
        """Columns of the tokens that are coded with a fresh one, in the order of tokens: int
        [batch, n]."""

    def _new_rows(self, layer: int, batch: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer. A latent key holds its value as well."""
        shape = self._layers[layer]
        rows = batch, shape.num_kv_heads, num_columns
        keys = torch.empty(*rows, shape.head_dim, dtype=self._dtype, device=self._device)
        if shape.latent is not None:
            return keys, keys[..., : shape.value_dim]
        return keys, torch.empty(*rows, shape.value_dim, dtype=self._dtype, device=self._device)

    def enter(self, valid: Tensor) -> Tensor:
        """Give the next columns their tokens; returns positions int [batch, rows], those of padding
        repeated."""
        before = (self.tokens[:, : self.length] != EMPTY).sum(-1)
        positions = (before[:, None] + valid.cumsum(-1) - 1).clamp(min=0)
        columns = slice(self.length, self.length + valid.shape[1])
        self.tokens[:, columns] = positions.masked_fill(~valid, EMPTY).int()
        self.length = columns.stop
        if self._span > 1:
            first = int(before.min()) // self._span * self._span
            self._regrouped = self.tokens[:, : self.length].argsort(-1)[:, first:]
        return positions

    def keep(self, layer: int, key: Tensor, value: Tensor, columns: slice) -> None:
        """Write fresh rows, as they read back from storage: coded in layers that have a codec, but
        for what stays. Several rows that a codec cannot hold raise UserError; a single one is a
        step of generation, which waits for no device."""
        stored, codec = self.kv[layer], self.codecs[layer]
        if layer in self.uncoded:
            self._write(layer, self.uncoded[layer], key, value, columns)
        if codec is None or layer in self.resident:
            self._write(layer, stored, key, value, columns)
            return
        if key.shape[2] > 1:
            require_codable(codec, layer, key, value)
        coded_key = codec.keys.roundtrip(key) if codec.keys.span == 1 else key
        coded_value = codec.values.roundtrip(value) if codec.values.span == 1 else value
        self._write(layer, stored, coded_key, coded_value, columns)
        if codec.keys.span > 1:
            self._code_groups(codec.keys, self.uncoded[layer][0], stored[0])
        if codec.values.span > 1 and self._layers[layer].latent is None:
            self._code_groups(codec.values, self.uncoded[layer][1], stored[1])

    def _code_groups(self, half: RowCodec, exact: Tensor, stored: Tensor) -> None:
        """Code the groups of the fresh tokens again. No row reads one that is not full yet."""
        regrouped = self._regrouped[:, None, :, None]
        index = regrouped.expand(-1, exact.shape[1], -1, exact.shape[3])
        stored.scatter_(2, index, half.roundtrip(exact.gather(2, index)))

    def uncoded_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer's columns as the model made them. Needs `keeps_uncoded` where
        they read back otherwise."""
        return self.uncoded.get(layer, self.kv[layer])

    def _write(
        self, layer: int, kv: tuple[Tensor, Tensor], key: Tensor, value: Tensor, columns: slice
    ) -> None:
        kv[0][:, :, columns] = key
        if self._layers[layer].latent is None:
            kv[1][:, :, columns] = value

    def hold(self, layer: int, number: int, state: State, key: Tensor, value: Tensor) -> None:
        """Write a prompt whose keys `state` has taken in: the resident rows exactly, the others as
        `state` rebuilds them. number: the layer's, as methods count."""
        self.resident[layer] = resident_of(state, number, key)
        stays = self.resident[layer].unsqueeze(-1)
        columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        keys = self.kv[layer][0][:, :, : key.shape[2]]
        values = self.kv[layer][1][:, :, : key.shape[2]]
        keys.copy_(torch.where(stays, key, rebuilt(state, number, columns)))
        values.copy_(torch.where(stays, value, values))

    def fork(self, index: Tensor, num_columns: int) -> History:
        """The sequences `index` [new_batch], with room for `num_columns`."""
        child, used = copy(self), slice(0, self.length)
        index = index.to(self._device)
        child.tokens = self.tokens.new_full((len(index), num_columns), EMPTY)
        child.tokens[:, used] = self.tokens[index, used]
        for name in ("last_queries", "resident"):
            taken = {}
            for layer, tensor in getattr(self, name).items():
                taken[layer] = tensor.index_select(0, index)
            setattr(child, name, taken)
        for name in ("kv", "uncoded"):
            rows = {}
            for layer, kv in getattr(self, name).items():
                rows[layer] = self._new_rows(layer, len(index), num_columns)
                for new, old in zip(rows[layer], kv, strict=True):
                    torch.index_select(old[:, :, used], 0, index, out=new[:, :, used])
            setattr(child, name, rows)
        return child


class ReplaySession:
    """One batch of sequences under one method.

    final_lengths: int [batch], T of each sequence. num_columns: columns the batch will ever use.
    measure_recall: also measure attention_recall, at the cost of a second pass over the scores.
    measure_errors: also measure the errors of attention outputs, at the cost of the full cache's
    attention, and of a second cache where rows read back otherwise than they were made.
    rows_per_block: rows of a layer that select and attend together; None: as many as memory allows.
    It changes no number. gpu_cache: as in `LiveSession`; replay counts which rows would be on the
    device. It changes no logit. Raises ValueError where the method cannot work in so few layers,
    and in `prefill` where it cannot at these lengths.
    """

    def __init__(
        self,
        attached: Attached,
        method: Method,
        *,
        final_lengths: Tensor,
        num_columns: int,
        codec: CacheCodec | None = None,
        calibration: Calibration | None = None,
        measure_recall: bool = False,
        measure_errors: bool = False,
        rows_per_block: int | None = None,
        gpu_cache: float = 0,
    ) -> None:
        attached.require_length(int(final_lengths.max()))
        require_layers(codec, attached.geometry.num_layers)
        self.codec = codec_of_cache(codec, method, attached.geometry)
        self.attached = attached
        self.method = method
        needs_method = not method.reads_all or self.codec is not None
        self.policies = policies_of(attached, method, needs_method=needs_method)
        self.final_lengths = final_lengths
        self.calibration = calibration
        self.measure_recall = measure_recall and self.codec is None
        self.measure_errors = measure_errors
        self.errors: list[Tensor] = []
        self.rows_per_block = rows_per_block
        self.gpu_cache = gpu_cache
        self.rooms: list[int] | None = None
        self.gpu_caches: dict[int, GpuCache] = {}
        self.state: State | None = None
        codecs: list[AnyCodec | None] = []
        for policy in self.policies:
            if self.codec is not None and policy.kind == "method":
                codecs.append(codec_at(self.codec, policy.number))
            else:
                codecs.append(None)
        batch = len(final_lengths)
        self.history = History(attached, codecs, batch, num_columns, keeps_uncoded=measure_errors)
        self.model_cache = attached.new_cache()
        self.reads = self._constants()

    def prefill(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run the prompt densely, and again where the method asks for it.

        ids: int [batch, prompt]; valid: bool alike, False for the padding on the left;
        multiplicity: int [batch], how many requests share a sequence (1 by default). Returns final
        hidden states [batch, prompt, hidden_size].
        """
        assert not self.history.length, "prefill runs once, before any decode row"
        self.attached.require_even(valid)
        lengths = Lengths(valid.sum(-1), self.final_lengths)
        self.state = new_state(self.attached, self.method, lengths, self.calibration)
        of_sequences = zip(lengths.prompt.tolist(), lengths.final.tolist(), strict=True)
        self.rooms = rooms(self.method, self.policies, self.gpu_cache, of_sequences)
        if self.rooms is not None:
            for layer, shape in enumerate(self.attached.layers):
                if self.policies[layer].names_rows:
                    cache = GpuCache(self.rooms, shape.num_kv_heads, ids.device)
                    self.gpu_caches[layer] = cache
        positions = self.history.enter(valid)
        keep = partial(self._keep_prompt, valid)
        hidden = run_prompts(
            self.attached, self.method, self.state, ids, valid, keep, self.model_cache
        )
        pairs = float((_weights(valid, multiplicity) * (positions + 1)).sum())
        self.reads += replace(self._constants(), pairs=pairs, pairs_read=pairs)
        return hidden

    def _keep_prompt(self, valid: Tensor, layer: int, prompt: LayerPrompt) -> None:
        """A layer's prompt joins the history, and the state of the method that governs the
        layer."""
        query, key, value = prompt.query, prompt.key, prompt.value
        self.history.keep(layer, key, value, slice(0, key.shape[2]))
        policy, state = self.policies[layer], self.state
        if policy.kind != "method" or state is None:
            return
        rows = PromptRows(valid, self.history.tokens.shape[1], prompt.inputs)
        take_prompt(state, policy.number, prompt, rows)
        if policy.when == "previous_step":
            self.history.last_queries[layer] = query[:, :, -1:].clone()
        if self.method.keeps_keys:
            self.history.hold(layer, policy.number, state, key, value)

    def decode(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run teacher-forced decode rows; may be called again for the rows that follow.

        ids: int [batch, rows]; valid: bool alike, False for the padding on the right. Returns
        hidden states [batch, rows, hidden_size], where padding holds nothing of meaning.
        """
        assert self.history.length, "decode rows need a prompt"
        positions = self.history.enter(valid)
        rows = DecodePass(self, positions, valid)
        hidden = self.attached.forward(ids, positions, rows, self.model_cache, valid)
        weights = _weights(valid, multiplicity)
        resident = resident_share(
            self.state,
            self.codec,
            self.final_lengths,
            self.method.dense_layers,
            self.attached.geometry,
            self.rooms,
        )
        resident_sum = float(weights.sum(1).cpu() @ resident)
        stats = rows.stats(weights)
        self.reads += self._constants() + replace(stats, resident_sum=resident_sum)
        if self.measure_errors:
            self.errors.append(rows.counts.attention_errors(valid))
        return hidden

    @property
    def attention_errors(self) -> Tensor:
        """Relative errors |output - full| / |full| of the attention outputs of all real decode rows
        so far, each once: fp32 [layers that see every token, rows, heads], on the CPU.

        full: the full cache's output for the same query, over the keys and values that the model
        made in this session's own passes. It is of a head, before the model's output projection.
        """
        return torch.cat(self.errors, 1)

    @property
    def reads_everything(self) -> bool:
        """Whether decode rows read all columns, as they were: the full cache."""
        return self.method.reads_all and self.codec is None

    def fork(self, index: Tensor, num_columns: int) -> ReplaySession:
        """A session of the sequences `index` [new_batch] of this one, state copied; its `reads` and
        `errors` start empty."""
        child = copy(self)
        child.reads = self._constants()
        child.errors = []
        child.final_lengths = self.final_lengths[index]
        if self.state is not None:
            num_slots = num_columns
            if isinstance(self.state, EvictingState):
                num_slots += 1  # the dump
            child.state = self.state.fork(index.to(self.attached.device), num_slots)
        child.history = self.history.fork(index, num_columns)
        child.gpu_caches = {}
        for layer, gpu_cache in self.gpu_caches.items():
            child.gpu_caches[layer] = gpu_cache.fork(index.to(gpu_cache.slots.device))
        if self.rooms is not None:
            child.rooms = [self.rooms[sequence] for sequence in index.tolist()]
        child.model_cache = self.model_cache.fork(index)
        return child

    def _constants(self) -> ReadStats:
        """No counts, and what does not change while a session runs."""
        latent = 0
        for layer in self.attached.layers:
            if layer.latent is not None:
                latent += layer.num_kv_heads * layer.elements
        governed = [policy.number for policy in self.policies if policy.kind == "method"]
        return ReadStats(
            code_bits=16 if self.codec is None else mean_bits(self.codec, governed),
            recurrent_bytes=self.model_cache.nbytes / len(self.final_lengths),
            latent_bytes=latent * self.attached.dtype.itemsize,
        )


@dataclass(frozen=True)
class Setup:
    """method: `budget` resolved, and settled by its calibration. codec: None stores rows exactly.
    calibration: None where none is needed. gpu_cache: as in `LiveSession`."""

    method: Method
    codec: CacheCodec | None
    calibration: Calibration | None
    gpu_cache: float = 0

    def __post_init__(self) -> None:
        method = self.method
        if self.calibration is not None:
            object.__setattr__(self, "method", method.settled(self.calibration))

    def replay(
        self, attached: Attached, final_lengths: Tensor, num_columns: int, **options: Any
    ) -> ReplaySession:
        """A fresh replay session. options: of `ReplaySession`."""
        lengths = {"final_lengths": final_lengths, "num_columns": num_columns}
        return ReplaySession(attached, **(vars(self) | lengths | options))

    def live(self, attached: Attached, max_new_tokens: int, **options: Any) -> LiveSession:
        """A fresh live session. options: of `LiveSession`."""
        return LiveSession(attached, **(vars(self) | {"max_new_tokens": max_new_tokens} | options))


def _weights(valid: Tensor, multiplicity: Tensor | None) -> Tensor:
    return valid.double() if multiplicity is None else valid.double() * multiplicity[:, None]
