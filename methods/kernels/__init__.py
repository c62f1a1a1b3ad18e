"""Triton kernels of what `methods` does step by step elsewhere; nothing imports them before a tensor lies on a GPU."""

from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices for which they are compiled."""


def compiled_for(tensor: Tensor) -> bool:
    """Whether kernels serve tensors that lie where `tensor` does."""
    return tensor.device.type in COMPILED
