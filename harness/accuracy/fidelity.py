"""How close a method's predictions are to the full cache's, row by row, in bounded memory.

Only final hidden states are kept; the output head is applied to `HEAD_CHUNK` rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.model.attach import Attached

HEAD_CHUNK = 128


class RowScores(NamedTuple):
    """Per scored row, fp64 [rows] on the CPU. kl and agrees are None where there is no reference.

    nll: negative log-likelihood of the next token, nats. kl: KL(full || method), nats. agrees: 1 where the most
    likely token is the full cache's.
    """

    nll: Tensor
    kl: Tensor | None
    agrees: Tensor | None


@torch.inference_mode()
def score_rows(attached: Attached, hidden: Tensor, targets: Tensor, reference: Tensor | None = None) -> RowScores:
    """Score rows against the tokens that follow them and against the full cache.

    hidden, reference: final hidden states [rows, hidden_size] of the method and of the full cache;
    targets: int [rows], the token that follows each row.
    """
    nll, kl, agrees = [], [], []
    for begin in range(0, len(hidden), HEAD_CHUNK):
        rows = slice(begin, begin + HEAD_CHUNK)
        log_probs = attached.logits(hidden[rows]).log_softmax(-1)
        nll.append(-log_probs.gather(-1, targets[rows, None]).squeeze(-1))
        if reference is not None:
            full = attached.logits(reference[rows]).log_softmax(-1)
            agrees.append(full.argmax(-1) == log_probs.argmax(-1))
            kl.append((full.exp() * full.sub(log_probs)).sum(-1))
    return RowScores(_joined(nll), _joined(kl) if kl else None, _joined(agrees) if agrees else None)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).double().cpu()
