"""Where Triton kernels take the place of torch code: the one switch of methods and of the KV
store."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torch import Tensor

COMPILED = {"cuda"}
"""Kinds of devices that have Triton kernels."""
ELEMENTS = 1024
"""Slots or scores that a program of a kernel holds in registers at a time."""


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`methods.kernels` where kernels serve the device of `tensor`; else None."""
    return import_module("methods.kernels") if tensor.device.type in COMPILED else None
