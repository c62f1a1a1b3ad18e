"""Offline calibration of InfiniGen: one rotation per layer and KV head, measured once and kept on disk.

One dense forward over the calibration text. Per layer and KV head, A = V of the SVD of the group's stacked
post-position queries, not centred, in fp32 (paper, section 4.1).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.errors import UserError
from harness.model.attach import Attached, Handler
from harness.model.attention import dense_attention

FORMAT = 1
"""Part of the cache key: raise it when the computation changes."""


@dataclass(frozen=True)
class Calibration:
    """rotation: fp32 [num_layers, num_kv_heads, head_dim, head_dim], orthogonal; columns by falling singular value."""

    rotation: Tensor


def calibrate(attached: Attached, ids: Sequence[int]) -> Calibration:
    """Measure the rotations on one sequence of token ids."""
    attached.require_window(len(ids))
    tokens = torch.tensor([ids], device=attached.device)
    collector = _Collector(attached)
    attached.forward(tokens, torch.arange(len(ids), device=attached.device)[None], collector)
    return Calibration(torch.stack(collector.rotations))


def cached_calibration(attached: Attached, ids: Sequence[int], fingerprint: str, cache_dir: Path) -> Calibration:
    """`calibrate`, or its earlier result for the same weights (`fingerprint`), dtype and ids from `cache_dir`."""
    key = hashlib.sha256(repr((FORMAT, fingerprint, str(attached.dtype), list(ids))).encode()).hexdigest()[:32]
    path = cache_dir / f"{key}.safetensors"
    geometry = attached.geometry
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
    try:
        rotation = load_file(path)["rotation"]
    except (OSError, SafetensorError, KeyError):
        rotation = torch.empty(0)  # not there yet, or damaged
    if rotation.shape != shape:
        rotation = calibrate(attached, ids).rotation
        _save(rotation, path)
    return Calibration(rotation.to(attached.device))


def _save(rotation: Tensor, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        save_file({"rotation": rotation.cpu()}, temporary)
        os.replace(temporary, path)
    except OSError as error:
        where = f"the cache {path.parent} cannot be written ({error.strerror})"
        raise UserError(f"{where}: set KV_HARNESS_CACHE to a folder that can") from error


class _Collector(Handler):
    """A dense pass that keeps each layer's rotation, and no queries."""

    def __init__(self, attached: Attached) -> None:
        self.geometry = attached.geometry
        self.rotations: list[Tensor] = []

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stacked = query[0].reshape(self.geometry.num_kv_heads, -1, self.geometry.head_dim).float()
        few = stacked.shape[1] < stacked.shape[2]  # then the reduced V would not be square
        self.rotations.append(torch.linalg.svd(stacked, full_matrices=few).Vh.transpose(-1, -2).contiguous())
        return dense_attention(query, key, value, self.geometry.scale)
