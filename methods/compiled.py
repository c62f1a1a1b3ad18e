"""Where Triton kernels take the place of torch code: the one switch of methods and of the KV
store."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices that have Triton kernels."""


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`methods.kernels` where kernels serve the device of `tensor`; else None."""
    if tensor.device.type not in COMPILED:
        return None
    from methods import kernels  # Triton, which only a GPU needs

    return kernels
