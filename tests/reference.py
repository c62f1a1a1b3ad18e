"""Arithmetic that the plain rules of methods and codecs share, in double precision."""

from __future__ import annotations

import math

import numpy as np

Vector = np.ndarray


def softmax(scores: Vector) -> Vector:
    """Of a vector."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def plain_hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of the largest power of two that divides `size`, once for each block."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block)), block) / math.sqrt(len(block))


def quantized(row: Vector, bits: int, group_size: int) -> Vector:
    """A row as it reads back from integer codes."""
    out = []
    for start in range(0, len(row), group_size):
        group = row[start : start + group_size]
        step = float(np.float16((group.max() - group.min()) / (2**bits - 1)))
        low = float(np.float16(group.min()))
        for x in group:
            code = min(max(round((x - low) / step), 0), 2**bits - 1) if step else 0
            out.append(code * step + low)
    return np.array(out)
