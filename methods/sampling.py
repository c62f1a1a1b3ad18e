"""Samples of cached tokens, and the weights with which they stand for the tokens that are not read.

A sample is drawn by score. A token of score p gets a random number u in (0, 1), and the tokens with
the largest p / u are read. Let c be the largest p / u of the tokens that are not read. A token of
score p >= c is read whatever its number is. A token of less score is read with probability p / c,
and so it counts c / p times. Every sum over the weighted tokens is then right on average: priority
sampling (Duffield, Lund and Thorup, Journal of the ACM 54(6), 2007, section 2), whose variance is
nearly the least that a sample of this size can have. The number of tokens is exact.

Random numbers are hashes. Those of `random_numbers` differ in every row. Those of `lasting_numbers`
belong to a token, so that neighbouring rows draw nearly the same tokens, and a GPU
cache has them already.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from methods.base import QueryRows
from methods.compiled import kernels_for

Number = TypeVar("Number", int, Tensor)
WORD = 2**32 - 1
"""The bits of a hash."""
LASTING_BITS = 23
"""Bits of a lasting number: with a half added, fp32 holds it exactly."""


def ranked(score: Tensor, seed: int, layer: int, rows: QueryRows) -> Tensor:
    """Score / number of each token: those with the largest are drawn. fp32 like `score` [batch,
    sets, rows, slots], which is above 0 and finite, -inf for a token that may not be read."""
    if kernels := kernels_for(score):
        return kernels.ranked(score, rows, mixed(seed), layer, LASTING_BITS)
    return score / lasting_numbers(seed, layer, rows, score.shape[1])


def log_weights(score: Tensor, ranked: Tensor, mask: Tensor) -> Tensor:
    """Logarithm of how many times each token that is read (`mask`) counts, fp32 like `score`; 0
    for a token that counts once and for one that is not read."""
    if kernels := kernels_for(score):
        return kernels.log_weights(score, ranked, mask)
    border = ranked.masked_fill(mask, 0.0).amax(-1, keepdim=True)
    # The quotient of a token that is not read may be anything.
    return (border / score).clamp_(min=1.0).masked_fill_(~mask, 1.0).log_()


# Random numbers


def random_numbers(seed: int, layer: int, rows: QueryRows, sets: int, sample: int = 0) -> Tensor:
    """A number from 0 to 2^24 - 1 for each row and token, fp32 [batch, sets, rows, slots].

    They depend on the seed, layer, set, sample, row and token alone, and so are the same in replay
    and live decoding, in any batch and block of rows.
    """
    salt = layer * 2**16 + sample * 2**31
    if kernels := kernels_for(rows.positions):
        return kernels.random_numbers(salt, seed, rows, sets)
    heads = torch.arange(sets, device=rows.positions.device)
    set_hash = mixed(mixed(heads + salt) + seed)
    row_hash = mixed(set_hash[:, None] + rows.positions[:, None])
    return (mixed(row_hash.unsqueeze(-1) + rows.slot_positions.unsqueeze(2)) >> 8).float()


def lasting_numbers(seed: int, layer: int, rows: QueryRows, sets: int) -> Tensor:
    """A number in (0, 1) for each token, the same in all rows: fp32 [batch, sets, 1, slots].

    The numbers of a set are independent of one another. Another set or layer turns them: the same
    amount is added to each, and what is above 1 begins again at 0. One hash a token serves all sets
    then.
    """
    turn = mixed(torch.arange(sets, device=rows.positions.device) + layer * 2**16)
    token_hash = mixed(rows.slot_positions.long() + mixed(seed))
    turned = (token_hash + turn[:, None]) & (2**LASTING_BITS - 1)
    return turned.float().add_(0.5).div_(2**LASTING_BITS).unsqueeze(2)


def mixed(numbers: Number) -> Number:
    """A hash of 32 bits of each number >= 0, int64. No product exceeds 64 bits."""
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) & WORD) * 0x45D9F3B & WORD
    return numbers ^ (numbers >> 16)
