"""Replay: score a given text in few large forwards, with exactly the selections that live decoding would make.

A session holds one padded batch. `prefill` runs the prompt densely, `decode` runs any number of teacher-forced rows at
once, each seeing only its selection and itself, and `fork` repeats sequences for several continuations of one context.
Columns are token slots: prompts are padded left and end in one column, later rows are padded right.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from harness.model.attach import Attached
from harness.model.policies import new_states, policies_of
from harness.model.prompt import PromptPass
from harness.replay.decode_rows import DecodePass
from harness.replay.history import History
from harness.sizes import ReadStats, resident_share
from methods.base import Calibration, Lengths, Method, PromptRows, State
from methods.codec import AnyCodec, without_keys


class ReplaySession:
    """One batch of sequences under one method.

    final_lengths: int [batch], T of each sequence. num_columns: columns the batch will ever use.
    measure_recall: also measure attention_recall, at the cost of a second pass over the scores. rows_per_block: rows of
    a layer that select and attend together; None: as many as memory allows. It changes no number.
    Raises ValueError where the method cannot work in so few layers, and in `prefill` where it cannot at these lengths.
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
    ) -> None:
        attached.require_length(int(final_lengths.max()))
        codec = without_keys(codec) if method.holds_keys else codec
        self.attached = attached
        self.method = method
        self.policies = policies_of(attached, method, needs_method=not method.reads_all or codec is not None)
        self.final_lengths = final_lengths
        self.calibration = calibration
        self.measure_recall = measure_recall and codec is None
        self.rows_per_block = rows_per_block
        self.states: dict[torch.device, State] = {}
        self.history = History(attached, self.policies, method, codec, len(final_lengths), num_columns)
        self.model_cache = attached.new_cache()
        self.reads = self._no_reads()

    def prefill(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run the prompt densely.

        ids: int [batch, prompt]; valid: bool alike, False for the padding on the left; multiplicity: int [batch], how
        many requests share a sequence (1 by default). Returns final hidden states [batch, prompt, hidden_size].
        """
        if self.history.length:
            raise RuntimeError("prefill runs once, before any decode row")
        self.attached.require_even(valid)
        lengths = Lengths(valid.sum(-1), self.final_lengths)
        self.states = new_states(self.attached, self.method, lengths, self.calibration)
        positions = self.history.enter(valid)
        prompt = PromptPass(self.attached, valid, self._keep_prompt)
        self._prompt_rows = {
            device: PromptRows(valid.to(device), self.history.tokens.shape[1]) for device in self.states
        }
        hidden = self.attached.forward(ids, positions, prompt, self.model_cache, valid)
        pairs = float((_weights(valid, multiplicity) * (positions + 1)).sum())
        self.reads += replace(self._no_reads(), pairs=pairs, pairs_read=pairs)
        return hidden

    def _keep_prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """A layer's prompt joins the history, and the state of the method that governs the layer."""
        self.history.keep(layer, key, value, slice(0, key.shape[2]))
        policy, device = self.policies[layer], self.attached.layers[layer].device
        if policy.kind != "method" or device not in self.states:
            return
        state = self.states[device]
        state.prompt(policy.number, query, key, value, self._prompt_rows[device])
        if policy.when == "previous_step":
            self.history.last_queries[layer] = query[:, :, -1:].clone()
        if self.method.holds_keys:
            self.history.hold(layer, state, key, value)

    def decode(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run teacher-forced decode rows; may be called again for the rows that follow.

        ids: int [batch, rows]; valid: bool alike, False for the padding on the right. Returns hidden states
        [batch, rows, hidden_size], where padding holds nothing of meaning.
        """
        if not self.history.length:
            raise RuntimeError("decode rows need a prompt: call prefill first")
        positions = self.history.enter(valid)
        rows = DecodePass(
            self.attached, self.history, self.states, positions, valid, self.measure_recall, self.rows_per_block
        )
        hidden = self.attached.forward(ids, positions, rows, self.model_cache, valid)
        self.reads += rows.stats(_weights(valid, multiplicity), self._resident())
        return hidden

    @property
    def reads_everything(self) -> bool:
        """Whether decode rows read all columns, as they were: the full cache."""
        return self.method.reads_all and self.history.codec is None

    def fork(self, index: Tensor, num_columns: int) -> ReplaySession:
        """A session of the sequences `index` [new_batch] of this one, state copied; its `reads` start empty."""
        child = copy(self)
        child.reads = self._no_reads()
        child.final_lengths = self.final_lengths[index]
        child.states = {device: state.fork(index.to(device), num_columns) for device, state in self.states.items()}
        child.history = self.history.fork(index, num_columns)
        child.model_cache = self.model_cache.fork(index)
        return child

    def _resident(self) -> Tensor:
        """What is kept on the device of each sequence / the full cache, fp64 [batch]."""
        states, exempt = list(self.states.values()), self.method.num_exempt_layers
        return resident_share(states, self.history.codec, self.final_lengths, exempt, self.attached.geometry)

    def _no_reads(self) -> ReadStats:
        codec, layers = self.history.codec, self.attached.layers
        latent = sum(each.num_kv_heads * each.elements for each in layers if each.latent is not None)
        return ReadStats(
            code_bits=codec.bits if codec else 16,
            recurrent_bytes=self.model_cache.nbytes / len(self.final_lengths),
            latent_bytes=latent * self.attached.dtype.itemsize,
        )


def _weights(valid: Tensor, multiplicity: Tensor | None) -> Tensor:
    return valid.double() if multiplicity is None else valid.double() * multiplicity[:, None]
