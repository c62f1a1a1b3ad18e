"""Eigenvectors of many matrices in one launch: torch has CUDA's library take those above 32 x 32
one after another. One program serves a matrix.

The rows of a matrix R are turned in pairs until all are orthogonal (one-sided Jacobi). The turns
leave R^T R as it is, so that the rows end as its eigenvectors times the roots of its eigenvalues. A
sweep meets every pair once, in steps of as many pairs as a matrix has rows for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Numbers of one row of each pair that a program holds at a time: with twice as many, registers
spill."""
NUM_WARPS = 16
COSINE = 1e-6
"""Largest cosine of two rows in the last sweep. A sweep squares it, about."""
MOST_SWEEPS = 30
"""Nine are enough for 128 rows."""


@triton.jit
def _columns(of_first, of_second, has_first, has_second, start, size, TILE: tl.constexpr):
    """A tile of the rows of each pair, [PAIRS, TILE]: where they lie, which there are, and they."""
    column = start + tl.arange(0, TILE)[None, :]
    in_first = has_first[:, None] & (column < size)
    in_second = has_second[:, None] & (column < size)
    at_first, at_second = of_first + column, of_second + column
    left = tl.load(at_first, mask=in_first, other=0)
    right = tl.load(at_second, mask=in_second, other=0)
    return at_first, at_second, in_first, in_second, left, right


@triton.jit
def _orthogonalize(
    rows,  # of every matrix; turned in place
    size, cosine, most_sweeps,
    PAIRS: tl.constexpr,  # size / 2, rounded up
    TILE: tl.constexpr,
):  # fmt: skip
    rows += tl.program_id(0).to(tl.int64) * size * size
    pair = tl.arange(0, PAIRS)
    others = (size + 1) // 2 * 2 - 1  # one row stays in the first pair, the others move around it
    is_pair = pair <= others // 2
    worst = tl.full((), 1.0, tl.float64)
    sweep = 0
    while (worst > cosine * cosine) & (sweep < most_sweeps):
        worst = tl.zeros((), tl.float64)
        for step in range(others):
            first = tl.where(pair == 0, others, (step + pair) % others)
            second = (step + others - pair % others) % others
            has_first, has_second = is_pair & (first < size), is_pair & (second < size)
            of_first, of_second = rows + (first * size)[:, None], rows + (second * size)[:, None]
            square_first = tl.zeros((PAIRS,), tl.float64)
            square_second = tl.zeros((PAIRS,), tl.float64)
            product = tl.zeros((PAIRS,), tl.float64)
            for start in range(0, size, TILE):
                _, _, _, _, left, right = _columns(
                    of_first, of_second, has_first, has_second, start, size, TILE
                )
                square_first += tl.sum(left * left, 1)
                square_second += tl.sum(right * right, 1)
                product += tl.sum(left * right, 1)
            squares = square_first * square_second
            is_turned = (product != 0) & (squares > 0)
            squares = tl.where(is_turned, squares, 1.0)
            worst = tl.maximum(worst, tl.max(product * product / squares, 0))
            ratio = (square_second - square_first) / tl.where(is_turned, 2 * product, 1.0)
            ratio = ratio.to(tl.float32)  # a turn need not be exact, only to keep lengths
            tangent = 1 / (tl.abs(ratio) + tl.sqrt(1 + ratio * ratio))
            tangent = tl.where(is_turned, tl.where(ratio < 0, -tangent, tangent), 0.0)
            tangent = tangent.to(tl.float64)
            cos = tl.rsqrt(1 + tangent * tangent)
            sin = (cos * tangent)[:, None]
            cos = cos[:, None]
            tl.debug_barrier()  # other threads may store a number than those that have loaded it
            for start in range(0, size, TILE):
                at_first, at_second, in_first, in_second, left, right = _columns(
                    of_first, of_second, has_first, has_second, start, size, TILE
                )
                tl.store(at_first, cos * left - sin * right, mask=in_first)
                tl.store(at_second, sin * left + cos * right, mask=in_second)
            tl.debug_barrier()
        sweep += 1


def eigenvectors(matrices: Tensor) -> Tensor:
    """Eigenvectors of positive definite matrices, fp64 [..., n, n], as columns, by rising
    eigenvalue. The host waits for nothing: a matrix that has no Cholesky factor is not reported."""
    size = matrices.shape[-1]
    rows = torch.linalg.cholesky_ex(matrices).L.mT.contiguous()
    pairs = triton.next_power_of_2(triton.cdiv(size, 2))
    tile = min(triton.next_power_of_2(size), max(1, ELEMENTS // pairs))
    _orthogonalize[(rows.numel() // size**2,)](
        rows, size, COSINE, MOST_SWEEPS, PAIRS=pairs, TILE=tile, num_warps=NUM_WARPS
    )
    roots = rows.norm(dim=-1, keepdim=True)
    rising = roots.argsort(-2).expand_as(rows)
    return (rows / roots).gather(-2, rising).mT
