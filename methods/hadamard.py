"""The Hadamard rotation, which spreads an outlier over a row."""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """`x` [..., head_dim] times the orthonormal Hadamard matrix in Sylvester's order, which is its own inverse.

    Where head_dim is no power of two: in blocks of the largest one that divides it. By butterflies, so that a row's
    bits do not depend on the rows beside it, as they may in a product of matrices.
    """
    block = x.shape[-1] & -x.shape[-1]
    rotated, half = x.unflatten(-1, (-1, block)), 1
    while half < block:
        first, second = rotated.unflatten(-1, (-1, 2, half)).unbind(-2)
        rotated = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return rotated.mul(block**-0.5).flatten(-2)
