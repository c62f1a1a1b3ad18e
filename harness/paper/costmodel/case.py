"""A run to predict: the machine, the model, the system and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from harness.errors import UserError, nearest
from harness.model.shape import ModelShape
from harness.paper.costmodel.hardware import FITTED, Efficiency, Platform
from harness.paper.costmodel.overlap import Overlap
from harness.paper.costmodel.schemes import SCHEMES, Scheme

WEIGHTS_FRAC = 0.9
"""Share of device memory that weights may take; the rest is for buffers and activations, which are not counted."""


@dataclass(frozen=True)
class Case:
    """A run to predict.

    label: one of `SCHEMES`.
    host_weight_frac: share of every block's weights that lies in host memory and crosses the link in each pass; None
        takes the least that makes the rest fit, in tenths (0.3 for the paper's OPT-30B, as there).
    trace: InfiniGen's mean tokens per decode step, gen_len - 1 of them; None takes the paper's counts.
    overlap: instead of the label's own.

    Raises:
        UserError: an unknown label, a size below its minimum, a trace of another length, or weights that do
            not fit.
    """

    platform: Platform
    shape: ModelShape
    label: str
    batch_size: int
    prompt_len: int
    gen_len: int
    host_weight_frac: float | None = None
    trace: tuple[float, ...] | None = None
    overlap: Overlap | None = None
    efficiency: Efficiency = field(default=FITTED)

    def __post_init__(self) -> None:
        if self.label not in SCHEMES:
            raise UserError(f"label={self.label}: {nearest(self.label, SCHEMES)}")
        for name, low in (("batch_size", 1), ("prompt_len", 1), ("gen_len", 2)):
            if getattr(self, name) < low:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {low}")
        if self.trace is not None and len(self.trace) != self.gen_len - 1:
            raise UserError(f"trace: {len(self.trace)} steps, must be gen_len - 1 = {self.gen_len - 1}")
        given, least = self.host_weight_frac, self._least_host_weight_frac
        if given is not None and not least <= given <= 1:
            where = f"{self.shape.name} on {self.platform.name}"
            raise UserError(
                f"host_weight_frac={given:g}: must be in [{math.ceil(100 * least) / 100:.2f}, 1] for {where}"
            )

    @property
    def _least_host_weight_frac(self) -> float:
        """Managed memory and `ideal` hold everything, whatever its size."""
        if self.scheme.placement in ("managed", "device"):
            return 0.0
        excess = self.shape.weight_bytes - WEIGHTS_FRAC * self.platform.device_bytes
        return max(0.0, excess / (self.shape.num_layers * self.shape.block_bytes))

    @property
    def host_block_bytes(self) -> float:
        """Bytes of a block's weights that cross the link in each pass."""
        given, least = self.host_weight_frac, self._least_host_weight_frac
        return self.shape.block_bytes * (min(1.0, math.ceil(10 * least) / 10) if given is None else given)

    @property
    def scheme(self) -> Scheme:
        """What the label stands for, with this case's overlap."""
        scheme = SCHEMES[self.label]
        return replace(scheme, overlap=self.overlap) if self.overlap else scheme

    @property
    def final_len(self) -> int:
        """T: tokens of a sequence at its end."""
        return self.prompt_len + self.gen_len
