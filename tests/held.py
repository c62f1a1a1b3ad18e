"""How much memory tensors hold at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Bytes of the memory of a kind of device that tensors made under it hold: now, and at most since `restart`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def restart(self) -> None:
        """Forget what has been freed."""
        self.peak = self.now

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device_type:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.storages.pop(key)
