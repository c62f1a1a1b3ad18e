"""Triton kernels of `methods`. They are imported only when a tensor lies on a GPU."""

from importlib import import_module
from types import ModuleType

from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices that have them."""


def kernels_for(tensor: Tensor, name: str) -> ModuleType | None:
    """The module `name` of this folder where kernels serve the device of `tensor`; else None."""
    return import_module(f"methods.kernels.{name}") if tensor.device.type in COMPILED else None
