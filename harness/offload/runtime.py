"""CUDA's runtime as `cuda.bindings` gives it, which PyTorch's CUDA build brings along."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

RUNTIME = "cuda.bindings.runtime"


def cuda_runtime() -> ModuleType | None:
    """The module, imported where it is needed first; None where it is not installed."""
    try:
        return import_module(RUNTIME)
    except ImportError:
        return None
