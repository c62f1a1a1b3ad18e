"""Where Triton kernels take the place of torch code: the one switch of methods and of the KV
store."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices that have Triton kernels."""


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`methods.kernels` where kernels serve the device of `tensor`; else None."""
    if tensor.device.type not in COMPILED:
        return None
    from methods import kernels  # Triton, which only a GPU needs

    return kernels


def unpacks_pairs(device: torch.device, dtype: torch.dtype) -> bool:
    """True if rows of `PairCodec` are unpacked fast: to fp32 on a CPU for which torch has FBGEMM.
    Elsewhere the call goes element by element, and the kernels know another order of bytes."""
    if device.type in COMPILED or device.type != "cpu" or dtype != torch.float32:
        return False
    return "fbgemm" in torch.backends.quantized.supported_engines
