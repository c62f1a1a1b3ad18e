"""Triton kernels of `methods`. They are imported only when a tensor lies on a GPU."""

from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices that have them."""


def compiled_for(tensor: Tensor) -> bool:
    """True if kernels serve tensors on the device of `tensor`."""
    return tensor.device.type in COMPILED
