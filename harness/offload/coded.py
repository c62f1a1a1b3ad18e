"""Where kernels take rows of integer codes as they lie (`kernels.pack`, `kernels.attention`), and where torch does."""

from __future__ import annotations

from typing import TypeGuard

import torch

from methods.codec import AnyCodec, Codec

COMPILED = {"cuda"}
"""Kinds of devices for which the kernels are compiled."""


def has_kernels(codec: AnyCodec, device: torch.device) -> TypeGuard[Codec]:
    """Whether they know the format: K and V coded alike, in groups along head_dim, without a rotation."""
    plain = type(codec) is Codec and not codec.is_float and codec.rotation is None
    return plain and device.type in COMPILED
