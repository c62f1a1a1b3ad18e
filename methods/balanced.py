"""The best pair of projections to few columns: query . key is nearly (W_q^T query) . (W_k^T key).

Scores q^T A k with A = W_q W_k^T differ from q^T k by an expected square of |L_q^T (I - A) L_k|^2 (Frobenius), where
L_q L_q^T = E[q q^T] and L_k L_k^T = Cov(k); keys are centred, as what all scores of a query share changes no choice.
With the SVD L_q^T L_k = P S R^T the best A of rank r is the one whose L_q^T A L_k is that SVD cut to r (Eckart and
Young): W_q = L_k R_r S_r^(-1/2), W_k = L_q P_r S_r^(-1/2). Control theory calls this balanced truncation in its
square-root form; with all columns A is the identity. A rotation (InfiniGen's, Loki's) sees one of the two sides only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

RIDGE = 1e-4
"""Added to the moments' diagonals, as a share of their mean: few tokens do not span all of head_dim."""


def moments(query: Tensor, key: Tensor, real: Tensor) -> dict[str, Tensor]:
    """query: E[q q^T] over tokens and the group; key: Cov(k); fp32 [batch, num_kv_heads, head_dim, head_dim] each.

    query: [batch, heads, tokens, head_dim]; key: [batch, num_kv_heads, tokens, head_dim]; real: bool [batch, tokens].
    """
    weight = (real / real.sum(-1, keepdim=True))[:, None, :, None]
    batch, num_kv_heads, tokens, head_dim = key.shape
    grouped = query.float().view(batch, num_kv_heads, -1, tokens, head_dim)
    weighted = grouped * weight.unsqueeze(2) / grouped.shape[2]
    centred = key.float() - (key.float() * weight).sum(2, keepdim=True)
    return {
        "query": weighted.flatten(2, 3).mT @ grouped.flatten(2, 3),
        "key": (centred * weight).mT @ centred,
    }


def balanced(known: Sequence[Mapping[str, Tensor]], columns: int) -> Tensor:
    """W_q and W_k, fp64 [batch, 2, num_kv_heads, head_dim, columns], by the sum of `known` moments, of which some may
    have no batch."""
    left, right = (_factor(reduce(torch.add, (each[name] for each in known))) for name in ("query", "key"))
    left_basis, strength, right_basis = torch.linalg.svd(left.mT @ right)
    scale = strength[..., None, :columns].rsqrt()
    of_query, of_key = right @ right_basis.mT[..., :columns] * scale, left @ left_basis[..., :columns] * scale
    return torch.stack([of_query, of_key], -4)


def _factor(moment: Tensor) -> Tensor:
    """L, lower triangular, with L L^T = moment."""
    moment = moment.double()
    ridge = RIDGE * moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=RIDGE)
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return torch.linalg.cholesky(moment + ridge[..., None, None] * identity)
