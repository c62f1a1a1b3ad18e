"""What the cost model knows of a machine: data-sheet rates (`conf/platform/<name>.yaml` with `kind: modelled`), and
what of them is achieved."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from harness.errors import UserError, nearest
from harness.model.shape import read_yaml
from harness.settings.choices import CONF_DIR
from harness.settings.schema import build


@dataclass(frozen=True)
class Platform:
    """A machine by its data sheets. `source` names them.

    flops_per_s: fp16 matrix products, dense. memory_bytes_per_s: device memory. device_bytes: its size.
    link_bytes_per_s: host to device from pinned memory, as achieved. host_channel_bytes_per_s: one channel of host
    memory, which bounds the one core that stages a copy from pageable memory.

    Raises:
        UserError: a rate or size that is not positive.
    """

    name: str
    kind: Literal["modelled"]
    source: str
    flops_per_s: float
    memory_bytes_per_s: float
    device_bytes: float
    link_bytes_per_s: float
    host_channel_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and value <= 0:
                raise UserError(f"platform.{field.name}={value:g} of {self.name}: must be above 0")

    @property
    def pageable_bytes_per_s(self) -> float:
        """Host to device from pageable memory: the driver copies into a pinned buffer (a read and a write of the
        channel per byte), then transfers."""
        return 1 / (1 / self.link_bytes_per_s + 2 / self.host_channel_bytes_per_s)


@dataclass(frozen=True)
class Efficiency:
    """What is achieved of a data-sheet rate, in (0, 1]; the only fitted numbers of the cost model.

    matmul: of `flops_per_s` by matrix products too large for the memory to bound them, which is prefill.
    memory: of `memory_bytes_per_s` by kernels that stream weights or cached rows.
    row_fetch: of `link_bytes_per_s` when tokens are fetched one by one, 256 bytes a head, instead of in one piece.
    """

    matmul: float
    memory: float
    row_fetch: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value <= 1:
                raise UserError(f"efficiency.{field.name}={value:g}: must be in (0, 1]")


FITTED = Efficiency(matmul=0.36, memory=0.81, row_fetch=0.83)
"""What `fit` finds over all published numbers, to two digits."""


def load_platform(name: str) -> Platform:
    """`conf/platform/<name>.yaml`; UserError for one that is unknown, or measured instead of modelled."""
    known = {path.stem: read_yaml(path) for path in sorted((CONF_DIR / "platform").glob("*.yaml"))}
    modelled = [stem for stem, node in known.items() if node.get("kind") == "modelled"]
    if name not in modelled:
        why = "is measured, the cost model predicts others; " if name in known else ""
        raise UserError(f"platform={name}: {why}{nearest(name, modelled)}")
    return build(Platform, known[name], "platform")
