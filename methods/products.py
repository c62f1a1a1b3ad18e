"""Products in fp32, whatever the precision of their factors.

A product of half precision factors is added up in fp32 and then rounded, in bf16 to 8 bits: a score of 60 to a quarter.
Which tokens score best is for the query and the keys to say, so scores are not rounded again.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """`left` [..., rows, n] times `right` [..., n, columns] times `scale`: fp32 [..., rows, columns].

    Under CUDA half precision factors are read as they are; elsewhere no product of theirs gives fp32.
    """
    if left.dtype == right.dtype == torch.float32:
        return left @ (right if scale == 1 else right * scale)
    if left.device.type != "cuda" or left.dtype != right.dtype:
        return left.float() @ right.float() * scale
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (part.expand(*batch, *part.shape[-2:]).flatten(0, -3) for part in (left, right))
    found = torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, batch)
    return found if scale == 1 else found.mul_(scale)
