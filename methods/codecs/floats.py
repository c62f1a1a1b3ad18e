"""Floats: `fp32`, `fp16`, `bf16`, and `fp8`, which is e4m3 without a scale, saturating at +-448, as
vLLM's `kv_cache_dtype=fp8` without calibrated scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.codecs.base import FLOAT_DTYPES, RowCodec, require_name

STORED_DTYPES = FLOAT_DTYPES | {"fp8": torch.float8_e4m3fn}
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class FloatCodec(RowCodec):
    """Elements as they are, in a float format.

    name: one of STORED_DTYPES. Raises ValueError for another.
    """

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, STORED_DTYPES)

    @property
    def bits(self) -> int:
        """Bits that an element counts: 16 for any float but fp8, which has 8."""
        return 16 if self.name in FLOAT_DTYPES else 8

    def bits_per_element(self, head_dim: int) -> float:
        return float(self.bits)

    def row_bytes(self, head_dim: int) -> int:
        return -(-head_dim * STORED_DTYPES[self.name].itemsize // 2) * 2

    def roundtrip(self, x: Tensor) -> Tensor:
        """`x` [..., head_dim] as it reads back from storage, in its own dtype; may be `x`
        itself."""
        return self._stored(x).to(x.dtype)

    def encode(self, x: Tensor) -> Tensor:
        packed = self._stored(x).contiguous().view(torch.uint8)
        missing = self.row_bytes(x.shape[-1]) - packed.shape[-1]
        return pad(packed, (0, missing)) if missing else packed

    def decode(self, packed: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """As `RowCodec.decode`; a view of `packed`, no copy, where rows are stored in `dtype`."""
        stored = STORED_DTYPES[self.name]
        return packed[..., : head_dim * stored.itemsize].view(stored).to(dtype)

    def _stored(self, x: Tensor) -> Tensor:
        # A cast turns numbers beyond the range into infinity or NaN; deployed kernels saturate.
        stored = STORED_DTYPES[self.name]
        most = torch.finfo(stored).max
        if most < torch.finfo(x.dtype).max:
            x = x.float().clamp(-most, most)
        return x.to(stored)
