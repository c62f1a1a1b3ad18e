"""Replay: score a given text in few large forwards, with exactly the selections that live decoding would make.

A session holds one padded batch. `prefill` runs the prompt densely, `decode` runs any number of teacher-forced rows
at once, each seeing only its selection plus itself, and `fork` repeats sequences for several continuations of one
context. Columns are token slots: prompts are padded left and end in one column, later rows are padded right.

Memory is linear in the length, see `harness.replay.passes`.
"""

from __future__ import annotations

from copy import copy

from torch import Tensor

from harness.model.attach import Attached
from harness.replay.decode_rows import DecodePass, PromptPass
from harness.replay.history import History
from harness.sizes import ReadStats, resident_share
from methods.base import Calibration, Lengths, Method, State
from methods.checks import require
from methods.codec import AnyCodec
from methods.keyless_codec import without_keys


class ReplaySession:
    """One batch of sequences under one method.

    final_lengths: int [batch], T of each sequence. num_columns: columns the batch will ever use.
    measure_recall: also measure attention_recall, at the cost of a second pass over the scores.
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
    ) -> None:
        exempt, layers = method.num_exempt_layers, attached.geometry.num_layers
        dense = method.reads_all and codec is None
        require(dense or exempt < layers, "num_exempt_layers", exempt, f"< {layers} layers")
        attached.require_window(int(final_lengths.max()))
        codec = without_keys(codec) if method.holds_keys else codec
        self.attached = attached
        self.method = method
        self.final_lengths = final_lengths
        self.calibration = calibration
        self.measure_recall = measure_recall and codec is None
        self.state: State | None = None
        self.history = History(attached, method, codec, len(final_lengths), num_columns)
        self.reads = self._no_reads()

    def prefill(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run the prompt densely.

        ids: int [batch, prompt]; valid: bool alike, False for the padding on the left; multiplicity: int [batch], how
        many requests share a sequence (1 by default). Returns final hidden states [batch, prompt, hidden_size].
        """
        if self.history.length:
            raise RuntimeError("prefill runs once, before any decode row")
        if not self.method.reads_all:
            lengths = Lengths(valid.sum(-1), self.final_lengths)
            self.state = self.method.new_state(self.attached.geometry, lengths, self.calibration)
        positions = self.history.enter(valid)
        hidden = self.attached.forward(ids, positions, PromptPass(self.attached, self.history, self.state, valid))
        pairs = float((_weights(valid, multiplicity) * (positions + 1)).sum())
        self.reads += ReadStats(pairs=pairs, pairs_read=pairs, code_bits=self.reads.code_bits)
        return hidden

    def decode(self, ids: Tensor, valid: Tensor, multiplicity: Tensor | None = None) -> Tensor:
        """Run teacher-forced decode rows; may be called again for the rows that follow.

        ids: int [batch, rows]; valid: bool alike, False for the padding on the right. Returns hidden states
        [batch, rows, hidden_size], where padding holds nothing of meaning.
        """
        if not self.history.length:
            raise RuntimeError("decode rows need a prompt: call prefill first")
        positions = self.history.enter(valid)
        rows = DecodePass(self.attached, self.history, self.state, positions, valid, self.measure_recall)
        hidden = self.attached.forward(ids, positions, rows)
        self.reads += rows.stats(_weights(valid, multiplicity), self.reads.code_bits, self._resident())
        return hidden

    def fork(self, index: Tensor, num_columns: int) -> ReplaySession:
        """A session of the sequences `index` [new_batch] of this one, state copied; its `reads` start empty."""
        child = copy(self)
        child.reads = self._no_reads()
        child.final_lengths = self.final_lengths[index]
        child.state = None if self.state is None else self.state.fork(index, num_columns)
        child.history = self.history.fork(index, num_columns)
        return child

    def _resident(self) -> Tensor:
        """What is kept on the device of each sequence / the full cache, fp64 [batch]."""
        exempt, layers = self.method.num_exempt_layers, self.attached.geometry.num_layers
        return resident_share(self.state, self.history.codec, self.final_lengths, exempt, layers)

    def _no_reads(self) -> ReadStats:
        codec = self.history.codec
        return ReadStats(code_bits=codec.bits if codec else 16)


def _weights(valid: Tensor, multiplicity: Tensor | None) -> Tensor:
    return valid.double() if multiplicity is None else valid.double() * multiplicity[:, None]
