"""Group-wise asymmetric quantization of the whole cache (FlexGen's; InfiniGen paper, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Method, require
from methods.full import Full

BITS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Quantized(Full):
    """Full cache through an integer codec: `num_bits` per element, groups of `group_size` along head_dim.

    A preset: `method=int4` is the full cache with the codec int4. A token is exact in its own step and within the
    prompt's dense pass, and quantized whenever a later row reads it.
    """

    num_bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_bits in BITS, "num_bits", self.num_bits, f"one of {', '.join(map(str, BITS))}")
        require(self.group_size >= 1, "group_size", self.group_size, "an integer >= 1")

    @property
    def name(self) -> str:
        """The preset's name."""
        return f"int{self.num_bits}"

    def artifact_budget(self) -> float:
        """Every row past the first reads quantized tokens."""
        return 0.0


def require_codec(method: Method, codec: object | None) -> None:
    """Raise ValueError for a quantized method without its codec: it would read the cache exactly."""
    if isinstance(method, Quantized) and codec is None:
        raise ValueError(f"codec=None: method={method.name} reads a quantized cache; pass the codec {method.name}")
