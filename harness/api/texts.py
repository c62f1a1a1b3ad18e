"""Whole texts that an attached model scores: their columns, their lengths and their labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UserError

IGNORED_LABEL = -100
SCORE_WITH = (
    "give harness.attach prefill_len=N, the tokens of a text's prompt (1: the method decodes every "
    "row), or use harness.lm(model, ...), which knows them of each request"
)


class Texts:
    """Whole texts of a call, ids [batch, rows] padded at either end, from the first column on.

    real: bool [batch, rows], False for padding. lengths: [batch]; longest: of them. tokens, within:
    [batch, longest]; within is False behind a text's end. Raises UserError for padding within a
    text.
    """

    def __init__(self, ids: Tensor, real: Tensor) -> None:
        self.real = real
        starts = real & ~pad(real[:, :-1], (1, 0))
        if bool((starts.sum(-1) > 1).any()):
            raise UserError(
                "attention_mask: a text's tokens follow one another; allowed: padding at its ends"
            )
        self.lengths = real.sum(-1)
        self.longest = int(self.lengths.max())
        self._first = real.long().argmax(-1)
        columns = self._first[:, None] + torch.arange(self.longest, device=ids.device)
        ends = self._first + self.lengths
        self.within = columns < ends[:, None]
        self.tokens = ids.gather(1, columns.clamp(max=ids.shape[1] - 1))

    def require_lengths(self, prompt: int, most: int | None) -> None:
        """Raise UserError for texts without a decoded row, or beyond the model's limit."""
        shortest = int(self.lengths.min())
        if shortest <= prompt:
            raise UserError(
                f"prefill_len={prompt}: a text of {shortest} tokens leaves no row that the method "
                "decodes; give longer texts, or past_key_values where these tokens continue a "
                "prompt"
            )
        if most is not None and self.longest > most:
            raise UserError(
                f"input_ids: a text of {self.longest} tokens, and the model takes {most}"
            )

    def in_place(self, found: Tensor, prompt: int) -> Tensor:
        """Logits [batch, rows, vocab] in the columns that the texts came from, zeros elsewhere.

        found: [batch, longest - prompt + 1, vocab], of the prompt's last row and all later ones.
        """
        logits = found.new_zeros(*self.real.shape, found.shape[-1])
        texts = zip(self._first.tolist(), self.lengths.tolist(), strict=True)
        for at, (start, length) in enumerate(texts):
            rows = slice(start + prompt - 1, start + length)
            logits[at, rows] = found[at, : length - prompt + 1]
        return logits


def require_prefill_len(
    prefill_len: int | None, ids: Tensor, mask: Tensor | None, *, reads_all: bool
) -> int:
    """The tokens of a text's prompt; UserError where they, or the text's own, are not known.
    reads_all: the method has no budget, which would depend on T."""
    batch, num_rows = ids.shape
    if prefill_len is None:
        raise UserError(
            f"a text of {num_rows} rows without a cache: which of them are its prompt is not "
            f"known; to score it by the method {SCORE_WITH}; a prompt to go on from takes "
            "use_cache=True and no labels"
        )
    if mask is None and batch > 1 and not reads_all:
        raise UserError(
            f"a batch of {batch} texts without attention_mask: padding on the right looks like "
            "tokens, and T, on which the method's budget depends, would count it; give "
            "attention_mask, or one text a call (lm-eval's HFLM: batch_size=1)"
        )
    return prefill_len


def require_predicted(labels: Tensor, real: Tensor, decoded: Tensor, prompt: int) -> None:
    """Raise UserError for labels [batch, rows] of tokens that no decoded row predicts."""
    targets = pad(labels[:, 1:] != IGNORED_LABEL, (0, 1))
    predicted = decoded & pad(real[:, 1:], (0, 1))
    if bool((targets & ~predicted).any()):
        raise UserError(
            f"labels: the tokens of the prompt (prefill_len={prompt}) and padding are not "
            f"predicted by the method; set their labels to {IGNORED_LABEL}"
        )


SCORED = (
    "the text before was scored as a whole (prefill_len=); where it is a prompt to go on from, "
    "call the model with use_cache=True"
)
